"""Search for the fastest order for given durations and a memory limit, on any placement. ZB-1P and
ZB-2P.

The authors of the zero-bubble paper search with a heuristic and an integer program, and those of
controllable memory among building blocks. Here the candidates are the registry's schedules, rows
that grow by some hundred policies and, on a V, building blocks. The best of them are improved step
by step.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from math import inf

from ...builders import build, known, register
from ...builders.registry import Rows as Built
from ...costs import Costs, of_stage
from ...errors import expect, number, positive_int, shown
from ...footprint import Memory
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Timeline
from ..schedules import Block, v_blocks
from .growth import grown, policies
from .improving import improved
from .problem import built
from .row_slots import CLOSE, Key, NumberedProblem, Rows

_SOURCE = "Qi et al. 2023, arXiv:2401.10241, section 3"
_RULES = (
    "any number of ranks and microbatches; one stage per rank; seconds for some thousand actions"
)
_SEARCHED = ("ZB-1P", "ZB-2P")
_STARTS = 4  # candidates that are improved
_INTERVALS = (7, 8, 9, 10, 12, 14, 16, 20, 24)  # of a block, in units of F = I = W
_GOALS = ("makespan", "span")


@dataclass(frozen=True)
class Found:
    """The best order that a search found, what it was made from, and how many orders were tried."""

    timeline: Timeline
    origin: str
    tried: int

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    def __str__(self) -> str:
        shape = (
            f"makespan {self.timeline.makespan:g}, span bubble "
            f"{self.timeline.span_bubble_fraction:.4f}"
        )
        return f"{shape}, from {self.origin}, {self.tried} orders tried"


def search(
    num_ranks: int,
    num_microbatches: int,
    *,
    placement: str | Sequence[int] = "one stage per rank",
    costs: Costs | None = None,
    memory: Memory | None = None,
    limit: float | Sequence[float] | None = None,
    goal: str = "makespan",
    tries: int | None = None,
) -> Found:
    """Find the best order for this placement and memory. It is never worse than a schedule of the
    registry.

    - `placement`: "one stage per rank", "V", "loop" (two stages per rank), or the rank of every
      stage.
    - `costs`: per stage (all ones when left out).
    - `limit`: the most that a rank may hold at once, or one value per rank, in the unit of
      `memory`. Without `memory` the unit is one stage's activations of one microbatch. ValueError
      names the smallest limit that can be met.
    - `goal`: "makespan", or "span" for the bubble rate of the zero-bubble papers.
    - `tries`: how many orders are tried to improve the best candidates (by default a few seconds'
      worth).

    The same arguments find the same order.
    """
    P, M = positive_int("num_ranks", num_ranks), positive_int("num_microbatches", num_microbatches)
    placed = _placed(placement, P)
    costs, memory = costs or Costs(), memory or Memory()
    expect(Costs, costs=costs)
    expect(Memory, memory=memory)
    costs.check(len(placed), P)
    memory.check(len(placed))
    if goal not in _GOALS:
        raise ValueError(f'goal must be "makespan" or "span", got {shown(goal)}')
    given = limit if isinstance(limit, Sequence) else [inf if limit is None else limit] * P
    if len(given) != P:
        raise ValueError(
            f"limit has {len(given)} values for {P} ranks: give one per rank, or a single number"
        )
    limits = [each if each == inf else number("limit", each) for each in given]
    problem = NumberedProblem(placed, M, costs, memory, limits, goal)
    if short := [r for r in range(P) if problem.least[r] > problem.limits[r] * (1 + CLOSE)]:
        rank = max(short, key=lambda r: problem.least[r] - problem.limits[r])
        smallest = (
            f"rank {rank} has to hold {problem.least[rank]:g} even with one microbatch at a time"
        )
        raise ValueError(
            f"no order stays within a limit of {problem.limits[rank]:g}: {smallest}; give it at "
            "least that"
        )
    hunt = _Hunt(problem, tries)
    hunt.run()
    found = hunt.timeline()
    return Found(found, hunt.origin, hunt.tried)


def _placed(placement: str | Sequence[int], P: int) -> tuple[int, ...]:
    ranks = tuple(range(P))
    known = {"one stage per rank": ranks, "V": ranks + ranks[::-1], "loop": ranks * 2}
    if isinstance(placement, str):
        if placement not in known:
            raise ValueError(
                f"placement must be {', '.join(map(repr, known))} or the rank of every stage, got "
                f"{shown(placement)}"
            )
        return known[placement]
    if sorted(set(placement)) != list(ranks):
        raise ValueError(
            f"placement must give every one of {P} ranks a stage, and no other, got "
            f"{shown(placement)}"
        )
    return tuple(placement)


class _Hunt:
    """One search: what it has tried, and the best order so far."""

    def __init__(self, problem: NumberedProblem, tries: int | None = None):
        self.problem = problem
        actions = 3 * len(problem.placement) * problem.num_microbatches
        self.tries = (
            max(300, 1_500_000 // actions) if tries is None else positive_int("tries", tries, 0)
        )
        self.tried, self.origin = 0, ""
        self.best: Key | None = None
        self.kept: Rows | Schedule | None = None  # the best's
        self.pool: list[tuple[Key, str, Rows]] = []  # the best candidates, to be improved
        self.policies = list(policies(problem))
        self.orders = [(True, True), (False, True), (True, False)][
            : 3 if problem.stages_per_rank > 1 else 1
        ]

    def run(self) -> None:
        for schedule in self._known():
            self.offer(self.key(schedule), schedule.name, schedule)
        for schedule in self._blocks():
            self.offer(self.key(schedule), schedule.name, schedule)
        self.grow()
        self.improve()

    def grow(self) -> None:
        """Grow rows by every policy."""
        size, seen = 3 * len(self.problem.placement) * self.problem.num_microbatches, set()
        for deepest in self.orders:
            for each in self.policies:
                rows = grown(self.problem, each, deepest)
                self.tried += 1
                if (
                    sum(map(len, rows)) == size
                    and (mark := hash(tuple(map(tuple, rows)))) not in seen
                ):
                    seen.add(mark)
                    if times := self.problem.times(rows):
                        self.offer(
                            self.problem.key(rows, *times), "rows that grow by a policy", rows
                        )

    def improve(self) -> None:
        """Spend half of the tries on the best few, and the others on the best of the results."""
        few, begun = self.tries // (2 * _STARTS), self.pool[:]
        for seed in range(_STARTS + 1 if self.tries else 0):
            last = seed == _STARTS
            _, origin, rows = self.pool[0] if last else begun[seed % len(begun)]
            tries = self.tries - few * _STARTS if last else few
            for key, better in improved(self.problem, rows, tries, random.Random(seed)):
                self.tried += 1
                if better:
                    self.offer(key, f"{origin.removesuffix(', improved')}, improved", better)

    def offer(self, key: Key, origin: str, rows: Rows | Schedule) -> None:
        """Keep an order that is better than all before, and the best few candidates."""
        if self.best is None or key < self.best:
            self.best, self.origin, self.kept = key, origin, rows
        if self.tries and all(key != known for known, *_ in self.pool):
            split = self.problem.rows_of(rows) if isinstance(rows, Schedule) else rows
            if all(self.problem.fitted(rank, row) == row for rank, row in enumerate(split)):
                self.pool = sorted([*self.pool, (key, origin, split)], key=lambda each: each[0])[
                    :_STARTS
                ]

    def timeline(self) -> Timeline:
        name = f"found in {self.tried} tries"
        kept = (
            self.kept if isinstance(self.kept, Schedule) else self.problem.schedule(self.kept, name)
        )
        return simulate(kept, self.problem.costs)

    def key(self, schedule: Schedule) -> Key:
        timeline = simulate(schedule, self.problem.costs)
        rows = [range(*row) for row in pairwise(schedule.columns.bounds)]
        return self.problem.key(rows, timeline.starts, timeline.ends)

    def _known(self) -> Iterator[Schedule]:
        """The registry's schedules that have this placement, within the limits."""
        problem, M = self.problem, self.problem.num_microbatches
        yield problem.one_at_a_time()
        others = [builder for builder in known() if builder.name not in _SEARCHED]
        given = {"costs": problem.costs, "stages_per_rank": problem.stages_per_rank}
        yield from filter(problem.allows, built(others, problem.num_ranks, M, given))

    def _blocks(self) -> Iterator[Schedule]:
        """On a V, the best building blocks of the controllable-memory paper by their offsets,
        reordered, and the best of those with a longer interval.
        """
        problem, P = self.problem, self.problem.num_ranks
        if problem.placement == _placed("V", P):
            yield from self._reordered(v_blocks(P), 3)
            yield from self._reordered(self._wider(), 1)

    def _reordered(self, blocks: Iterable[Block], most: int) -> Iterator[Schedule]:
        problem, M, made = self.problem, self.problem.num_microbatches, []
        for block in blocks:
            schedule = block.stamp(M).schedule
            if problem.allows(schedule):
                made.append((self.key(schedule), len(made), block))
        for _, _, block in sorted(made)[:most]:
            schedule = block.reorder(M, problem.costs).schedule
            if problem.allows(schedule):
                yield schedule

    def _wider(self) -> Iterator[Block]:
        """For slow messages or little memory: blocks with a few offsets, each at the shortest
        interval that it allows.
        """
        problem, P, M = self.problem, self.problem.num_ranks, self.problem.num_microbatches
        unit = sum(map(sum, problem.takes)) / (6 * P)
        steps = sorted({1, 2, 3, 1 + round(max(map(max, problem.lag_of)) / unit)})
        for down, up in combinations_with_replacement(steps, 2):
            for interval in _INTERVALS:
                blocks = list(v_blocks(P, [(down, up, down, up)], interval))
                if blocks and problem.allows(blocks[0].stamp(M).schedule):
                    yield blocks[0]
                    break


