"""When things happened: one type for what a simulation predicts and for what real processes did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import chain, pairwise
from operator import add, itemgetter, sub
from typing import Any, NamedTuple

from .actions import Action
from .schedule import Schedule


class Span(NamedTuple):
    """Something that kept a rank busy. `action` is an item of the schedule, a communication action,
    or a label.
    """

    rank: int
    action: Action | Any  # an overlap, or the name of something else
    start: float
    end: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """The start and end of every action of a schedule, and what else the ranks did.

    `starts` and `ends` have one value for each item of rank 0's row in order, then for each of rank
    1's, and so on (in `unit`, from 0). An overlap has one of each, like any action. `others` are
    spans that aren't in the schedule, for example waiting for a message (its receive action) or the
    optimizer's step.
    """

    schedule: Schedule
    starts: Sequence[float] = field(repr=False)
    ends: Sequence[float] = field(repr=False)
    unit: str = ""
    how: str = "simulated"  # or "measured", or "paced": measured, with actions as long as told
    others: tuple[Span, ...] = ()

    @cached_property
    def makespan(self) -> float:
        """Time from 0 to the end of the last action of any rank."""
        return max(self.ends)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per rank, the time that it spent in actions."""
        lasted = list(map(sub, self.ends, self.starts))
        return tuple(
            total(lasted[first:end]) for first, end in pairwise(self.schedule.columns.bounds)
        )

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank, the time until the makespan that it didn't spend in actions."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all rank-time: idle / (P * makespan). For 1F1B it is (P-1)/(M+P-1)."""
        return total(self.idle) / (self.schedule.num_ranks * self.makespan)

    @property
    def bubble_ratio(self) -> float:
        """Idle time relative to the work: idle / ideal. For 1F1B it is (P-1)/M."""
        return total(self.idle) / total(self.busy)

    @cached_property
    def spans_per_rank(self) -> tuple[float, ...]:
        """Per rank, from the start of its first action to the end of its last."""
        bounds = self.schedule.columns.bounds
        return tuple(self.ends[end - 1] - self.starts[first] for first, end in pairwise(bounds))

    @property
    def span_bubble_fraction(self) -> float:
        """The bubble rate of the zero-bubble papers: 1 - work / span for the rank with the longest
        span.
        """
        rank = max(range(self.schedule.num_ranks), key=self.spans_per_rank.__getitem__)
        return 1 - self.busy[rank] / self.spans_per_rank[rank]

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank, the largest number of forwards whose activations are held at once: from F until
        B, or until W when the backward is split.
        """
        return self.schedule.peak_in_flight

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every action of the schedule with its rank, start and end, rank by rank in order."""
        ranks = self.schedule.columns.ranks[: len(self.ends)]
        each = zip(ranks, chain(*self.schedule.rows), self.starts, self.ends, strict=True)
        return tuple(map(Span._make, each))

    def spans_of(self, rank: int) -> list[Span]:
        """A rank's actions with start and end, in order."""
        first, end = self.schedule.columns.bounds[rank : rank + 2]
        return list(self.spans[first:end])

    def __repr__(self) -> str:
        return (
            f"<Timeline {self.schedule.name}, {self.how}: makespan {self.makespan:g}"
            f"{self.unit and ' ' + self.unit}>"
        )

    def _repr_png_(self) -> bytes:
        """Its Gantt chart, in a notebook."""
        from .plot import picture

        return picture(self)


@dataclass(frozen=True)
class Idle:
    """A stretch of time in which a rank does nothing."""

    rank: int
    start: float
    end: float
    phase: str  # "fill" before the rank's first action, "drain" after its last, "inner" between
    waits_for: Action | None = None  # what it needs from another rank; None when draining or ready
    on_rank: int | None = None
    until: float | Any = None  # when that ends; what it makes arrives later

    def __str__(self) -> str:
        when = f"rank {self.rank} is idle from {self.start:g} to {self.end:g}"
        if self.phase == "drain":
            return f"{when}: it has nothing left to do"
        if self.waits_for is None:
            return f"{when}: it could go on"
        made = f"{self.waits_for} on rank {self.on_rank}"
        if self.until >= self.end:
            return f"{when}: it waits for {made}"
        return f"{when}: it waits for what {made} has made by {self.until:g}"


def idle_intervals(timeline: Timeline) -> tuple[Idle, ...]:
    """Every stretch of idle time of every rank, with what the rank waits for."""
    columns, graph, ends = timeline.schedule.columns, timeline.schedule.graph, timeline.ends
    found = []
    for rank, (first, end) in enumerate(pairwise(columns.bounds)):
        now, phase = 0, "fill"
        for i in range(first, end):
            if timeline.starts[i] > now:
                awaited = [
                    (graph.action(maker), columns.ranks[maker], ends[graph.id_of(maker)])
                    for _, maker in graph.awaited(i)
                    if columns.ranks[maker] != rank
                ]
                last = max(awaited, key=itemgetter(2), default=())
                found.append(Idle(rank, now, timeline.starts[i], phase, *last))
            now, phase = ends[i], "inner"
        if now < timeline.makespan:
            found.append(Idle(rank, now, timeline.makespan, "drain"))
    return tuple(found)


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """One longest chain of actions, first to last, in which each action has to wait for the one
    before it.
    """
    graph, spans, ends = timeline.schedule.graph, timeline.spans, timeline.ends
    firsts = set(graph.columns.bounds)
    i = max(range(len(ends)), key=ends.__getitem__)
    path = []
    while i is not None:
        path.append(spans[i])
        before = None if i in firsts else i - 1
        if before is None or spans[i].start > ends[before]:  # it waited for a message, if any
            makers = [graph.id_of(maker) for _, maker in graph.awaited(i)]
            before = max(makers, key=ends.__getitem__, default=before)
        i = before
    return tuple(reversed(path))


def total(values: Iterable[float]) -> float:
    """Add from left to right, alike on every Python. `sum` compensates for rounding from 3.12 on,
    and numpy doesn't.
    """
    return reduce(add, values, 0)
