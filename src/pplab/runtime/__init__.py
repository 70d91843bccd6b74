"""Run schedules with real processes: a pool of ranks, one executor for every schedule, one clock."""

from ..lab.checkpoint import Checkpoint, CheckpointError
from .launch import Pool, RankError
from .report import GradientReport, Reference, Run
from .workload import Batch, Modules, Workload

__all__ = [
    "Batch",
    "Checkpoint",
    "CheckpointError",
    "GradientReport",
    "Modules",
    "Pool",
    "RankError",
    "Reference",
    "Run",
    "Workload",
]
