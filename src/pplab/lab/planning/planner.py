"""What a step takes on several nodes when tensors, context, experts, pipeline and replicas are
combined.

A model of the first order: roofline compute, ring collectives, latency plus size over bandwidth,
everything that isn't the pipeline's sends exposed. It ranks layouts; a measurement decides between
near ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from ...actions import B, F
from ...builders import build
from ...costs import Costs
from ...errors import expect, positive_int
from ...footprint import Memory
from ...schedule import Schedule, plural
from ...timeline import Timeline
from ..streams import simulate_sends
from .expert_layers import ExpertLayers
from .layers import Model
from .layout import Layout, Machine
from .recomputing import Recompute, recomputed_of
from .stage_costs import Asked, all_reduce, layers_of, ring_times, sends_of
from .state import State
from .transformer import Transformer, checked


@dataclass(frozen=True)
class Plan(Asked):
    """What a layout is predicted to take: seconds, and bytes; and what was asked."""

    # of one replica's pipeline, a rank standing for the tp * cp ranks of its place
    timeline: Timeline
    costs: Costs  # of its stages, in seconds
    memory: Memory  # of its stages, in bytes
    compute_s: float  # of the busiest rank in a step
    tp_s: float  # of that rank in a step, in its tensor collectives
    cp_s: float  # of that rank in a step, what it waits for keys and values
    ep_s: float  # of that rank in a step, what it waits for all-to-alls
    dp_s: float  # what the gradients' reduction adds to the step
    sent_bytes: dict[str, float]  # per axis, what the busiest rank sends in a step
    # of `fsdp_plan`: what replicas share, from nothing to all of a parameter's state
    zero: int | None = None

    @cached_property
    def step_s(self) -> float:
        """The step: the pipeline, and what of the gradients' reduction comes after it."""
        return self.timeline.makespan + self.dp_s

    @cached_property
    def held_bytes(self) -> tuple[float, ...]:
        """What each of the pipeline's ranks holds at its fullest: in a pass, or in the optimizer's
        step. The step holds no activations. But Megatron-LM then copies gradients of two bytes to
        float32 (d98e8a64, optimizer.py:1097, distrib_optimizer.py:2792), unless it is given
        `--use-precision-aware-optimizer`, as moments of 8 bits need.
        """
        rows, state = self.timeline.schedule, self.state
        held = rows.peak_held(self.memory)
        if self.zero in (None, 0, 1) and 0 < state.gradients < 4 and state.optimizer >= 8:
            before = replace(self, shard_optimizer=self.shard_optimizer or self.zero == 1)
            copied = replace(before, state=replace(state, optimizer=state.optimizer + 4))
            each = zip(
                self.memory.parameters, copied.state_bytes(), before.state_bytes(), strict=True
            )
            step = Memory(0, parameters=[kept + more - less for kept, more, less in each])
            held = tuple(map(max, held, rows.peak_held(step)))
        return tuple(each + self.machine.reserved for each in held)

    @property
    def memory_bytes(self) -> float:
        """What the fullest rank holds."""
        return max(self.held_bytes)

    @property
    def bound(self) -> str:
        """What the layers of a microbatch take longest for: the `host`, or of a GPU's times
        (`LayerTimes`) the longest: `computing`, `touching` memory, or waiting for `sums`, a `ring`
        or `copies`.
        """
        layers = [self.times[kind.name] for kind in self.long.layers]
        both_ways = {"computing": 3, "sums": 2, "ring": 3, "copies": 2, "touching": 6}
        parts = {
            name: times * sum(getattr(each, name) for each in layers)
            for name, times in both_ways.items()
        }
        return (
            "host"
            if self.machine.launching(self.layout) * len(layers) > sum(parts.values())
            else max(parts, key=parts.__getitem__)
        )

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's memory is enough."""
        return self.memory_bytes <= self.machine.memory


