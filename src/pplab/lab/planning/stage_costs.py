"""What the stages of a plan take and hold: a model's layers over stages, as costs and as memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, pairwise, product
from numbers import Integral
from operator import mul
from typing import Any

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


def layer_times(
    model: Transformer, machine: Machine, layout: Layout, microbatch: int, experts: ExpertLayers | None
) -> LayerTimes:
    """Of a layer cut over tensor and context ranks."""
    rate, boundary, link = machine.rate(layout), model.boundary_bytes(microbatch) / layout.cp, None
    summed = boundary, boundary * copies_of(experts)
    link = machine.ring_link(layout.groups("tp"))
    around = machine.link(layout.crosses("cp", machine.ranks_per_node))
    message = around.latency + keys_and_values(model, layout, microbatch) / around.bandwidth
    beside = model.attention_flops(microbatch) / rate / layout.cp
    return LayerTimes(
        model.layer_flops(microbatch) / rate,
        sum(all_reduce(layout.tp, size, link) for size in summed),
        (layout.cp - 1) * max(message - beside, 0),
        2 * experts.all_to_all_time(model, machine, microbatch, layout) if experts else 0,
    )


def copies_of(experts: ExpertLayers | None) -> int:
    """How many outputs of its MLP, or of experts, a token adds up."""
    return experts.used + (experts.shared > 0) if experts else 1


def keys_and_values(model: Transformer, layout: Layout, microbatch: int) -> float:
    """In bytes: what a rank has of a layer's, and passes on around the ring of context ranks."""
    return 2 * microbatch * model.sequence * model.kv_width * model.bytes_each / (layout.tp * layout.cp)


def costs_of(
    model: Transformer,
    machine: Machine,
    layout: Layout,
    microbatch: int,
    rows: Schedule,
    layers: Sequence[int],
    again: Sequence[int],
    state: State,
    times: LayerTimes,
    experts: ExpertLayers | None,
) -> Costs:
    """How long the stages take, and the links of a pipeline's ranks. Frozen weights have no W."""
    layer = times.computing + times.sums
    plain = layer + times.computing  # a backward
    factor = at_degree(machine.backward_at, layout.tp, 0)
    scale = factor * layer / plain if factor else 1
    forward, inputs = layer + times.ring + times.copies, layer * scale + 2 * times.ring + times.copies
    head = [0] * (len(layers) - 1) + [model.head_flops(microbatch) / machine.rate(layout)]
    half = [h * machine.head_backward / 2 for h in head]
    costs = Costs(
        [n * forward + h for n, h in zip(layers, head, strict=True)],
        [n * inputs + h for n, h in zip(layers, half, strict=True)],
        [(n * times.computing * scale + h) * bool(state.gradients) for n, h in zip(layers, half, strict=True)],
        recompute=[n * forward for n in again],
        message=model.boundary_bytes(microbatch) / layout.cp / layout.tp,
        links={pair: machine.link(_crosses(layout, pair, machine.ranks_per_node)) for pair in sends_of(rows)},
        unit="s",
    )
    if not experts or not rows.columns.overlaps:
        return costs
    pieces = experts.pieces(model, machine, microbatch, layout)
    return replace(costs, overlap=_pairs(costs, pieces, head[-1] * 1e3, layers, again))


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


Alike = tuple[Sequence[Sequence[int]], list[float]]  # groups whose ranks have the same weights; how many, per stage


def memory_of(
    model: Transformer,
    layout: Layout,
    microbatch: int,
    layers: Sequence[int],
    again: Sequence[int],
    state: State,
    shard_optimizer: bool,
    weights: Sequence[Alike],
    experts: ExpertLayers | None,
) -> Memory:
    """What the stages hold.

    Recomputing, a full backward has one layer whole at a time, and W waits for all of them.
    """
    each = [state.bytes(len(groups[0]) if shard_optimizer else 1) for groups, _ in weights]
    more = experts.kept_bytes(model, microbatch) if experts else 0
    parts = layout.tp * layout.cp
    kept, whole = model.boundary_bytes(microbatch) / parts, (model.layer_bytes(microbatch) + more) / parts
    freed = whole - kept  # of a layer, when only its input is kept
    return Memory(
        [n * whole - r * freed for n, r in zip(layers, again, strict=True)],
        weight_input=[n * whole for n in layers],
        recomputed=[min(r, 1) * freed for r in again],
        while_input_gradient=[max(r - 1, 0) * freed for r in again],
        parameters=[sum(map(mul, each, own)) for own in zip(*(found for _, found in weights), strict=True)],
    )


def weights_of(model: Transformer, layout: Layout, layers: Sequence[int], experts: ExpertLayers | None) -> list[Alike]:
    """How many parameters of each stage a rank has, and who has the same: all but experts; with them, its experts."""
    shared = model.layer_parameters - (experts.spread_parameters(model) if experts else 0)
    found = [n * shared / layout.tp for n in layers]
    for end in (0,) if model.tied and len(layers) == 1 else (0, -1):
        found[end] += model.table_parameters / layout.tp
    alike: list[Alike] = [(layout.groups("cp", "dp"), found)]
    if experts:
        own = experts.spread_parameters(model) * experts.mlp_share()
        alike.append((experts.groups(layout)[1], [n * own / layout.tp for n in layers]))
    return alike


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
