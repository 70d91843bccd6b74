"""A run that is stopped and goes on, on as many ranks as there are then.

Chapter 13 uses it. A checkpoint is whole or refused, and a run that goes on gives the losses of one
that wasn't stopped.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
