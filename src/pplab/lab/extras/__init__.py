"""What a run can be given in addition to its schedule: a pace, a meter of memory, clipping,
recomputation, a learning rate, evaluation, a budget.

Chapters 2 to 14 use them. Each is an `Extra`. The runtime doesn't know them by name, and doesn't
change for a run without them.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
