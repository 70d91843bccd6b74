"""From what ranks compute to what they compute and communicate."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from .actions import Action, Overlap, parts
from .deps import incoming, outgoing
from .schedule import Schedule

LoweredRow = tuple[Action | Overlap, ...]


def lower(schedule: Schedule, *, ahead: int = 0) -> tuple[LoweredRow, ...]:
    """The rows of `schedule` with a SEND after every action whose result another rank needs, and the RECV for it.

    A receive stands `ahead` actions before the one that needs it. Messages from one rank to another are received in
    the order in which they are sent, so that a channel that keeps its order (NCCL) can't deadlock. Stages on one rank
    exchange nothing.

    >>> print(lower(Schedule([["0F0", "0B0"], ["1F0", "1B0"]]))[0])
    (0F0, 0SEND_F0, 0RECV_B0, 0B0)
    """
    num_stages = schedule.num_stages
    every = [(r, at, a) for r, row in enumerate(schedule.rows) for at, item in enumerate(row) for a in parts(item)]
    users = {incoming(action, num_stages): (rank, at) for rank, at, action in every}  # by receive: what needs it

    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)  # (rank, position) -> what is sent after it
    channels: dict[tuple[int, int], list[Action]] = defaultdict(list)  # (from, to) -> receives in order of sending
    for rank, position, action in every:
        message = outgoing(action, num_stages)
        if message and users[message.receive][0] != rank:
            sends[rank, position].append(message.send)
            channels[rank, users[message.receive][0]].append(message.receive)

    receives: dict[tuple[int, int], list[Action]] = defaultdict(list)  # (rank, position) -> what is posted before it
    for (_, to), order in channels.items():
        wanted = [max(users[receive][1] - ahead, 0) for receive in order]
        places = reversed([*accumulate(reversed(wanted), min)])  # not after a receive of what is sent later
        for place, receive in zip(places, order, strict=True):
            receives[to, place].append(receive)

    lowered: list[list[Action | Overlap]] = [[] for _ in schedule.rows]
    for rank, row in enumerate(schedule.rows):
        for position, item in enumerate(row):
            lowered[rank] += [*receives[rank, position], item, *sends[rank, position]]
    return tuple(map(tuple, lowered))
