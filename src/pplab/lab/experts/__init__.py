"""Overlapping pairs whose halves take turns on a rank while tokens cross to their experts.

Chapter 9 uses it. Gradients stay those of one process.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
