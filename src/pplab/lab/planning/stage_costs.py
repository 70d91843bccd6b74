"""What the stages of a plan take and hold: a model's layers over stages, as costs and as memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations_with_replacement, pairwise, product
from numbers import Integral
from typing import Any, NamedTuple

from ...actions import B, F, I, W
from ...costs import Costs, Link
from ...footprint import Memory
from ...schedule import Schedule
from ..experts import Pieces
from .expert_layers import ExpertLayers
from .formulas import ring_all_reduce_time
from .kinds import Kind
from .layers import Model
from .layout import Layout, Machine, at_degree
from .state import State
from .transformer import Transformer


def layers_of(
    model: Transformer | Model, num_stages: int, cut: Sequence[int] | None
) -> tuple[int, ...]:
    """How many layers each stage has."""
    if cut is None and isinstance(model, Model):
        return model.cut(num_stages)
    if cut is None:
        each, rest = divmod(model.num_layers, num_stages)
        if rest:
            raise ValueError(
                f"{model.num_layers} layers don't divide into {num_stages} stages: give cut, the "
                "layers of each stage"
            )
        return (each,) * num_stages
    if not whole_numbers(cut, num_stages) or sum(cut) != model.num_layers:
        raise ValueError(
            f"cut must say for each of {num_stages} stages how many of {model.num_layers} layers "
            f"it has, got {cut!r}"
        )
    return tuple(cut)


def whole_numbers(given: Any, count: int) -> bool:
    """Whether these are so many whole numbers from 0 on."""
    several = isinstance(given, Sequence) and len(given) == count
    return several and all(isinstance(n, Integral) and n >= 0 for n in given)


@dataclass(frozen=True)
class LayerTimes:
    """What a layer's forward of a microbatch takes on a rank, in s. In a backward, waits for sums
    and copies are as long again, and those for keys and values twice as long.
    """

    computing: float
    sums: float  # of activations, over tensor ranks
    ring: float  # what keys and values take longer than the attention beside them
    copies: float  # in both all-to-alls
    touching: float  # for what it keeps to go once between a GPU and its memory

    @property
    def forward(self) -> float:
        """All of it."""
        return self.computing + self.sums + self.ring + self.copies + 2 * self.touching


@dataclass(frozen=True)
class Asked:
    """What a plan was asked for, and from it what stages take and hold."""

    model: Transformer | Any  # or a Model
    machine: Machine
    layout: Layout
    layers: tuple[int, ...]  # of each stage
    recomputed: tuple[int, ...]  # how many of them run their forward again
    modules: tuple[str, ...]  # of which every layer computes these again, and nothing else
    batch: int  # sequences of a step, of all replicas
    microbatch: int  # sequences
    # in place of a short form's MLPs, or how those of a Model are spread
    experts: ExpertLayers | None
    state: State  # of a parameter
    shard_optimizer: bool
    sends: str  # who waits for them

    @property
    def recompute(self) -> tuple[str, ...] | tuple[int, ...]:
        """What runs again, as `plan` takes it: modules, or how many layers of each stage."""
        return self.modules or self.recomputed

    @property
    def boundary(self) -> float:
        """What crosses between two layers, in bytes, of all tensor ranks."""
        return self.model.boundary_bytes(self.microbatch) / self.layout.cp

    @cached_property
    def long(self) -> Model:
        """The model with its layers one by one."""
        return self.model.long(self.experts)

    @cached_property
    def spans(self) -> list[tuple[Counter[str], Counter[str]]]:
        """How many layers of each kind a stage has, and how many of them run again: its first
        ones.
        """
        names, starts = [kind.name for kind in self.long.layers], [0, *accumulate(self.layers)]
        stages = [names[start : start + n] for start, n in zip(starts, self.layers, strict=False)]
        stages[-1] += [kind.name for kind in self.long.predictors]
        return [
            (Counter(stage), Counter(stage if self.modules else stage[:again]))
            for stage, again in zip(stages, self.recomputed, strict=True)
        ]

    @cached_property
    def again(self) -> dict[str, Kind]:
        """What of a kind of layers runs again where it does, by the kind's name."""
        return {
            kind.name: kind.again(self.modules) if self.modules else kind
            for kind in self.long.kinds
        }

    def per_stage(self, value: Callable[[Kind], float], again: bool = False) -> list[float]:
        """The sums of a value over each stage's layers, or over those that run again."""
        runs = self.again if again else {kind.name: kind for kind in self.long.kinds}
        known = {name: value(kind) for name, kind in runs.items()}
        return [sum(n * known[name] for name, n in span[again].items()) for span in self.spans]

    def in_passes(
        self, passes: Mapping[int, int], value: Callable[[Kind], float], times: int = 2
    ) -> float:
        """The sum of a value over a rank's forwards, which count once more in backwards, or twice,
        and where they run again.
        """
        runs, again = self.per_stage(value), self.per_stage(value, again=True)
        return sum(n * (times * runs[stage] + again[stage]) for stage, n in passes.items())

    def passed_bytes(self, kind: Kind) -> float:
        """What a rank has of a layer's keys and values, and passes on around the ring of context
        ranks.
        """
        return self.boundary / self.layout.tp * kind.total("passed") / self.model.width

    def summed(self, kind: Kind) -> list[int]:
        """How many times tensor ranks add up a boundary in each part's forward: of every expert's
        output its own, unless experts are whole.
        """
        own = self.experts is not None and not self.experts.whole
        return [part.sums + (part.routed.used * own if part.routed else 0) for part in kind.parts]

    @property
    def head_flops(self) -> float:
        """Of its forward, once more for each predictor."""
        return (1 + len(self.long.predictors)) * self.model.head_flops(self.microbatch)

    @cached_property
    def copies(self) -> float:
        """How long both all-to-alls of a layer take."""
        if not self.experts:
            return 0.0
        return 2 * self.experts.all_to_all_time(
            self.model, self.machine, self.microbatch, self.layout
        )

    def times_of(self, kind: Kind) -> LayerTimes:
        """Of a layer cut over tensor and context ranks."""
        model, machine, layout = self.model, self.machine, self.layout
        link = machine.ring_link(layout.groups("tp"))
        around = machine.link(layout.crosses("cp", machine.ranks_per_node))
        ring = 0.0
        if kind.total("passed"):
            message = around.latency + self.passed_bytes(kind) / around.bandwidth
            pairs = kind.pair_flops(model.sequence) * self.microbatch
            ring = max(message - machine.computing_s(layout, pairs, pairs) / layout.cp, 0)
        if state := kind.total("handed"):
            # in float32
            ring += around.latency + 4 * self.microbatch * state / layout.tp / around.bandwidth
        return LayerTimes(
            machine.computing_s(
                layout,
                *(
                    self.microbatch * each(model.sequence)
                    for each in (kind.flops, kind.plain_flops)
                ),
            ),
            sum(all_reduce(layout.tp, n * self.boundary, link) for n in self.summed(kind) if n),
            (layout.cp - 1) * ring,
            self.copies if kind.routed else 0,
            self.touched_of(kind) / machine.hbm if machine.hbm else 0,
        )

    @cached_property
    def times(self) -> dict[str, LayerTimes]:
        """Of each kind, and of what of it runs again, by their names."""
        every = {*self.long.kinds, *self.again.values()}
        return {kind.name: self.times_of(kind) for kind in every}

    def forward_s(self, kind: Kind) -> float:
        """How long a forward takes, or what of it runs again."""
        launched = (kind.name in self.again) * self.machine.launching(self.layout) / 3
        return max(self.times[kind.name].forward, launched)

    @property
    def again_s(self) -> float:
        """How long a microbatch's backward takes longer in the stage that computes most again."""
        return max(self.per_stage(self.forward_s, again=True))

    def stage_costs(self, rows: Schedule, messages: Iterable[tuple[int, int]]) -> Costs:
        """How long the stages take, and the links of a pipeline's ranks. Frozen weights have no
        W.
        """
        machine, layout, learns = self.machine, self.layout, bool(self.state.gradients)
        factor = at_degree(machine.backward_at, layout.tp, 0)
        launched = machine.launching(layout) / 3

        def directions(kind: Kind) -> tuple[float, float, float]:
            times = self.times[kind.name]
            layer = times.computing + times.sums
            scale = factor * layer / (layer + times.computing) if factor else 1
            inputs = layer * scale + 2 * times.ring + times.copies + 4 * times.touching
            return (
                self.forward_s(kind),
                max(inputs, launched),
                max(times.computing * scale, launched),
            )

        head = machine.computing_s(layout, self.head_flops, self.head_flops)
        half = head * machine.head_backward / 2
        forward, inputs, weights = (
            self.per_stage(lambda kind, at=at: directions(kind)[at]) for at in range(3)
        )
        forward[-1] += head
        inputs[-1] += half
        weights[-1] += half
        costs = Costs(
            forward,
            inputs,
            [each * learns for each in weights],
            recompute=self.per_stage(self.forward_s, again=True),
            message=self.boundary / layout.tp,
            links={
                pair: machine.link(_crosses(layout, pair, machine.ranks_per_node))
                for pair in messages
            },
            unit="s",
        )
        if not self.experts or not rows.columns.overlaps:
            return costs
        if self.modules:
            raise ValueError(
                f"pairs of actions are planned with whole layers that run again, got "
                f"{', '.join(self.modules)}: say how many layers, or take Interleaved1F1B"
            )
        pieces = self.experts.pieces(self.model, machine, self.microbatch, layout)
        return replace(
            costs, overlap=_pairs(costs, pieces, head * 1e3, self.layers, self.recomputed)
        )

    def weights_of(self, kind: Kind) -> tuple[float, float]:
        """How many of a layer's parameters a rank has: of all but experts, and of experts."""
        tp, experts = self.layout.tp, self.experts
        shared, own = kind.total("divided") / tp + kind.total("whole"), 0.0
        if kind.routed and experts:
            own = (
                kind.routed.count * kind.routed.each / (experts.gpus * (1 if experts.whole else tp))
            )
        return shared, own

    def kept_of(self, kind: Kind, fp8: bool = True) -> float:
        """The bytes that a rank keeps of a layer until its backward."""
        tokens, parts = self.microbatch * self.model.sequence, self.layout.tp * self.layout.cp
        less = fp8 and self.machine.flops_bf16 is not None and kind.total("less_in_fp8")
        return tokens * (kind.kept_bytes(self.model.bytes_each) - less) / parts

    def freed_of(self, kind: Kind) -> float:
        """The bytes that are free until then if it runs again: a whole layer keeps its input."""
        return self.kept_of(kind) - (0 if self.modules else self.boundary / self.layout.tp)

    def touched_of(self, kind: Kind) -> float:
        """The bytes that a forward moves twice and a backward four times: what is kept, and more of
        an expert's copies, which move 20 numbers per width both ways (NVIDIA's mixtures:
        book/published.md). Casts to FP8 move as much as they make smaller.
        """
        copies = kind.routed.used * self.boundary / self.layout.tp if kind.routed else 0
        return self.kept_of(kind, fp8=False) + copies * 7 / 3

    def weights(self, copies: int = 1, gathers: bool = False) -> list[Alike]:
        """How many parameters of each stage a rank has, and who has the same: of all but experts,
        and of its experts, with a ring that sums their gradients, or `gathers`. A schedule may have
        several copies of the model on a pipeline.
        """
        model, layout = self.long, self.layout
        shared = self.per_stage(lambda kind: self.weights_of(kind)[0])
        shared[0] += model.beside / layout.tp
        for end in (0,) if model.tied and len(self.layers) == 1 else (0, -1):
            shared[end] += model.table_parameters / layout.tp
        if model.predictors and not model.tied and len(self.layers) > 1:
            shared[-1] += model.table_parameters / layout.tp  # predictors embed their tokens
        found = [(layout.groups("cp", "dp"), shared)]
        if self.experts:
            found.append(
                (
                    self.experts.groups(layout)[1],
                    self.per_stage(lambda kind: self.weights_of(kind)[1]),
                )
            )
        beside = layout.groups("pp") if copies > 1 else ()
        return [
            Alike(len(groups[0]), self.machine.ring_link([*groups, *beside], gathers), each)
            for groups, each in found
        ]

    def state_bytes(self) -> list[float]:
        """What each stage's parameters take on a rank."""
        parameters = [0.0] * len(self.layers)
        for ranks, _, weights in self.weights():
            each = self.state.bytes(ranks if self.shard_optimizer else 1)
            parameters = [held + each * n for held, n in zip(parameters, weights, strict=True)]
        return parameters

    def stage_memory(self, parameters: Sequence[float] | None = None) -> Memory:
        """What the stages hold, of `parameters` their `state_bytes`.

        Recomputing, a full backward has one layer whole at a time, and W waits for all of them.
        """
        held, freed = self.per_stage(self.kept_of), self.per_stage(self.freed_of, again=True)
        known = {name: self.freed_of(kind) for name, kind in self.again.items()}
        largest = [max((known[name] for name in again), default=0) for _, again in self.spans]
        activations = [all_of_it - less for all_of_it, less in zip(held, freed, strict=True)]
        logits = self.microbatch * self.model.sequence * self.model.vocabulary
        activations[-1] += self.state.logits * logits / self.layout.tp / self.layout.cp
        return Memory(
            activations,
            weight_input=held,
            recomputed=largest,
            while_input_gradient=[less - one for less, one in zip(freed, largest, strict=True)],
            parameters=self.state_bytes() if parameters is None else parameters,
        )

    def sent(self, passes: Mapping[int, int]) -> dict[str, float]:
        """What a rank sends for its layers in these passes, by axis, in bytes."""
        layout, experts = self.layout, self.experts
        found = {
            "tp": ring_times(layout.tp)
            * self.boundary
            * self.in_passes(passes, lambda kind: sum(self.summed(kind))),
            "cp": (layout.cp - 1) * self.in_passes(passes, self.passed_bytes, 3),
            "ep": 0.0,
        }
        if experts:
            copies = experts.all_to_all_bytes(self.model, self.microbatch) / layout.tp / layout.cp
            found["ep"] = 2 * copies * self.in_passes(passes, lambda kind: kind.routed is not None)
        return found


