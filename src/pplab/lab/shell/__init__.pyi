# The names that the package gives, each with its home: it opens when it is asked for.

from .checking import Checked as Checked
from .checking import check as check
from .commands import main as main
from .torchrun import is_torchrun as is_torchrun
from .torchrun import train_here as train_here
