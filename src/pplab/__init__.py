"""pplab: build, validate, simulate, draw and run pipeline-parallel schedules.

What is imported here is pure Python; torch and matplotlib load only where they are used.
"""

from importlib import import_module as _import_module

from .actions import Action, Kind, Overlap, parse
from .builders import build, register
from .costs import Costs, Link, Memory
from .errors import ScheduleError
from .lowering import lower
from .metrics import critical_path, held, idle_intervals, in_flight, num_messages, table
from .schedule import Schedule
from .simulator import simulate
from .timeline import Span, Timeline
from .validity import validate

__version__ = "0.1.0"

_LAZY = dict.fromkeys(("gantt", "memory", "compare"), "plot")
_LAZY_MODULES = (
    "builders",
    "data",
    "formulas",
    "lab",
    "metrics",
    "models",
    "plot",
    "runtime",
)

__all__ = [
    *("Action", "Costs", "Kind", "Link", "Memory", "Overlap", "Schedule", "ScheduleError", "Span", "Timeline"),
    *("build", "critical_path", "held", "idle_intervals", "in_flight", "lower", "num_messages", "parse", "register"),
    *("simulate", "table", "validate", *_LAZY, *_LAZY_MODULES),
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(_import_module(f".{_LAZY[name]}", __name__), name)
    if name in _LAZY_MODULES:
        return _import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
