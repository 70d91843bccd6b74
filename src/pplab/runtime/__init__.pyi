# Written by tools/names.py from __init__.py, for editors and type checkers.

from .executor import Executor as Executor
from .failures import RankError as RankError
from .listener import Extra as Extra
from .listener import Listener as Listener
from .options import Options as Options
from .pool import Pool as Pool
from .reference import GradientReport as GradientReport
from .report import Machine as Machine
from .report import Run as Run
from .stage import Stage as Stage
from .workload import Batch as Batch
from .workload import Workload as Workload
