"""Which rank does what when tensors, pipeline and replicas are combined, and what that costs on several nodes.

A model of the first order: roofline compute, ring collectives, latency plus size over bandwidth, everything that isn't
the pipeline's sends exposed. It ranks layouts; a measurement decides between near ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ...builders import build
from ...costs import Costs, Link
from ...errors import expect, number, positive_int
from ...footprint import Memory
from ...schedule import Schedule, plural
from ...timeline import Timeline
from ..streams import simulate_sends
from .stage_costs import all_reduce, costs_of, layers_of, memory_of, recomputed_of, sends_of, weights_of
from .state import State
from .transformer import Transformer

if TYPE_CHECKING:
    from .expert_layers import ExpertLayers

AXES = ("tp", "dp", "pp")


@dataclass(frozen=True)
class Layout:
    """`tp * pp * dp` ranks: every layer cut over tp, the stack of layers over pp, the batch over dp.

    `order` says which axis' neighbours get neighbouring ranks, nearest first. Megatron-LM's default is tp-dp-pp.

    >>> Layout(tp=2, pp=2, dp=2).groups("tp")
    ((0, 1), (2, 3), (4, 5), (6, 7))
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    order: str = "tp-dp-pp"

    def __post_init__(self) -> None:
        for axis in AXES:
            positive_int(axis, getattr(self, axis))
        if sorted(str(self.order).split("-")) != sorted(AXES):
            raise ValueError(f'order must name each of tp, dp and pp once, such as "tp-dp-pp", got {self.order!r}')

    @property
    def num_ranks(self) -> int:
        """tp * pp * dp."""
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> dict[str, int]:
        """A rank's number along each axis."""
        found = {}
        for axis in self.order.split("-"):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ in this axis only, group by group: those that communicate for it."""
        if axis not in AXES:
            raise ValueError(f"axis must be tp, dp or pp, got {axis!r}")
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.num_ranks):
            rest = {name: at for name, at in self.place(rank).items() if name != axis}
            found.setdefault(tuple(rest.values()), []).append(rank)
        return tuple(map(tuple, found.values()))

    def crosses(self, axis: str, ranks_per_node: int) -> bool:
        """Whether a group of this axis has ranks on several nodes."""
        return any(len({rank // ranks_per_node for rank in group}) > 1 for group in self.groups(axis))


def dp_degree(num_ranks: int, tp: int, pp: int) -> int:
    """How many replicas `num_ranks` ranks make; ValueError when the layout doesn't divide them.

    >>> dp_degree(64, tp=4, pp=2)
    8
    """
    each = positive_int("tp", tp) * positive_int("pp", pp)
    if positive_int("num_ranks", num_ranks) % each:
        raise ValueError(f"{num_ranks} ranks don't divide into replicas of {tp} x {pp} = {each}: change one of them")
    return num_ranks // each


def layouts(num_ranks: int, order: str = "tp-dp-pp") -> Iterator[Layout]:
    """Every layout of `num_ranks` ranks."""
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    for tp in divisors:
        for pp in divisors:
            if num_ranks % (tp * pp) == 0:
                yield Layout(tp, pp, num_ranks // (tp * pp), order)


@dataclass(frozen=True)
class Machine:
    """Nodes of `ranks_per_node` ranks. Links are in seconds and bytes per second, one way, for every rank its own.

    What follows `memory` refines it, with numbers that somebody measured. `ring`: bytes per second of a ring in a node,
    where only the switch's own sums reach what `inside` says. `ports`: over how many of a node's links `between` a ring
    goes that fills whole nodes. `flops_at`: FLOP/s of a rank by tensor degree, {8: 300e12}; `backward_at`: how many of
    its forwards a layer's backward takes, sums included, by tensor degree, {1: 1.97, 8: 1.55}. A degree that isn't in
    them has the next smaller one's; below the least it has `flops`, and two forwards without a second pair of sums.
    `head_backward`: the same of the head. ValueError for numbers that aren't above 0.
    """

    ranks_per_node: int
    inside: Link
    between: Link
    flops: float  # that a rank really reaches, per second
    memory: float  # bytes of a rank
    ring: float | None = None
    ports: int = 1
    flops_at: Mapping[int, float] = field(default_factory=dict, hash=False)
    backward_at: Mapping[int, float] = field(default_factory=dict, hash=False)
    head_backward: float = 2

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "ports"):
            positive_int(name, getattr(self, name))
        expect(Link, inside=self.inside, between=self.between)
        given = {"flops": self.flops, "memory": self.memory, "head_backward": self.head_backward}
        if self.ring is not None:
            given["ring"] = self.ring
        for name in ("flops_at", "backward_at"):
            table = getattr(self, name)
            expect(Mapping, **{name: table})
            for degree, value in table.items():
                given[f"{name}[{positive_int(f'a tensor degree of {name}', degree)}]"] = value
        for name, value in given.items():
            if not number(name, value):
                raise ValueError(f"{name} must be above 0, got {value!r}")

    def link(self, crosses: bool) -> Link:
        """The slowest link of a group."""
        return self.between if crosses else self.inside

    def ring_link(self, groups: Iterable[Sequence[int]]) -> Link:
        """What a ring through the ranks of each group has for a link: the slowest on its way."""
        nodes = [Counter(rank // self.ranks_per_node for rank in group) for group in groups]
        inside = Link(self.inside.latency, self.ring or self.inside.bandwidth)
        if all(len(ranks) == 1 for ranks in nodes):
            return inside
        filled = all({*ranks.values()} == {self.ranks_per_node} for ranks in nodes)
        if self.ports == 1 or not filled:
            return self.between
        return Link(self.between.latency, min(inside.bandwidth, self.ports * self.between.bandwidth))


@dataclass(frozen=True)
class Plan:
    """What a layout is predicted to take: seconds, and bytes; and what was asked."""

    model: Transformer
    machine: Machine
    layout: Layout
    layers: tuple[int, ...]  # of each stage
    recomputed: tuple[int, ...]  # how many of them run their forward again
    batch: int  # sequences of a step, of all replicas
    microbatch: int  # sequences
    experts: ExpertLayers | None  # in place of every layer's MLP
    shard_optimizer: bool
    timeline: Timeline  # of one replica's pipeline, a rank standing for the tp ranks of its place
    costs: Costs  # of its stages, in seconds
    memory: Memory  # of its stages, in bytes
    state: State  # of a parameter
    sends: str  # who waits for them
    compute_s: float  # of the busiest rank in a step
    tp_s: float  # of that rank in a step, in its tensor collectives
    dp_s: float  # what the gradients' reduction adds to the step
    sent_bytes: dict[str, float]  # per axis, what the busiest rank sends in a step

    @property
    def step_s(self) -> float:
        """The step: the pipeline, and what of the gradients' reduction comes after it."""
        return self.timeline.makespan + self.dp_s

    @cached_property
    def held_bytes(self) -> tuple[float, ...]:
        """What each of the pipeline's ranks holds at its fullest."""
        return self.timeline.schedule.peak_held(self.memory)

    @property
    def memory_bytes(self) -> float:
        """What the fullest rank holds."""
        return max(self.held_bytes)


