"""Which rank does what when tensors, context, pipeline and replicas are combined, and the machines
that they run on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ...costs import Link
from ...errors import expect, number, positive_int

AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True)
class Layout:
    """`tp * cp * pp * dp` ranks: every layer cut over tp, each sequence over cp, the stack of
    layers over pp, the batch over dp.

    `order` says which axis' neighbours get neighbouring ranks, nearest first. Megatron-LM's default
    is tp-cp-dp-pp: an order that doesn't name cp has it right after tp.

    >>> Layout(tp=2, pp=2, dp=2).groups("tp")
    ((0, 1), (2, 3), (4, 5), (6, 7))
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    order: str = "tp-dp-pp"
    cp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            positive_int(axis, getattr(self, axis))
        if sorted(self.axes) != sorted(AXES):
            raise ValueError(
                'order must name each of tp, dp and pp once, such as "tp-dp-pp", and may name cp, '
                f"got {self.order!r}"
            )

    @property
    def axes(self) -> list[str]:
        """All four, nearest first."""
        named = str(self.order)
        return (named if "cp" in named else named.replace("tp", "tp-cp")).split("-")

    @property
    def num_ranks(self) -> int:
        """tp * cp * pp * dp."""
        return self.tp * self.cp * self.pp * self.dp

    def place(self, rank: int) -> dict[str, int]:
        """A rank's number along each axis."""
        found = {}
        for axis in self.axes:
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ in this axis only, or in these, group by group: those that
        communicate for it.
        """
        if not {*axes} <= {*AXES}:
            raise ValueError(f"axis must be tp, cp, dp or pp, got {', '.join(map(repr, axes))}")
        return _groups(self, axes)

    def crosses(self, axis: str, ranks_per_node: int) -> bool:
        """Whether a group of this axis has ranks on several nodes."""
        positive_int("ranks_per_node", ranks_per_node)
        return any(len(nodes) > 1 for nodes in _nodes(self.groups(axis), ranks_per_node))


@lru_cache(maxsize=512)
def _groups(layout: Layout, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.num_ranks):
        rest = tuple(at for name, at in layout.place(rank).items() if name not in axes)
        found.setdefault(rest, []).append(rank)
    return tuple(map(tuple, found.values()))


def layouts(num_ranks: int) -> Iterator[Layout]:
    """Every layout of `num_ranks` ranks."""
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    for tp in divisors:
        for pp in divisors:
            if num_ranks % (tp * pp) == 0:
                yield Layout(tp, pp, num_ranks // (tp * pp))


@dataclass(frozen=True)
class Machine:
    """Nodes of `ranks_per_node` ranks. Links are in seconds and bytes per second, one way, for
    every rank its own.

    What follows `memory` refines it, with numbers that somebody measured. `ring`: bytes per second
    of a ring in a node, where only the switch's own sums reach what `inside` says. `ports`: over
    how many of a node's links `between` a ring goes that fills whole nodes. `flops_at`: FLOP/s of a
    rank by tensor degree, {8: 300e12}; `backward_at`: how many of its forwards a layer's backward
    takes, sums included, by tensor degree, {1: 1.97, 8: 1.55}. A degree that isn't in them has the
    next smaller one's; below the least it has `flops`, and two forwards without a second pair of
    sums. `head_backward`: the same of the head. `reserved`: bytes that the allocator, workspaces
    and communicators hold besides what is counted, 1.9 GiB in three published sources.

    One number of FLOP/s stands for three things, unless these tell them apart. `hbm`: bytes per
    second that a GPU's own memory gives to work between products, 0.9 of what its data sheet says.
    `host`: seconds that a framework needs to launch a layer's forward and backward of a microbatch,
    however small: 1.6e-3 for PyTorch alone (results/nvidia-h100-80gb-hbm3.json), 4.5e-3 for
    nanotron, 8.8e-3 for mixtures in Megatron-LM without CUDA graphs (book/published.md), 0 with
    graphs. `host_at`: the same by tensor degree, for stages on several nodes, such as {8: 19.7e-3}
    for nanotron, whose cause isn't known. `ring_over`: bytes per second of an all-reduce by the
    number of nodes that it fills, {2: 362e9}, as nccl-tests prints them, and `gather_over` of an
    all-gather or a reduce-scatter. Each step of such a ring has the latency of `between` as well,
    50e-6 in the Playbook's runs. `overlaps`: whether replicas without a pipeline send beside their
    work, as Megatron-LM and FSDP do and nanotron doesn't. `flops_bf16`: FLOP/s of what Transformer
    Engine leaves in bfloat16 where layers run in FP8: attention's products, scans and the head. A
    machine that has it plans memory in FP8, too. ValueError for numbers that aren't above 0.
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
    reserved: float = 0
    hbm: float | None = None
    host: float = 0
    host_at: Mapping[int, float] = field(default_factory=dict, hash=False)
    ring_over: Mapping[int, float] = field(default_factory=dict, hash=False)
    flops_bf16: float | None = None
    gather_over: Mapping[int, float] = field(default_factory=dict, hash=False)
    overlaps: bool = True

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "ports"):
            positive_int(name, getattr(self, name))
        expect(Link, inside=self.inside, between=self.between)
        given = {"flops": self.flops, "memory": self.memory, "head_backward": self.head_backward}
        given |= {
            name: each
            for name in ("ring", "hbm", "flops_bf16")
            if (each := getattr(self, name)) is not None
        }
        number("host", self.host)
        number("reserved", self.reserved)
        keys = dict.fromkeys(("flops_at", "backward_at", "host_at"), "a tensor degree")
        keys |= dict.fromkeys(("ring_over", "gather_over"), "nodes")
        for name, key in keys.items():
            table = getattr(self, name)
            expect(Mapping, **{name: table})
            for degree, value in table.items():
                given[f"{name}[{positive_int(f'{key} of {name}', degree)}]"] = value
        for name, value in given.items():
            if not number(name, value):
                raise ValueError(f"{name} must be above 0, got {value!r}")

    def rate(self, layout: Layout) -> float:
        """FLOP/s of the tensor and context ranks that compute a layer together."""
        return layout.tp * layout.cp * at_degree(self.flops_at, layout.tp, self.flops)

    def computing_s(self, layout: Layout, flops: float, plain: float) -> float:
        """How long these ranks take for so many FLOPs, of which some are `plain`: of no layer's
        matrix, and not faster in FP8.
        """
        return (flops - plain + self.slower * plain) / self.rate(layout)

    @property
    def slower(self) -> float:
        """How many times as long as a layer's matrices the rest takes for a FLOP: 1 without FP8."""
        return self.flops / self.flops_bf16 if self.flops_bf16 else 1

    def launching(self, layout: Layout) -> float:
        """Seconds that the host needs at least for a layer's forward and backward."""
        over = self.host_at and layout.pp > 1 and layout.crosses("pp", self.ranks_per_node)
        return at_degree(self.host_at if over else {}, layout.tp, self.host)

    def link(self, crosses: bool) -> Link:
        """The slowest link of a group."""
        return self.between if crosses else self.inside

    def ring_link(self, groups: Iterable[Sequence[int]], gathers: bool = False) -> Link:
        """What a ring through the ranks of each group has for a link: the slowest on its way. It
        sums, or only `gathers` or scatters.
        """
        nodes = _nodes(tuple(map(tuple, groups)), self.ranks_per_node)
        inside = Link(self.inside.latency, self.ring or self.inside.bandwidth)
        if all(len(ranks) == 1 for ranks in nodes):
            return inside
        if over := (gathers and self.gather_over) or self.ring_over:
            # a node's ranks in the ring, each with its port
            own = min(min(ranks.values()) for ranks in nodes)
            measured = at_degree(over, max(map(len, nodes)), self.between.bandwidth)
            return Link(self.between.latency, min(measured, own * self.between.bandwidth))
        filled = all({*ranks.values()} == {self.ranks_per_node} for ranks in nodes)
        if self.ports == 1 or not filled:
            return self.between
        return Link(
            self.between.latency, min(inside.bandwidth, self.ports * self.between.bandwidth)
        )


@lru_cache(maxsize=512)
def _nodes(groups: Iterable[Sequence[int]], ranks_per_node: int) -> list[Counter[int]]:
    """How many ranks of each group a node has."""
    return [Counter(rank // ranks_per_node for rank in group) for group in groups]


def at_degree(table: Mapping[int, float], degree: int, otherwise: float) -> float:
    """The value of the largest key up to `degree`."""
    return table[max(given)] if (given := [key for key in table if key <= degree]) else otherwise
