"""What a run can be given besides its schedule: a pace, a meter of memory, clipping, recomputation,
a learning rate, evaluation, a budget.

Chapters 2 to 14 use them. Each is an `Extra`, which the runtime doesn't know by name; a run without
it is the same.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
