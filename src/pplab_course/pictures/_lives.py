"""The microbatches that a stage holds, one below the other: how many it holds at one moment, and
why there can't be more.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from pplab.errors import number, positive_int

from ._canvas import BLUE, FAINT, GREY, LIMIT, LINE, WIDTH, arrow, box, canvas, line, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW, _HIGH = 26, 16  # points: from microbatch to microbatch, a life
_LEFT, _ABOVE, _BELOW = 92, 46, 26


def lives(lifespan: float, interval: float, microbatches: int = 6) -> Axes:
    """Draw how long a stage holds each microbatch, with a new one every `interval`, and which ones
    it holds when the last but one starts, because then it holds as many as it ever does.
    """
    lifespan, interval = number("lifespan", lifespan), number("interval", interval)
    M = positive_int("microbatches", microbatches)
    now = interval * max(M - 2, 0)
    held = [m for m in range(M) if m * interval <= now < m * interval + lifespan]
    most = ceil(lifespan / interval - 1e-9)
    end = interval * (M - 1) + lifespan
    height = M * _ROW + _ABOVE + _BELOW
    ax = canvas(
        height,
        f"A stage holds each microbatch for {lifespan:g} units, and a new one comes every "
        f"{interval:g}. At {now:g} it holds "
        f"{len(held)} of them; the starts of those that are held lie within the {lifespan:g} units "
        "before, and there are at most "
        f"{most}",
    )
    scale = (WIDTH - _LEFT - 6) / end

    def x(time: float) -> float:
        return _LEFT + time * scale

    bottom, top = _BELOW, height - _ABOVE
    box(ax, x(now - lifespan), bottom, lifespan * scale, top - bottom, fc=FAINT)
    for m in range(M):
        low = top - (m + 1) * _ROW + (_ROW - _HIGH) / 2
        say(ax, 0, low + _HIGH / 2, f"microbatch {m}", ha="left")
        alpha = 1 if m in held else 0.35
        box(ax, x(m * interval), low, lifespan * scale, _HIGH, fc=BLUE, alpha=alpha)
    line(ax, (x(now), bottom - 6), (x(now), top + 4), ec=LIMIT, lw=1.6 * LINE)
    say(ax, x(now), bottom - 15, f"now: {len(held)} held", color=LIMIT)
    _measure(ax, x(now - lifespan), x(now), top + 14, f"lifespan {lifespan:g}")
    return ax


def _measure(ax: Axes, left: float, right: float, y: float, text: str) -> None:
    """A length, with its meaning above it."""
    arrow(ax, ((left + right) / 2, y), (left, y), colour=GREY)
    arrow(ax, ((left + right) / 2, y), (right, y), colour=GREY)
    say(ax, (left + right) / 2, y + 14, text)