def plan(
    model: Transformer,
    machine: Machine,
    layout: Layout,
    batch: int,
    microbatch: int = 1,
    *,
    schedule: str | Schedule = "1F1B",
    cut: Sequence[int] | None = None,
    recompute: bool | Sequence[int] = False,
    state: State | None = None,
    shard_optimizer: bool = False,
    sends: str = "nobody waits",
    **options: object,
) -> Plan:
    """Predict a step of `batch` samples, `microbatch` at a time, under a Schedule, or one's name with its `options`.

    `cut` says how many layers each stage has, in the order of stages; left out, all have the same. The first stage has
    the embedding as well, the last one the head. `recompute` says of how many layers the forward runs again: of all,
    or of a number per stage. A layer has four all-reduces over tp, two in each direction; a boundary is sent in tp
    parts (sequence parallelism). A rank reduces its gradients when its row is done; over two copies of the model
    (DualPipe) as over two replicas. With `shard_optimizer` it scatters them and gathers the new weights.
    `sends` says who waits for messages that it sends, as `simulate_sends` takes it.

    Memory is `state` per parameter, `State()` when left out, of which `shard_optimizer` divides the optimizer's by dp
    (ZeRO-1), and `layer_bytes` from forward to backward; of a layer that is recomputed, only its input. Logits aren't
    in it: head and loss go over a sequence in chunks.

    Raises ValueError for a batch, a stack of layers or a width that the layout doesn't divide, for a Schedule of other
    ranks or microbatches, and for what isn't a Transformer, Machine, Layout or State.

    >>> node = Machine(8, inside=Link(5e-6, 400e9), between=Link(15e-6, 50e9), flops=400e12, memory=80e9)
    >>> model = Transformer(num_layers=32, width=4096, sequence=4096, vocabulary=128000)
    >>> found = plan(model, node, Layout(tp=4, pp=2, dp=2), batch=32)
    >>> print(f"{found.step_s:.2f} s, {found.memory_bytes / 1e9:.0f} GB, {found.timeline.bubble_fraction:.1%} bubble")
    1.22 s, 21 GB, 10.6% bubble
    """
    state = State() if state is None else state
    expect(Transformer, model=model)
    expect(Machine, machine=machine)
    expect(Layout, layout=layout)
    expect(State, state=state)
    batch, microbatch = positive_int("batch", batch, 0), positive_int("microbatch", microbatch)
    num_microbatches, rest = divmod(batch, layout.dp * microbatch)
    if rest or not num_microbatches:
        raise ValueError(f"a batch of {batch} doesn't divide into {layout.dp} replicas of microbatches of {microbatch}")
    for name, size in (("width", model.width), ("heads", model.heads if model.heads > 1 else layout.tp)):
        if size % layout.tp:
            raise ValueError(f"{name} {size} doesn't divide into {layout.tp} parts")
    rows = _rows(schedule, layout.pp, num_microbatches, options)
    layers = layers_of(model, rows.num_stages, cut)
    again = recomputed_of(layers, recompute)

    costs = costs_of(model, machine, layout, microbatch, rows, layers, again, state)
    timeline = simulate_sends(rows, costs, sends)

    boundary, sent = model.boundary_bytes(microbatch), sends_of(rows)
    busiest = max(range(layout.pp), key=timeline.busy.__getitem__)
    passes = (stage for (stage, _), rank in rows.home().items() if rank == busiest)
    all_reduces = sum(4 * layers[stage] + 2 * again[stage] for stage in passes)
    tp_s = all_reduces * all_reduce(layout.tp, boundary, machine.ring_link(layout.groups("tp")))

    weights, each = weights_of(model, layout, layers), state.gradients
    if shard_optimizer and layout.dp > 1 and each:
        each = (each + state.weights) / 2  # gradients go around the ring once, and new weights, not twice the gradients
    gradients = [sum(weights[s] for s in rows.stages_of(rank)) * each for rank in range(layout.pp)]
    replicas, axes = layout.dp * rows.copies, ("dp", "pp") if rows.copies > 1 else ("dp",)
    link = machine.ring_link(group for axis in axes for group in layout.groups(axis))
    ends = (timeline.ends[bound - 1] for bound in rows.columns.bounds[1:])
    reduced = max(end + all_reduce(replicas, size, link) for end, size in zip(ends, gradients, strict=True))
    return Plan(
        model,
        machine,
        layout,
        layers,
        again,
        batch,
        microbatch,
        None,
        shard_optimizer,
        timeline,
        costs,
        memory_of(model, layout, microbatch, layers, again, state.bytes(layout.dp if shard_optimizer else 1)),
        state,
        sends,
        timeline.busy[busiest] - tp_s,
        tp_s,
        reduced - timeline.makespan,
        {
            "tp": all_reduces * _ring(layout.tp) * boundary,
            "pp": max(sum(n for (at, _), n in sent.items() if at == rank) for rank in range(layout.pp))
            * (boundary / layout.tp),
            "dp": _ring(replicas) * max(gradients),
        },
    )


