"""A building block as a value: one microbatch scheduled on all ranks, and the interval at which the
next one follows.

Repeat it once per microbatch and you have a schedule, whose memory you can read off the block.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import combinations
from math import ceil, inf
from typing import TYPE_CHECKING

from ...actions import INPUT_GRADIENT, Action, B, F, I, Kind, W
from ...costs import Costs
from ...deps import needs
from ...errors import accept, expect, number, positive_int, shown
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Timeline
from .reordering import reordered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLOSE = 1e-9  # of the interval: times that differ by less are the same
Plan = list[tuple[float, Action]]  # what a rank runs from when on, in order


@dataclass(frozen=True)
class Block:
    """The start of each action of one microbatch, on all ranks. The next microbatch starts one
    interval later.

    - `starts`: of every stage's F and B, or F, I and W: `{"0F": 0, "1F": 1, "1B": 2, "0B": 4}`. If
      you leave a W out, it runs as soon as its rank has a gap for it, the oldest first.
    - `placement`: the rank of every stage.
    - `costs`: how long actions take (all ones when left out), and how long messages do.

    Raises ValueError for an action that starts before what it waits for has arrived, and for two
    actions of a rank whose times overlap modulo the interval. Also for a W without a start, if gaps
    that are long enough come too seldom, because microbatches would be held longer and longer.

    >>> block = Block({"0F": 0, "1F": 1, "1B": 2, "0B": 4}, placement=(0, 1), interval=3)
    >>> print(block.stamp(3).schedule)
    block, 3 times: 2 ranks, 2 stages, 3 microbatches, 12 actions
    rank 0  0F0 0F1 0B0 0F2 0B1 0B2
    rank 1  1F0 1B0 1F1 1B1 1F2 1B2
    >>> block.lifespans, block.bound
    ((6.0, 3.0), (2, 1))
    """

    starts: Mapping[str, float]
    placement: Sequence[int]
    interval: float
    costs: Costs = field(default_factory=Costs)
    name: str = "block"

    def __post_init__(self) -> None:
        expect(Mapping, starts=self.starts)
        expect(Costs, costs=self.costs)
        expect(Sequence, placement=self.placement)
        interval, placement = number("interval", self.interval), tuple(self.placement)
        given = {
            _parsed(key): number(f"the start of {key}", start) for key, start in self.starts.items()
        }
        starts = {
            f"{stage}{kind}": start
            for (stage, kind), start in sorted(given.items(), key=lambda each: each[1])
        }
        accept(self, starts=starts, placement=placement, interval=interval)
        if sorted(set(placement)) != list(range(max(placement, default=-1) + 1)):
            raise ValueError(
                "placement must give every stage a rank, and leave no rank out, got "
                f"{shown(placement)}"
            )
        self.costs.check(len(placement), self.num_ranks)
        self._check_dependencies({Action(*key, 0): start for key, start in given.items()})
        for rank in range(self.num_ranks):
            self._check_collisions(rank)
        if not all(map(self._has_room, range(self.num_ranks))):
            _ = self._many  # which raises the error, unless they fit all the same

    @property
    def num_ranks(self) -> int:
        return max(self.placement) + 1

    @classmethod
    def of(
        cls,
        timeline: Timeline,
        microbatch: int = 0,
        *,
        interval: float | None = None,
        name: str = "",
    ) -> Block:
        """The block that a timeline has for one of its microbatches.

        By default the interval is that to the next microbatch. Raises ValueError if the next one's
        actions aren't all later by this interval, because the timeline isn't in its steady state
        there.
        """
        spans = {span.action: span for span in timeline.spans}
        own = {
            a: span
            for a, span in spans.items()
            if isinstance(a, Action) and a.microbatch == microbatch
        }
        if not own:
            raise ValueError(
                f"{timeline.schedule.name} has no microbatch {microbatch!r} to make a block of"
            )
        if interval is None:
            later = {a: spans.get(a._replace(microbatch=microbatch + 1)) for a in own}
            steps = {a: span.start - own[a].start for a, span in later.items() if span}
            interval = min(steps.values(), default=0)
            if len(steps) < len(own) or any(
                step > interval * (1 + CLOSE) for step in steps.values()
            ):
                beside = (
                    f"microbatch {microbatch} isn't followed by the next one at one interval: "
                    f"{shown(steps)}"
                )
                raise ValueError(f"{beside}; take one of the steady state, or give the interval")
        first = min(span.start for span in own.values())
        starts = {f"{a.stage}{a.kind}": span.start - first for a, span in own.items()}
        return cls(
            starts, timeline.schedule.placement, interval, _costs_of(timeline, own), name or "block"
        )

    def stamp(self, num_microbatches: int) -> Timeline:
        """Repeat the block once per microbatch, at the times that it gives."""
        M = positive_int("num_microbatches", num_microbatches)
        plans = [self.plan(rank, M) for rank in range(self.num_ranks)]
        schedule = Schedule(
            [[action for _, action in plan] for plan in plans], f"{self.name}, {M} times"
        )
        begins = [start for plan in plans for start, _ in plan]
        takes = cache(self.costs.of)
        ends = [
            start + takes(action.kind, action.stage) for plan in plans for start, action in plan
        ]
        return Timeline(schedule, begins, ends, unit=self.costs.unit, how="planned")

    def squeeze(self, num_microbatches: int, costs: Costs | None = None) -> Timeline:
        """The stamped rows with every action as early as it can run, at the block's own costs or at
        others.
        """
        return simulate(self.stamp(num_microbatches).schedule, costs or self.costs)

    def reorder(self, num_microbatches: int, costs: Costs | None = None) -> Timeline:
        """Squeeze the rows with warm-up and cool-down in an order that holds no more, the fastest
        of a few for `costs`.

        It tries the stamped rows, and three whose steady state keeps to the block. That steady
        state lasts from the first microbatch's last input gradient to the start of the last
        microbatch, or somewhat longer, or longer still.
        """
        M = positive_int("num_microbatches", num_microbatches)
        plans = [self.plan(rank, M) for rank in range(self.num_ranks)]
        back = next(self.starts[f"0{kind}"] for kind in INPUT_GRADIENT if f"0{kind}" in self.starts)
        last, unit = (
            self.starts["0F"] + self.interval * (M - 1),
            max(self.costs.of(k, 0) for k in (F, I, W)),
        )
        found = [self.squeeze(M, costs)]
        for more in (0, unit * self.num_ranks, 2 * unit * self.num_ranks):
            rows = reordered(plans, len(self.placement), back - more, last + more)
            found.append(simulate(Schedule(rows, self.name), costs or self.costs))
        return min(found, key=lambda timeline: timeline.makespan)

    def plan(self, rank: int, num_microbatches: int) -> Plan:
        """When a rank runs what, with every W that has no start of its own."""
        each = [(start, *_parsed(key)) for key, start in self.starts.items()]
        fixed = [
            (start + self.interval * m, Action(stage, kind, m))
            for start, stage, kind in each
            if self.placement[stage] == rank
            for m in range(num_microbatches)
        ]
        return filled(fixed, self.costs, set(self._open), CLOSE * self.interval)

    @cached_property
    def lifespans(self) -> tuple[float, ...]:
        """Per stage, how long it holds a microbatch: from the start of its F to the end of its B or
        W.

        If the W has no start of its own, it is the time of a microbatch in the steady state.
        """
        return tuple(max(lives) for lives in self._lives(self._many))

    @property
    def bound(self) -> tuple[int, ...]:
        """Per rank, the most that it can hold with any number of microbatches: lifespan / interval,
        rounded up for each of its stages, and added.

        Stage s, with F at f and lifespan l, holds microbatch m at time t if f + mT <= t < f + mT +
        l, with interval T. Those m lie in a half-open stretch of length l / T, which has at most
        ceil(l / T) whole numbers in it. The rank holds the sum over its stages. Squeezing keeps
        every row's order, which alone decides what is held.
        """
        return tuple(
            sum(ceil(self.lifespans[s] / self.interval - CLOSE) for s in own)
            for own in self._stages
        )

    @property
    def peak(self) -> tuple[int, ...]:
        """Per rank, the most that it holds when there are many microbatches. It is counted, so it
        is exact.
        """
        return self._many.peak_in_flight

    @property
    def mean_held(self) -> tuple[float, ...]:
        """Per rank, what it holds on average in the steady state: lifespan / interval, added over
        its stages. The peak is no less, and it is at the bound where lifespans are multiples of the
        interval.
        """
        return tuple(sum(self.lifespans[s] for s in own) / self.interval for own in self._stages)

    def draw(self, copies: int = 3) -> Axes:
        """Draw the block in colour and the copies that follow it pale, with the interval."""
        from ..forms import block_chart

        return block_chart(self, copies)

    @cached_property
    def _many(self) -> Timeline:
        """Enough microbatches for a W without a start to repeat itself in the middle of them.

        Relative to its microbatch, a W never starts earlier than the one before, because its start
        decides when the next one can start. So once two in turn are alike, all that follow are like
        them, as long as microbatches come. If they repeat at all, every W has a place in which it
        waits for less than two intervals for each W of its rank, and one more. A W that waits
        longer would wait longer and longer.
        """
        M, T, close = (
            2 * (ceil(max(self.starts.values()) / self.interval) + 4),
            self.interval,
            CLOSE * self.interval,
        )
        open_ = self._open
        while True:
            many = self.stamp(M)
            # which begins here
            lives, cool_down = self._lives(many), T * M + min(self.starts.values())
            settled = True
            for stage in open_:
                begin, held, middle = self.starts[f"{stage}F"], lives[stage], M // 2
                at_once = (
                    self.starts[f"{stage}I"]
                    + self.costs.of(I, stage)
                    + self.costs.of(W, stage)
                    - begin
                )
                rank = self.placement[stage]
                if max(held) - at_once > (2 * len(self._stages[rank]) + 1) * T + close:
                    short = f"rank {rank} has no gap for stage {stage}'s W in every interval"
                    longer = f"{short} of {T:g}, and holds each microbatch longer than the last"
                    raise ValueError(f"{longer}: give the W a start, or lengthen the interval")
                settled &= abs(held[middle + 1] - held[middle]) <= close
                settled &= begin + T * (middle + 1) + held[middle + 1] <= cool_down + close
            if settled:
                return many
            M *= 2

    @property
    def _open(self) -> list[int]:
        """The stages whose W's start is left open."""
        return [
            s for s, _ in enumerate(self.placement) if not {f"{s}B", f"{s}W"} & self.starts.keys()
        ]

    def _has_room(self, rank: int) -> bool:
        """Whether the W's without a start surely fit: an interval's gaps would have room for as
        many of the longest ones.
        """
        own, T = self._stages[rank], self.interval
        lasts = [self.costs.of(W, s) for s in self._open if s in own]
        longest = max(lasts, default=0)
        if not longest:
            return True
        keys = ((start % T, *_parsed(key)) for key, start in self.starts.items())
        taken = sorted(
            (start, start + self.costs.of(kind, stage))
            for start, stage, kind in keys
            if stage in own
        )
        following = [start for start, _ in taken[1:]] + [taken[0][0] + T]
        gaps = (start - end for (_, end), start in zip(taken, following, strict=True))
        return sum(int((gap + CLOSE * T) / longest) for gap in gaps if gap > 0) >= len(lasts)

    def _lives(self, many: Timeline) -> list[list[float]]:
        """Per stage and microbatch, from the start of its F to the end of its B or W."""
        found = [[0.0] * many.schedule.num_microbatches for _ in self.placement]
        for span in many.spans:
            stage, kind, m = span.action
            if kind is not I:
                found[stage][m] += -span.start if kind is F else span.end
        return found

    @property
    def _stages(self) -> list[list[int]]:
        return [
            [s for s, rank in enumerate(self.placement) if rank == own]
            for own in range(self.num_ranks)
        ]

    def _check_dependencies(self, starts: dict[Action, float]) -> None:
        num_stages = len(self.placement)
        for stage in range(num_stages):
            kinds = {action.kind for action in starts if action.stage == stage}
            if kinds not in ({F, B}, {F, I}, {F, I, W}):
                raise ValueError(
                    f"stage {stage} must start an F and a B, or an F and an I, got "
                    f"{', '.join(sorted(kinds)) or 'neither'}"
                )
        for action, start in starts.items():
            if action.stage >= num_stages:
                raise ValueError(
                    f"{_key(action)} is of a stage that placement, with {num_stages} stages, "
                    "doesn't place"
                )
            for need in needs(action, num_stages):
                made = next(
                    Action(need.stage, kind, 0)
                    for kind in need.kinds
                    if (need.stage, kind, 0) in starts
                )
                ways = self.placement[need.stage], self.placement[action.stage]
                there = starts[made] + self.costs.of_item(made)
                there += self.costs.link(*ways).latency if ways[0] != ways[1] else 0
                if start < there - CLOSE * max(self.interval, there):
                    late = (
                        f"{_key(action)} starts at {start:g}, and what {_key(made)} makes arrives "
                        f"at {there:g}"
                    )
                    raise ValueError(f"{late}: start it at {there:g} or later")

    def _check_collisions(self, rank: int) -> None:
        T, close = self.interval, CLOSE * self.interval
        stages = self._stages[rank]
        own = [(start, *_parsed(key)) for key, start in self.starts.items()]
        own = [
            (start, f"{s}{kind}", self.costs.of(kind, s)) for start, s, kind in own if s in stages
        ]
        work = sum(
            self.costs.of(kind, s)
            for s in stages
            for kind in ((F, B) if f"{s}B" in self.starts else (F, I, W))
        )
        if work > T + close:
            raise ValueError(
                f"rank {rank} has {work:g} of work on a microbatch, and the interval is {T:g}: "
                "make it longer"
            )
        for (a, first, takes), (b, second, lasts) in combinations(own, 2):
            if (b - a + close) % T < takes - close or (a - b + close) % T < lasts - close:
                met = a if (a - b + close) % T < lasts - close else b
                both = (
                    f"on rank {rank}, {first} (at {a:g}) and {second} (at {b:g}) meet in unit "
                    f"{met % T:g}"
                )
                raise ValueError(
                    f"{both} of the interval of {T:g}: start one of them at another time"
                )


