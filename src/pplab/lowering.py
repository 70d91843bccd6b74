"""Turn what ranks compute into what they compute and communicate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from .actions import Action, Item, parts
from .deps import incoming, outgoing
from .errors import expect
from .schedule import Schedule
from .simulator import run

LoweredRow = tuple[Item, ...]


def lower(schedule: Schedule, *, ahead: int = 0) -> tuple[LoweredRow, ...]:
    """The rows of `schedule` with its messages: a SEND after every action whose result a different
    rank needs, and a RECV before the action that needs it.

    A receive stands `ahead` actions before the one that needs it. It never stands before an action
    for which its sender may wait, because a host that waits for its GPU there would then wait for
    itself. A rank receives messages in the order in which they are sent, so a channel that keeps
    this order (NCCL) can't deadlock. Stages on one rank exchange nothing.

    >>> print(lower(Schedule([["0F0", "0B0"], ["1F0", "1B0"]]))[0])
    (0F0, 0SEND_F0, 0RECV_B0, 0B0)
    """
    expect(Schedule, schedule=schedule)
    num_stages = schedule.num_stages
    places = [
        (rank, i, action)
        for rank, row in enumerate(schedule.rows)
        for i, item in enumerate(row)
        for action in parts(item)
    ]
    users = {incoming(action, num_stages): (rank, i) for rank, i, action in places}  # of receives

    sends = defaultdict(list)  # (rank, place in its row) -> what is sent after it
    channels = defaultdict(list)  # (from, to) -> its messages in the order of sending
    for rank, i, action in places:
        if message := outgoing(action, num_stages):
            to, used = users[message.receive]
            if to != rank:
                sends[rank, i].append(message.send)
                channels[rank, to].append(_Message(message.receive, i, used))

    receives = defaultdict(list)  # (rank, place in its row) -> what is posted before it
    times = _unit_times(schedule) if ahead else None
    for (source, to), messages in channels.items():
        posted = _latest(messages)
        if times:
            starts, ends = times
            posted = _earlier(posted, messages, ahead, starts[source], ends[to])
        for message, place in zip(messages, posted, strict=True):
            receives[to, place].append(message.receive)

    rows = []
    for rank, row in enumerate(schedule.rows):
        lowered = []
        for i, item in enumerate(row):
            lowered += [*receives[rank, i], item, *sends[rank, i]]
        rows.append(tuple(lowered))
    return tuple(rows)


class _Message(NamedTuple):
    """A message of a channel, with the places in their rows of what sends it and what needs it."""

    receive: Action
    sent: int
    used: int


def _latest(messages: Sequence[_Message]) -> list[int]:
    """The latest place of each receive: no later message's user may come before it."""
    places = [*accumulate((message.used for message in reversed(messages)), min)]
    return places[::-1]


def _earlier(
    latest: Sequence[int],
    messages: Sequence[_Message],
    ahead: int,
    starts: Sequence[float],
    ends: Sequence[float],
) -> list[int]:
    """The places up to `ahead` actions before the latest ones. `starts` are those of the sender's
    items, and `ends` those of the receiver's.
    """
    places, place = [], 0
    for last, message in zip(latest, messages, strict=True):
        place = max(place, last - ahead)  # not before the receive of an earlier message
        # What ends by the time its sender starts may be what the sender waits for: stay behind.
        while place < last and ends[place] <= starts[message.sent]:
            place += 1
        places.append(place)
    return places


def _unit_times(schedule: Schedule) -> tuple[list[list[float]], list[list[float]]] | None:
    """When the items of each row start, and when they end, if each takes a unit of time; None where
    they can't run to their end.
    """
    rows, needs = schedule.graph.turns
    bounds = schedule.columns.bounds
    lasts = [int(i < bounds[-1]) for i in range(len(needs))]
    starts, ends = run(rows, needs, lasts, [0] * len(needs))
    if None in ends:
        return None
    rows = [slice(*ids) for ids in pairwise(bounds)]
    return [starts[ids] for ids in rows], [ends[ids] for ids in rows]
