"""Figures and schedules in the forms that a notebook keeps, so that they can be seen wherever it is
opened.

The book's page takes a figure as SVG in its own colours, kept under a special type. As HTML,
JupyterLab would only show the chart's words in a notebook that isn't trusted yet, and as SVG,
nbconvert would need Inkscape for a PDF. All other viewers take the picture, on white, and readers
who can't see it take the sentence.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pplab import palette
from pplab.actions import Action, Overlap, parts
from pplab.lab.forms import alternative_text, figure_html
from pplab.plot import gantt, ink, shade

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

    from pplab.schedule import Schedule
    from pplab.timeline import Timeline

PAGE = "application/vnd.pplab.page+html"
Bundle = tuple[dict[str, str], dict[str, dict[str, object]]]  # data and metadata, by MIME type

_SHARPNESS = 1.5  # of a picture's pixels per pixel of the screen
_COLOURS = 64  # charts have few, and a small palette makes a small file


def timeline_bundle(timeline: Timeline, **_: object) -> Bundle:
    """A timeline's Gantt chart, as IPython's `_repr_mimebundle_` wants it."""
    from matplotlib import pyplot as plt

    figure = gantt(timeline).figure
    plt.close(figure)  # or the notebook shows it once more
    return figure_bundle(figure)


def figure_bundle(figure: Figure, **_: object) -> Bundle:
    """The figure as such a bundle."""
    return bundle(figure_html(figure), [figure_picture(figure)], alternative_text(figure))


def bundle(page: str, pictures: Sequence[Image], text: str) -> Bundle:
    """HTML for the book's page, pictures one above the other for other viewers, and their
    description in words.
    """
    from PIL import Image

    size = max(picture.width for picture in pictures), sum(picture.height for picture in pictures)
    sheet, top = Image.new("RGB", size, "white"), 0
    for picture in pictures:
        sheet.paste(picture, (0, top))
        top += picture.height
    file = io.BytesIO()
    sheet.quantize(_COLOURS, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    shown = {
        name: round(pixels / _SHARPNESS)
        for name, pixels in zip(("width", "height"), size, strict=True)
    }
    data = {
        PAGE: page,
        "image/png": base64.b64encode(file.getvalue()).decode() + "\n",
        "text/plain": text,
    }
    return data, {"image/png": shown | {"alt": text}}


def figure_picture(figure: Figure) -> Image:
    """The figure's pixels, on white."""
    from PIL import Image

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=96 * _SHARPNESS, facecolor="white", bbox_inches="tight")
    return Image.open(file).convert("RGB")


_MOST_CELLS = 64  # of a row
_TABLE = "border-collapse:separate;border-spacing:2px;margin:0;font:12px/1.7 sans-serif;width:auto"
_CAPTION = "text-align:left;caption-side:top;white-space:nowrap"
_HEAD = "text-align:right;padding:0 .6em 0 0;font-weight:normal;white-space:nowrap"
_CELL = "padding:0 .35em;text-align:center;border:0;border-radius:3px;white-space:nowrap"


def schedule_html(schedule: Schedule) -> str:
    """A schedule as a grid of coloured cells. It shows order, not time: a simulation shows when
    things happen.
    """
    lines = []
    for rank, row in enumerate(schedule.rows):
        stages = schedule.stages_of(rank)
        cells = "".join(_cell(item, stages) for item in row[:_MOST_CELLS])
        more = f"<td>… {len(row) - _MOST_CELLS} more</td>" if len(row) > _MOST_CELLS else ""
        lines.append(f'<tr><th scope="row" style="{_HEAD}">rank {rank}</th>{cells}{more}</tr>')
    return (
        f'<div class="pplab-table" style="overflow-x:auto"><table style="{_TABLE}"><caption style="'
        f'{_CAPTION}">'
        f"{html.escape(repr(schedule)[10:-1])}</caption><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cell(item: Action | Overlap, stages: Sequence[int]) -> str:
    """One table cell: colour is the kind, a lighter shade a later stage of the rank."""
    fills = [shade(palette.FILL[a.kind], stages.index(a.stage), len(stages)) for a in parts(item)]
    fill = fills[0] if len(fills) == 1 else f"linear-gradient(135deg,{fills[0]} 50%,{fills[1]} 50%)"
    text = "&amp;".join(str(a) for a in parts(item))
    return f'<td style="{_CELL};background:{fill};color:{ink(fills[0])}">{text}</td>'
