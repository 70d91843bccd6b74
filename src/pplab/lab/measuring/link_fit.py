"""What a timeline tells of the links between its ranks: when every message was made, and until when it was waited for.

A link is taken to be what a simulation has: messages pass one after the other, each in `size / bandwidth`, and arrive
`latency` later. Where none ever queued and all had one size, latency and bandwidth can't be told apart: the whole time
is latency then, which predicts the same as long as no other schedule makes a queue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import compress
from math import inf
from statistics import fmean, linear_regression
from typing import NamedTuple

from ...costs import Costs, Link, PerStage
from ...deps import incoming
from ...timeline import Timeline, total

_STARTS, _ROUNDS = 16, 8  # bandwidths from which a fit is tried, and how often each is made better
_FEWEST = 4  # messages that somebody waited for
_MATTERS = 0.01  # of an action's mean duration: how far off message times must be before a queue is thought of
_WAITED, _LATE = 0.1, 5  # of an action's mean duration, of mean lateness: a receive that took longer had to wait
_EXPLAINS = 0.75  # of the squared deviations: what a queue must explain to be believed


class Delivery(NamedTuple):
    """A message on a link. Its receiver was ready for it from `begun` on, and had it at `there`."""

    sent: tuple[int, int]  # the id that made it, and its entry: of an overlap, the forward's leaves first
    size: float  # in the unit of `Costs.message`
    made: float
    begun: float
    there: float


def observe(timeline: Timeline, message: PerStage = 1) -> tuple[dict[tuple[int, int], list[Delivery]], list[float]]:
    """Every link's messages in the order of sending, and each rank's mean time from being able to start an action to
    starting it."""
    schedule, graph, columns = timeline.schedule, timeline.schedule.graph, timeline.schedule.columns
    sizes = Costs(message=message)
    sizes.check(schedule.num_stages, schedule.num_ranks, schedule.num_microbatches)
    waits = {
        (span.rank, span.action): (span.start, span.end) for span in timeline.others if not isinstance(span.action, str)
    }
    found: dict[tuple[int, int], list[Delivery]] = defaultdict(list)
    late: list[list[float]] = [[] for _ in schedule.rows]
    for rank in range(schedule.num_ranks):
        free = 0.0
        for i in range(*columns.bounds[rank : rank + 2]):
            ready, start = free, timeline.starts[i]
            awaited = [(user, maker) for user, maker in graph.awaited(i) if columns.ranks[maker] != rank]
            since = free if len(awaited) == 1 else start  # of two messages, nobody knows which one was waited for
            for user, maker in awaited:
                sent = graph.id_of(maker), maker
                receive = incoming(graph.action(user), schedule.num_stages)
                begun, there = waits.get((rank, receive), (since, start))
                size = sizes.occupancy(columns.kinds[maker], columns.stages[maker], 1, columns.microbatches[maker])
                found[columns.ranks[maker], rank].append(Delivery(sent, size, timeline.ends[sent[0]], begun, there))
                ready = max(ready, there)
            late[rank].append(max(0.0, start - ready))
            free = timeline.ends[i]
    for messages in found.values():
        messages.sort()
    return found, [total(each) / len(each) for each in late]


def fit(messages: Sequence[Delivery], action: float, late: float) -> Link:
    """The link by which these messages came when they did. `action` is the mean duration of an action, `late` how long
    after it could one starts: what is small beside them says nothing.

    A message tells its time where somebody waited for it; where nobody did, the time within which it must have come. A
    bandwidth is believed if it explains most of how far the times are from one latency for all.
    """
    if seen := [m for m in messages if m.begun < m.made]:
        plain = Link(total(max(0.0, m.there - m.made) for m in seen) / len(seen))
    else:
        plain = Link(min(max(0.0, m.there - m.made) for m in messages))
    waited = max(_WAITED * action, _LATE * late)
    told = [m.begun < m.made or m.there - m.begun > waited for m in messages]
    if sum(told) < _FEWEST:
        return plain
    latency = max(0.0, fmean(m.there - m.made for m in compress(messages, told)))
    error = _error(messages, told, _queue(messages, 0.0), Link(latency))
    if error <= sum(told) * (_MATTERS * action) ** 2:
        return plain
    most = max(((m.there - m.made) / m.size for m in messages if m.size), default=0)
    found = (_narrow(messages, told, most * start / _STARTS) for start in range(1, _STARTS + 1))
    link, left = min(found, key=lambda each: each[1])
    return link if left <= (1 - _EXPLAINS) * error else plain


def _narrow(messages: Sequence[Delivery], told: Sequence[bool], slope: float) -> tuple[Link, float]:
    """The link that fits best, where each message's queue is the one that `slope`, a time per size, makes, then the one
    that the new slope makes, and so on; and the sum of squared errors."""
    best = Link(), inf
    for _ in range(_ROUNDS):
        queue = _queue(messages, slope)
        latency, new = _straight(
            [passed for _, passed in compress(queue, told)],
            [m.there - since for m, (since, _) in compress(zip(messages, queue, strict=True), told)],
        )
        link = Link(latency, 1 / new if new else inf)
        if (error := _error(messages, told, queue, link)) < best[1]:
            best = link, error
        if new == slope:
            break
        slope = new
    return best


def _queue(messages: Sequence[Delivery], slope: float) -> list[tuple[float, float]]:
    """Of each message: when its queue began, and how much passes from then to its end."""
    free, queue = -inf, []
    since, passed = 0.0, 0.0
    for m in messages:
        if m.made >= free:
            since, passed = m.made, 0.0
        passed += m.size
        free = since + passed * slope
        queue.append((since, passed))
    return queue


def _error(
    messages: Sequence[Delivery], told: Sequence[bool], queue: Sequence[tuple[float, float]], link: Link
) -> float:
    """The sum of squared errors: of what isn't told, only of what would come too late."""
    error = 0.0
    for m, known, (since, passed) in zip(messages, told, queue, strict=True):
        off = since + passed / link.bandwidth + link.latency - m.there
        error += off * off if known or off > 0 else 0
    return error


def _straight(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, neither below 0, of the line through some points."""
    if len(set(sizes)) > 1:
        slope, intercept = linear_regression(sizes, times)
        if intercept < 0:
            slope, intercept = linear_regression(sizes, times, proportional=True)
        if slope > 0:
            return intercept, slope
    return max(0.0, fmean(times)), 0.0