class Alike(NamedTuple):
    """Parameters that several ranks have alike, of each stage, and the link of a ring through those
    ranks.
    """

    ranks: int
    link: Link
    weights: list[float]


def _pairs(
    costs: Costs, pieces: Pieces, head: float, layers: Sequence[int], again: Sequence[int]
) -> dict[tuple[str, str], float]:
    """How long any two actions take at once: both, less what the best order of their pieces
    hides.
    """
    kinds = {F: F, I: I, W: W, B: B} if any(costs.backward_weight) else {F: F, I: I, B: I}
    halves = [
        (kind, stage, (runs, layers[stage], again[stage], head * (stage == len(layers) - 1)))
        for stage, (kind, runs) in product(range(len(layers)), kinds.items())
    ]
    lasts = {half: sum(length for *_, length in pieces.of(*half)) for *_, half in halves}
    found = {}
    for (kind, stage, one), (beside, at, other) in combinations_with_replacement(halves, 2):
        hidden = (lasts[one] + lasts[other] - pieces.at_best(one, other)) / 1e3
        found[f"{stage}{kind}", f"{at}{beside}"] = (
            costs.of(kind, stage) + costs.of(beside, at) - hidden
        )
    return found


def sends_of(rows: Schedule) -> Counter[tuple[int, int]]:
    """How many messages go from rank to rank in a step: for every two ranks that the placement
    makes neighbours.
    """
    found: Counter[tuple[int, int]] = Counter()
    if rows.copies == 1:
        ways = [(pair, rows.num_microbatches) for pair in pairwise(rows.placement)]
    else:
        home = rows.home()
        ways = [((rank, home.get((stage + 1, m), rank)), 1) for (stage, m), rank in home.items()]
    for (rank, target), times in ways:
        if target != rank:
            found[rank, target] += times
            found[target, rank] += times
    return found


def _crosses(layout: Layout, pair: tuple[int, int], ranks_per_node: int) -> bool:
    """Whether in some replica these two of a pipeline's ranks are on different nodes."""
    return any(
        len({group[at] // ranks_per_node for at in pair}) > 1 for group in layout.groups("pp")
    )


def ring_times(n: int) -> float:
    """How often a rank sends a sum's size around a ring of n."""
    return 2 * (n - 1) / n


def all_reduce(n: int, size: float, link: Link) -> float:
    """How long a sum over n ranks takes, in a ring."""
    return ring_all_reduce_time(n, size, link.latency, link.bandwidth)
