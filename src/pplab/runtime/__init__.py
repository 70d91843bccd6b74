"""Run schedules with real processes: a pool of ranks, one executor for every schedule, one
clock.

`__all__` is for whoever runs something, or writes an extra; the other names here are what `lab`
needs of these files.
"""

from ..optional import bring as _bring
from ..optional import lazily as _lazily

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
from .rank import Rank, RankReport, Whereabouts, connect
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
from .workload import (
    Batch,
    Places,
    Workload,
    as_tuple,
    check_divides,
    loss_shares,
    names_in_whole,
)

# These open where a rank computes on a GPU, and where weights have copies.
_, __getattr__, _ = _lazily(__name__, {"gpu": "cuda", "reduction": "Reducer"})

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
    "cuda",
    "naming",
]


def __dir__() -> list[str]:
    return sorted(__all__)
