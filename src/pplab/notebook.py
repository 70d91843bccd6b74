"""What the notebooks show beside figures: `%load_ext pplab.notebook`, sources of functions, and a slider over figures.

With the extension, matplotlib's figures are inline SVG in the page's own text colour. Without it they are pictures on
white, which glare on a dark page, blur on a dense screen, and say nothing to a reader who doesn't see them.
"""

from __future__ import annotations

import html
import inspect
import textwrap
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def load_ipython_extension(shell) -> None:
    """Show matplotlib figures by `pplab.plot.figure_html`."""
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib_inline.config import InlineBackend

    from .plot import AxesColumn, figure_html

    warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm: a plain progress bar will do
    shell.run_line_magic("matplotlib", "inline")
    plt.close("all")
    InlineBackend.instance(parent=shell).figure_formats = set()
    shell.display_formatter.formatters["text/html"].for_type(Figure, figure_html)
    shell.display_formatter.formatters["text/plain"].for_type(Figure, lambda figure, p, cycle: p.text("<Figure>"))
    for kind in (Axes, AxesColumn):  # a cell that ends with a drawing shows the drawing, not also its Axes
        shell.display_formatter.ipython_display_formatter.for_type(kind, lambda axes: None)


class Source:
    """A function's or class's own source, which a notebook shows as code."""

    def __init__(self, thing: Callable | type):
        self.text = textwrap.dedent(inspect.getsource(thing)).rstrip()

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"

    def __repr__(self) -> str:
        return self.text


class Slider:
    """Figures behind a slider: one for every value of `name`, the first one shown until it is moved.

    Works without a kernel, from the keyboard, and without scripts shows the first figure.
    """

    def __init__(self, name: str, figures: Mapping[object, Axes]):
        from matplotlib import pyplot as plt

        from .plot import figure_html

        self.name, self.values = name, list(figures)
        self._frames = [figure_html(ax.figure) for ax in figures.values()]
        for ax in figures.values():
            plt.close(ax.figure)

    def _repr_html_(self) -> str:
        frames = "".join(
            f'<div class="pplab-frame"{" hidden" if number else ""}>{frame}</div>'
            for number, frame in enumerate(self._frames)
        )
        values = html.escape(",".join(map(str, self.values)), quote=True)
        move = (
            "const p=this.closest('.pplab-slider'),v=this.dataset.values.split(',')[this.value];"
            "p.querySelectorAll('.pplab-frame').forEach((f,i)=>{f.hidden=i!=this.value});"
            "p.querySelector('output').textContent=v;this.setAttribute('aria-valuetext',v)"
        )
        return (
            f'<div class="pplab-slider"><label style="display:flex;gap:.8em;align-items:center;max-width:34em">'
            f'<span>{html.escape(self.name)}</span><input type="range" style="flex:1" min="0" '
            f'max="{len(self.values) - 1}" step="1" value="0" data-values="{values}" '
            f'aria-valuetext="{self.values[0]}" oninput="{html.escape(move, quote=True)}">'
            f'<output style="min-width:2em">{self.values[0]}</output></label>{frames}</div>'
        )

    def __repr__(self) -> str:
        return f"<slider over {self.name}: {', '.join(map(str, self.values))}>"
