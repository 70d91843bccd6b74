"""Turn what ranks compute into what they compute and communicate."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from .actions import Action, Overlap, parts
from .deps import incoming, outgoing
from .schedule import Schedule
from .simulator import run

LoweredRow = tuple[Action | Overlap, ...]


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
    num_stages, bounds = schedule.num_stages, schedule.columns.bounds
    rows, needs = schedule.graph.turns
    places = [
        (rank, i, action)
        for rank, row in enumerate(schedule.rows)
        for i, item in enumerate(row)
        for action in parts(item)
    ]
    users = {incoming(action, num_stages): (rank, i) for rank, i, action in places}  # of receives
    starts = ends = [0.0] * len(needs)
    if ahead:  # when do items start and end, if each takes a unit of time?
        lasts = [int(i < bounds[-1]) for i in range(len(needs))]
        starts, ends = run(rows, needs, lasts, [0] * len(needs))
        if None in ends:  # what can't run to its end is left as it is
            ahead = 0

    sends = defaultdict(list)  # (rank, place in its row) -> what is sent after it
    channels = defaultdict(list)  # (from, to) -> receives, with their senders' starts
    for rank, i, action in places:
        if (message := outgoing(action, num_stages)) and users[message.receive][0] != rank:
            sends[rank, i].append(message.send)
            to = users[message.receive][0]
            channels[rank, to].append((message.receive, starts[bounds[rank] + i]))

    receives = defaultdict(list)  # (rank, place in its row) -> what is posted before it
    for (_, to), messages in channels.items():
        # No receive may stand behind a later message's user, since it has to come before that one.
        latest = [*accumulate((users[receive][1] for receive, _ in reversed(messages)), min)]
        first = 0  # nor before the receive of an earlier message
        for (receive, sender_starts), last in zip(messages, reversed(latest), strict=True):
            # What ends by the time its sender starts may be what the sender waits for: stay behind.
            early = range(max(first, last - ahead), last)
            first = next((i for i in early if ends[bounds[to] + i] > sender_starts), last)
            receives[to, first].append(receive)

    return tuple(
        tuple(
            step
            for i, item in enumerate(row)
            for step in (*receives[rank, i], item, *sends[rank, i])
        )
        for rank, row in enumerate(schedule.rows)
    )
