"""`%load_ext pplab.notebook`: figures in notebooks as inline SVG in the page's own text colour.

Without it matplotlib's figures are pictures on white, which glare on a dark page, blur on a dense screen, and say
nothing to a reader who doesn't see them.
"""

from __future__ import annotations


def load_ipython_extension(shell) -> None:
    """Show matplotlib figures by `pplab.plot.figure_html`."""
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure
    from matplotlib_inline.config import InlineBackend

    from .plot import figure_html

    shell.run_line_magic("matplotlib", "inline")
    plt.close("all")
    InlineBackend.instance(parent=shell).figure_formats = set()
    shell.display_formatter.formatters["text/html"].for_type(Figure, figure_html)
    shell.display_formatter.formatters["text/plain"].for_type(Figure, lambda figure, p, cycle: p.text("<Figure>"))
