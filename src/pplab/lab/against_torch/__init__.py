"""PyTorch's own pipelining beside pplab's: its engine under our ranks, its rows and queues read and
run, a reference without a pipeline.

Chapter 2 and the pages on PyTorch and on GPUs use it. Here alone private names of torch are used.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
