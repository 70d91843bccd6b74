"""Common parts of the pictures: a canvas on which a unit is a point, one size of letters, one
weight of lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pplab import palette
from pplab.actions import B, F
from pplab.lab.forms import LIMIT as LIMIT
from pplab.plot import ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
Colour = str | tuple[str, float]  # with its opacity

WIDTH = 380  # points: a phone of 360 pixels shows the whole, with 9 pixels for letters
SIZE = 11  # of letters, in points
LINE = 1.3  # points
DASHED = (0, (2, 2.5))
BLUE, ORANGE = palette.FILL[F], palette.FILL[B]  # what goes down in the forward, up in the backward
# Black is the page's colour of text, so that these fit both themes.
STATE: Colour = ("black", 0.3)
FAINT: Colour = ("black", 0.07)
EDGE: Colour = ("black", 0.55)
GREY = palette.IDLE  # for arrows, whose heads would show twice through their shafts


def canvas(height: float, says: str) -> Axes:
    """Bare axes, WIDTH by `height` points, in a figure of that size. `says` becomes their label."""
    import matplotlib.pyplot as plt

    ax = plt.figure(figsize=(WIDTH / 72, height / 72)).add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(0, height), aspect="equal", label=says)
    ax.axis("off")
    return ax


def say(ax: Axes, x: float, y: float, text: str, **style: object) -> None:
    """Letters around a point, or starting there (`ha="left"`)."""
    ax.text(
        x,
        y,
        text,
        **{"fontsize": SIZE, "ha": "center", "va": "center", "parse_math": False, **style},
    )


def box(ax: Axes, x: float, y: float, width: float, height: float, **style: object) -> None:
    """A rectangle, given its lower left corner."""
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y), width, height, **{"lw": 0, "fc": STATE, **style}))


def bar(ax: Axes, x: float, y: float, width: float, height: float, fill: str, text: str) -> None:
    """A box with a little air at either end, and letters in its middle."""
    box(ax, x + 0.7, y, width - 1.4, height, fc=fill)
    say(ax, x + width / 2, y + height / 2, text, color=ink(fill))


def key(ax: Axes, x: float, y: float, name: str, **style: object) -> None:
    """A small square, and what its look means."""
    box(ax, x, y, 13, 13, **style)
    say(ax, x + 18, y + 6, name, ha="left")


def frame(ax: Axes, x: float, y: float, width: float, height: float, **style: object) -> None:
    """An empty rectangle."""
    box(ax, x, y, width, height, **{"fc": "none", "ec": EDGE, "lw": LINE, **style})


def line(ax: Axes, *points: Point, **style: object) -> None:
    """A line from point to point."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    ax.add_patch(
        PathPatch(
            Path(points), **{"fc": "none", "ec": EDGE, "lw": LINE, "capstyle": "round", **style}
        )
    )


def arrow(ax: Axes, start: Point, end: Point, colour: str = GREY, **style: object) -> None:
    """An arrow, straight unless `connectionstyle` bends it."""
    from matplotlib.patches import FancyArrowPatch

    look = {
        "arrowstyle": "-|>",
        "mutation_scale": 11,
        "shrinkA": 0,
        "shrinkB": 0,
        "lw": 1.5 * LINE,
        "joinstyle": "miter",
    }
    ax.add_patch(FancyArrowPatch(start, end, **{**look, "color": colour, **style}))


def spot(ax: Axes, x: float, y: float, radius: float, **style: object) -> None:
    """A circle."""
    from matplotlib.patches import Circle

    ax.add_patch(Circle((x, y), radius, **{"fc": STATE, "ec": "none", "lw": LINE, **style}))


def number(amount: float) -> str:
    """An amount with one decimal, or none if that is 0: 40.9, 80, 144.5."""
    return f"{round(amount, 1):.10g}"


def named_bytes(amount: float) -> str:
    """Bytes in the unit that leaves few digits: 67 MB, 4.2 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= size:
            return (
                f"{amount / size:.2g} {unit}"
                if amount < 100 * size
                else f"{amount / size:.0f} {unit}"
            )
    return f"{amount:.0f} bytes"


def listed(amounts: object) -> str:
    """Amounts as a list in a sentence."""
    texts = [amount if isinstance(amount, str) else number(amount) for amount in amounts]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
