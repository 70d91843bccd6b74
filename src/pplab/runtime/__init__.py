"""Run schedules with real processes: a pool of ranks, one executor for every schedule, one
clock.

`__all__` is for whoever runs something, or writes an extra; the other names here are what `lab`
needs of these files. Each opens when a name of it is asked for.
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
