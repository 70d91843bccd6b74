# Written by tools/names.py from __init__.py, for editors and type checkers.

from .launch_line import Launch as Launch
from .launch_line import read_launch as read_launch
from .launch_line import read_layout as read_layout
from .to_paste import flags as flags
