"""A forward and a backward of a layer of experts on two streams: one after the other, and at the
same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pplab.actions import W
from pplab.palette import FILL

from ._canvas import BLUE, FAINT, ORANGE, STATE, WIDTH, bar, box, canvas, key, number, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMPUTE, NETWORK = "compute", "network"
# What is put into the streams: "f" of the forward, "b" of the backward, and "w" of the gradients of
# weights where the backward leaves them out. The pairs are in the order of Megatron-LM's
# `TransformerLayerSchedulePlan.run`.
ORDERS = {
    "one after the other": "fA fD fE fC bC bE bD bA",
    "a pair": "bC fA bE fD bD fE fC bA",
    "--delay-wgrad-compute": "bC fA bE fD wE bD fE fC bA wA",
}
_FILL = {"f": BLUE, "b": ORANGE, "w": FILL[W]}
_LEFT, _BAR, _ROW = 60, 24, 28  # points
# "f", "b" or "w", its letter, its stream, start, duration
Piece = tuple[str, str, str, float, float]


def pair(
    attention: float = 1,
    network: float = 1,
    experts: float = 1,
    *,
    orders: Sequence[str] = ("one after the other", "a pair"),
    unit: str = "units",
) -> Axes:
    """Draw what a layer computes and sends in a forward and a backward, in one order or in several.

    The times are those of attention and experts in a forward, which take twice as long in a
    backward, and of each of the two all-to-alls.
    """
    charts = [streams(order, attention, network, experts) for order in orders]
    titles = [
        f"{order}: {_said(pieces, unit)}" for order, pieces in zip(orders, charts, strict=True)
    ]
    top = len(charts) * (3 * _ROW + 8) + 38
    ax = canvas(
        top + 8,
        f"A forward and a backward of a layer, what they compute and send. {'; '.join(titles)}",
    )
    scale = (WIDTH - _LEFT) / max(map(_end, charts))
    for title, pieces in zip(titles, charts, strict=True):
        say(ax, 0, top, title, ha="left", fontweight="bold")
        rows = {COMPUTE: top - 8 - _ROW, NETWORK: top - 8 - 2 * _ROW}
        for stream, y in rows.items():
            say(ax, 0, y + _BAR / 2, stream, ha="left")
            box(ax, _LEFT, y, _end(pieces) * scale, _BAR, fc=STATE if stream == COMPUTE else FAINT)
        for kind, letter, stream, start, length in pieces:
            left, text = _LEFT + start * scale, "W" if kind == "w" else letter
            bar(ax, left, rows[stream], length * scale, _BAR, _FILL[kind], text)
        top -= 3 * _ROW + 8
    say(ax, 0, 28, "A attention   D dispatch   E experts   C combine", ha="left")
    key(ax, 0, 3, "forward", fc=BLUE)
    key(ax, 90, 3, "backward of another microbatch", fc=ORANGE)
    return ax


def _end(pieces: Sequence[Piece], kinds: str = "fbw") -> float:
    return max(start + length for kind, *_, start, length in pieces if kind in kinds)


def _said(pieces: Sequence[Piece], unit: str) -> str:
    """How long it takes, and how long the GPU pauses, or where weights come later, when the
    gradient can leave.
    """
    lasts = f"{number(_end(pieces))} {unit}, "
    if pieces[-1][0] == "w":
        return lasts + f"the gradient after {number(_end(pieces, 'b'))}"
    pause = _end(pieces) - sum(length for _, _, stream, _, length in pieces if stream == COMPUTE)
    return lasts + (f"the GPU pauses for {number(pause)}" if pause else "the GPU never pauses")


def streams(
    order: str, attention: float, network: float, experts: float, layers: int = 1
) -> list[Piece]:
    """When every piece of so many layers runs, which is when its stream is free and the piece
    before it in its half is done.
    """
    takes, split = {"A": attention, "E": experts, "D": network, "C": network}, "w" in ORDERS[order]
    at = dict.fromkeys((COMPUTE, NETWORK, "f", "b", "w"), 0.0)
    placed: list[Piece] = []
    for kind, letter in ORDERS[order].split() * layers:
        stream = COMPUTE if letter in "AE" else NETWORK
        length = takes[letter] * (2 if kind == "b" and stream == COMPUTE and not split else 1)
        start = max(at[stream], at[kind])
        at[stream] = at[kind] = start + length
        placed.append((kind, letter, stream, start, length))
    return placed