def plan(
    model: Transformer | Model,
    machine: Machine,
    layout: Layout,
    batch: int,
    microbatch: int = 1,
    *,
    schedule: str | Schedule = "1F1B",
    cut: Sequence[int] | None = None,
    recompute: Recompute = False,
    state: State | None = None,
    shard_optimizer: bool = False,
    sends: str = "nobody waits",
    experts: ExpertLayers | None = None,
    **options: object,
) -> Plan:
    """Predict a step of `batch` samples, `microbatch` at a time, under a Schedule, or one's name
    with its `options`.

    `cut` says how many layers each stage has, in the order of stages. Left out, all have the same
    number, and those of a Model the same work. The first stage has the embedding as well, the last
    one the head, and predictors. `recompute` says how many layers run their forward again: all, or
    a number per stage, which are its first ones. A dense layer has four all-reduces over tp, two in
    each direction; a boundary is sent in tp parts (sequence parallelism). A rank reduces its
    gradients when its row is done; over two copies of the model (DualPipe) as over two replicas.
    With `shard_optimizer` it scatters them and gathers the new weights. `sends` says who waits for
    messages that it sends, as `simulate_sends` takes it.

    Of each sequence, a rank computes one of cp parts, with as many pairs of tokens as any other.
    Keys and values go around the ring of context ranks in every forward, and with their gradients
    in every backward, beside attention's products; what takes longer than those is waited for.
    Gradients are reduced over cp as over dp.

    With `experts` every layer of a Transformer has them for its MLP; of a Model they say how its
    own are spread, which left out are on every GPU. Neighbouring ranks, `experts.gpus` of them,
    share one set. Their all-to-alls are waited for, except in pairs of actions, which have the best
    order of their pieces; all-to-alls and messages between stages don't hinder each other. Under tp
    every expert is cut, too, and a token's copies are summed one by one, unless experts are
    `whole`. Gradients of experts are reduced over the ranks that have the same ones.

    Memory is `state` per parameter, `State()` when left out, of which `shard_optimizer` divides the
    optimizer's among the ranks that reduce its gradient (ZeRO-1), and what a layer keeps from
    forward to backward; of a layer that is recomputed, only its input, and without what modules
    compute again; a module that no layer has does nothing. In FP8 it keeps a byte of each number
    that a matrix reads, which without `reserved` is within 11 % of seven published peaks. Logits
    are in it if `state` has bytes for them; else head and loss go over a sequence in chunks. Every
    rank also holds what the machine has `reserved`.

    Raises ValueError for a batch, a stack of layers, a width or a sequence that the layout doesn't
    divide, for a Schedule of other ranks or microbatches, for pairs of layers that differ, and for
    what isn't a Transformer or Model, Machine, Layout, State or ExpertLayers.

    >>> from pplab import Link
    >>> inside, between = Link(5e-6, 400e9), Link(15e-6, 50e9)
    >>> node = Machine(8, inside=inside, between=between, flops=400e12, memory=80e9)
    >>> model = Transformer(num_layers=32, width=4096, sequence=4096, vocabulary=128000)
    >>> found = plan(model, node, Layout(tp=4, pp=2, dp=2), batch=32)
    >>> print(f"{found.step_s:.2f} s, {found.memory_bytes / 1e9:.0f} GB")
    1.22 s, 21 GB
    >>> print(f"{found.timeline.bubble_fraction:.1%} bubble")
    10.6% bubble
    """
    experts, state = checked(model, experts, state)
    expect(Machine, machine=machine)
    expect(Layout, layout=layout)
    rows = _rows(schedule, layout.pp, _microbatches(model, layout, batch, microbatch), options)
    layers = layers_of(model, rows.num_stages, cut)
    again, modules = recomputed_of(model.long(experts), layers, recompute)
    asked = Asked(
        model,
        machine,
        layout,
        layers,
        again,
        modules,
        batch,
        microbatch,
        experts,
        state,
        bool(shard_optimizer),
        sends,
    )
    messages = sends_of(rows)
    each_sends = [
        sum(n for (at, _), n in messages.items() if at == rank) for rank in range(layout.pp)
    ]
    costs = asked.stage_costs(rows, messages)
    timeline = simulate_sends(rows, costs, sends)
    busiest = max(range(layout.pp), key=timeline.busy.__getitem__)
    passes = _forwards(rows, busiest)
    # pairs take less
    alone = sum(n * (costs.of(F, stage) + costs.of(B, stage)) for stage, n in passes.items())
    tp_s, cp_s, ep_s = _waits(asked, passes)
    reduced = _reduced(asked, rows)
    last = (timeline.ends[bound - 1] for bound in rows.columns.bounds[1:])
    return Plan(
        **{each.name: getattr(asked, each.name) for each in fields(asked)},
        timeline=timeline,
        costs=costs,
        memory=asked.stage_memory(),
        compute_s=alone - tp_s - cp_s - ep_s,
        tp_s=tp_s,
        cp_s=cp_s,
        ep_s=ep_s and ep_s + timeline.busy[busiest] - alone,
        dp_s=max(end + took for end, (took, _) in zip(last, reduced, strict=True))
        - timeline.makespan,
        sent_bytes={
            **asked.sent(passes),
            "pp": max(each_sends) * (asked.boundary / layout.tp),
            "dp": max(sent for _, sent in reduced),
        },
    )


