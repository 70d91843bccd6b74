"""Run schedules with real processes: a pool of ranks, one executor for every schedule, one clock.

`__all__` lists the names for you who run something or write an extra. The other names here are
those that `lab` needs from these files. A file is opened when you ask for one of its names.
"""

from ..optional import bring as _bring
from ..optional import lazily as _lazily

_bring("torch")
_, __getattr__, _ = _lazily(__name__, __file__)

__all__ = (
    "Batch Compared EndOfBatches Executor Extra GradientReport Job Listener Machine Options Pool "
    "Rank RankContext RankError RankReport Reducer Run Stage Status Workload add_loss autocast "
    "cuda listening naming"
).split()


def __dir__() -> list[str]:
    return sorted(__all__)
