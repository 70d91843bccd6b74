"""Autograd's graph, cut in two: which parts have gradients after each line of the handshake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._canvas import (
    BLUE,
    DASHED,
    EDGE,
    FAINT,
    ORANGE,
    STATE,
    WIDTH,
    arrow,
    box,
    canvas,
    line,
    listed,
    say,
    spot,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = (
    "sent = front(x)",
    "received = sent.detach().requires_grad_()",
    "loss = back(received)",
    "loss.backward()",
    "sent.backward(received.grad)",
)
_ROW, _BEAD = 56, 8  # points
_LAYERS = 3  # of each half
_EDGE, _GAP = 12, 80  # from the picture's edge to a string, from string to string
_DOTTED = (0, (1, 2.5))


def handshake(lines: Sequence[str] = _LINES) -> Axes:
    """Draw the graphs of two halves as beads on two strings, as they are after each of five lines
    of code.

    The lines do the front's forward; the cut (`detach`); the back's forward; its backward; the
    front's backward. What has a gradient is orange: layers and `received`, a leaf, but never
    `sent`. There is no string before its forward, a dark one while autograd has the graph, and a
    dotted one when a backward has freed it.
    """
    if len(lines) != 5:
        raise ValueError(f"expected the handshake's 5 lines of code, got {len(lines)}")
    who = ("nobody", "nobody", "nobody", "the back", "front and back")
    said = (f"{has} after {text}" for text, has in zip(lines, who, strict=True))
    height = 5 * _ROW + 42
    ax = canvas(
        height, f"Autograd's graph in two pieces, front and back. Who has gradients: {listed(said)}"
    )
    for x, name in ((WIDTH / 4, "front"), (3 * WIDTH / 4, "back")):
        say(ax, x, height - 8, name, fontweight="bold")
    for step, text in enumerate(lines, 1):
        y = height - 24 - (step - 1) * _ROW
        say(ax, 0, y - 9, text, ha="left", family="monospace")
        _strings(ax, y - 35, step)
    spot(ax, _EDGE, 8, 5, fc=ORANGE)
    say(ax, _EDGE + 10, 8, "has a gradient", ha="left")
    for x, name in (((WIDTH - _GAP) / 2, "sent"), ((WIDTH + _GAP) / 2, "received")):
        say(ax, x, 8, name, family="monospace")
    return ax


def _strings(ax: Axes, y: float, step: int) -> None:
    """Both strings after a step: the front's from the input to `sent`, and the back's from
    `received` to the loss.
    """
    left, right = (WIDTH - _GAP) / 2, (WIDTH + _GAP) / 2
    line(ax, (WIDTH / 2, y - 14), (WIDTH / 2, y + 14), ls=DASHED)
    _string(ax, y, (_EDGE, left), leaf=False, there=True, begun=True, done=step == 5)
    _string(
        ax, y, (WIDTH - _EDGE, right), leaf=True, there=step >= 2, begun=step >= 3, done=step >= 4
    )
    if step == 2:
        arrow(ax, (left + _BEAD + 4, y), (right - _BEAD - 4, y), BLUE)
    if step == 5:
        arrow(ax, (right - _BEAD - 4, y), (left + _BEAD + 4, y), ORANGE)


def _string(
    ax: Axes,
    y: float,
    ends: tuple[float, float],
    *,
    leaf: bool,
    there: bool,
    begun: bool,
    done: bool,
) -> None:
    """A string from its outer end to the tensor at the cut, with a bead for every layer between."""
    step = (ends[1] - ends[0]) / (_LAYERS + 1)
    side = 1 if step > 0 else -1
    stops = [ends[0], *(ends[0] + k * step for k in range(1, _LAYERS + 1)), ends[1]]
    for k, (start, end) in enumerate(zip(stops, stops[1:], strict=False)):
        air = side * (_BEAD if k else 3)
        if begun:
            line(ax, (start + air, y), (end - side * _BEAD, y), ls=_DOTTED if done else "-")
    spot(ax, ends[0], y, 3, fc=EDGE if begun else FAINT)
    for x in stops[1:-1]:
        spot(
            ax,
            x,
            y,
            _BEAD,
            fc=ORANGE if done else STATE if begun else FAINT,
            ec=EDGE if begun else FAINT,
        )
    fill = ORANGE if done and leaf else BLUE if there else FAINT
    box(ax, ends[1] - _BEAD, y - _BEAD, 2 * _BEAD, 2 * _BEAD, fc=fill)
