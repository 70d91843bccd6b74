"""What the stages of a plan take and hold: a model's layers over stages, as costs and as memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ...costs import Costs, Link
from ...footprint import Memory
from ...schedule import Schedule
from .formulas import ring_all_reduce_time
from .state import State
from .transformer import Transformer

if TYPE_CHECKING:
    from .layout import Layout, Machine


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


def costs_of(
    model: Transformer,
    machine: Machine,
    layout: Layout,
    microbatch: int,
    rows: Schedule,
    layers: Sequence[int],
    again: Sequence[int],
    state: State,
) -> Costs:
    """How long the stages take, and the links of a pipeline's ranks. Frozen weights have no W."""
    boundary, rate = model.boundary_bytes(microbatch), layout.tp * _at(machine.flops_at, layout.tp, machine.flops)
    exchange = 2 * all_reduce(layout.tp, boundary, machine.ring_link(layout.groups("tp")))
    flops = model.layer_flops(microbatch)
    layer = flops / rate + exchange
    plain = layer + flops / rate  # a backward
    factor = _at(machine.backward_at, layout.tp, 0)
    scale = factor * layer / plain if factor else 1
    head = [0] * (len(layers) - 1) + [model.head_flops(microbatch) / rate]
    half = [h * machine.head_backward / 2 for h in head]
    return Costs(
        [n * layer + h for n, h in zip(layers, head, strict=True)],
        [n * layer * scale + h for n, h in zip(layers, half, strict=True)],
        [(n * flops / rate * scale + h) * bool(state.gradients) for n, h in zip(layers, half, strict=True)],
        recompute=[n * layer for n in again],
        message=boundary / layout.tp,
        links={pair: machine.link(_crosses(layout, pair, machine.ranks_per_node)) for pair in sends_of(rows)},
        unit="s",
    )


def memory_of(
    model: Transformer,
    layout: Layout,
    microbatch: int,
    layers: Sequence[int],
    again: Sequence[int],
    bytes_each: float,
) -> Memory:
    """What the stages hold, with `bytes_each` of a parameter.

    Recomputing, a full backward has one layer whole at a time, and W waits for all of them.
    """
    parameters = [bytes_each * n for n in weights_of(model, layout, layers)]
    kept, whole = model.boundary_bytes(microbatch) / layout.tp, model.layer_bytes(microbatch) / layout.tp
    freed = whole - kept  # of a layer, when only its input is kept
    return Memory(
        [n * whole - r * freed for n, r in zip(layers, again, strict=True)],
        weight_input=[n * whole for n in layers],
        recomputed=[min(r, 1) * freed for r in again],
        while_input_gradient=[max(r - 1, 0) * freed for r in again],
        parameters=parameters,
    )


def weights_of(model: Transformer, layout: Layout, layers: Sequence[int]) -> list[float]:
    """How many parameters of each stage a rank has."""
    found = [n * model.layer_parameters / layout.tp for n in layers]
    for end in (0, -1):
        found[end] += model.table_parameters / layout.tp
    return found


def sends_of(rows: Schedule) -> Counter[tuple[int, int]]:
    """How many messages go from rank to rank in a step: for every two ranks that the placement makes neighbours."""
    home = rows.home()
    found: Counter[tuple[int, int]] = Counter()
    for (stage, microbatch), rank in home.items():
        target = home.get((stage + 1, microbatch), rank)
        if target != rank:
            found[rank, target] += 1
            found[target, rank] += 1
    return found


def _at(table: Mapping[int, float], degree: int, otherwise: float) -> float:
    """The value of the largest key up to `degree`."""
    return table[max(given)] if (given := [key for key in table if key <= degree]) else otherwise


def _crosses(layout: Layout, pair: tuple[int, int], ranks_per_node: int) -> bool:
    """Whether in some replica these two of a pipeline's ranks are on different nodes."""
    return any(len({group[at] // ranks_per_node for at in pair}) > 1 for group in layout.groups("pp"))


def all_reduce(n: int, size: float, link: Link) -> float:
    """How long a sum over n ranks takes, in a ring."""
    return ring_all_reduce_time(n, size, link.latency, link.bandwidth)