def best(plans: list[Plan], memory: float) -> Plan:
    """The fastest of the plans that fit; ValueError when none does."""
    fitting = [each for each in plans if each.memory_bytes <= memory]
    if not fitting:
        least = min(each.memory_bytes for each in plans)
        raise ValueError(f"no layout fits in {memory:.3g} bytes; the smallest needs {least:.3g}: take more ranks")
    return min(fitting, key=lambda each: each.step_s)


def _ring(n: int) -> float:
    """How often a rank sends a sum's size around a ring of n."""
    return 2 * (n - 1) / n


def _rows(schedule: str | Schedule, num_ranks: int, num_microbatches: int, options: Mapping[str, object]) -> Schedule:
    """The schedule of that name, or the one that was given."""
    if not isinstance(schedule, Schedule):
        return build(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    if options:
        raise ValueError(
            f"{', '.join(options)}: options are for a schedule's name, and {schedule.name} is built already"
        )
    given, needed = (schedule.num_ranks, schedule.num_microbatches), (num_ranks, num_microbatches)
    if given != needed:
        has, needs = (f"{plural(P, 'rank')} and {plural(M, 'microbatch')}" for P, M in (given, needed))
        raise ValueError(f"{schedule.name} has {has}, and this needs {needs}: build it for those")
    return schedule
