"""Why a stage holds no more than lifespan / interval: one microbatch stays after the other, each an interval later."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from ._canvas import BLUE, EDGE, FAINT, LIMIT, LINE, WIDTH, box, canvas, line, number, say, spot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW, _BAR, _LEFT, _BASE = 22, 15, 26, 62  # points


def stays(lifespan: float, interval: float, *, ax: Axes | None = None) -> Axes:
    """Draw how long a stage holds each of some microbatches, a moment at which it holds the most, and the starts that
    can lie behind that moment. Both are in the same unit of time, and more than 0."""
    if not (lifespan > 0 and interval > 0):
        raise ValueError(f"lifespan and interval must be more than 0, got {lifespan!r} and {interval!r}")
    most = ceil(lifespan / interval)
    copies = most + 2
    now = (most + 0.5) * interval - (most * interval - lifespan) / 2  # of the starts behind it, the oldest still stays
    ax = canvas(
        copies * _ROW + _BASE + 18,
        ax,
        f"A stage holds each of {copies} microbatches for {number(lifespan)} units, the next one {number(interval)} "
        f"units later. At one moment {most} of them are held: those that came within the last {number(lifespan)} "
        f"units, into which {most} starts fit, {number(interval)} apart",
    )
    scale = (WIDTH - _LEFT - 1) / (lifespan + (copies - 1) * interval)
    at = _LEFT + now * scale
    back = at - lifespan * scale
    for m in range(copies):
        x, y = _LEFT + m * interval * scale, _BASE + (copies - 1 - m) * _ROW
        held = m * interval <= now < m * interval + lifespan
        box(ax, x, y, lifespan * scale, _BAR, fc=BLUE if held else FAINT, ec=EDGE, lw=LINE / 2)
        say(ax, x + 8, y + _BAR / 2, str(m), color="white" if held else "black")
        spot(ax, x, 44, 3.2, fc=BLUE if held else EDGE)
    line(ax, (at, 36), (at, copies * _ROW + _BASE + 4), ec=LIMIT, lw=1.6 * LINE, ls=(0, (4, 3)))
    line(ax, (back, 36), (back, 30), (at, 30), (at, 36), ec=LIMIT, lw=1.5 * LINE)
    say(ax, at, copies * _ROW + _BASE + 11, f"{most} held", color=LIMIT)
    fit = f"{number(lifespan)} units, {number(interval)} from start to start: {most} of them fit"
    say(ax, max(_LEFT, back), 16, fit, ha="left")
    return ax
