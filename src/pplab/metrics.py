"""What a timeline means: its critical path, and how many messages cross."""

from __future__ import annotations

from .actions import parts
from .deps import outgoing
from .schedule import Schedule
from .timeline import Span, Timeline


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """One longest chain of actions, each of which starts late because of the one before it. First to last."""
    graph, spans, ends = timeline.schedule.graph, timeline.spans, timeline.ends
    firsts = set(graph.columns.bounds)
    i = max(range(len(ends)), key=ends.__getitem__)
    path = []
    while i >= 0:
        path.append(spans[i])
        last = max((graph.id_of(maker) for _, maker in graph.awaited(i)), key=ends.__getitem__, default=-1)
        before = -1 if i in firsts else i - 1
        i = last if last >= 0 and (before < 0 or path[-1].start > ends[before]) else before
    return tuple(reversed(path))


def num_messages(schedule: Schedule) -> int:
    """Messages between ranks in one step: activations and gradients that cross from one rank to another."""
    home = schedule.home()
    return sum(
        home[message.receive.stage, message.receive.microbatch] != rank
        for rank, row in enumerate(schedule.rows)
        for item in row
        for action in parts(item)
        if (message := outgoing(action, schedule.num_stages))
    )
