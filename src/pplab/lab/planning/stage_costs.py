"""What the stages of a plan take and hold: a model's layers over stages, as costs and as memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, pairwise, product
from numbers import Integral
from typing import Any, NamedTuple

from ...actions import B, F, I, W
from ...costs import Costs, Link
from ...footprint import Memory
from ...schedule import Schedule
from ..experts import Pieces
from .expert_layers import ExpertLayers
from .formulas import ring_all_reduce_time
from .layout import Layout, Machine, at_degree
from .state import State
from .transformer import Transformer


def layers_of(model: Transformer, num_stages: int, cut: Sequence[int] | None) -> tuple[int, ...]:
    """How many layers each stage has."""
    if cut is None:
        each, rest = divmod(model.num_layers, num_stages)
        if rest:
            raise ValueError(
                f"{model.num_layers} layers don't divide into {num_stages} stages: give cut, the layers of each stage"
            )
        return (each,) * num_stages
    if not _layers(cut, num_stages) or sum(cut) != model.num_layers:
        raise ValueError(
            f"cut must say for each of {num_stages} stages how many of {model.num_layers} layers it has, got {cut!r}"
        )
    return tuple(cut)


def _layers(given: Any, count: int) -> bool:
    """Whether these are so many whole numbers from 0 on."""
    several = isinstance(given, Sequence) and len(given) == count
    return several and all(isinstance(n, Integral) and n >= 0 for n in given)


def recomputed_of(layers: Sequence[int], recompute: bool | Sequence[int]) -> tuple[int, ...]:
    """How many layers of each stage run their forward again."""
    if isinstance(recompute, bool):
        return tuple(n * recompute for n in layers)
    if not _layers(recompute, len(layers)) or any(r > n for r, n in zip(recompute, layers, strict=True)):
        raise ValueError(
            f"recompute must be True, or say how many of each stage's {', '.join(map(str, layers))} layers run their "
            f"forward again, got {recompute!r}"
        )
    return tuple(recompute)


@dataclass(frozen=True)
class LayerTimes:
    """What a layer's forward of a microbatch takes on a rank, in s. In a backward, waits for sums and copies are as
    long again, and those for keys and values twice as long."""

    computing: float
    sums: float  # of activations, over tensor ranks
    ring: float  # what keys and values take longer than the attention beside them
    copies: float  # in both all-to-alls


@dataclass(frozen=True)
class Asked:
    """What a plan was asked for, and from it what stages take and hold."""

    model: Transformer
    machine: Machine
    layout: Layout
    layers: tuple[int, ...]  # of each stage
    recomputed: tuple[int, ...]  # how many of them run their forward again
    batch: int  # sequences of a step, of all replicas
    microbatch: int  # sequences
    experts: ExpertLayers | None  # in place of every layer's MLP
    state: State  # of a parameter
    shard_optimizer: bool
    sends: str  # who waits for them

    @property
    def boundary(self) -> float:
        """What crosses between two layers, in bytes, of all tensor ranks."""
        return self.model.boundary_bytes(self.microbatch) / self.layout.cp

    @property
    def keys_and_values(self) -> float:
        """In bytes: what a rank has of a layer's, and passes on around the ring of context ranks."""
        return self.boundary / self.layout.tp * 2 * self.model.kv_width / self.model.width

    @property
    def summed(self) -> int:
        """How many times a boundary tensor ranks add up in a layer's forward: of every expert's output its own, unless
        experts are whole."""
        if not self.experts:
            return 2
        return 1 + (self.experts.shared > 0) + self.experts.used * (not self.experts.whole)

    @property
    def times(self) -> LayerTimes:
        """Of a layer cut over tensor and context ranks."""
        model, machine, layout, experts = self.model, self.machine, self.layout, self.experts
        rate, link = machine.rate(layout), machine.ring_link(layout.groups("tp"))
        around = machine.link(layout.crosses("cp", machine.ranks_per_node))
        message = around.latency + self.keys_and_values / around.bandwidth
        beside = model.attention_flops(self.microbatch) / rate / layout.cp
        sums = [all_reduce(layout.tp, n * self.boundary, link) for n in (1, self.summed - 1)]
        return LayerTimes(
            model.layer_flops(self.microbatch) / rate,
            sum(sums),
            (layout.cp - 1) * max(message - beside, 0),
            2 * experts.all_to_all_time(model, machine, self.microbatch, layout) if experts else 0,
        )

    def stage_costs(self, rows: Schedule, messages: Iterable[tuple[int, int]]) -> Costs:
        """How long the stages take, and the links of a pipeline's ranks. Frozen weights have no W."""
        model, machine, layout, times = self.model, self.machine, self.layout, self.times
        layer = times.computing + times.sums
        plain = layer + times.computing  # a backward
        factor = at_degree(machine.backward_at, layout.tp, 0)
        scale = factor * layer / plain if factor else 1
        forward, inputs = layer + times.ring + times.copies, layer * scale + 2 * times.ring + times.copies
        weights, learns = times.computing * scale, bool(self.state.gradients)
        head = model.head_flops(self.microbatch) / machine.rate(layout)
        ends = [0] * (len(self.layers) - 1) + [1]
        half = head * machine.head_backward / 2
        costs = Costs(
            [n * forward + end * head for n, end in zip(self.layers, ends, strict=True)],
            [n * inputs + end * half for n, end in zip(self.layers, ends, strict=True)],
            [(n * weights + end * half) * learns for n, end in zip(self.layers, ends, strict=True)],
            recompute=[n * forward for n in self.recomputed],
            message=self.boundary / layout.tp,
            links={pair: machine.link(_crosses(layout, pair, machine.ranks_per_node)) for pair in messages},
            unit="s",
        )
        if not self.experts or not rows.columns.overlaps:
            return costs
        pieces = self.experts.pieces(model, machine, self.microbatch, layout)
        return replace(costs, overlap=_pairs(costs, pieces, head * 1e3, self.layers, self.recomputed))

    def weights(self, copies: int = 1) -> list[Alike]:
        """How many parameters of each stage a rank has, and who has the same: of all but experts, and of its experts.
        A schedule may have several copies of the model on a pipeline."""
        model, layout, experts = self.model, self.layout, self.experts
        spread = experts.spread_parameters(model) if experts else 0
        shared = [n * (model.layer_parameters - spread) / layout.tp for n in self.layers]
        for end in (0,) if model.tied and len(self.layers) == 1 else (0, -1):
            shared[end] += model.table_parameters / layout.tp
        found = [(layout.groups("cp", "dp"), shared)]
        if experts:
            own = spread * experts.mlp_share() / (1 if experts.whole else layout.tp)
            found.append((experts.groups(layout)[1], [n * own for n in self.layers]))
        beside = layout.groups("pp") if copies > 1 else ()
        return [Alike(len(groups[0]), self.machine.ring_link([*groups, *beside]), each) for groups, each in found]

    def stage_memory(self) -> Memory:
        """What the stages hold.

        Recomputing, a full backward has one layer whole at a time, and W waits for all of them.
        """
        model, parts = self.model, self.layout.tp * self.layout.cp
        more = self.experts.kept_bytes(model, self.microbatch) if self.experts else 0
        kept, whole = self.boundary / self.layout.tp, (model.layer_bytes(self.microbatch) + more) / parts
        freed = whole - kept  # of a layer, when only its input is kept
        parameters = [0.0] * len(self.layers)
        for ranks, _, weights in self.weights():
            each = self.state.bytes(ranks if self.shard_optimizer else 1)
            parameters = [held + each * n for held, n in zip(parameters, weights, strict=True)]
        return Memory(
            [n * whole - r * freed for n, r in zip(self.layers, self.recomputed, strict=True)],
            weight_input=[n * whole for n in self.layers],
            recomputed=[min(r, 1) * freed for r in self.recomputed],
            while_input_gradient=[max(r - 1, 0) * freed for r in self.recomputed],
            parameters=parameters,
        )


