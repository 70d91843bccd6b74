"""DualPipe's ranks with the ways of its microbatches, cut in the middle, so that a V is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._canvas import BLUE, FAINT, LIMIT, LINE, SIZE, STATE, arrow, box, canvas, frame, line, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW, _HIGH = 52, 34  # points: from rank to rank, a rank
_WIDE, _LEFT, _RIGHT = 108, 44, 262  # a rank, where DualPipe's ranks begin, where DualPipeV's do
_TOP = 44  # for what enters


def fold(num_ranks: int = 4) -> Axes:
    """Draw the ways of forwards in a DualPipe on an even number of ranks, and in the V that is its
    upper half.
    """
    if num_ranks < 2 or num_ranks % 2:
        raise ValueError(f"expected an even number of ranks, which have a middle, got {num_ranks}")
    half = num_ranks // 2
    height = num_ranks * _ROW + 2 * _TOP
    ax = canvas(
        height,
        f"DualPipe on {num_ranks} ranks: every rank has a stage for the microbatches that go down "
        "and one for those that go up. Cut between rank "
        f"{half - 1} and rank {half}, its upper half is DualPipeV on "
        f"{half} ranks with "
        f"{num_ranks} stages: what left downwards turns, and goes up",
    )
    tops = [height - _TOP - rank * _ROW for rank in range(num_ranks)]
    cut = tops[half] + (_ROW - _HIGH) / 2
    for rank, top in enumerate(tops):
        say(ax, 0, top - _HIGH / 2, f"rank {rank}", ha="left")
        _rank(ax, _LEFT, top, rank, num_ranks - 1 - rank, gone=rank >= half)
        if rank < half:
            _rank(ax, _RIGHT, top, rank, num_ranks - 1 - rank)
    down, up = _ways(ax, _LEFT, tops, height)
    bottom = tops[-1] - _HIGH
    arrow(ax, (down, bottom), (down, 20), colour=BLUE)
    arrow(ax, (up, 20), (up, bottom), colour=BLUE)
    line(ax, (0, cut), (_LEFT + _WIDE + 30, cut), ec=LIMIT, lw=1.6 * LINE, ls=(0, (4, 3)))
    say(ax, _LEFT + _WIDE + 34, cut, "cut here", ha="left", color=LIMIT)
    say(ax, _LEFT + _WIDE / 2, height - 8, "DualPipe", fontweight="bold")
    say(ax, _RIGHT + _WIDE / 2, height - 8, "DualPipeV", fontweight="bold")
    down, up = _ways(ax, _RIGHT, tops[:half], height)
    last = tops[half - 1] - _HIGH
    arrow(ax, (down, last), (up, last), colour=BLUE, connectionstyle="arc3,rad=0.6")
    return ax


def _rank(ax: Axes, x: float, top: float, left: int, right: int, gone: bool = False) -> None:
    """A rank with two stages, one for the microbatches that go down and one for those that go
    up.
    """
    for place, stage in enumerate((left, right)):
        at = x + place * _WIDE / 2
        box(ax, at, top - _HIGH, _WIDE / 2, _HIGH, fc=FAINT if gone else STATE)
        frame(ax, at, top - _HIGH, _WIDE / 2, _HIGH)
        say(ax, at + _WIDE / 4, top - _HIGH / 2, f"stage {stage}", fontsize=SIZE)


def _ways(ax: Axes, left: float, tops: list[float], height: float) -> tuple[float, float]:
    """Arrows down and up through these ranks, from and to above them, and where these are."""
    down, up = left + _WIDE * 0.25, left + _WIDE * 0.75
    bottom = height - 20
    for top in tops:
        arrow(ax, (down, bottom), (down, top), colour=BLUE)
        arrow(ax, (up, top), (up, bottom), colour=BLUE)
        bottom = top - _HIGH
    return down, up
