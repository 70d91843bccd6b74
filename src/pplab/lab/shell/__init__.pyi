# Written by tools/names.py from __init__.py, for editors and type checkers.

from .commands import main as main
from .torchrun import is_torchrun as is_torchrun
from .torchrun import train_here as train_here
