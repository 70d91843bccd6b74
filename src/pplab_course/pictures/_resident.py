"""The streams of one GPU in a step: its computation, and the transfers that are on the GPU while
they wait for their peer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pplab.actions import RECV_B, RECV_F, F, parts
from pplab.costs import Costs
from pplab.deps import other_end, outgoing
from pplab.lowering import lower
from pplab.schedule import Schedule
from pplab.simulator import simulate
from pplab.timeline import Timeline

from ._canvas import BLUE, EDGE, FAINT, LINE, ORANGE, WIDTH, bar, box, canvas, key, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT, _BAR, _ROW = 82, 24, 34  # points
_WIDE = WIDTH - _LEFT - 4
_WAITS = {"fc": "none", "ec": EDGE, "lw": LINE, "hatch": "////"}
_MESSAGE = 0.5  # units of time that a message takes


class _Receive(NamedTuple):
    """A receive, on the GPU from `start` to `end`. From `moves` on its message moves."""

    start: float
    moves: float
    end: float
    colour: str


def resident(schedule: Schedule, rank: int = 0) -> Axes:
    """Draw what is on `rank`'s GPU over time: its actions, at the default costs, and a row for each
    channel of a transfer.

    A receive is there from the time when it can start, behind everything that was enqueued before
    it, until its message has come. Only in the last half unit of that does anything move. Sends
    aren't drawn, because their receives are posted before them here.
    """
    timeline = simulate(schedule, Costs(latency=_MESSAGE))
    channels = _channels(timeline, rank)
    receives = [receive for channel in channels.values() for receive in channel]
    waiting = sum(receive.moves - receive.start for receive in receives)
    y, unit = 46 + _ROW * len(channels), _WIDE / timeline.makespan
    ax = canvas(
        y + _ROW + 6,
        f"The GPU of rank {rank} under {schedule.name}: {len(receives)} receives are on it for "
        f"{waiting + _MESSAGE * len(receives):g} units in all, and in {waiting:g} of them they "
        "wait for their send",
    )
    _row(ax, y, "compute")
    for span in timeline.spans_of(rank):
        action, left = parts(span.action)[0], _LEFT + span.start * unit
        fill = BLUE if action.kind == F else ORANGE
        bar(ax, left, y, (span.end - span.start) * unit, _BAR, fill, str(action.microbatch))
    for peer, channel in channels.items():
        y -= _ROW
        _row(ax, y, f"from rank {peer}")
        for receive in channel:
            _draw_receive(ax, y, unit, receive)
    key(ax, 0, 5, "waits, on the GPU", **_WAITS)
    key(ax, 140, 5, "forward", fc=BLUE)
    key(ax, 226, 5, "backward", fc=ORANGE)
    return ax


def _channels(timeline: Timeline, rank: int) -> dict[int, list[_Receive]]:
    """The receives on a rank's GPU by the rank that sends. Those of a channel take turns."""
    schedule = timeline.schedule
    ends = {action: span.end for span in timeline.spans for action in parts(span.action)}
    sent = {
        out.receive: end
        for action, end in ends.items()
        if (out := outgoing(action, schedule.num_stages))
    }
    home, now = schedule.home(), 0.0
    channels: dict[int, list[_Receive]] = {}
    for step in lower(schedule, ahead=1)[rank]:
        first = parts(step)[0]
        if first in ends:
            now = ends[first]
        elif first.kind in (RECV_F, RECV_B):
            peer = home[other_end(first).stage, first.microbatch]
            channel = channels.setdefault(peer, [])
            start = max(now, channel[-1].end if channel else 0.0)
            moves = max(start, sent[first])
            colour = BLUE if first.kind is RECV_F else ORANGE
            channel.append(_Receive(start, moves, moves + _MESSAGE, colour))
    return channels


def _row(ax: Axes, y: float, name: str) -> None:
    """A row with its name and nothing in it."""
    say(ax, 0, y + _BAR / 2, name, ha="left")
    box(ax, _LEFT, y, _WIDE, _BAR, fc=FAINT)


def _draw_receive(ax: Axes, y: float, unit: float, receive: _Receive) -> None:
    """A hatched bar, filled while the message moves."""
    left, moves, right = (_LEFT + time * unit for time in receive[:3])
    box(ax, left + 0.7, y, right - left - 1.4, _BAR, **_WAITS)
    box(ax, moves, y, right - moves - 0.7, _BAR, fc=receive.colour)
