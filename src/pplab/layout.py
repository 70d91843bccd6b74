"""Which rank does what when tensors, pipeline and replicas are combined, and what that costs on several nodes.

A model of the first order: roofline compute, ring collectives, latency plus size over bandwidth, everything that isn't
the pipeline's sends exposed. It ranks layouts; a measurement decides between near ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .builders import build
from .costs import Costs, Link
from .errors import positive_int
from .formulas import ring_all_reduce_time
from .simulate import simulate
from .timeline import Timeline

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
        if sorted(self.order.split("-")) != sorted(AXES):
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
    """How many replicas `num_ranks` ranks make; ValueError when the layout doesn't divide them."""
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
class Transformer:
    """Layers of equal size, without embedding and head. Numbers take `bytes_each` on the wire."""

    num_layers: int
    width: int
    sequence: int
    bytes_each: int = 2

    @property
    def layer_parameters(self) -> int:
        """Of a layer: 4 C^2 in attention, 8 C^2 in the MLP."""
        return 12 * self.width**2

    def layer_flops(self, samples: int) -> float:
        """Of a layer's forward: two per weight and token, and attention's products. A backward takes twice as many."""
        tokens = samples * self.sequence
        return 2 * self.layer_parameters * tokens + 4 * tokens * self.sequence * self.width

    def boundary_bytes(self, samples: int) -> int:
        """What crosses between two layers: (samples, sequence, width) numbers."""
        return samples * self.sequence * self.width * self.bytes_each


@dataclass(frozen=True)
class Machine:
    """Nodes of `ranks_per_node` ranks. Links are in seconds and bytes per second, one way, for every rank its own."""

    ranks_per_node: int
    inside: Link
    between: Link
    flops: float  # that a rank really reaches, per second
    memory: float  # bytes of a rank

    def link(self, crosses: bool) -> Link:
        """The slowest link of a group."""
        return self.between if crosses else self.inside


@dataclass(frozen=True)
class Plan:
    """What a layout is predicted to take: seconds, and bytes."""

    layout: Layout
    timeline: Timeline  # of one replica's pipeline, a rank standing for the tp ranks of its stage
    compute_s: float  # of a rank in a step
    tp_s: float  # of a rank in a step, in its tensor collectives
    dp_s: float  # of the gradients' reduction
    sent_bytes: dict[str, float]  # per axis, what the busiest rank sends in a step
    memory_bytes: float  # of the fullest rank

    @property
    def step_s(self) -> float:
        """The step: the pipeline, and the first stage's reduction, which nothing hides."""
        return self.timeline.makespan + self.dp_s


def plan(
    model: Transformer,
    machine: Machine,
    layout: Layout,
    batch: int,
    microbatch: int = 1,
    *,
    schedule: str = "1F1B",
    shard_optimizer: bool = False,
) -> Plan:
    """Predict a step of `batch` samples, `microbatch` at a time.

    A layer has four all-reduces over tp, two in each direction; a boundary is sent in tp parts (sequence parallelism).
    Memory is 16 bytes per parameter (weights and gradients in 2 bytes, 12 for Adam's state, which `shard_optimizer`
    divides by dp: ZeRO-1), and 34 bytes per activation of width (Korthikanti et al. 2022, attention recomputed).
    Raises ValueError for a batch or a stack of layers that the layout doesn't divide.
    """
    num_microbatches, rest = divmod(batch, layout.dp * microbatch)
    if rest or not num_microbatches:
        raise ValueError(f"a batch of {batch} doesn't divide into {layout.dp} replicas of microbatches of {microbatch}")
    per_stage, rest = divmod(model.num_layers, layout.pp)
    if rest:
        raise ValueError(f"{model.num_layers} layers don't divide into {layout.pp} stages")
    if model.width % layout.tp:
        raise ValueError(f"width {model.width} doesn't divide into {layout.tp} parts")
    boundary = model.boundary_bytes(microbatch)
    slowest = {axis: machine.link(layout.crosses(axis, machine.ranks_per_node)) for axis in AXES}
    all_reduce = _all_reduce(layout.tp, boundary, slowest["tp"])
    compute = per_stage * model.layer_flops(microbatch) / layout.tp / machine.flops
    exchange = 2 * per_stage * all_reduce
    half = compute + exchange / 2  # of the backward, which computes twice as much as the forward, and exchanges as much
    costs = Costs(compute + exchange, half, half, message=boundary / layout.tp, links=_links(layout, machine), unit="s")
    timeline = simulate(build(schedule, num_ranks=layout.pp, num_microbatches=num_microbatches), costs)
    weights = per_stage * model.layer_parameters / layout.tp
    gradients = weights * model.bytes_each
    held = 34 * boundary / model.bytes_each * per_stage / layout.tp
    ring = {axis: 2 * (getattr(layout, axis) - 1) / getattr(layout, axis) for axis in ("tp", "dp")}
    sent = {
        "tp": num_microbatches * per_stage * 4 * ring["tp"] * boundary,
        "pp": num_microbatches * min(layout.pp - 1, 2) * boundary / layout.tp,
        "dp": ring["dp"] * gradients,
    }
    return Plan(
        layout,
        timeline,
        3 * num_microbatches * compute,
        2 * num_microbatches * exchange,
        _all_reduce(layout.dp, gradients, slowest["dp"]),
        sent,
        weights * (4 + 12 / (layout.dp if shard_optimizer else 1)) + held * max(timeline.peak_in_flight),
    )


def best(plans: list[Plan], memory: float) -> Plan:
    """The fastest of the plans that fit; ValueError when none does."""
    fitting = [each for each in plans if each.memory_bytes <= memory]
    if not fitting:
        least = min(each.memory_bytes for each in plans)
        raise ValueError(f"no layout fits in {memory:.3g} bytes; the smallest needs {least:.3g}: take more ranks")
    return min(fitting, key=lambda each: each.step_s)


def _all_reduce(n: int, size: float, link: Link) -> float:
    return ring_all_reduce_time(n, size, link.latency, link.bandwidth)


def _links(layout: Layout, machine: Machine) -> dict[tuple[int, int], Link]:
    """The links of one pipeline: between two stages, the slowest that any of their ranks has to use."""
    found = {}
    for low in range(layout.pp - 1):
        pairs = [
            (group[low] // machine.ranks_per_node, group[low + 1] // machine.ranks_per_node)
            for group in layout.groups("pp")
        ]
        found[low, low + 1] = found[low + 1, low] = machine.link(any(a != b for a, b in pairs))
    return found
