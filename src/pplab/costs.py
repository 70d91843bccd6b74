"""How long actions and messages take: what a simulation gives to a schedule."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from numbers import Integral
from typing import Any

from .actions import Action, B, F, I, Kind, Overlap, W, parts
from .errors import MOST, accept, expect, number, shown

PerStage = float | Sequence[float]  # one number for all stages, or one for each
PerMicrobatch = float | Sequence[PerStage]  # a stage may have one number for each microbatch, too


@dataclass(frozen=True)
class Link:
    """The way from one rank to another. A message takes its size divided by `bandwidth`, then
    `latency`.

    The messages of a link pass one after the other, so they queue on a slow link. `bandwidth` is in
    units of `Costs.message` per unit of time.
    """

    latency: float = 0
    bandwidth: float = inf

    def __post_init__(self) -> None:
        bandwidth = number("bandwidth", self.bandwidth, inf)
        accept(self, latency=number("latency", self.latency), bandwidth=bandwidth)
        if bandwidth < 1 / MOST:
            raise ValueError(
                f"bandwidth must be a number above 0, of at least {1 / MOST:g}, got {bandwidth!r}"
            )


@dataclass(frozen=True)
class Costs:
    """How long actions and messages take, in one unit of your choice (`unit` names it in drawings).

    Each duration belongs to a stage. Give one number for all stages, or one value per stage. If
    microbatches differ, give each stage a list with one value per microbatch, for example
    `forward=[[1, 2, 1]] * 4`. In a schedule with two stages per rank each stage is half as deep, so
    use `finer(2)` to compare schedules on one model.

    - `backward`: time of a full backward. By default it is the sum of its two halves.
    - `recompute`: time that a full backward or an input gradient takes longer, because activations
      are computed again.
    - `overhead`: time that every action takes in addition, whatever its size. Two actions that run
      at once pay it once (the larger of the two), since a rank takes them up as one item of its
      row.
    - `overlap`: time of two actions that run at once: "sum" or "max" of the two, or the duration of
      an F with a B. To distinguish pairs, map them to durations, by kinds {(F, I): 4}, with stages
      {("0F", "1I"): 4}, or {(0, 1): 6} for 0F and 1B, in any order. Pairs that you leave out take
      the sum.
    - `latency`, `bandwidth`: those of every link between two ranks, except for the links in
      `links[source, target]`.
    - `message`: size of what a stage sends to the next one, and gets back as a gradient, in the
      unit of `bandwidth`. Give one value per stage for its output, and one per microbatch as for
      durations.
    """

    forward: PerMicrobatch = 1
    backward_input: PerMicrobatch = 1
    backward_weight: PerMicrobatch = 1
    latency: float = 0
    backward: PerMicrobatch | None = None
    recompute: PerMicrobatch = 0
    overhead: PerMicrobatch = 0
    overlap: str | float | Mapping[Any, float] = "sum"
    bandwidth: float = inf
    message: PerMicrobatch = 1
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    unit: str = ""

    def __post_init__(self) -> None:
        for name in _PER_STAGE:
            if (value := getattr(self, name)) is not None or name != "backward":
                accept(self, **{name: per_stage(name, value, each=per_stage)})
        expect(str, unit=self.unit)
        if not _any((self.forward, self.backward_input, self.backward_weight, self.backward or 0)):
            raise ValueError(
                "forward, backward_input and backward_weight are all 0, and without work there is "
                "nothing to compare idle time with: give one of them a duration above 0"
            )
        overlap, pairs = self.overlap, {}
        if isinstance(overlap, Mapping):
            overlap = pairs = {pair: number("overlap", each) for pair, each in overlap.items()}
        elif not isinstance(overlap, str):
            overlap = pairs[F, B] = number("overlap", overlap)
        elif overlap not in ("sum", "max"):
            raise ValueError(f'overlap must be "sum", "max" or a duration, got {shown(overlap)}')
        by_halves = {_halves(pair): duration for pair, duration in pairs.items()}
        accept(self, overlap=overlap, _pairs=by_halves, **vars(Link(self.latency, self.bandwidth)))
        expect(Mapping, links=self.links)
        for item in self.links.items():
            match item:
                case (Integral(), Integral()), Link():
                    continue
            raise ValueError(
                "links must map (source rank, target rank) to a pplab.Link, such as {(0, 1): "
                f"pplab.Link(latency=1)}}, got {shown(dict([item]))}"
            )

    @property
    def by_microbatch(self) -> bool:
        """Whether microbatches differ, that is, whether some stage has one value for each of
        them.
        """
        given = (getattr(self, name) for name in _PER_STAGE)
        return any(isinstance(x, tuple) and tuple in map(type, x) for x in given)

    def of(self, kind: Kind, stage: int) -> float:
        """How long `kind` takes on `stage`. Raises ValueError where microbatches differ."""
        return self._work(stage, kind, _ALL) + of_stage(self.overhead, stage, _ALL)

    def of_overlap(
        self, first_stage: int, second_stage: int, first: Kind = F, second: Kind = B
    ) -> float:
        """How long two actions take at once. By default they are a forward and a full backward."""
        return self.of_item(
            Overlap(Action(first_stage, first, _ALL), Action(second_stage, second, _ALL))
        )

    def of_item(self, item: Action | Overlap) -> float:
        """How long an item of a row takes, an overlap or one action of one microbatch."""
        halves = parts(item)
        alone = [self._work(*half) for half in halves]
        takes = max(alone) if self.overlap == "max" else sum(alone)
        if len(halves) > 1:
            pairs = vars(self)["_pairs"]
            kinds = pairs.get(frozenset(half.kind for half in halves), takes)
            takes = pairs.get(frozenset(f"{x.stage}{x.kind}" for x in halves), kinds)
        return takes + max(of_stage(self.overhead, x.stage, x.microbatch) for x in halves)

    def _work(self, stage: int, kind: Kind, microbatch: int | None) -> float:
        """How long an action takes alone, without its overhead."""
        names = _WORK[kind]
        if kind == B and self.backward is not None:
            names = ["backward", *names[2:]]  # in place of its halves
        return sum(of_stage(getattr(self, name), stage, microbatch) for name in names)

    def link(self, source: int, target: int) -> Link:
        """The link from rank `source` to rank `target`."""
        return self.links.get((source, target)) or Link(self.latency, self.bandwidth)

    def occupancy(
        self, kind: Kind, stage: int, bandwidth: float, microbatch: int | None = None
    ) -> float:
        """How long the message of `kind` on `stage` keeps a link of that bandwidth busy."""
        return of_stage(self.message, stage - (kind != F), microbatch) / bandwidth

    @property
    def has_queues(self) -> bool:
        """Whether one message can have to wait for a different one, because some link's bandwidth
        is finite.
        """
        return min([self.bandwidth, *(link.bandwidth for link in self.links.values())]) < inf

    def finer(self, stages_per_rank: int) -> Costs:
        """The costs of the same model when it is cut into `stages_per_rank` times as many stages.
        Each stage keeps the same overhead.

        >>> Costs(forward=2).finer(2).forward
        1.0
        """

        def part(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(part, value))
            if isinstance(value, Mapping):
                return {pair: part(duration) for pair, duration in value.items()}
            return value if isinstance(value, str | None) else value / stages_per_rank

        return replace(
            self, **{name: part(getattr(self, name)) for name in (*DURATIONS, "overlap")}
        )

    def check(self, num_stages: int, num_ranks: int, num_microbatches: int | None = None) -> None:
        """Raise ValueError unless these costs fit so many stages, ranks and microbatches. Without a
        number of microbatches, all microbatches have to take the same time.
        """
        if num_microbatches is None and self.by_microbatch:
            raise ValueError(_ALIKE)
        for name in _PER_STAGE:
            check_length(name, value := getattr(self, name), num_stages)
            for stage, own in enumerate(value if isinstance(value, tuple) else ()):
                check_length(f"{name} of stage {stage}", own, num_microbatches, "microbatch")
        for source, target in self.links:
            if source == target or not {source, target} <= set(range(num_ranks)):
                raise ValueError(
                    f"links names ({source}, {target}), and the schedule has ranks 0 to "
                    f"{num_ranks - 1}: name two different ones"
                )


def _halves(pair: object) -> frozenset[str]:
    """The two actions that a key of `overlap` names: {"F", "I"}, or with stages {"0F", "1I"}."""
    match pair:
        case (Integral() as forward, Integral() as backward):
            return frozenset((f"{forward}F", f"{backward}B"))
        case (str(), str()) if all(re.fullmatch(r"\d*[FBIW]", half) for half in pair):
            return frozenset(pair)
    raise ValueError(
        'overlap must name pairs by two kinds, such as ("F", "I"), with stages ("0F", "1I"), or '
        f"two stages (a forward's, a backward's), got {shown(pair)}"
    )


def _any(value: Any) -> bool:
    """Whether any number in lists of lists is above 0."""
    return any(map(_any, value)) if isinstance(value, tuple) else value > 0


_ALL: Any = None  # in place of a microbatch
_ALIKE = "costs differ by microbatch, and here all microbatches take the same: give one per stage"
_WORK = {
    F: ["forward"],
    B: ["backward_input", "backward_weight", "recompute"],
    I: ["backward_input", "recompute"],
    W: ["backward_weight"],
}
DURATIONS = ("forward", "backward_input", "backward_weight", "backward", "recompute")
_PER_STAGE = (*DURATIONS, "overhead", "message")


def per_stage(
    name: str, value: Any, most: float = MOST, each: Callable[..., Any] = number
) -> PerStage:
    """Return a checked value: a number from 0 to `most`, or a tuple of what `each` returns for the
    entries of a list.
    """
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    if several or getattr(value, "ndim", 0) > 0:  # an array of numpy's or torch's
        return tuple(each(name, x, most) for x in value)
    return number(name, value, most)


def check_length(name: str, value: Any, count: int | None, each: str = "stage") -> None:
    """Raise ValueError unless a list has one value for every stage (or for each of something
    else).
    """
    if isinstance(value, tuple) and len(value) != count:
        given = f"{name} has {len(value)} values for {count} {each}{'e' * (each[-1] == 'h')}s"
        raise ValueError(f"{given}: give one per {each}, or a single number")


def of_stage(value: Any, stage: int, microbatch: int | None = None) -> float:
    """The value of one stage, and of one microbatch where microbatches differ."""
    own = value[stage] if isinstance(value, tuple) else value
    if not isinstance(own, tuple):
        return own
    if microbatch is None:
        raise ValueError(_ALIKE)
    return own[microbatch]
