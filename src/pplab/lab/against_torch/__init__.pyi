# Written by tools/names.py from __init__.py, for editors and type checkers.

from .torch_engine import CLASSES as CLASSES
from .torch_engine import TorchEngine as TorchEngine
from .torch_rows import lower_by_torch as lower_by_torch
from .torch_rows import refusals as refusals
from .torch_rows import take_steps as take_steps
from .whole_model import Reference as Reference
from .whole_model import reference as reference
