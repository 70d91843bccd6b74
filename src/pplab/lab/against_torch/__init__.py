"""PyTorch's own pipelining next to pplab's: its engine on our ranks, its rows and queues read and
run, and a reference without a pipeline.

Chapter 2 and the pages on PyTorch and on GPUs use it. Only this room uses private names of torch.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
