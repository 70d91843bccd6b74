# The names that the package gives, each with its home: it opens when it is asked for.

from .offload import Offload as Offload
from .offload import Offloaded as Offloaded
from .offload import leaving_of as leaving_of
from .offload import offloaded_row as offloaded_row
from .queues import check_queues as check_queues
from .queues import compute_of as compute_of
from .queues import parse_lowered as parse_lowered
from .queues import simulate_lowered as simulate_lowered
from .sends import SENDS as SENDS
from .sends import posted as posted
from .sends import sends_in as sends_in
from .sends import simulate_sends as simulate_sends
from .sends import simulator_of as simulator_of
from .vocabulary import VocabularyParallel as VocabularyParallel
from .vocabulary import vocabulary_row as vocabulary_row
