"""Closed-form lower bounds: times that no order of a `lab.Problem` can beat.

For a rank, A is when its first I starts (its first B, where backwards are whole), and C is when its
last one ends. Between the two it has to do all its work except for the forwards before A and the
weight gradients after C:

    makespan >= A + (work - forwards before A - weight gradients after C) + what has to come after C

- **Head.** Its first forward starts once a microbatch has come down to its lowest stage, and the
  forwards before A come after that: A >= head + forwards before A.
- **Memory holds the first I back.** A isn't before a microbatch has been down to the last stage and
  back. Until then the rank runs only forwards, and no more than it can hold. With less room than
  the round trip is long, it waits.
- **Tail.** Its last I is of its lowest stage. Then come an I of every stage below, up the pipeline,
  and stage 0's W. Meanwhile the rank runs weight gradients that it has left for later, no more than
  it can hold.

So makespan >= work + max(head, round trip - forwards that it can hold) + max(0, tail - weight
gradients that it can hold). A whole backward leaves nothing for later, so its tail is B's, in full.

- **Turns.** Let there be room for k activations of a stage, and let H be the least time that one is
  held: down, back, and I and W. Number a stage's actions of a kind in order of time
  (`lab.constraints` explains why nothing is lost when these numbers are the microbatches'). Forward
  j + k waits for the release of activation j, so it starts at least H after forward j. Forward j +
  k + i starts at least H + i (F + I + W) after it, because between the start of I j and that
  forward lie I's and W's j to j + i and forwards j + k to j + k + i - 1, of which H has one I and
  one W. So of n forwards the last one starts, for every a >= 1 with a k < n, at least a H + (n - 1
  - a k) (F + I + W) after the first. Then its own H begins.
- **Area.** What a rank holds, summed over time, is at least each activation's size times how long
  it is held, and at most its room times its span.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ...actions import F, W
from ...costs import of_stage
from .problem import Problem, Stream


class Floor(NamedTuple):
    """A time that no order beats."""

    value: float
    rank: int  # whose work and waiting it adds up
    why: str  # which of the arguments above

    def __repr__(self) -> str:
        return f"<Floor {self.value:g}: rank {self.rank}, {self.why}>"


def floor(problem: Problem) -> Floor:
    """The highest of the closed-form bounds on a problem's makespan. No order is shorter.

    It needs no search and no solver, and orders often meet it.

    >>> floor(Problem(4, 8, split=False)), floor(Problem(4, 8, limit=4))
    (<Floor 33: rank 3, work and tail>, <Floor 27: rank 0, work and the round trip in that memory>)
    >>> floor(Problem(4, 6, placement="V", limit=6))
    <Floor 41: rank 3, work and the round trip in that memory>
    """
    return max(_floors(problem), key=lambda floor: (floor.value, -floor.rank))


@dataclass(frozen=True)
class _Rank:
    """Times from which one rank's bounds are made, each as if nothing were in its way."""

    problem: Problem
    rank: int

    @property
    def ways(self) -> list[tuple[Stream, tuple[int, ...]]]:
        """The streams that pass this rank, and the stages that they have here."""
        return [
            (stream, stream.of(self.rank))
            for stream in self.problem.streams
            if stream.of(self.rank)
        ]

    @property
    def counts(self) -> dict[int, int]:
        """How many microbatches each stage does here."""
        return {stage: len(stream.microbatches) for stream, stages in self.ways for stage in stages}

    @property
    def work(self) -> float:
        p = self.problem
        return sum(
            n * sum(p.takes(kind, stage) for kind in p.kinds) for stage, n in self.counts.items()
        )

    @property
    def head(self) -> float:
        """Time until its first forward."""
        return min(down(self.problem, stream, 0, stages[0]) for stream, stages in self.ways)

    @property
    def returns(self) -> float:
        """Time until its first I."""
        trips = (
            (stream, down(self.problem, stream, 0, stages[0]), stages)
            for stream, stages in self.ways
        )
        return min(
            head + round_trip(self.problem, stream, stages) for stream, head, stages in trips
        )

    @property
    def tail(self) -> float:
        """Time after its last I: the I's of stages further up, and stage 0's W."""
        return min(up(self.problem, stream, stages[0]) for stream, stages in self.ways)

    @property
    def forwards_held(self) -> float:
        """The most time that it can spend in forwards before its first I."""
        room, memory = self.problem.room(self.rank), self.problem.memory
        return most(
            (self.problem.takes(F, s), of_stage(memory.activation, s), n, room)
            for s, n in self.counts.items()
        )

    @property
    def weights_held(self) -> float:
        """The most time that it can spend in weight gradients after its last I, which is of a
        lowest stage.
        """
        p, found = self.problem, 0.0
        if not p.split:
            return 0
        changes = {stage: p.memory.changes(stage) for stage in self.counts}
        for _, (lowest, *_) in self.ways:
            left = p.room(self.rank) - changes[lowest][F][0] - changes[lowest][p.kinds[1]][0]
            others = (
                (p.takes(W, s), -changes[s][W][1], n - (s == lowest), left)
                for s, n in self.counts.items()
            )
            found = max(found, p.takes(W, lowest) + most(others))
        return found


