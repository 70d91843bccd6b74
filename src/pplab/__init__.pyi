# The names that the package gives, each with its home: it opens when it is asked for.

from . import builders as builders
from . import runtime as runtime
from .actions import Action as Action
from .actions import Kind as Kind
from .actions import Overlap as Overlap
from .builders import build as build
from .builders import register as register
from .costs import Costs as Costs
from .costs import Link as Link
from .errors import ScheduleError as ScheduleError
from .footprint import Memory as Memory
from .lowering import lower as lower
from .plot import compare as compare
from .plot import gantt as gantt
from .schedule import Schedule as Schedule
from .simulator import simulate as simulate
from .simulator import validate as validate
from .text import parse as parse
from .timeline import Span as Span
from .timeline import Timeline as Timeline
from .timeline import critical_path as critical_path
from .timeline import idle_intervals as idle_intervals

__version__: str
