"""A recorded job as one graph: every event of every rank, replica and step, each with the time that it took itself.

There are three such times, and nobody's waiting is one of them, because waiting follows from the others:

    an action or other work     how long it lasted
    a message                   its transit: from when it was both sent and asked for until it was there
    a rank's own gap            how long an event began after all that the rank may have waited for

`TracedJob.replay` lets the graph run: without a change each step ends when it did, and with a change, whenever it would
have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

from ...timeline import Timeline

ACTION, ASK, SEND, SUM, OTHER = "action", "ask", "send", "sum", "other"


@dataclass(eq=False, slots=True)
class Event:
    """Something that a rank did. `gap` is its own gap before it, and `needs` what it may have waited for, each with how
    long after its arrival the rank knew it."""

    rank: int
    kind: str
    name: str
    start: float
    end: float
    step: int = 0  # the step that it is in, or before
    before: Event | None = field(default=None, repr=False)  # of the rank's earlier events that which ended last
    needs: list[tuple[Message, float]] = field(default_factory=list, repr=False)
    gap: float = 0.0

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(eq=False, slots=True)
class Message:
    """A message, or a sum over replicas: it is there `transit` after the last of `posts`."""

    pair: tuple[int, int] | None  # its source and target; None for a sum
    posts: list[Event]
    there: float
    transit: float = 0.0
    bound: bool = False  # it was asked for after it was sent, or nobody knows when: it took at most that

    def __post_init__(self) -> None:
        self.transit = self.there - max(map(_posted, self.posts))


def _posted(post: Event) -> float:
    return post.end if post.kind == ACTION else post.start


@dataclass(frozen=True)
class Change:
    """Other times for some events and messages."""

    durations: Mapping[Event, float] = field(default_factory=dict)
    gaps: Mapping[Event, float] = field(default_factory=dict)
    transits: Mapping[Message, float] = field(default_factory=dict)

    def __and__(self, other: Change) -> Change:
        """Both changes: the shorter time where both change one."""
        return Change(
            _shorter(self.durations, other.durations),
            _shorter(self.gaps, other.gaps),
            _shorter(self.transits, other.transits),
        )


def _shorter(one: Mapping, other: Mapping) -> dict:
    return {**one, **{key: min(value, one.get(key, value)) for key, value in other.items()}}


@dataclass(frozen=True)
class TracedJob:
    """All that traces tell of a job. Ranks are the job's own, and times are in ms from its first event on."""

    pipelines: tuple[tuple[int, ...], ...]
    stages: Mapping[int, tuple[int, ...]]  # of each rank
    rows: Mapping[int, Sequence[Event]] = field(repr=False)  # of each rank, in order
    messages: Sequence[Message] = field(repr=False)
    timelines: tuple[Timeline, ...] = field(repr=False)  # of the slowest pipeline, one for each step
    iterations: tuple[tuple[int, int], ...]  # the steps at whose ends one begins and ends
    watched: bool  # whether actions are computing alone
    notes: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        return 1 + max(event.step for row in self.rows.values() for event in row)

    @cached_property
    def _graph(self) -> tuple[list[list[tuple[int, float]]], dict, dict, list[list[int]]]:
        """All events and messages, each behind what it needs: for which times it waits, with how long after them it
        knows; its own gap; how long it takes. Then of each step the times at which its actions end.

        The i-th starts at time 2i+1 and ends at time 2i+2. Time 0 is the zero of the job's clock.
        """
        needs: list[list[tuple[int, float]]] = []
        gaps: dict[Any, float] = {}
        takes: dict[Any, float] = {}
        ended: dict[Event | Message, int] = {}
        ends: list[list[int]] = [[] for _ in range(self.num_steps)]
        waiting = defaultdict(list)
        for message in self.messages:
            for post in message.posts:
                waiting[post].append(message)
        at, moved = dict.fromkeys(self.rows, 0), True
        while moved:
            moved = False
            for rank, row in self.rows.items():
                while at[rank] < len(row) and all(message in ended for message, _ in row[at[rank]].needs):
                    event = row[at[rank]]
                    # a rank's first event is there without having waited for anything of its own
                    since = (ended[event.before], 0.0) if event.before else (0, event.start - event.gap)
                    needs.append([since, *((ended[message], known) for message, known in event.needs)])
                    gaps[event], takes[event], ended[event] = event.gap, event.duration, 2 * len(needs)
                    if event.kind == ACTION:
                        ends[event.step].append(ended[event])
                    for message in waiting[event]:
                        if all(post in ended for post in message.posts):
                            needs.append([(ended[post] - (post.kind != ACTION), 0.0) for post in message.posts])
                            gaps[message], takes[message], ended[message] = 0.0, message.transit, 2 * len(needs)
                    at[rank] += 1
                    moved = True
        if stuck := [row[at[rank]].name for rank, row in self.rows.items() if at[rank] < len(row)]:
            raise ValueError(f"these events wait for each other, so the traces are of different runs: {stuck}")
        return needs, gaps, takes, ends

    def replay(self, change: Change | None = None) -> list[float]:
        """When each step ends on its last rank, with other times for what `change` has."""
        change = change or Change()
        needs, gaps, takes, ends = self._graph
        gaps, takes = {**gaps, **change.gaps}, {**takes, **change.durations, **change.transits}
        times = [0.0]
        for needed, gap, lasting in zip(needs, gaps.values(), takes.values(), strict=True):
            since = -inf
            for time, known in needed:
                if times[time] + known > since:
                    since = times[time] + known
            times += since + gap, since + gap + lasting
        return [max(times[end] for end in of_step) for of_step in ends]

    def lengths(self, marks: Sequence[float]) -> list[float]:
        """How long each iteration takes, from the end of a step to the end of the next."""
        return [marks[end] - marks[start] for start, end in self.iterations] or [marks[0]]
