# The names that the package gives, each with its home: it opens when it is asked for.

from .budget import Budget as Budget
from .causes import Causes as Causes
from .clip import Clip as Clip
from .clip import own_stages as own_stages
from .evaluation import Evaluate as Evaluate
from .learning_rate import LearningRate as LearningRate
from .log import Log as Log
from .meter import Held as Held
from .meter import Meter as Meter
from .meter import readable_bytes as readable_bytes
from .numbers import Numbers as Numbers
from .numbers import say as say
from .pace import Pace as Pace
from .pace import paced as paced
from .pace import settle as settle
from .random_numbers import random_state as random_state
from .random_numbers import set_random_state as set_random_state
from .recompute import Recompute as Recompute
from .seeded_dropout import SeededDropout as SeededDropout
