from ._artists import Text

__all__ = ["Text"]
