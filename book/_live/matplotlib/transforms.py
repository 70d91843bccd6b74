from .axes import ScaledTranslation

__all__ = ["ScaledTranslation"]
