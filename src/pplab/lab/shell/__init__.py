"""The command line, `pplab check`, and a run under torchrun.

Chapters 12, 13 and 14 and the page on GPUs use it. Errors tell what to do, and the exit status is
then not 0.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
