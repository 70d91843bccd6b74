"""Stop a run and go on later, on any number of ranks.

Chapter 13 uses it. A checkpoint is whole or it is refused, and a run that goes on has the losses of
a run that wasn't stopped.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
