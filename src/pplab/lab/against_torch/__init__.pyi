# The names that the package gives, each with its home: it opens when it is asked for.

from .torch_engine import CLASSES as CLASSES
from .torch_engine import TorchEngine as TorchEngine
from .torch_rows import lower_by_torch as lower_by_torch
from .torch_rows import take_steps as take_steps
from .whole_model import Reference as Reference
from .whole_model import reference as reference
