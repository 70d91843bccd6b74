"""Run schedules with real processes: a pool of ranks, one executor for every schedule, one
clock.
"""

from ..optional import bring as _bring

_bring("torch")
from .executor import Executor
from .failures import RankError
from .listener import Extra, Listener
from .options import Options
from .pool import Pool
from .reference import GradientReport
from .report import Machine, Run
from .stage import Stage
from .workload import Batch, Workload

__all__ = [name for name in globals() if name[0].isupper()]