@register("ZB-1P", rules=_RULES, source=_SOURCE)
def zb_1p(
    P: int,
    M: int,
    *,
    costs: Costs | None = None,
    memory: Memory | None = None,
    limit: int | None = None,
) -> Built:
    """The best order that a search finds for `costs` (all ones by default) in 1F1B's memory.

    `limit` is the most that a rank may hold at once, in activations of one forward of its stage (P
    by default). `memory` tells what an input gradient frees. By default it frees nothing, and
    everything is held until the weight gradient.
    """
    return _zero_bubble(P, M, costs, memory, P if limit is None else limit)


@register("ZB-2P", rules=_RULES, source=_SOURCE)
def zb_2p(
    P: int,
    M: int,
    *,
    costs: Costs | None = None,
    memory: Memory | None = None,
    limit: int | None = None,
) -> Built:
    """The best order that a search finds for `costs` in twice 1F1B's memory (`limit` = 2P)."""
    return _zero_bubble(P, M, costs, memory, 2 * P if limit is None else limit)


def _zero_bubble(P: int, M: int, costs: Costs | None, memory: Memory | None, limit: int) -> Built:
    """The rows with the smallest span bubble among ZB-H1, ZB-H2 (where they fit) and grown rows.
    They aren't improved, so that the page's explorer, which searches in the same way, finds the
    same.
    """
    costs, memory, most = costs or Costs(), memory or Memory(), positive_int("limit", limit)
    costs.check(P, P)
    memory.check(P)
    whole = [of_stage(memory.activation, rank) for rank in range(P)]
    kept = [
        1 if memory.weight_input is None or not a else of_stage(memory.weight_input, r) / a
        for r, a in enumerate(whole)
    ]
    held = Memory() if all(each == 1 for each in kept) else Memory(weight_input=kept)
    hunt = _Hunt(NumberedProblem(range(P), M, costs, held, [most] * P, "span"), 0)
    for name, needs in (("ZB-H1", P), ("ZB-H2", 2 * P - 1)):
        if most >= needs:
            schedule = build(name, num_ranks=P, num_microbatches=M)
            hunt.offer(hunt.key(schedule), name, schedule)
    hunt.grow()
    return hunt.timeline().schedule.rows
