"""pplab: build, validate, simulate, draw and run pipeline-parallel schedules.

Importing it runs pure Python only, because torch and matplotlib are loaded when you first use them.
`pplab.lab` has what single chapters need, and `pplab_course` has the checkers of their exercises.
"""

from .actions import Action, Kind, Overlap
from .builders import build, register
from .costs import Costs, Link
from .errors import ScheduleError
from .footprint import Memory
from .lowering import lower
from .optional import bring as _bring
from .plot import compare, gantt
from .schedule import Schedule
from .simulator import simulate, validate
from .text import parse
from .timeline import Span, Timeline, critical_path, idle_intervals

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Kind",
    "Overlap",
    "Schedule",
    "ScheduleError",
    "build",
    "lower",
    "parse",
    "register",
    "validate",
    "Costs",
    "Link",
    "Memory",
    "Span",
    "Timeline",
    "simulate",
    "critical_path",
    "idle_intervals",
    "compare",
    "gantt",
    "builders",
    "runtime",
]


def __getattr__(name: str):
    if name == "runtime":  # which loads torch
        return _bring("pplab.runtime")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
