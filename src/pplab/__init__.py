"""pplab: build, validate, simulate, draw and run pipeline-parallel schedules.

What is imported here is pure Python; torch and matplotlib load only where they are used.
"""

from importlib import import_module as _import_module

from .actions import Action, Kind, Overlap
from .builders import build, register
from .costs import Costs, Link
from .errors import ScheduleError
from .footprint import Memory, held, in_flight
from .lowering import lower
from .metrics import critical_path, num_messages, table
from .panels import compare, memory
from .plot import gantt
from .schedule import Schedule
from .simulator import simulate, validate
from .text import parse
from .timeline import Span, Timeline, idle_intervals

__version__ = "0.1.0"

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


def __getattr__(name: str):
    if name in _LAZY_MODULES:
        return _import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
