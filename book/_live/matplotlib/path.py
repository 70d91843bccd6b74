from ._artists import Path

__all__ = ["Path"]
