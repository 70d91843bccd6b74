"""The three decisions that make up every schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pplab import palette
from pplab.actions import parts
from pplab.plot import shade
from pplab.schedule import Schedule

from ._canvas import EDGE, FAINT, box, canvas, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CELL, _AIR = 112, 22  # points: a knob's width, the space between two
_UP = 52  # a pictogram's height
_MOST = 16  # actions of a row that are drawn
_MORE = 14  # points for the dots that say: and so on
_LONGEST = 16  # letters that a knob is wide


def knobs(
    schedule: Schedule, *, cut: Sequence[int] | None = None, words: Sequence[str] = ()
) -> Axes:
    """Draw a schedule as a setting of three knobs: where to cut the model, which rank holds each
    piece, and what runs next.

    `cut` gives the layers of each stage, by default equal. `words` replaces the names of the three
    drawings, which otherwise come from the schedule.
    """
    cut = list(cut) if cut is not None else [1] * schedule.num_stages
    if len(cut) != schedule.num_stages:
        raise ValueError(
            f"expected one number of layers per stage, {schedule.num_stages}, got {len(cut)}"
        )
    names = ("where to cut", "on which rank", "what to run next")
    order = schedule.name if len(schedule.name) <= _LONGEST else "its own order"
    settings = tuple(words) or (_where(cut), _placed(schedule), order)
    if len(settings) != len(names):
        raise ValueError(f"expected words for the 3 knobs, or none, got {len(settings)}")
    said = "; ".join(f"{name}: {setting}" for name, setting in zip(names, settings, strict=True))
    ax = canvas(_UP + 40, f"The three knobs as {schedule.name} sets them: {said}")
    for place, (name, setting) in enumerate(zip(names, settings, strict=True)):
        x = place * (_CELL + _AIR)
        say(ax, x, _UP + 32, name, ha="left", fontweight="bold")
        say(ax, x, 7, setting, ha="left")
    _model(ax, 0, 18, cut)
    _grid(ax, _CELL + _AIR, 18, schedule)
    _rows(ax, 2 * (_CELL + _AIR), 18, schedule)
    return ax


def _where(cut: Sequence[int]) -> str:
    uneven = "+".join(map(str, cut))
    return uneven if len(set(cut)) > 1 and len(uneven) <= _LONGEST else f"{len(cut)} pieces"


def _placed(schedule: Schedule) -> str:
    ranks, places = schedule.num_ranks, schedule.placement
    down = list(range(ranks))
    if any(isinstance(place, tuple) for place in places):
        return "both ways at once"
    if list(places) == down:
        return "one per rank"
    if list(places) == down * (len(places) // ranks):
        return f"{len(places) // ranks} per rank, in a loop"
    return "2 per rank, in a V" if list(places) == down + down[::-1] else "as drawn"


def _model(ax: Axes, x: float, y: float, cut: Sequence[int]) -> None:
    """The model as a bar, its pieces apart."""
    air = min(4, 30 / len(cut))
    unit = (_CELL - air * (len(cut) - 1)) / sum(cut)
    for layers in cut:
        box(ax, x, y + 14, layers * unit, _UP - 28, fc=EDGE)
        x += layers * unit + air


def _grid(ax: Axes, x: float, y: float, schedule: Schedule) -> None:
    """A row per rank and a column per piece: filled where the rank has the piece."""
    wide, high = _CELL / schedule.num_stages, _UP / schedule.num_ranks
    for rank in range(schedule.num_ranks):
        for stage in range(schedule.num_stages):
            here = stage in schedule.stages_of(rank)
            low = y + _UP - (rank + 1) * high
            box(
                ax,
                x + stage * wide + 0.8,
                low + 0.8,
                wide - 1.6,
                high - 1.6,
                fc=EDGE if here else FAINT,
            )


def _rows(ax: Axes, x: float, y: float, schedule: Schedule) -> None:
    """The actions of every rank, in order. A long row ends in dots."""
    longest = max(map(len, schedule.rows))
    shown, room = min(_MOST, longest), _CELL - _MORE * (longest > _MOST)
    wide, high = room / shown, _UP / schedule.num_ranks
    if longest > _MOST:
        say(ax, x + _CELL, y + _UP / 2, "…", ha="right")
    for rank, row in enumerate(schedule.rows):
        stages = schedule.stages_of(rank)
        for place, item in enumerate(row[:shown]):
            low, halves = y + _UP - (rank + 1) * high, parts(item)
            for k, action in enumerate(halves):
                fill = shade(palette.FILL[action.kind], stages.index(action.stage), len(stages))
                tall = (high - 1.6) / len(halves)
                box(
                    ax,
                    x + place * wide + 0.6,
                    low + 0.8 + (len(halves) - 1 - k) * tall,
                    wide - 1.2,
                    tall,
                    fc=fill,
                )