def filled(fixed: Plan, costs: Costs, open_: set[int], close: float = 0) -> Plan:
    """A rank's plan, where every gap that is long enough gets the oldest W of the stages whose W
    has no place yet.
    """
    plan: Plan = []
    waiting: deque[Action] = deque()
    now, lasts = 0.0, cache(costs.of)
    for start, action in [*sorted(fixed), (inf, None)]:
        while waiting and now + (takes := lasts(W, waiting[0].stage)) <= start + close:
            plan.append((now, waiting.popleft()))
            now += takes
        if action:
            plan.append((start, action))
            now = start + lasts(action.kind, action.stage)
            if action.kind is I and action.stage in open_:
                waiting.append(action._replace(kind=W))
    return plan


@cache  # a search looks at the same few again and again
def _parsed(key: str) -> tuple[int, Kind]:
    if not (isinstance(key, str) and (match := re.fullmatch(r"(\d{1,9})([FBIW])", key))):
        raise ValueError(
            f"starts must name actions as a stage and F, B, I or W, such as '0F', got {shown(key)}"
        )
    return int(match[1]), Kind(match[2])


def _key(action: Action) -> str:
    return f"{action.stage}{action.kind}"


def _costs_of(timeline: Timeline, own: Mapping) -> Costs:
    """How long the actions of one microbatch took, by stage."""
    found: dict[Kind, dict[int, float]] = defaultdict(dict)
    for action, span in own.items():
        found[action.kind][action.stage] = span.end - span.start
    names = {F: "forward", B: "backward", I: "backward_input", W: "backward_weight"}
    stages = range(timeline.schedule.num_stages)
    given = {
        names[kind]: tuple(by_stage.get(s, 0) for s in stages) for kind, by_stage in found.items()
    }
    return Costs(**given, unit=timeline.unit)
