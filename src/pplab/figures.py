"""A figure in the forms in which a notebook keeps it, so that it is seen wherever the notebook is opened.

The book's page takes SVG in its own colours. It is kept under a type of its own: as HTML, JupyterLab would show what is
left of it in a notebook that nobody has trusted yet, the chart's words without the chart; as SVG, nbconvert would need
Inkscape for a PDF. Everybody else takes the picture, which is on white, and who can't see it the sentence.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .plot import alternative_text, figure_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

PAGE = "application/vnd.pplab.page+html"
Bundle = tuple[dict[str, str], dict[str, dict[str, object]]]  # data and metadata, by MIME type

_SHARPNESS = 1.5  # of a picture's pixels per pixel of the screen
_COLOURS = 64  # charts have few, and a small palette makes a small file


def figure_bundle(figure: Figure, include: object = None, exclude: object = None) -> Bundle:
    """The figure for a notebook, as IPython's `_repr_mimebundle_` wants it."""
    return bundle(figure_html(figure), [figure_picture(figure)], alternative_text(figure))


def bundle(page: str, pictures: Sequence[Image], text: str) -> Bundle:
    """HTML for the book's page, pictures one above the other for other viewers, and what they show in words."""
    from PIL import Image

    size = max(picture.width for picture in pictures), sum(picture.height for picture in pictures)
    sheet, top = Image.new("RGB", size, "white"), 0
    for picture in pictures:
        sheet.paste(picture, (0, top))
        top += picture.height
    file = io.BytesIO()
    sheet.quantize(_COLOURS, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    shown = {name: round(pixels / _SHARPNESS) for name, pixels in zip(("width", "height"), size, strict=True)}
    data = {PAGE: page, "image/png": base64.b64encode(file.getvalue()).decode() + "\n", "text/plain": text}
    return data, {"image/png": shown | {"alt": text}}


def figure_picture(figure: Figure) -> Image:
    """The figure's pixels, on white."""
    from PIL import Image

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=96 * _SHARPNESS, facecolor="white", bbox_inches="tight")
    return Image.open(file).convert("RGB")
