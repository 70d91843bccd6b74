# The names that the package gives, each with its home: it opens when it is asked for.

from .beside import Beside as Beside
from .experts import Experts as Experts
from .pieces import Pieces as Pieces
from .under_prediction import Measured as Measured
from .under_prediction import UnderPrediction as UnderPrediction
from .under_prediction import measure_under as measure_under
from .wire import Wire as Wire