class Alike(NamedTuple):
    """Parameters that several ranks have alike, of each stage, and the link of a ring through those ranks."""

    ranks: int
    link: Link
    weights: list[float]


def _pairs(
    costs: Costs, pieces: Pieces, head: float, layers: Sequence[int], again: Sequence[int]
) -> dict[tuple[str, str], float]:
    """How long any two actions take at once: both, less what the best order of their pieces hides."""
    kinds = {F: F, I: I, W: W, B: B} if any(costs.backward_weight) else {F: F, I: I, B: I}
    halves = [
        (kind, stage, (runs, layers[stage], again[stage], head * (stage == len(layers) - 1)))
        for stage, (kind, runs) in product(range(len(layers)), kinds.items())
    ]
    lasts = {half: sum(length for *_, length in pieces.of(*half)) for *_, half in halves}
    found = {}
    for (kind, stage, one), (beside, at, other) in combinations_with_replacement(halves, 2):
        hidden = (lasts[one] + lasts[other] - pieces.at_best(one, other)) / 1e3
        found[f"{stage}{kind}", f"{at}{beside}"] = costs.of(kind, stage) + costs.of(beside, at) - hidden
    return found


def sends_of(rows: Schedule) -> Counter[tuple[int, int]]:
    """How many messages go from rank to rank in a step: for every two ranks that the placement makes neighbours."""
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
    return any(len({group[at] // ranks_per_node for at in pair}) > 1 for group in layout.groups("pp"))


def all_reduce(n: int, size: float, link: Link) -> float:
    """How long a sum over n ranks takes, in a ring."""
    return ring_all_reduce_time(n, size, link.latency, link.bandwidth)
