# Written by tools/names.py from __init__.py, for editors and type checkers.

from .to_paste import flags as flags
