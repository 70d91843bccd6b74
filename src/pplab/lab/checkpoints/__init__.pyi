# The names that the package gives, each with its home: it opens when it is asked for.

from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import CheckpointError as CheckpointError
from .checkpoint import check_place as check_place
from .resuming import Resume as Resume
from .saving import NotSaved as NotSaved
from .saving import Save as Save
