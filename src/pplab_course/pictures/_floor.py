"""The floor of GPipe and 1F1B as a receipt: the way down to the last rank, its work, and the way up
from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._canvas import BLUE, EDGE, FAINT, LINE, ORANGE, STATE, WIDTH, box, canvas, line, number, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW, _BAR, _LEFT, _BASE = 30, 26, 44, 66  # points


def floor_receipt(
    num_ranks: int,
    num_microbatches: int,
) -> Axes:
    """Draw why no order of whole forwards and backwards ends earlier: the last rank is reached,
    works, and is left.

    For a microbatch on a rank, a forward takes one unit and a backward two.
    """
    forward, backward = 1, 2
    down, up = (num_ranks - 1) * forward, (num_ranks - 1) * backward
    work = num_microbatches * (forward + backward)
    sums = f"{number(down)} + {number(work)} + {number(up)} = {number(down + work + up)} units"
    ax = canvas(
        num_ranks * _ROW + _BASE,
        f"The last of {num_ranks} ranks works for {number(work)} units. Its first input comes down "
        "through the others in "
        f"{number(down)}, its last gradient goes up through them in {number(up)}: no step is "
        f"shorter than {sums}",
    )
    scale = (WIDTH - _LEFT - 1) / (down + work + up)
    for rank in range(num_ranks):
        y, up_from = (
            _BASE + (num_ranks - 1 - rank) * _ROW,
            down + work + (num_ranks - 2 - rank) * backward,
        )
        say(ax, 0, y + _BAR / 2, f"rank {rank}", ha="left")
        box(ax, _LEFT, y, (down + work + up) * scale, _BAR, fc=FAINT)
        if rank < num_ranks - 1:
            box(ax, _LEFT + rank * forward * scale, y, forward * scale, _BAR, fc=BLUE)
            box(ax, _LEFT + up_from * scale, y, backward * scale, _BAR, fc=ORANGE)
    box(ax, _LEFT + down * scale, _BASE, work * scale, _BAR, fc=STATE)
    product = f"{num_microbatches} × ({number(forward)} + {number(backward)})"
    say(ax, _LEFT + (down + work / 2) * scale, _BASE + _BAR / 2, product)
    start = _LEFT
    for name, amount, colour in (("down", down, BLUE), ("work", work, EDGE), ("up", up, ORANGE)):
        end = start + amount * scale
        if amount:
            line(
                ax,
                (start + 2, 58),
                (start + 2, 52),
                (end - 2, 52),
                (end - 2, 58),
                ec=colour,
                lw=1.5 * LINE,
            )
            say(ax, (start + end) / 2, 40, number(amount))
            say(ax, (start + end) / 2, 26, name)
        start = end
    say(ax, WIDTH, 8, sums, ha="right", fontweight="bold")
    return ax
