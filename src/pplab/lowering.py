"""From what ranks compute to what they compute and communicate."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from .actions import Action, Overlap, parts
from .deps import incoming, outgoing
from .schedule import Schedule
from .simulator import run

LoweredRow = tuple[Action | Overlap, ...]


def lower(schedule: Schedule, *, ahead: int = 0) -> tuple[LoweredRow, ...]:
    """The rows of `schedule` with a SEND after every action whose result another rank needs, and
    the RECV for it.

    A receive stands `ahead` actions before the one that needs it, but before none that its sender
    may wait for: a host that waited for its GPU there would wait for itself. A rank receives what
    another sends in the order of sending, so that a channel that keeps it (NCCL) can't deadlock.
    Stages on one rank exchange nothing.

    >>> print(lower(Schedule([["0F0", "0B0"], ["1F0", "1B0"]]))[0])
    (0F0, 0SEND_F0, 0RECV_B0, 0B0)
    """
    num_stages, rows = schedule.num_stages, schedule.rows
    places = [
        (r, i, action)
        for r, row in enumerate(rows)
        for i, item in enumerate(row)
        for action in parts(item)
    ]
    # Of each receive, the rank and position of what needs it.
    users = {
        need: (rank, i) for rank, i, action in places if (need := incoming(action, num_stages))
    }

    bounds, graph = schedule.columns.bounds, schedule.graph
    starts, ends = (
        run(graph, [1] * bounds[-1], [0] * len(graph.slots)) if ahead else [[0] * bounds[-1]] * 2
    )
    ahead *= None not in ends  # what can't run to its end is left as it is
    sends: dict[tuple[int, int], list[Action]] = defaultdict(
        list
    )  # (rank, position) -> what is sent after it
    channels: dict[tuple[int, int], list] = defaultdict(
        list
    )  # (from, to) -> receives as sent, senders' starts
    for rank, position, action in places:
        if (message := outgoing(action, num_stages)) and users[message.receive][0] != rank:
            sends[rank, position].append(message.send)
            channels[rank, users[message.receive][0]].append(
                (message.receive, starts[bounds[rank] + position])
            )

    receives: dict[tuple[int, int], list[Action]] = defaultdict(
        list
    )  # (rank, position) -> what is posted before it
    for (_, to), order in channels.items():
        needed, at = [*accumulate((users[receive][1] for receive, _ in reversed(order)), min)], 0
        for (receive, sender), by in zip(order, reversed(needed), strict=True):
            at = max(at, by - ahead)
            while (
                at < by and sender >= ends[bounds[to] + at]
            ):  # a sender that needs this one's end starts no sooner
                at += 1
            receives[to, at].append(receive)

    return tuple(
        tuple(
            step
            for i, item in enumerate(row)
            for step in (*receives[rank, i], item, *sends[rank, i])
        )
        for rank, row in enumerate(rows)
    )
