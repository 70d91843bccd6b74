"""Run schedules with real processes: a pool of ranks, one executor for every schedule, one clock."""

from .executor import Executor
from .listener import Extra, Listener
from .meter import Held, readable_bytes
from .options import Options
from .pool import Pool
from .processes import RankError
from .reference import GradientReport, Reference
from .report import Machine, Run
from .stage import Stage
from .workload import Batch, Modules, Workload

__all__ = [
    "Batch",
    "Executor",
    "Extra",
    "GradientReport",
    "Held",
    "Listener",
    "Machine",
    "Modules",
    "Options",
    "Pool",
    "RankError",
    "Reference",
    "Run",
    "Stage",
    "Workload",
    "readable_bytes",
]
