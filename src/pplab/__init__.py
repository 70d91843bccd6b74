"""pplab: build, validate, simulate, draw and run pipeline-parallel schedules.

What is imported here is pure Python; torch and matplotlib load only where they are used.
"""

from importlib import import_module as _import_module

from .actions import Action, Kind, Overlap, parse
from .builders import build
from .costs import Costs, Link, Memory
from .errors import ScheduleError
from .lower import lower
from .metrics import critical_path, held, idle_intervals, in_flight, num_messages, table
from .partition import partition
from .queues import simulate_lowered
from .replicate import replicate
from .schedule import Schedule
from .simulate import simulate
from .sweep import sweep
from .timeline import Span, Timeline
from .validate import validate
from .where import calibrate, calibrating, where

__version__ = "0.1.0"

_LAZY = dict.fromkeys(("gantt", "memory", "compare", "waterfall", "stacked"), "plot")
_LAZY["messages"] = "plot_messages"
_LAZY_MODULES = (
    "builders",
    "data",
    "formulas",
    "layout",
    "metrics",
    "models",
    "plot",
    "profiles",
    "results",
    "runtime",
)


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(_import_module(f".{_LAZY[name]}", __name__), name)
    if name in _LAZY_MODULES:
        return _import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
