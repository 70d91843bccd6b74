"""A recorded job as one graph: every event of every rank, replica and step, each with its own time.

There are three kinds of such times. The time that a rank waits is none of them, because it follows
from the others:

    an action or other work   how long it lasted
    a message                 its transit, since it was both sent and asked for
    a rank's own gap          how long an event began after all that the rank may have waited for

`TracedJob.replay` runs the graph. Without a change each step ends when it did, and with a change it
ends when it would have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from ...timeline import Timeline

ACTION, ASK, SEND, SUM, OTHER = "action", "ask", "send", "sum", "other"


@dataclass(eq=False, slots=True)
class Event:
    """Something that a rank did. `gap` is the rank's own gap before it. `needs` lists what the rank
    may have waited for, each with how long after its arrival the rank knew about it.
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float
    step: int = 0  # the step that it is in, or before
    # of the rank's earlier events that which ended last
    before: Event | None = field(default=None, repr=False)
    needs: list[tuple[Message, float]] = field(default_factory=list, repr=False)
    gap: float = 0.0

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(eq=False, slots=True)
class Message:
    """A message, or a sum over replicas. It is there `transit` after the last of `posts`."""

    pair: tuple[int, int] | None  # its source and target; None for a sum
    posts: list[Event]
    there: float
    transit: float = 0.0
    # it was asked for after it was sent, or nobody knows when: it took at most that
    bound: bool = False

    def __post_init__(self) -> None:
        self.transit = self.there - max(map(_posted, self.posts))


def _posted(post: Event) -> float:
    return post.end if post.kind == ACTION else post.start


@dataclass(frozen=True)
class Change:
    """Different times for some events and messages."""

    durations: Mapping[Event, float] = field(default_factory=dict)
    gaps: Mapping[Event, float] = field(default_factory=dict)
    transits: Mapping[Message, float] = field(default_factory=dict)

    def __and__(self, other: Change) -> Change:
        """Both changes, with the shorter time where both change the same thing."""
        return Change(
            _shorter(self.durations, other.durations),
            _shorter(self.gaps, other.gaps),
            _shorter(self.transits, other.transits),
        )


def _shorter(one: Mapping, other: Mapping) -> dict:
    return {**one, **{key: min(value, one.get(key, value)) for key, value in other.items()}}


class _Graph:
    """All events and messages of a job, numbered so that each comes after what it needs. Number 0
    is the zero of the job's clock. Posting takes no time, so that everything that needs an item
    waits for its end.
    """

    def __init__(self, ends: list[list[int]]) -> None:
        self.ends = ends  # of each step: its actions
        self.number: dict[Event | Message, int] = {}
        self.things: list[Any] = [None]
        # something that each needs, and how long after its end it is known
        self.firsts, self.knowns = [0], [0.0]
        self.others: list[Sequence[tuple[int, float]]] = [()]  # the same of what else it needs
        self.gaps, self.takes = [0.0], [0.0]

    def add(
        self,
        thing: Event | Message,
        first: tuple[int, float],
        others: Sequence[tuple[int, float]],
        gap: float,
        takes: float,
    ) -> None:
        self.number[thing] = len(self.things)
        self.things.append(thing)
        self.firsts.append(first[0])
        self.knowns.append(first[1])
        self.others.append(others)
        self.gaps.append(gap)
        self.takes.append(takes)


@dataclass(frozen=True)
class TracedJob:
    """Everything that traces tell about a job. Ranks are numbered as in the job, and times are in
    ms from its first event on.
    """

    pipelines: tuple[tuple[int, ...], ...]
    stages: Mapping[int, tuple[int, ...]]  # of each rank
    rows: Mapping[int, Sequence[Event]] = field(repr=False)  # of each rank, in order
    messages: Sequence[Message] = field(repr=False)
    # of the slowest pipeline, one for each step
    timelines: tuple[Timeline, ...] = field(repr=False)
    iterations: tuple[tuple[int, int], ...]  # the steps at whose ends one begins and ends
    watched: bool  # whether actions are computing alone
    notes: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        return 1 + max(event.step for row in self.rows.values() for event in row)

    @cached_property
    def _graph(self) -> _Graph:
        graph = _Graph([[] for _ in range(self.num_steps)])
        waiting = defaultdict(list)
        for message in self.messages:
            for post in message.posts:
                waiting[post].append(message)
        number, at, moved = graph.number, dict.fromkeys(self.rows, 0), True
        while moved:
            moved = False
            for rank, row in self.rows.items():
                while at[rank] < len(row) and all(
                    [message in number for message, _ in row[at[rank]].needs]
                ):
                    event = row[at[rank]]
                    # a rank's first event is there without having waited for anything of its own
                    since = (
                        (number[event.before], 0.0)
                        if event.before
                        else (0, event.start - event.gap)
                    )
                    needs = [(number[message], known) for message, known in event.needs]
                    graph.add(event, since, needs, event.gap, event.duration)
                    if event.kind == ACTION:
                        graph.ends[event.step].append(number[event])
                    for message in waiting.get(event, ()):
                        if all([post in number for post in message.posts]):
                            first, *others = [(number[post], 0.0) for post in message.posts]
                            graph.add(message, first, others, 0.0, message.transit)
                    at[rank] += 1
                    moved = True
        if stuck := [row[at[rank]].name for rank, row in self.rows.items() if at[rank] < len(row)]:
            raise ValueError(
                f"these events wait for each other, so the traces are of different runs: {stuck}"
            )
        return graph

    def _times(self, change: Change) -> list[float]:
        """When every item of the graph ends, by number, with the times that `change` gives."""
        graph = self._graph
        gaps, takes = graph.gaps[:], graph.takes[:]
        for event, gap in change.gaps.items():
            gaps[graph.number[event]] = gap
        for changed in (change.durations, change.transits):
            for each, lasting in changed.items():
                takes[graph.number[each]] = lasting
        times = [0.0]
        columns = zip(graph.firsts, graph.knowns, graph.others, gaps, takes, strict=True)
        for first, known, others, gap, lasting in islice(columns, 1, None):
            since = times[first] + known
            for other, later in others:
                if times[other] + later > since:
                    since = times[other] + later
            times.append(since + gap + lasting)
        return times

    def replay(self, change: Change | None = None) -> list[float]:
        """When each step ends on its last rank, with the times that `change` gives."""
        times = self._times(change or Change())
        return [max(times[end] for end in of_step) for of_step in self._graph.ends]

    def critical(self, change: Change) -> list[set[Event | Message]]:
        """The chain of items for which the last iteration's end waited, in each of the files that
        hold steps.

        Without some of these the job ends earlier by no more than they took. Without anything else
        it doesn't end earlier at all.
        """
        graph, times, found = self._graph, self._times(change), []
        for step in {end for _, end in self.iterations} - {
            start for start, _ in self.iterations
        } or {0}:
            at, path = max(graph.ends[step], key=times.__getitem__), set()
            while at:
                path.add(graph.things[at])
                needs = [(graph.firsts[at], graph.knowns[at]), *graph.others[at]]
                at = max(needs, key=lambda need: times[need[0]] + need[1])[0]
            found.append(path)
        return found

    def lengths(self, marks: Sequence[float]) -> list[float]:
        """How long each iteration takes, from the end of a step to the end of the next."""
        return [marks[end] - marks[start] for start, end in self.iterations] or [marks[0]]
