"""Read from a timeline when every message between ranks was made, and until when its receiver
waited for it.

The whole time of a message counts as its link's latency. Messages queue on a narrow link, and the
times of one run can't distinguish that from a slow one, but `measure_link` can.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ...costs import Link
from ...deps import incoming
from ...timeline import Timeline, total


class Delivery(NamedTuple):
    """A message on a link. Its receiver was ready for it from `begun` on, and had it at `there`."""

    made: float
    begun: float
    there: float

    @property
    def waited(self) -> bool:
        """Whether its receiver waited for it before it was made. Only then its time is the
        link's.
        """
        return self.begun < self.made


def observe(timeline: Timeline) -> tuple[dict[tuple[int, int], list[Delivery]], list[float]]:
    """Every link's messages in the order of their making, and each rank's mean lateness, from being
    able to start an action to starting it.
    """
    schedule, graph, columns = timeline.schedule, timeline.schedule.graph, timeline.schedule.columns
    waits = {
        (span.rank, span.action): (span.start, span.end)
        for span in timeline.others
        if not isinstance(span.action, str)
    }
    found: dict[tuple[int, int], list[Delivery]] = defaultdict(list)
    late: list[list[float]] = [[] for _ in schedule.rows]
    for rank in range(schedule.num_ranks):
        free = 0.0
        for i in range(*columns.bounds[rank : rank + 2]):
            ready, start = free, timeline.starts[i]
            awaited = [
                (user, maker) for user, maker in graph.awaited(i) if columns.ranks[maker] != rank
            ]
            # of two messages, nobody knows which one was waited for
            since = free if len(awaited) == 1 else start
            for user, maker in awaited:
                receive = incoming(graph.action(user), schedule.num_stages)
                begun, there = waits.get((rank, receive), (since, start))
                made = timeline.ends[graph.id_of(maker)]
                found[columns.ranks[maker], rank].append(Delivery(made, begun, there))
                ready = max(ready, there)
            late[rank].append(max(0.0, start - ready))
            free = timeline.ends[i]
    for messages in found.values():
        messages.sort()
    return found, [total(each) / len(each) for each in late]


def link_of(messages: Sequence[Delivery]) -> Link:
    """A link with the mean time of the messages that a rank waited for. If there is none, it has
    the shortest time within which one must have come.
    """
    if waited := [message for message in messages if message.waited]:
        return Link(
            total(max(0.0, message.there - message.made) for message in waited) / len(waited)
        )
    return Link(min(max(0.0, message.there - message.made) for message in messages))
