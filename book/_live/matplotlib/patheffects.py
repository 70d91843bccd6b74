from ._artists import withStroke

__all__ = ["withStroke"]
