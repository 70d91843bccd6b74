"""The command line, what `pplab check` says of a text, and a run under torchrun.

Chapters 12, 13 and 14 and the page on GPUs use it. An error says what to do and ends with a code
that isn't 0.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