def _floors(problem: Problem) -> Iterator[Floor]:
    for rank in range(problem.num_ranks):
        at = _Rank(problem, rank)
        head = at.head
        waits = max(0, at.returns - at.forwards_held - head)
        tail = max(0, at.tail - at.weights_held)
        why = " and ".join(
            ["work", *["the round trip in that memory"] * (waits > 0), *["tail"] * (tail > 0)]
        )
        yield Floor(head + at.work + waits + tail, rank, why)
        if problem.limit is not None:
            yield from (Floor(head + floor, rank, why) for floor, why in _held_in_turns(at))


def _held_in_turns(at: _Rank) -> Iterator[tuple[float, str]]:
    """The bounds by turns and by area, from the rank's first forward on."""
    problem, memory, room = at.problem, at.problem.memory, at.problem.room(at.rank)
    area = 0.0
    for stream, stages in at.ways:
        n = len(stream.microbatches)
        for stage in stages:
            size, kept = of_stage(memory.activation, stage), -memory.changes(stage)[W][1]
            held, weight = (
                lifespan(problem, stream, stage),
                problem.takes(W, stage) if problem.split else 0,
            )
            area += n * (size * held + kept * weight)
            if size * n > room:
                # else I is the release
                k, weight_too = int(room / size * (1 + 1e-12)), weight * (kept >= size)
                work = problem.takes(F, stage) + problem.takes(problem.kinds[1], stage) + weight_too
                for a in (1, (n - 1) // k):  # in between lies nothing higher
                    last = a * (held + weight_too) + (n - 1 - a * k) * work
                    yield (
                        last + held + max(up(problem, stream, stage), weight),
                        "turns in that memory",
                    )
    if area:
        yield area / room, "what is held, over time"


def down(problem: Problem, stream: Stream, first: int, last: int) -> float:
    """Time of the forwards from `first` on, until the result is with `last`."""
    return sum(problem.takes(F, s) + problem.lag(stream, F, s) for s in range(first, last))


def up(problem: Problem, stream: Stream, stage: int) -> float:
    """Time after a stage's last I or B: those of the stages below, and stage 0's W."""
    kind = problem.kinds[1]
    above = sum(problem.lag(stream, kind, s + 1) + problem.takes(kind, s) for s in range(stage))
    return above + problem.takes(W, 0) * (problem.split and stage > 0)


def round_trip(problem: Problem, stream: Stream, stages: tuple[int, ...]) -> float:
    """From the start of the lowest stage's forward to the start of the highest one's I."""
    return lifespan(problem, stream, stages[0], stages[-1]) - problem.takes(
        problem.kinds[1], stages[-1]
    )


def lifespan(problem: Problem, stream: Stream, stage: int, end: int | None = None) -> float:
    """Time from the start of a stage's forward to the end of its I or B (or of that of the stage
    `end`).
    """
    last, end, kind = problem.num_stages - 1, stage if end is None else end, problem.kinds[1]
    back = sum(
        problem.takes(kind, s) + problem.lag(stream, kind, s) * (s > end)
        for s in range(end, last + 1)
    )
    return down(problem, stream, stage, last) + problem.takes(F, last) + back


def most(items: Iterable[tuple[float, float, int, float]]) -> float:
    """The most time that fits, given (time, size, how many there are, room), with the best use of
    the room first.

    Where sizes differ, a part of the last one counts, too, because this is a bound and no packing.
    """
    items = list(items)
    room, sizes = min(room for *_, room in items), {size for _, size, _, _ in items}
    if len(sizes) == 1 and room < inf and (size := sizes.pop()):
        room = int(room / size * (1 + 1e-12)) * size
    found = 0.0
    for time, size, n, _ in sorted(items, key=lambda item: item[1] / item[0]):
        fitting = min(n, room / size) if size else n
        found, room = found + fitting * time, room - fitting * size
    return found
