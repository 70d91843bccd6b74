"""What takes turns apart from the ranks' rows: copies to the host, passes that all ranks make
together, the queues of NCCL and of lowered rows, and sends for which a rank waits.

Chapters 5, 8, 11 and 14 use it. All of it runs on the package's one loop.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
