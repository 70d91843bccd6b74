"""Rows of numbers, as the simulator's loop takes them, of which a search can try thousands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import inf
from operator import sub

from ...actions import Action, B, F, I, Kind, Overlap, W, parts
from ...costs import Costs, of_stage
from ...footprint import Memory
from ...links import with_links
from ...schedule import Schedule
from ...simulator import durations_of, run
from ...timeline import total

Rows = list[list[int]]  # of every rank, the numbers of its F, I and W in order
Key = tuple[float, float]  # what is compared: the less the better
CLOSE = 1e-9  # as a share of a limit


class NumberedProblem:
    """What a search is given, by stage and by action: placement, microbatches, costs, memory, and
    the limits of ranks.
    """

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
        self._number(plain)
        adds = [of_stage(memory.activation, s) for s in stages]
        kept = [
            each if memory.weight_input is None else of_stage(memory.weight_input, s)
            for s, each in enumerate(adds)
        ]
        self.adds, self.i_frees, self.w_frees = adds, list(map(sub, adds, kept)), kept
        self.needed = [
            sum(adds[t] for t in stages[s:] if placement[t] == placement[s]) for s in stages
        ]
        during = [
            of_stage(memory.recomputed, s) + of_stage(memory.while_input_gradient, s)
            for s in stages
        ]
        self.rooms = [
            limit * (1 + CLOSE) - memory.constant(own) - max(during[s] for s in own)
            for limit, own in zip(limits, self.stages, strict=True)
        ]
        fits = (
            min(self.rooms, default=inf) / min(adds)
            if memory.weight_input is None and min(adds)
            else inf
        )
        self.most_held = int(min(self.stages_per_rank * M, max(fits, 1)))

    def _number(self, plain: Schedule) -> None:
        """Number all actions by their ids in `plain`. Except for the rows, the loop takes what it
        takes for that schedule.
        """
        graph = plain.graph
        rows, *self._columns = with_links(graph, self.costs, durations_of(plain, self.costs))
        self.needs, self.lags = graph.makers, self._columns[-1]
        self.action_of = [graph.action(i) for i in range(len(plain.columns.kinds))]
        self.number_of = {action: i for i, action in enumerate(self.action_of)}
        changes = [self.memory.changes(s) for s in range(len(self.placement))]
        # more, at its start and end
        held = [changes[stage][kind] for stage, kind, _ in self.action_of]
        self._starts_with, self._ends_with = map(list, zip(*held, strict=True))
        weights = [action for action in self.action_of if action.kind is W]
        self.input_of = {self.number_of[w]: self.number_of[w._replace(kind=I)] for w in weights}
        links = rows[self.num_ranks :]
        self.num_links = len(links)
        self.link_of = {
            self._columns[0][message]: (k, message)
            for k, link in enumerate(links)
            for message in link
        }

    def one_at_a_time(self) -> Schedule:
        """The order that holds least: a microbatch ends before the next begins, and every W follows
        its I.
        """
        order = [(s, F) for s in range(len(self.placement))]
        for s in reversed(range(len(self.placement))):
            order += [(s, I), (s, W)]
        each = range(self.num_microbatches)
        rows = [
            [Action(s, kind, m) for m in each for s, kind in order if s in own]
            for own in self.stages
        ]
        return Schedule(rows, "one microbatch at a time")

    def schedule(self, rows: Rows, name: str) -> Schedule:
        return Schedule([[self.action_of[i] for i in row] for row in rows], name)

    def rows_of(self, schedule: Schedule) -> Rows:
        """The rows of a schedule, with overlaps taken apart and full backwards in two halves."""
        return [[i for item in row for i in self._numbers_of(item)] for row in schedule.rows]

    def _numbers_of(self, item: Action | Overlap) -> list[int]:
        halves = [
            (part, kind)
            for part in parts(item)
            for kind in ((I, W) if part.kind is B else (Kind(part.kind),))
        ]
        return [self.number_of[part._replace(kind=kind)] for part, kind in halves]

    def times(self, rows: Rows) -> tuple[list, list] | None:
        """When every action starts and ends, by number, or None where ranks wait in a circle."""
        links: Rows = [[] for _ in range(self.num_links)]
        for i in chain.from_iterable(rows) if links else ():
            if i in self.link_of:
                link, message = self.link_of[i]
                links[link].append(message)
        starts, ends = run(rows + links, *self._columns)
        if any(ends[row[-1]] is None for row in rows):
            return None
        return starts[: len(self.needs)], ends[: len(self.needs)]

    def key(self, rows: Rows, starts: Sequence[float], ends: Sequence[float]) -> Key:
        """What the goal compares. It is the makespan and, for equal ones, the longest span, or the
        bubble rate of the zero-bubble papers (`Timeline.span_bubble_fraction`) and, for equal ones,
        the makespan.
        """
        spans = [ends[row[-1]] - starts[row[0]] for row in rows]
        if self.goal == "makespan":
            return max(ends), max(spans)
        rank = max(range(len(spans)), key=spans.__getitem__)
        return 1 - total(ends[i] - starts[i] for i in rows[rank]) / spans[rank], max(ends)

    def last(self, rows: Rows, starts: Sequence[float], ends: Sequence[float]) -> int:
        """The item whose end decides the goal: the last of all, or the last of the rank with the
        longest span.
        """
        if self.goal == "makespan":
            return max(chain.from_iterable(rows), key=ends.__getitem__)
        return max(rows, key=lambda row: ends[row[-1]] - starts[row[0]])[-1]

    def fitted(self, rank: int, row: list[int]) -> list[int] | None:
        """A rank's row within its limit. Where a forward needs room, weight gradients are moved
        before it.
        """
        at_start, at_end = self._starts_with, self._ends_with
        most, held = self.limits[rank] * (1 + CLOSE), self.memory.constant(self.stages[rank])
        left, made = list(reversed(row)), []
        while left:
            i = left.pop()
            if held + at_start[i] > most:
                done, weights = set(made), self.input_of
                first = next(
                    (w for w in reversed(left) if w in weights and weights[w] in done), None
                )
                if first is None:
                    return None
                left.remove(first)
                left.append(i)
                i = first
                if held + at_start[i] > most:
                    return None
            held += at_start[i] + at_end[i]
            made.append(i)
        return made

    def allows(self, schedule: Schedule) -> bool:
        """Whether a schedule has this placement and stays within the limits."""
        if (
            schedule.placement != self.placement
            or schedule.num_microbatches != self.num_microbatches
        ):
            return False
        held = schedule.peak_held(self.memory)
        return all(
            most <= limit * (1 + CLOSE) for most, limit in zip(held, self.limits, strict=True)
        )
