"""Figures and schedules in the forms in which a notebook keeps them, to be seen wherever the notebook is opened.

Of a figure, the book's page takes SVG in its own colours. It is kept under a type of its own: as HTML, JupyterLab would
show what is left of it in a notebook that nobody has trusted yet, the chart's words without the chart; as SVG,
nbconvert would need Inkscape for a PDF. Everybody else takes the picture, which is on white, and who can't see it the
sentence.
"""

from __future__ import annotations

import base64
import html
import io
import re
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pplab import palette
from pplab.actions import Action, Overlap, parts
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


def timeline_bundle(timeline: Timeline, include: object = None, exclude: object = None) -> Bundle:
    """A timeline's Gantt chart, as IPython's `_repr_mimebundle_` wants it."""
    from matplotlib import pyplot as plt

    figure = gantt(timeline).figure
    plt.close(figure)  # or the notebook shows it once more
    return figure_bundle(figure)


def figure_bundle(figure: Figure, include: object = None, exclude: object = None) -> Bundle:
    """The figure, likewise."""
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


def figure_html(figure: Figure) -> str:
    """The figure as inline SVG whose text takes the page's colour, with alternative text, wide figures scrolling."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "pplab", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = svg.replace("#000000", "currentColor")
    own = f"{zlib.crc32(svg.encode()):08x}"  # or a hatching shared with a chart that isn't shown isn't shown either
    svg = re.sub(r'(?<=["#])[a-z][0-9a-f]{10}(?=[")])', rf"\g<0>{own}", svg)
    alt = html.escape(alternative_text(figure), quote=True)
    width, height = (float(x) for x in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    opening = (
        f'<svg role="img" aria-label="{alt}" viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink" fill="currentColor" '
        f'style="width:100%;min-width:{_least_width(figure, width):.0f}px;max-width:{width * 4 / 3:.0f}px;height:auto">'
    )
    svg = re.sub("<svg[^>]*>", lambda _: opening, svg, count=1)  # a text with \1 in it stays as it is
    return f'<div class="pplab-figure" style="overflow-x:auto">{svg}</div>'


def _least_width(figure: Figure, width: float) -> float:
    """Pixels below which a figure of `width` points scrolls: where its smallest letters have nine, at most 480."""
    from matplotlib.text import Text

    sizes = [text.get_fontsize() for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    return min(width, 480, *(9 * width / size for size in sizes))


def alternative_text(figure: Figure) -> str:
    """What the figure's axes say of themselves: their label where a drawing set one, else title and axis names."""
    said = []
    for ax in figure.axes:
        label = ax.get_label()
        if not label or label.startswith("<"):
            axes = " against ".join(filter(None, (ax.get_ylabel(), ax.get_xlabel())))
            label = ": ".join(filter(None, (ax.get_title() or ax.get_title(loc="left"), axes)))
        said.append(label)
    return ". ".join(filter(None, said))


_MOST_CELLS = 64  # of a row
_TABLE = "border-collapse:separate;border-spacing:2px;margin:0;font:12px/1.7 sans-serif;width:auto"
_CAPTION = "text-align:left;caption-side:top;white-space:nowrap"
_HEAD = "text-align:right;padding:0 .6em 0 0;font-weight:normal;white-space:nowrap"
_CELL = "padding:0 .35em;text-align:center;border:0;border-radius:3px;white-space:nowrap"


def schedule_html(schedule: Schedule) -> str:
    """A schedule as a grid of coloured cells. It shows order, not time: a simulation shows when things happen."""
    lines = []
    for rank, row in enumerate(schedule.rows):
        stages = schedule.stages_of(rank)
        cells = "".join(_cell(item, stages) for item in row[:_MOST_CELLS])
        more = f"<td>… {len(row) - _MOST_CELLS} more</td>" if len(row) > _MOST_CELLS else ""
        lines.append(f'<tr><th scope="row" style="{_HEAD}">rank {rank}</th>{cells}{more}</tr>')
    return (
        f'<div class="pplab-table" style="overflow-x:auto"><table style="{_TABLE}"><caption style="{_CAPTION}">'
        f"{html.escape(repr(schedule)[10:-1])}</caption><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cell(item: Action | Overlap, stages: Sequence[int]) -> str:
    """One table cell: colour is the kind, a lighter shade a later stage of the rank."""
    fills = [shade(palette.FILL[a.kind], stages.index(a.stage), len(stages)) for a in parts(item)]
    fill = fills[0] if len(fills) == 1 else f"linear-gradient(135deg,{fills[0]} 50%,{fills[1]} 50%)"
    text = "&amp;".join(str(a) for a in parts(item))
    return f'<td style="{_CELL};background:{fill};color:{ink(fills[0])}">{text}</td>'