def _forwards(rows: Schedule, rank: int) -> Counter[int]:
    """How many forwards of each of its stages a rank runs."""
    stages, kinds = (
        rows.columns.of_rank(rank, each) for each in (rows.columns.stages, rows.columns.kinds)
    )
    return Counter(stage for stage, kind in zip(stages, kinds, strict=True) if kind is F)


def _waits(asked: Asked, passes: Mapping[int, int]) -> Iterator[float]:
    """How long a rank is in sums over tensor ranks, and waits for keys and values, and for copies
    of tokens, in these passes.
    """
    for what, times in (("sums", 2), ("ring", 3), ("copies", 2)):
        yield asked.in_passes(
            passes, lambda kind, what=what: getattr(asked.times[kind.name], what), times
        )


def _reduced(asked: Asked, rows: Schedule) -> list[tuple[float, float]]:
    """How long each rank reduces the gradients of its stages, and how many bytes it sends for
    that.
    """
    found, weights = [], asked.weights(rows.copies, asked.shard_optimizer)
    for rank in range(rows.num_ranks):
        sums = [
            (
                n * rows.copies,
                asked.state.reduced(n if asked.shard_optimizer else 1)
                * sum(own[stage] for stage in rows.stages_of(rank)),
                link,
            )
            for n, link, own in weights
        ]
        took = sum(all_reduce(*each) for each in sums)
        found.append((took, sum(ring_times(n) * size for n, size, _ in sums)))
    return found


def _microbatches(model: Transformer | Model, layout: Layout, batch: int, microbatch: int) -> int:
    """How many a replica has. ValueError for what the layout doesn't divide."""
    batch, microbatch = positive_int("batch", batch, 0), positive_int("microbatch", microbatch)
    found, rest = divmod(batch, layout.dp * microbatch)
    if rest or not found:
        raise ValueError(
            f"a batch of {batch} doesn't divide into {layout.dp} replicas of microbatches of "
            f"{microbatch}"
        )
    for name, size in (
        ("width", model.width),
        ("heads", model.heads if model.heads > 1 else layout.tp),
    ):
        if size % layout.tp:
            raise ValueError(f"{name} {size} doesn't divide into {layout.tp} parts")
    if layout.cp > 1 and model.sequence % (2 * layout.cp):
        raise ValueError(
            f"a sequence of {model.sequence} doesn't divide into two parts for each of {layout.cp} "
            "context ranks"
        )
    return found


def _rows(
    schedule: str | Schedule, num_ranks: int, num_microbatches: int, options: Mapping[str, object]
) -> Schedule:
    """The schedule of that name, or the one that was given."""
    if not isinstance(schedule, Schedule):
        return build(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    if options:
        raise ValueError(
            f"{', '.join(options)}: options are for a schedule's name, and {schedule.name} is "
            "built already"
        )
    given, needed = (schedule.num_ranks, schedule.num_microbatches), (num_ranks, num_microbatches)
    if given != needed:
        has, needs = (
            f"{plural(P, 'rank')} and {plural(M, 'microbatch')}" for P, M in (given, needed)
        )
        raise ValueError(f"{schedule.name} has {has}, and this needs {needs}: build it for those")
    return schedule
