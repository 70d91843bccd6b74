"""The scheduling problem: a placement, times, and how much ranks may hold. How short can an order
be?

`lab.floor` answers with a closed form that no order beats, and `lab.optimum` with an order and a
proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import NamedTuple

from ...actions import Action, B, F, I, Kind, W, parts
from ...builders import Builder, known
from ...costs import Costs, check_length, of_stage, per_stage
from ...errors import accept, expect, positive_int, shown
from ...footprint import Memory
from ...schedule import Schedule
from ...simulator import simulate, validate
from ...timeline import Timeline

PLACEMENTS = ("one stage per rank", "loop", "V", "bidirectional")  # as `pplab schedules` names them


class Stream(NamedTuple):
    """Microbatches that take the same way through the pipeline, and the rank of every stage on
    it.
    """

    microbatches: range
    ranks: tuple[int, ...]

    def of(self, rank: int) -> tuple[int, ...]:
        """The stages that it has on a rank, lowest first."""
        return tuple(stage for stage, home in enumerate(self.ranks) if home == rank)


def built(
    builders: Iterable[Builder], P: int, M: int, given: Mapping[str, object]
) -> Iterator[Schedule]:
    """The schedules of those builders that can be built for these sizes. Each gets the options that
    it has.
    """
    for builder in builders:
        options = {name: given[name] for name in builder.options if name in given}
        try:
            yield builder(P, M, **options)
        except ValueError:  # not for this many ranks or microbatches
            continue


@dataclass(frozen=True)
class Problem:
    """Microbatches to take through a pipeline, in any order that its placement, times and memory
    allow.

    - `placement`: "one stage per rank"; "loop" with `stages_per_rank` (2 by default); "V" with two
      stages per rank; or "bidirectional", with two copies of every stage and half of the
      microbatches from either end.
    - `costs`: those of a stage, as `pplab.simulate` takes them. For half a rank's share use, for
      example, `Costs(3, 4, 2).finer(2)`.
    - `split`: whether a backward comes in two halves, I and W, or whole.
    - `limit`: the most that a rank may hold, or one value per rank, in the unit of `memory`.
      Without `memory` the unit is a stage's activations of one microbatch, held from F to B or W.
      `Memory(0.5)` counts in those of a whole rank with two stages.

    Raises ValueError for values that don't fit together, for a limit that no order meets (it names
    the smallest one that works), and for a link on which messages would queue.

    >>> problem = Problem(num_ranks=4, num_microbatches=8, placement="V", limit=6)
    >>> problem.num_stages, problem.least_limit
    (8, (2, 2, 2, 2))
    """

    num_ranks: int
    num_microbatches: int
    placement: str = "one stage per rank"
    stages_per_rank: int | None = None
    costs: Costs = field(default_factory=Costs)
    split: bool = True
    memory: Memory = field(default_factory=Memory)
    limit: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        P, M = (
            positive_int(name, getattr(self, name)) for name in ("num_ranks", "num_microbatches")
        )
        expect(Costs, costs=self.costs)
        expect(Memory, memory=self.memory)
        if self.placement not in PLACEMENTS:
            raise ValueError(
                f"placement must be one of {', '.join(map(repr, PLACEMENTS))}, got "
                f"{shown(self.placement)}"
            )
        usual = {"loop": 2, "V": 2}.get(self.placement, 1)
        each = positive_int("stages_per_rank", self.stages_per_rank or usual)
        if self.placement != "loop" and each != usual:
            raise ValueError(
                f'stages_per_rank is {usual} in "{self.placement}", got {each}: only a loop can '
                "have more"
            )
        if self.placement == "bidirectional" and P % 2:
            raise ValueError(
                f"a bidirectional placement needs an even number of ranks, got {P}: each has a "
                "mirror image"
            )
        if self.placement == "bidirectional" and M < 2:
            raise ValueError(
                "a bidirectional placement needs a microbatch from either end, got 1: take 2 or "
                "more"
            )
        accept(self, num_ranks=P, num_microbatches=M, stages_per_rank=each)
        self.costs.check(self.num_stages, P)
        self.memory.check(self.num_stages)
        if self.limit is not None:
            accept(self, limit=per_stage("limit", self.limit, inf))
            check_length("limit", self.limit, P, "rank")
        self._check_durations()
        self._check_links()
        self._check_limit()

    @property
    def num_stages(self) -> int:
        """Number of pieces of the model."""
        return self.num_ranks * self.stages_per_rank

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of actions that a stage runs for a microbatch, in this order."""
        return (F, I, W) if self.split else (F, B)

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The streams of microbatches: one, or two for a bidirectional placement, where the first
        half enters at rank 0.
        """
        P, M = self.num_ranks, self.num_microbatches
        down = tuple(stage % P for stage in range(self.num_stages))
        if self.placement == "V":
            down = (*range(P), *reversed(range(P)))
        if self.placement != "bidirectional":
            return (Stream(range(M), down),)
        return Stream(range((M + 1) // 2), down), Stream(range((M + 1) // 2, M), down[::-1])

    def takes(self, kind: Kind, stage: int) -> float:
        """How long `kind` takes on `stage`."""
        return self.costs.of(kind, stage)

    def lag(self, stream: Stream, kind: Kind, stage: int) -> float:
        """Time until the result of `kind` on `stage` is with the next stage (with the one before
        for a backward), which is the latency and the time that the message takes to pass.
        """
        other = stage + 1 if kind is F else stage - 1
        if not 0 <= other < self.num_stages or stream.ranks[stage] == stream.ranks[other]:
            return 0
        link = self.costs.link(stream.ranks[stage], stream.ranks[other])
        return link.latency + (
            self.costs.occupancy(kind, stage, link.bandwidth) if link.bandwidth < inf else 0
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, lowest first."""
        return tuple(sorted({stage for stream in self.streams for stage in stream.of(rank)}))

    def room(self, rank: int) -> float:
        """How much a rank may hold in addition to what it holds all the time. It is inf without a
        limit.
        """
        if self.limit is None:
            return inf
        return of_stage(self.limit, rank) - self.memory.constant(self.stages_of(rank))

    @cached_property
    def least_limit(self) -> tuple[float, ...]:
        """Per rank, the least that an order can hold, which is what one microbatch at a time takes.

        No order needs less. While a rank runs an I (or B) of a stage, it still holds what all its
        lower stages keep of this microbatch, since their turn comes later.
        """
        return tuple(
            self.memory.constant(self.stages_of(rank))
            + max(self._alone(stream.of(rank)) for stream in self.streams)
            for rank in range(self.num_ranks)
        )

    def _alone(self, stages: Sequence[int]) -> float:
        before, most = 0, 0
        for stage in stages:
            changes = self.memory.changes(stage)
            before += changes[F][0]
            most = max(most, before + changes[self.kinds[1]][0])
        return most

    def one_at_a_time(self) -> Schedule:
        """The order that holds least: one microbatch goes through all stages and back before the
        next one starts.
        """
        rows: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        for stream in self.streams:
            for m in stream.microbatches:
                for stage, rank in enumerate(stream.ranks):
                    rows[rank].append(Action(stage, F, m))
                for stage, rank in reversed([*enumerate(stream.ranks)]):
                    rows[rank] += [Action(stage, kind, m) for kind in self.kinds[1:]]
        return Schedule(rows, "one at a time")

    def fits(self, schedule: Schedule) -> bool:
        """Whether every rank stays within the limit."""
        if self.limit is None:
            return True
        held = schedule.peak_held(self.memory)
        return all(h <= of_stage(self.limit, rank) * (1 + 1e-12) for rank, h in enumerate(held))

    def published(self) -> tuple[Timeline, ...]:
        """Every schedule of `pplab.build` that has this placement and can be built, without
        changes, whatever it holds.

        The builders that search for an order get the costs, the memory and the limit.
        """
        return tuple(simulate(schedule, self.costs) for schedule in self._published())

    def _published(self) -> Iterator[Schedule]:
        rooms = [self.room(rank) for rank in range(self.num_ranks)]
        sizes = [of_stage(self.memory.activation, stage) for stage in range(self.num_stages)]
        given = {
            "costs": self.costs,
            "memory": self.memory,
            "stages_per_rank": self.stages_per_rank,
        }
        if self.placement == "one stage per rank" and max(rooms) < inf and min(sizes):
            given["limit"] = max(
                1, min(int(room / size) for room, size in zip(rooms, sizes, strict=True))
            )
        of_placement = [builder for builder in known() if builder.placement == self.placement]
        yield from built(of_placement, self.num_ranks, self.num_microbatches, given)

    def known(self, more: Sequence[Schedule] = ()) -> list[Timeline]:
        """Orders that solve this problem: those of `more` and the published ones that stay within
        the limit, with backwards split or whole as asked. There is at least one.
        """
        found = [self._recast(schedule) for schedule in (*more, *self._published())]
        found = [
            self.one_at_a_time(),
            *(schedule for schedule in found if schedule and self.fits(schedule)),
        ]
        return [simulate(schedule, self.costs) for schedule in found]

    def _recast(self, schedule: Schedule) -> Schedule | None:
        """The order in this problem's kinds of actions, with overlaps one after the other. None if
        it belongs to a different problem.
        """
        rows = []
        for row in schedule.rows:
            made: list[Action] = []
            for action in (action for item in row for action in parts(item)):
                if self.split and action.kind is B:
                    made += [action._replace(kind=I), action._replace(kind=W)]
                elif self.split or action.kind in (F, B):
                    made.append(action)
                elif action.kind is I:
                    made.append(action._replace(kind=B))
            rows.append(made)
        recast = Schedule(rows, schedule.name)
        home = {
            (s, m): rank
            for stream in self.streams
            for m in stream.microbatches
            for s, rank in enumerate(stream.ranks)
        }
        if recast.home() != home:
            return None
        validate(recast)
        return recast

    def _check_durations(self) -> None:
        for stage in range(self.num_stages):
            for kind in self.kinds:
                if not self.takes(kind, stage):
                    raise ValueError(
                        f"{kind} of stage {stage} takes no time, and an order of such actions "
                        "isn't one of times: give it a duration above 0"
                    )

    def _check_links(self) -> None:
        """Raise ValueError for a link on which messages could queue. None waits if each takes no
        longer than any action that sends one.
        """
        if not self.costs.has_queues:
            return
        senders: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for stream in self.streams:
            for stage, (a, b) in enumerate(pairwise(stream.ranks)):
                for link, kind, at in (((a, b), F, stage), ((b, a), self.kinds[1], stage + 1)):
                    if a != b:
                        takes = self.costs.occupancy(kind, at, self.costs.link(*link).bandwidth)
                        senders.setdefault(link, []).append((takes, self.takes(kind, at)))
        for (a, b), each in senders.items():
            longest, shortest = max(takes for takes, _ in each), min(work for _, work in each)
            if longest > shortest:
                raise ValueError(
                    f"messages from rank {a} to rank {b} could queue: one takes {longest:g} to "
                    "pass, and an action that sends one "
                    f"{shortest:g}. Give a bandwidth at which it takes no longer than that"
                )

    def _check_limit(self) -> None:
        for rank, least in enumerate(self.least_limit):
            if self.limit is not None and of_stage(self.limit, rank) < least:
                unit = self.memory.unit and " " + self.memory.unit
                alone = "even when it does one microbatch at a time"
                per_rank = len(set(self.least_limit)) > 1
                smallest = (
                    ", ".join(f"{x:g}" for x in self.least_limit) if per_rank else f"{least:g}"
                )
                raise ValueError(
                    f"limit: rank {rank} may hold {of_stage(self.limit, rank):g}{unit}, and "
                    f"{alone} it holds "
                    f"{least:g}{unit}. The smallest limit that an order meets is {smallest}{unit}"
                )
