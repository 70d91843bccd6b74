"""Where the time of a measured step went, what a machine can do, and what a run will take.

Chapters 2, 5, 6, 9, 11 and 14 use it, and `make gpu`. Times are measured, never asserted.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
