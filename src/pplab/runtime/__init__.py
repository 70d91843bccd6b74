"""Run schedules with real processes: a pool of ranks, one executor for every schedule, one clock."""

from .launch import Pool, RankError
from .report import GradientReport, Reference, Run
from .workload import Batch, Modules, Workload

__all__ = ["Batch", "GradientReport", "Modules", "Pool", "RankError", "Reference", "Run", "Workload"]
