"""The round trip of microbatches as tickets that ride a loop: at work, on the wire, or waiting to
be admitted.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pplab.actions import B, F, Kind
from pplab.plot import idle_styles, ink
from pplab.timeline import Span, Timeline

from ._canvas import (
    BLUE,
    FAINT,
    LINE,
    ORANGE,
    WIDTH,
    arrow,
    box,
    canvas,
    frame,
    line,
    number,
    say,
    spot,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW, _HIGH = 74, 34  # points: from station to station, a station
_DOWN, _UP = 150, 250  # where the ways down and up lie
_RADIUS = 11
_WAITS = "#d5d8dd"


def tickets(timeline: Timeline, at: float, latency: float = 0, *, turn: int | None = None) -> Axes:
    """Draw where every microbatch is at the time `at`: at work on a rank, on the wire, or in the
    queue before rank 0.

    The timeline's schedule has one stage per rank and whole backwards. `latency` is how long a
    message takes, in the timeline's unit, so that a ticket on a wire lies where its message is. An
    arrow under the rank `turn` marks the shorter loop from rank 0 to it and back.
    """
    schedule = timeline.schedule
    if schedule.num_stages != schedule.num_ranks or schedule.copies > 1:
        raise ValueError(
            f"expected one stage per rank, got {schedule.num_stages} stages on "
            f"{schedule.num_ranks} ranks"
        )
    if set(schedule.columns.kinds) - {F, B}:
        raise ValueError(f"expected whole backwards, got {schedule.name}, which splits them")
    places = _places(timeline, at, latency)
    queue = [m for m, place in places.items() if place is None]
    riding = {m: place for m, place in places.items() if place is not None}
    done = schedule.num_microbatches - len(places)
    ranks, allowed = schedule.num_ranks, schedule.peak_in_flight[0]
    busy = {station for station, _, how in riding.values() if how == "works"}
    top = 40 + (ranks - 1) * _ROW + _HIGH
    ax = canvas(
        top + 40,
        f"A loop through {ranks} ranks under {schedule.name}, at time {number(at)}: rank 0 admits "
        f"at most {allowed} microbatches; "
        f"{len(riding)} ride, {len(queue)} wait in front of it, {done} are done; "
        f"{len(busy)} of {ranks} ranks work",
    )
    for rank in range(ranks):
        _station(ax, rank, top - rank * _ROW - _HIGH, rank in busy, rank == ranks - 1, rank == turn)
    arrow(ax, (_UP, top), (_DOWN, top), connectionstyle="arc3,rad=0.42")
    say(ax, (_DOWN + _UP) / 2, top + 32, f"{allowed} tickets")
    say(ax, WIDTH, top + 32, f"{done} done", ha="right")
    if ranks > 1:
        say(ax, 0, 40 + _HIGH / 2, "down: forward\nup: backward", ha="left", linespacing=1.3)
    _row(ax, _DOWN - 52, top - _HIGH / 2, -1, queue, None)
    line(ax, (_DOWN - 35, top - _HIGH / 2 - 22), (_DOWN - 35, top - _HIGH / 2 + 22), lw=3)
    for place in dict.fromkeys(riding.values()):
        microbatches = [m for m, where in riding.items() if where == place]
        x, y = _spot(place, top, ranks)
        _row(ax, x, y, -1 if place[1] is F else 1, microbatches, place[1])
    return ax


# a rank; on the way down or up; "works" there, or how far along the wire to it
Place = tuple[int, Kind, float | str]


def _places(timeline: Timeline, at: float, latency: float) -> dict[int, Place | None]:
    """Where every microbatch is that isn't done, or None where it hasn't begun."""
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(timeline.spans, key=lambda span: span.start):
        spans[span.action.microbatch].append(span)
    found: dict[int, Place | None] = {}
    for microbatch, trip in sorted(spans.items()):
        if trip[-1].end <= at:
            continue
        begun = [span for span in trip if span.start <= at]
        found[microbatch] = None
        if not begun:
            continue
        last = begun[-1]
        if at < last.end:
            found[microbatch] = last.rank, last.action.kind, "works"
        else:
            to = trip[len(begun)]
            moved = latency and to.rank != last.rank
            found[microbatch] = (
                to.rank,
                to.action.kind,
                min((at - last.end) / latency, 1) if moved else 1,
            )
    return found


def _station(ax: Axes, rank: int, y: float, works: bool, last: bool, turns: bool) -> None:
    """A rank, which is striped while it is idle, and the wires to the next one."""
    x, width = _DOWN - 26, _UP - _DOWN + 52
    for style in [{"fc": FAINT}] if works else idle_styles("inner"):
        box(ax, x, y, width, _HIGH, **style)
    frame(ax, x, y, width, _HIGH)
    say(
        ax,
        x + width + 9,
        y + _HIGH / 2,
        f"rank {rank}" if works else f"rank {rank}, idle",
        ha="left",
    )
    if last or turns:
        beside = 0 if last else _RADIUS + 5  # of tickets on the wires
        arrow(ax, (_DOWN + beside, y), (_UP - beside, y), connectionstyle="arc3,rad=0.42")
    if last:
        return
    for way, colour in ((_DOWN, BLUE), (_UP, ORANGE)):
        line(ax, (way, y), (way, y - _ROW + _HIGH), ec=colour, lw=1.5 * LINE, ls=(0, (0.1, 2.5)))


def _spot(place: Place, top: float, ranks: int) -> tuple[float, float]:
    """Where a ticket lies: in a station, on the wire to it, or on the last rank's turn."""
    rank, kind, how = place
    way, side = (_DOWN, -1) if kind is F else (_UP, 1)
    middle = top - rank * _ROW - _HIGH / 2
    if how == "works":
        return way, middle
    if kind is not F and rank == ranks - 1:
        return (_DOWN + _UP) / 2, middle - _HIGH / 2 - 21
    there = middle - side * (_HIGH / 2 + _RADIUS + 1)
    return way, there - side * (1 - how) * (_ROW - _HIGH - 2 * _RADIUS - 2)


def _row(
    ax: Axes, x: float, y: float, side: int, microbatches: list[int], kind: Kind | None
) -> None:
    """Tickets next to each other, as many as there is room for. None are those that don't ride
    yet.
    """
    step = 2 * _RADIUS + 2
    room = 1 + int((x - _RADIUS if side < 0 else WIDTH - x - _RADIUS) // step)
    shown = microbatches if len(microbatches) <= room else microbatches[: room - 1]
    fill = _WAITS if kind is None else BLUE if kind is F else ORANGE
    for place, microbatch in enumerate(shown):
        spot(ax, x + side * step * place, y, _RADIUS, fc=fill, zorder=3)
        say(ax, x + side * step * place, y, str(microbatch), color=ink(fill), zorder=4)
    if more := len(microbatches) - len(shown):
        say(ax, x + side * step * len(shown), y, f"+{more}")
