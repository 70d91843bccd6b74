"""A figure as inline SVG, for a page that may be light or dark."""

from __future__ import annotations

import html
import io
import re
import zlib
from typing import TYPE_CHECKING

from ...optional import bring

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure_html(figure: Figure) -> str:
    """The figure as inline SVG whose text takes the page's colour, with alternative text, wide
    figures scrolling.
    """
    buffer = io.StringIO()
    with bring("matplotlib").rc_context({"svg.hashsalt": "pplab", "svg.fonttype": "none"}):
        figure.savefig(
            buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None}
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = svg.replace("#000000", "currentColor")
    # or a hatching shared with a chart that isn't shown isn't shown either
    own = f"{zlib.crc32(svg.encode()):08x}"
    svg = re.sub(r'(?<=["#])[a-z][0-9a-f]{10}(?=[")])', rf"\g<0>{own}", svg)
    alt = html.escape(alternative_text(figure))
    width, height = (float(x) for x in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    opening = (
        f'<svg role="img" aria-label="{alt}" viewBox="0 0 {width:g} {height:g}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        'fill="currentColor" style="width:100%;min-width:'
        f"{_least_width(figure, width):.0f}px;"
        f'max-width:{width * 4 / 3:.0f}px;height:auto">'
    )
    # a text with \1 in it stays as it is
    svg = re.sub("<svg[^>]*>", lambda _: opening, svg, count=1)
    return f'<div class="pplab-figure" style="overflow-x:auto">{svg}</div>'


def _least_width(figure: Figure, width: float) -> float:
    """The width in pixels below which a figure of `width` points scrolls. Its smallest letters then
    have nine pixels. At most 480.
    """
    from matplotlib.text import Text

    sizes = [
        text.get_fontsize()
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text()
    ]
    return min(width, 480, *(9 * width / size for size in sizes))


def alternative_text(figure: Figure) -> str:
    """The description of the figure's axes: their label if a drawing set one, or title and axis
    names.
    """
    said = []
    for ax in figure.axes:
        label = ax.get_label()
        if not label or label.startswith("<"):
            axes = " against ".join(filter(None, (ax.get_ylabel(), ax.get_xlabel())))
            label = ": ".join(filter(None, (ax.get_title() or ax.get_title(loc="left"), axes)))
        said.append(label)
    return ". ".join(filter(None, said))
