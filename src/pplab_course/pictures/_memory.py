"""What ranks hold, compared with what a card has: state, and a brick for every microbatch in
flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pplab.plot import ink, shade

from ._canvas import BLUE, DASHED, LIMIT, LINE, WIDTH, arrow, box, canvas, line, listed, number, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT, _BASE = 34, 38  # points: where columns begin, and stand
_UP, _GHOST = 165, 36  # how high the highest gets, and a dashed one beyond that


def what_is_held(
    state: Sequence[float],
    per_microbatch: Sequence[float],
    in_flight: Mapping[str, Sequence[int]],
    budget: float,
    *,
    ghosts: Mapping[str, Sequence[int]] | None = None,
    ghosts_are: str = "",
) -> Axes:
    """Draw the most that every rank holds, a column per schedule, next to each other under a line
    at `budget`.

    `state[r]` and `per_microbatch[r]` are rank r's, in GB. `in_flight[name][r]` is the number of
    microbatches whose activations it keeps at once under a schedule, and each is a brick. `ghosts`
    are such numbers for some of the schedules in a different case, for example with more
    microbatches, which `ghosts_are` names. They are dashed, and cut off where they would dwarf the
    rest.
    """
    ghosts = {**in_flight, **(ghosts or {})}
    for name, counts in [*in_flight.items(), *ghosts.items()]:
        if not len(counts) == len(state) == len(per_microbatch):
            raise ValueError(
                f"{name}: expected one number per rank, {len(state)}, got {len(counts)}"
            )
    totals = {name: _totals(state, per_microbatch, counts) for name, counts in in_flight.items()}
    beyond = {name: _totals(state, per_microbatch, ghosts[name]) for name in in_flight}
    more = f". {ghosts_are or 'Beyond that'}: {_said(beyond)}" if beyond != totals else ""
    ax = canvas(
        _BASE + _UP + 36 + (_GHOST if more else 0),
        f"What ranks 0 to {len(state) - 1} hold at their fullest, in GB, where a card has "
        f"{number(budget)}: "
        f"{_said(totals)}{more}",
    )
    scale = _UP / max(budget, *(max(amounts) for amounts in totals.values()))
    group = (WIDTH - _LEFT) / len(state)
    width = min((group - 12) / len(in_flight), 60)
    for rank, each in enumerate(per_microbatch):
        left = _LEFT + rank * group + (group - width * len(in_flight)) / 2
        say(ax, left + width * len(in_flight) / 2, 10, f"rank {rank}")
        for place, (name, counts) in enumerate(in_flight.items()):
            x, total, ghost = left + place * width, totals[name][rank], beyond[name][rank]
            fill = shade(BLUE, len(in_flight) - 1 - place, len(in_flight))
            _column(ax, x + 2, width - 4, state[rank], [each] * counts[rank], scale, budget, fill)
            _sum(ax, x + width / 2, total, budget, scale, fill)
            if ghost > total:
                _ghost(ax, x + 2, width - 4, total, ghost, scale)
            say(ax, x + width / 2, _BASE - 11, name)
    _limit(ax, budget, scale)
    say(
        ax,
        _LEFT + (group - width * len(in_flight) + width) / 2,
        _BASE + state[0] * scale / 2,
        "state",
        rotation=90,
    )
    top = _BASE + _UP + 28 + (_GHOST if more else 0)
    say(ax, _LEFT, top, "brick: a microbatch's activations", ha="left")
    if more and ghosts_are:
        say(ax, WIDTH, top, f"dashed: {ghosts_are}", ha="right")
    return ax


def _totals(
    state: Sequence[float], per_microbatch: Sequence[float], counts: Sequence[int]
) -> list[float]:
    return [
        own + count * each for own, each, count in zip(state, per_microbatch, counts, strict=True)
    ]


def _said(totals: Mapping[str, Sequence[float]]) -> str:
    return "; ".join(f"{name} {listed(amounts)}" for name, amounts in totals.items())


def more_microbatches(
    state: float,
    sequence: float,
    sequences: int,
    cuts: Sequence[int],
    counts: Sequence[int],
    budget: float,
) -> Axes:
    """Draw two experiments on a rank that runs all forwards first: thinner microbatches, and more
    of them.

    `state` is the rank's, and `sequence` is what a sequence's activations take there, both in GB.
    On the left, `sequences` sequences are cut into each of `cuts` microbatches, and the columns are
    equal. On the right are `counts` microbatches of one sequence each.
    """
    if wrong := [cut for cut in cuts if cut < 1 or sequences % cut]:
        raise ValueError(
            f"expected numbers of microbatches that divide {sequences} sequences, got {wrong[0]}"
        )
    columns = [[sequence * sequences / cut] * cut for cut in cuts] + [
        [sequence] * count for count in counts
    ]
    totals = [state + sum(column) for column in columns]
    fitting = [count for count in counts if state + sequence * count <= budget]
    most = f"up to {max(fitting)} fit" if fitting else "none fits"
    ax = canvas(
        _BASE + _UP + 18,
        f"Left: {sequences} sequences in {listed(cuts)} microbatches take {number(totals[0])} GB, "
        "however cut. Right: "
        f"{listed(counts)} microbatches of one sequence each; under the line at "
        f"{number(budget)} GB, {most}",
    )
    scale, between = _UP / max(budget, *totals), 24
    pitch = (WIDTH - _LEFT - between) / len(columns)
    for place, (column, total, name) in enumerate(
        zip(columns, totals, [*cuts, *counts], strict=True)
    ):
        x = _LEFT + place * pitch + (between if place >= len(cuts) else 0)
        _column(ax, x + 2, pitch - 4, state, column, scale, budget, BLUE)
        _sum(ax, x + pitch / 2, total, budget, scale, BLUE)
        say(ax, x + pitch / 2, _BASE - 11, str(name))
    _limit(ax, budget, scale)
    say(ax, _LEFT + pitch / 2, _BASE + state * scale / 2, "state", rotation=90)
    say(ax, _LEFT + len(cuts) * pitch / 2, 9, f"{sequences} sequences in so many")
    say(ax, WIDTH - len(counts) * pitch / 2, 9, "microbatches of one sequence")
    return ax


def _column(
    ax: Axes,
    x: float,
    width: float,
    state: float,
    bricks: Sequence[float],
    scale: float,
    budget: float,
    fill: str,
) -> None:
    """State, and a brick for each of `bricks`. A brick over the line is red."""
    box(ax, x, _BASE, width, state * scale)
    held = state
    for brick in bricks:
        low, high = _BASE + held * scale + 1.4, _BASE + (held + brick) * scale
        fits = max(low, min(high, _BASE + budget * scale))
        box(ax, x, low, width, fits - low, fc=fill)
        box(ax, x, fits, width, high - fits, fc=(LIMIT, 0.75))
        held += brick


def _sum(ax: Axes, x: float, total: float, budget: float, scale: float, fill: str) -> None:
    """The sum of a column, above it, or inside it where it would lie on the line. It is a whole
    number, unless rounding would hide that it doesn't fit.
    """
    top, text = (
        _BASE + total * scale,
        number(round(total) if total >= 10 and abs(total - budget) >= 1 else total),
    )
    if 0 <= budget * scale + _BASE - top < 16:
        say(ax, x, top - 7, text, color=ink(fill))
    else:
        say(ax, x, top + 8, text)


def _ghost(ax: Axes, x: float, width: float, total: float, ghost: float, scale: float) -> None:
    """The column in the other case, with an arrow where it leaves the picture."""
    low, top = _BASE + total * scale, _BASE + _UP + _GHOST
    high = min(_BASE + ghost * scale, top)
    corners = [(x, low + 2), (x, high), (x + width, high), (x + width, low + 2)]
    for start, end in ((0, 1), (2, 3)) if high == top else ((0, 1), (1, 2), (2, 3)):
        line(ax, corners[start], corners[end], ls=DASHED)
    if high == top:
        arrow(ax, (x + width / 2, low + 18), (x + width / 2, high + 4))
    say(ax, x + width / 2, high + 11, number(round(ghost) if ghost >= 10 else ghost))


def _limit(ax: Axes, budget: float, scale: float) -> None:
    y = _BASE + budget * scale
    line(ax, (_LEFT - 4, _BASE), (WIDTH, _BASE))
    line(ax, (_LEFT - 4, y), (WIDTH, y), ec=LIMIT, lw=2 * LINE)
    say(ax, 0, y, f"{number(budget)}\nGB", color=LIMIT, ha="left", linespacing=1.1)
