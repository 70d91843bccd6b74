"""A sequence cut into slices: what each slice reads of those before it, where attention is
causal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pplab.errors import positive_int

from ._canvas import BLUE, EDGE, FAINT, LINE, ORANGE, WIDTH, arrow, canvas, frame, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TOP, _LEFT, _SIDE, _BASE = 34, 62, 200, 34  # points


def sliced_attention(slices: int) -> Axes:
    """Draw which tokens each token of a sequence looks at, in `slices` equal slices, with each
    slice's share of that work.
    """
    from matplotlib.patches import Polygon

    count = positive_int("slices", slices)
    shares = [(2 * j + 1) / count**2 for j in range(count)]
    said = ", ".join(f"{share:.0%}" for share in shares)
    ax = canvas(
        _TOP + _SIDE + _BASE,
        "A triangle: each token of a sequence looks at itself and at all tokens before it. Cut "
        f"into {count} slices of equal length, these have "
        f"{said} of attention's work. A slice reads the keys and values of the slices before it, "
        "and in the backward sends their gradients back",
    )
    base, each = _BASE, _SIDE / count
    for j, share in enumerate(shares):
        top, bottom = base + _SIDE - j * each, base + _SIDE - (j + 1) * each
        corners = [
            (_LEFT, top),
            (_LEFT + j * each, top),
            (_LEFT + (j + 1) * each, bottom),
            (_LEFT, bottom),
        ]
        ax.add_patch(
            Polygon(corners, fc=(BLUE, 0.25 + 0.55 * (j + 1) / count), ec=EDGE, lw=LINE / 2)
        )
        say(ax, _LEFT - 6, (top + bottom) / 2, f"slice {j}", ha="right")
        say(ax, _LEFT + _SIDE + 10, (top + bottom) / 2, f"{share:.0%}", ha="left")
        if j:
            x = _LEFT + _SIDE + 58
            middle = base + _SIDE - j * each
            arrow(ax, (x, middle + each / 2 - 4), (x, middle - each / 2 + 4), colour=BLUE)
            arrow(
                ax, (x + 34, middle - each / 2 + 4), (x + 34, middle + each / 2 - 4), colour=ORANGE
            )
    frame(ax, _LEFT, base, _SIDE, _SIDE, ec=FAINT)
    say(ax, _LEFT, base - 14, "tokens that are looked at", ha="left")
    say(ax, _LEFT + _SIDE + 20, base + _SIDE + 14, "of the work", ha="center")
    say(ax, WIDTH - 2, base - 14, "keys down, gradients up", ha="right")
    return ax
