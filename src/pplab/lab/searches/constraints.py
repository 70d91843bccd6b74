"""Turn a `lab.Problem` into what CP-SAT takes: start times in integers, and what has to hold for
them.

Microbatches of one stream are alike, so each stage may take them in order for every kind of action,
and nothing is lost. To see this, take any order, and for every stage and kind let the j-th action
in time be of microbatch j. Ranks are busy and hold memory at the same times as before. And nothing
comes too early: if for every microbatch y starts at least d after x ended, so does the j-th y after
the j-th x, since j of the y's, and the x's that belong to them, come no later than the j-th y. The
proof holds for the forwards of two neighbouring stages, for the I's, and on a stage from F to I to
W.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise
from math import ceil, gcd, inf, lcm
from operator import itemgetter
from types import ModuleType
from typing import TYPE_CHECKING

from ...actions import Action, F, Kind, W
from ...optional import bring
from ...schedule import Schedule
from ...simulator import run
from .problem import Problem

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntervalVar, LinearExpr

FINEST = 10**7  # parts of the longest duration, if times have to be rounded
FEW = 4  # parts of the longest duration, where the solver finds orders easily
MOST_TICKS = 2**40  # of all durations together: beyond, sums get too large for the solver

# what a stage does with the microbatches of a stream, one after the other
Chain = tuple[int, Kind, int]


class Scale:
    """Convert times to integers, either exactly, as multiples of the largest unit that divides all
    of them, or rounded down.

    >>> scale = Scale([18.522, 9.337, 0.601])
    >>> scale(0.601), scale.back(601), scale.exact
    (601, 0.601, True)
    """

    def __init__(self, times: Iterable[float]):
        fractions = [Fraction(repr(each)) for each in times if each]
        self.longest = max(fractions)
        below = lcm(*(each.denominator for each in fractions))
        self.unit = Fraction(gcd(*(int(each * below) for each in fractions)), below)
        self.exact = sum(fractions) / self.unit <= MOST_TICKS
        if not self.exact:
            self.unit = self.longest / FINEST

    def __call__(self, time: float) -> int:
        return int(Fraction(repr(time)) / self.unit)

    def back(self, ticks: int) -> float:
        """A number of units as a time."""
        time = ticks * self.unit
        return int(time) if time == int(time) else float(time)

    def at_least(self, time: float) -> int:
        """A lower bound in units, rounded up to a whole one if everything happens at whole ones."""
        ticks = float(Fraction(repr(time)) / self.unit)
        return max(0, ceil(ticks - 1e-3) if self.exact else int(ticks))


class Coarse:
    """Convert times to a few units, to the nearest one, to find a first order from which the search
    in exact times begins.
    """

    def __init__(self, scale: Scale):
        self.unit = scale.longest / FEW

    def __call__(self, time: float) -> int:
        return max(round(Fraction(repr(time)) / self.unit), 1 if time else 0)


def scale_of(problem: Problem) -> Scale:
    """A unit for all times of a problem."""
    stages = range(problem.num_stages)
    times = [problem.takes(kind, s) for kind in problem.kinds for s in stages]
    times += [
        problem.lag(stream, kind, s)
        for stream in problem.streams
        for kind in problem.kinds[:2]
        for s in stages
    ]
    return Scale(times * problem.num_microbatches)


class Model:
    """Start times as variables, and the constraints on them. `known` is an order that solves the
    problem.
    """

    def __init__(self, model: CpModel, problem: Problem, scale: Scale | Coarse, known: Schedule):
        self.model, self.problem = model, problem
        stages, streams = range(problem.num_stages), problem.streams
        self.ticks = {
            (kind, s): scale(problem.takes(kind, s)) for kind in problem.kinds for s in stages
        }
        self.lags = {
            (t, kind, s): scale(problem.lag(stream, kind, s)) if kind is not W else 0
            for t, stream in enumerate(streams)
            for kind, s in self.ticks
        }
        hint = self._hint(known)
        self.longest = sum(
            len(times) * (self.ticks[chain[1:]] + self.lags[chain]) for chain, times in hint.items()
        )
        self.starts = {
            chain: [model.new_int_var(0, self.longest, "") for _ in times]
            for chain, times in hint.items()
        }
        for chain, times in hint.items():
            for start, time in zip(self.starts[chain], times, strict=True):
                model.add_hint(start, time)
        self._precede()
        for rank in range(problem.num_ranks):
            self._work(rank)
            self._remember(rank)

    def _hint(self, schedule: Schedule) -> dict[Chain, list[int]]:
        """When a schedule starts each stage's actions of a kind, in order of time."""
        streams = self.problem.streams
        stream_of = {m: t for t, stream in enumerate(streams) for m in stream.microbatches}
        entries = zip(
            schedule.columns.microbatches,
            schedule.columns.kinds,
            schedule.columns.stages,
            strict=True,
        )
        chains = [(stream_of[m], kind, stage) for m, kind, stage in entries]
        rows, needs = schedule.graph.turns
        lags = [0 if need is None else self.lags[chains[need]] for need in needs]
        starts, _ = run(rows, needs, [self.ticks[chain[1:]] for chain in chains], lags)
        found: dict[Chain, list[int]] = {}
        for start, chain in sorted(zip(starts, chains, strict=True), key=itemgetter(0)):
            found.setdefault(chain, []).append(start)
        return found

    def _end(self, chain: Chain, j: int) -> LinearExpr:
        return self.starts[chain][j] + self.ticks[chain[1:]]

    def _of(self, rank: int) -> list[tuple[int, int]]:
        """The streams and their stages that a rank has."""
        return [
            (t, stage) for t, stream in enumerate(self.problem.streams) for stage in stream.of(rank)
        ]

    def schedule(self, solver: CpSolver) -> Schedule:
        """The rows that the solver found."""
        streams = self.problem.streams
        timed: list[list[tuple[int, int, Action]]] = [[] for _ in range(self.problem.num_ranks)]
        for (t, kind, stage), starts in self.starts.items():
            for m, start in zip(streams[t].microbatches, starts, strict=True):
                at = solver.value(start)
                timed[streams[t].ranks[stage]].append(
                    (at, at + self.ticks[kind, stage], Action(stage, kind, m))
                )
        return Schedule([[action for *_, action in sorted(row)] for row in timed], "optimum")

    def _precede(self) -> None:
        """Add which actions wait for which, and that each stage takes microbatches in order."""
        kinds, last = self.problem.kinds, self.problem.num_stages - 1
        for t, kind, stage in self.starts:
            before = [] if kind is F else [(t, kinds[kinds.index(kind) - 1], stage)]
            if kind is F and stage > 0:
                before.append((t, F, stage - 1))
            if kind is kinds[1] and stage < last:
                before.append((t, kind, stage + 1))
            starts = self.starts[t, kind, stage]
            for chain in before:
                lag = self.lags[chain] if chain[2] != stage else 0
                for j, start in enumerate(starts):
                    self.model.add(start >= self._end(chain, j) + lag)
            for one, other in pairwise(starts):
                self.model.add(other >= one + self.ticks[kind, stage])

    def _work(self, rank: int) -> None:
        """Add that a rank does one thing at a time."""
        chains = [(t, kind, stage) for t, stage in self._of(rank) for kind in self.problem.kinds]
        self.model.add_no_overlap(
            self.model.new_fixed_size_interval_var(start, self.ticks[chain[1:]], "")
            for chain in chains
            for start in self.starts[chain]
        )

    def _remember(self, rank: int) -> None:
        """Add that a rank holds no more than it may: an activation from F to the end of I or B,
        what W needs from there to its end, and what I or B needs in addition while it runs.
        """
        problem, (_, back, *_) = self.problem, self.problem.kinds
        if problem.room(rank) == inf:
            return
        sizes = {}
        for s in problem.stages_of(rank):
            changes = problem.memory.changes(s)
            sizes[s] = changes[F][0], changes[back][0], -changes[W][1] if problem.split else 0
        scale = Scale([size for each in sizes.values() for size in each])
        if not scale.exact:
            raise ValueError(
                f"the sizes of rank {rank} have no common unit: give memory in whole numbers, such "
                "as bytes"
            )
        room = int(Fraction(repr(problem.room(rank))) / scale.unit)
        self._cap(rank, {s: tuple(map(scale, each)) for s, each in sizes.items()}, room)

    def _cap(self, rank: int, sizes: dict[int, tuple[int, int, int]], room: int) -> None:
        """Add one such limit, given what each stage holds until I or B, in addition meanwhile, and
        until W.
        """
        (_, back, *_), last = self.problem.kinds, self.problem.kinds[-1]
        holdings: list[tuple[IntervalVar, int]] = []
        in_turns = len(self._of(rank)) == 1
        for t, s in self._of(rank):
            (whole, on_top, kept), forwards = sizes[s], self.starts[t, F, s]
            # one size from F to the last end
            whole_way = not on_top and kept == whole * self.problem.split
            release = (t, last if whole_way else back, s)
            in_turns = in_turns and whole_way
            # forward j + k waits until j's activation is released: it follows, and helps the solver
            if whole:
                for j, start in enumerate(forwards[room // whole :]):
                    self.model.add(start >= self._end(release, j))
            for j, start in enumerate(forwards):
                middle = self._end((t, back, s), j)
                parts = [(start, self._end(release, j), whole)]
                if not whole_way:
                    parts += [
                        (self.starts[t, back, s][j], middle, on_top),
                        (middle, self._end((t, last, s), j), kept),
                    ]
                holdings += [(self._between(*ends), size) for *ends, size in parts if size]
        if holdings and not in_turns:  # with one stage in one size, the turns say it all
            self.model.add_cumulative(*zip(*holdings, strict=True), room)

    def _between(self, start: LinearExpr, end: LinearExpr) -> IntervalVar:
        return self.model.new_interval_var(
            start, self.model.new_int_var(0, self.longest, ""), end, ""
        )

    def minimise(self, lowest: int) -> None:
        """Minimise the makespan, which is at least `lowest`. The known order is a hint and no
        constraint, because a solver told to stay below it finds longer orders, and finds them
        later.
        """
        last = self.problem.kinds[-1]
        aim = self.model.new_int_var(lowest, self.longest, "")
        for rank in range(self.problem.num_ranks):
            for t, stage in self._of(rank):
                self.model.add(aim >= self._end((t, last, stage), -1))
        self.model.minimize(aim)


def constraint_solver() -> ModuleType:
    """OR-Tools' CP-SAT. If it is missing, the error says how to install it."""
    return bring("ortools.sat.python.cp_model")
