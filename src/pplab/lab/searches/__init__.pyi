# The names that the package gives, each with its home: it opens when it is asked for.

from .bounds import Floor as Floor
from .bounds import floor as floor
from .exact import CLOSE as CLOSE
from .exact import BestSoFar as BestSoFar
from .exact import Optimum as Optimum
from .exact import optimum as optimum
from .frontier import COMMAND as COMMAND
from .frontier import Frontier as Frontier
from .frontier import Point as Point
from .frontier import frontiers as frontiers
from .growth import Policy as Policy
from .limits import check_memory as check_memory
from .problem import PLACEMENTS as PLACEMENTS
from .problem import Problem as Problem
from .problem import built as built
from .searching import Found as Found
from .searching import search as search
from .searching import zb_1p as zb_1p
from .searching import zb_2p as zb_2p
