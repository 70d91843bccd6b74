"""Run schedules with real processes: a pool of ranks, one executor for every schedule, one
clock.

`__all__` is for whoever runs something, or writes an extra; the other names here are what `lab`
needs of these files.
"""

from typing import TYPE_CHECKING

from ..optional import bring as _bring

_bring("torch")
from .comm import Spec, naming, producer
from .context import RankContext, Status
from .deferred import accumulate
from .devices import choose_transport, notes
from .executor import Executor
from .failures import RankError
from .listener import Extra, Listener, Listeners
from .options import Job, Options, make_job
from .pool import Pool, make_run
from .rank import Rank, RankReport
from .reference import (
    TOLERANCE,
    GradientReport,
    Gradients,
    check_gradients,
    collect_gradients,
    train_whole,
)
from .report import Machine, Run
from .stage import Stage, autocast, roots_of
from .training import Whereabouts, connect
from .workload import (
    Batch,
    Places,
    Workload,
    as_tuple,
    check_divides,
    loss_shares,
    names_in_whole,
)

if TYPE_CHECKING:
    from .reduction import Reducer

__all__ = [
    "Batch",
    "Executor",
    "Extra",
    "GradientReport",
    "Job",
    "Listener",
    "Machine",
    "Options",
    "Pool",
    "Rank",
    "RankContext",
    "RankError",
    "RankReport",
    "Reducer",
    "Run",
    "Stage",
    "Status",
    "Workload",
    "autocast",
    "naming",
]


def __getattr__(name: str) -> object:
    if name == "Reducer":  # opened where weights have copies
        return _bring("pplab.runtime.reduction").Reducer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
