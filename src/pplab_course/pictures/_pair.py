"""A forward and a backward of a layer of experts on two streams: one after the other, and beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pplab.plot import ink

from ._canvas import BLUE, FAINT, ORANGE, WIDTH, box, canvas, number, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMPUTE, NETWORK = "compute", "network"
_LEFT, _BAR, _ROW = 60, 24, 28  # points
Piece = tuple[str, str, float, float, float]  # "F" or "B", its letter, its stream's row, start, duration


def pair(compute: float = 1, network: float = 1, *, experts: float | None = None) -> Axes:
    """Draw what a layer computes and sends in a forward and a backward: apart, and as a pair.

    Attention takes `compute` in a forward, the experts as much or what `experts` says, and both twice that in a
    backward; each of the two all-to-alls takes `network`.
    """
    apart, together = (streams(compute, network, 1, paired, experts) for paired in (False, True))
    lasts = [max(start + length for *_, start, length in pieces) for pieces in (apart, together)]
    ax = canvas(
        6 * _ROW + 62,
        f"A forward and a backward of a layer, computing and sending. One after the other they take {number(lasts[0])} "
        f"units, and as a pair {number(lasts[1])}, since one computes while the other is on the network",
    )
    unit = (WIDTH - _LEFT) / lasts[0]
    top = 6 * _ROW + 54
    for title, pieces, last in zip(("one after the other", "a pair"), (apart, together), lasts, strict=True):
        say(ax, 0, top, f"{title}: {number(last)} units", ha="left", fontweight="bold")
        for row, stream in enumerate((COMPUTE, NETWORK)):
            y = top - 12 - _ROW * (row + 1) + (_ROW - _BAR)
            say(ax, 0, y + _BAR / 2, stream, ha="left")
            box(ax, _LEFT, y, last * unit, _BAR, fc=FAINT)
            for kind, letter, on, start, length in pieces:
                if on == stream:
                    fill = BLUE if kind == "F" else ORANGE
                    box(ax, _LEFT + start * unit + 0.7, y, length * unit - 1.4, _BAR, fc=fill)
                    say(ax, _LEFT + (start + length / 2) * unit, y + _BAR / 2, letter, color=ink(fill))
        top -= 3 * _ROW + 8
    say(ax, 0, 28, "A attention   D dispatch   E experts   C combine", ha="left")
    for x, fill, name in ((0, BLUE, "forward"), (90, ORANGE, "backward of another microbatch")):
        box(ax, x, 3, 13, 13, fc=fill)
        say(ax, x + 18, 9, name, ha="left")
    return ax


def streams(compute: float, network: float, layers: int, paired: bool, experts: float | None = None) -> list[Piece]:
    """When every piece runs: when its stream is free and the piece before it is done; a backward's piece goes first.

    A pair's pieces come in the order in which they can start; else the backward waits for the whole forward.
    """
    if experts is None:
        experts = compute
    forward = [("A", COMPUTE, compute), ("D", NETWORK, network), ("E", COMPUTE, experts), ("C", NETWORK, network)]
    waiting = {"B": [(letter, on, length * (1 + (on == COMPUTE))) for letter, on, length in forward[::-1]] * layers}
    waiting["F"] = forward * layers
    free, done = {COMPUTE: 0.0, NETWORK: 0.0}, {"B": 0.0, "F": 0.0}
    placed: list[Piece] = []
    while any(waiting.values()):
        able = [kind for kind, pieces in waiting.items() if pieces and (paired or kind == "F" or not waiting["F"])]
        kind = min(able, key=lambda kind: max(free[waiting[kind][0][1]], done[kind]))
        letter, on, length = waiting[kind].pop(0)
        start = max(free[on], done[kind]) if paired else max(done.values())
        free[on] = done[kind] = start + length
        placed.append((kind, letter, on, start, length))
    return placed
