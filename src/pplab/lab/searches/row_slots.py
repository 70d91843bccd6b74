"""Rows as lists of slots, the integers that the simulator's loop reads, of which a search can try thousands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from math import inf
from operator import sub
from types import SimpleNamespace

from ...actions import Action, B, F, I, Kind, Overlap, W, parts
from ...costs import Costs, of_stage
from ...errors import ScheduleError
from ...footprint import Memory
from ...links import lags_of
from ...schedule import Schedule
from ...simulator import durations_of, run, simulate
from ...timeline import total

Rows = list[list[int]]  # of every rank, the slots of its F, I and W in order: see `pplab.schedule.Graph`
Key = tuple[float, float]  # what is compared: the less the better
CLOSE = 1e-9  # as a share of a limit


class Problem:
    """What a search is given, by stage and by slot: placement, microbatches, costs, memory, and each rank's limit."""

    def __init__(
        self,
        placement: Sequence[int],
        M: int,
        costs: Costs,
        memory: Memory,
        limits: Sequence[float],
        goal: str = "makespan",
    ):
        self.placement, self.num_microbatches, self.costs = tuple(placement), M, costs
        self.memory, self.limits, self.goal = memory, limits, goal
        stages, self.num_ranks = range(len(placement)), max(placement) + 1
        ranks = range(self.num_ranks)
        self.stages = [[s for s in stages if placement[s] == rank] for rank in ranks]
        self.stages_per_rank = max(map(len, self.stages))
        self.takes = [[costs.of(kind, s) for s in stages] for kind in (F, I, W)]
        self.lag_of = [[0 if a == b else costs.link(a, b).latency for b in ranks] for a in ranks]
        plain = self.one_at_a_time()
        self.least = plain.peak_held(memory)  # what every rank has to hold
        self._read_slots(plain)
        adds = [of_stage(memory.activation, s) for s in stages]
        kept = [
            each if memory.weight_input is None else of_stage(memory.weight_input, s) for s, each in enumerate(adds)
        ]
        self.adds, self.i_frees, self.w_frees = adds, list(map(sub, adds, kept)), kept
        self.needed = [sum(adds[t] for t in stages[s:] if placement[t] == placement[s]) for s in stages]
        during = [of_stage(memory.recomputed, s) + of_stage(memory.while_input_gradient, s) for s in stages]
        self.rooms = [
            limit * (1 + CLOSE) - memory.constant(own) - max(during[s] for s in own)
            for limit, own in zip(limits, self.stages, strict=True)
        ]
        fits = min(self.rooms, default=inf) / min(adds) if memory.weight_input is None and min(adds) else inf
        self.most_held = int(min(self.stages_per_rank * M, max(fits, 1)))

    def _read_slots(self, plain: Schedule) -> None:
        graph, stages = plain.graph, range(len(self.placement))
        count = max(graph.slots) + 1
        self.action_of: list[Action | None] = [None] * count
        self.lasts, self.lags, self.rank_of = [0.0] * count, [0.0] * count, [0] * count
        self._starts_with, self._ends_with = [0.0] * count, [0.0] * count  # how much more is held then
        self.same = [0] * count  # the same for one stage's actions of a kind
        self.base = [[0] * len(self.placement) for _ in range(3)]  # of every kind and stage: microbatch 0's slot
        changes = [self.memory.changes(s) for s in stages]
        lasts, lags = durations_of(plain.columns, self.costs), lags_of(graph, self.costs)
        for i, slot in enumerate(graph.slots):
            stage, kind, m = self.action_of[slot] = graph.action(i)
            self.lasts[slot], self.lags[slot], self.rank_of[slot] = lasts[i], lags[i], plain.columns.ranks[i]
            self._starts_with[slot], self._ends_with[slot] = changes[stage][kind]
            self.same[slot] = 3 * stage + "FIW".index(kind)
            if m == 0:
                self.base["FIW".index(kind)][stage] = slot
        each = [(s, m) for s in stages for m in range(self.num_microbatches)]
        self.input_of = {self.base[2][s] + m: self.base[1][s] + m for s, m in each}  # of every weight gradient

    def one_at_a_time(self) -> Schedule:
        """A microbatch ends before the next begins, and every W follows its I: no order holds less."""
        order = [(s, F) for s in range(len(self.placement))]
        for s in reversed(range(len(self.placement))):
            order += [(s, I), (s, W)]
        each = range(self.num_microbatches)
        rows = [[Action(s, kind, m) for m in each for s, kind in order if s in own] for own in self.stages]
        return Schedule(rows, "one microbatch at a time")

    def schedule(self, rows: Rows, name: str) -> Schedule:
        return Schedule([[self.action_of[slot] for slot in row] for row in rows], name)

    def rows_of(self, schedule: Schedule) -> Rows:
        """Of a schedule, overlaps taken apart and full backwards as their halves."""
        return [[slot for item in row for slot in self._slots_of(item)] for row in schedule.rows]

    def _slots_of(self, item: Action | Overlap) -> list[int]:
        found = []
        for stage, kind, m in parts(item):
            found += [self.base["FIW".index(each)][stage] + m for each in ((I, W) if kind is B else (Kind(kind),))]
        return found

    def times(self, rows: Rows) -> tuple[list, list] | None:
        """When every item starts and ends; None where ranks wait in a circle."""
        slots, bounds = list(chain.from_iterable(rows)), (0, *accumulate(map(len, rows)))
        if self.costs.has_queues:
            try:
                timeline = simulate(self.schedule(rows, "tried"), self.costs)
            except ScheduleError:
                return None
            return timeline.starts, timeline.ends
        sizes = {"num_stages": len(self.placement), "num_microbatches": self.num_microbatches}
        graph = SimpleNamespace(columns=SimpleNamespace(bounds=bounds, **sizes), slots=slots, second={})
        lasts, lags = self.lasts, self.lags
        starts, ends = run(graph, [lasts[slot] for slot in slots], [lags[slot] for slot in slots])
        return None if any(ends[end - 1] is None for end in bounds[1:]) else (starts, ends)

    def key(self, rows: Rows, starts: Sequence[float], ends: Sequence[float]) -> Key:
        """What the goal compares: the makespan and, of equals, the longest span; or the zero-bubble papers' bubble
        rate, as in `Timeline.span_bubble_fraction`, and of equals the makespan."""
        bounds = [0, *accumulate(map(len, rows))]
        spans = [ends[end - 1] - starts[first] for first, end in pairwise(bounds)]
        if self.goal == "makespan":
            return max(ends), max(spans)
        rank = max(range(len(spans)), key=spans.__getitem__)
        row = slice(bounds[rank], bounds[rank + 1])
        return 1 - total(map(sub, ends[row], starts[row])) / spans[rank], max(ends)

    def last(self, rows: Rows, starts: Sequence[float], ends: Sequence[float]) -> int:
        """The item whose end the goal is about: of all, or of the rank with the longest span."""
        if self.goal == "makespan":
            return max(range(len(ends)), key=ends.__getitem__)
        bounds = [0, *accumulate(map(len, rows))]
        return max(pairwise(bounds), key=lambda row: ends[row[1] - 1] - starts[row[0]])[1] - 1

    def fitted(self, rank: int, row: list[int]) -> list[int] | None:
        """A rank's row within its limit: itself, or weight gradients are moved to where a forward needs their room."""
        at_start, at_end = self._starts_with, self._ends_with
        most, held = self.limits[rank] * (1 + CLOSE), self.memory.constant(self.stages[rank])
        left, made = list(reversed(row)), []
        while left:
            slot = left.pop()
            if held + at_start[slot] > most:
                done, weights = set(made), self.input_of
                first = next((w for w in reversed(left) if w in weights and weights[w] in done), None)
                if first is None:
                    return None
                left.remove(first)
                left.append(slot)
                slot = first
                if held + at_start[slot] > most:
                    return None
            held += at_start[slot] + at_end[slot]
            made.append(slot)
        return made

    def allows(self, schedule: Schedule) -> bool:
        """Whether a schedule has this placement and stays within the limits."""
        if schedule.placement != self.placement or schedule.num_microbatches != self.num_microbatches:
            return False
        held = schedule.peak_held(self.memory)
        return all(most <= limit * (1 + CLOSE) for most, limit in zip(held, self.limits, strict=True))
