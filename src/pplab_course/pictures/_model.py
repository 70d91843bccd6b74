"""The model, cut into pieces, and what crosses between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from ._canvas import (
    BLUE,
    DASHED,
    EDGE,
    FAINT,
    LIMIT,
    LINE,
    ORANGE,
    SIZE,
    STATE,
    WIDTH,
    arrow,
    box,
    canvas,
    frame,
    line,
    listed,
    named_bytes,
    number,
    say,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# points: a rank's row, what lies between two, the whole model above them
_ROW, _GAP, _TOP = 44, 30, 66
_LEFT, _CARD = 104, 32  # where the cards begin, a card's height
_OVER = (LIMIT, 0.45)  # what is more than a card has


def cut_model(
    cut: Sequence[int],
    state: Sequence[float],
    budget: float,
    message_bytes: float,
) -> Axes:
    """Draw a model of sum(cut) layers as a bar that is longer than a card, and cut into stages that
    fit.

    `cut[r]` is the number of layers of rank r. `state[r]` is what they take there, with embedding
    or head (weights, gradients and the optimizer's state, in GB). `budget` is what a card has.
    `message_bytes` cross a boundary for a microbatch, each way.
    """
    if len(cut) != len(state):
        raise ValueError(
            f"expected one amount of state per stage: {len(cut)} stages, {len(state)} amounts"
        )
    whole, ranks = sum(state), len(cut)
    fits = "every one fits" if max(state) <= budget else "not every one fits"
    message = named_bytes(message_bytes)
    notes = (
        [f"{message} of activations", f"{message} of gradients"]
        if ranks > 2
        else [f"{message} each way"]
    )
    height = _TOP + ranks * _ROW + (ranks - 1) * _GAP + 4
    ax = canvas(
        height,
        f"A model of {sum(cut)} layers takes {number(whole)} GB on one GPU, which has "
        f"{number(budget)}. Cut into stages of "
        f"{listed(cut)} layers it takes {listed(state)} GB on {ranks} GPUs: {fits}. Between "
        "neighbours, "
        f"{message} of activations go down and {message} of gradients come back up",
    )
    scale = (WIDTH - _LEFT - 2) / max(whole, budget)
    full, y = _LEFT + budget * scale, height - 50
    say(ax, 0, y + 13, f"{sum(cut)} layers\non one GPU", ha="left", linespacing=1.15)
    box(ax, _LEFT, y, min(whole, budget) * scale, 26)
    box(ax, full, y, max(whole - budget, 0) * scale, 26, fc=_OVER)
    say(ax, _LEFT + 8, y + 13, f"{number(whole)} GB", ha="left")
    pitch = _ROW / max(cut)
    for rank, (layers, amount) in enumerate(zip(cut, state, strict=True)):
        y = height - _TOP - _ROW / 2 - rank * (_ROW + _GAP)
        for layer in range(layers):
            box(ax, 0, y + (layers / 2 - layer - 1) * pitch + 0.6, 50, pitch - 1.2, fc=EDGE)
        arrow(ax, (57, y), (_LEFT - 8, y))
        low = y - _CARD / 2
        box(ax, _LEFT, low, amount * scale, _CARD, fc=STATE if amount <= budget else _OVER)
        frame(ax, _LEFT, low, budget * scale, _CARD)
        say(ax, _LEFT + 8, y, f"{number(amount)} GB", ha="left")
        say(ax, full + 9, y, f"GPU {rank}", ha="left")
        if rank < ranks - 1:
            note = "".join(notes[rank : rank + 1])
            _draw_boundary(ax, y - (_ROW + _GAP) / 2, sum(cut[: rank + 1]), note)
    line(ax, (full, 0), (full, height - 19), ec=LIMIT, lw=2 * LINE)
    say(ax, full, height - 9, f"{number(budget)} GB", color=LIMIT)
    return ax


def _draw_boundary(ax: Axes, y: float, layers: int, note: str) -> None:
    """The cut after so many layers, with the activation that goes down and its gradient."""
    top, bottom = y + _GAP / 2 + 2, y - _GAP / 2 - 2
    line(ax, (0, y), (46, y), ls=DASHED)
    say(ax, 52, y, f"after {layers}", ha="left")
    arrow(ax, (_LEFT + 10, top), (_LEFT + 10, bottom), BLUE)
    arrow(ax, (_LEFT + 24, bottom), (_LEFT + 24, top), ORANGE)
    say(ax, _LEFT + 33, y, note, ha="left")


def crossing(shape: Sequence[int], bytes_per_value: float, layers: tuple[int, int]) -> Axes:
    """Draw what crosses the boundary of two ranks for one microbatch: an activation down, and its
    gradient up.

    Both have the same shape. `layers` is the number of layers of each of the two ranks, from layer
    0 on. A message takes prod(shape) * bytes_per_value bytes.
    """
    size = named_bytes(prod(shape) * bytes_per_value)
    text = " × ".join(f"{each:,}" for each in shape)
    ax = canvas(
        150,
        f"For one microbatch, the upper rank sends the activation of its last layer down, {text} "
        f"values, {size}; the lower rank sends that activation's gradient up, of the same shape "
        "and size",
    )
    for rank, (y, start, count) in enumerate(((112, 0, layers[0]), (2, *layers))):
        frame(ax, 1, y, WIDTH - 2, 36, fc=FAINT)
        say(ax, 14, y + 18, f"rank {rank}", ha="left")
        say(ax, WIDTH - 14, y + 18, f"layers {start} to {start + count - 1}", ha="right")
    line(ax, (0, 75), (WIDTH, 75), ls=DASHED)
    for x, start, end, colour, what in (
        (24, 111, 39, BLUE, "activation"),
        (WIDTH / 2 + 24, 39, 111, ORANGE, "its gradient"),
    ):
        arrow(ax, (x, start), (x, end), colour)
        box(ax, x - 13, 66, 26, 18, fc=colour)  # an envelope
        line(ax, (x - 11, 82), (x, 73), (x + 11, 82), ec="white")
        say(ax, x + 22, 88, f"{what}, {size}", ha="left")
        say(ax, x + 22, 62, text, ha="left", fontsize=SIZE)
    return ax
