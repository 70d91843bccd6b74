from ._artists import Circle, FancyArrowPatch, Patch, PathPatch, Polygon, Rectangle

__all__ = ["Circle", "FancyArrowPatch", "Patch", "PathPatch", "Polygon", "Rectangle"]
