"""How the experts of layers are spread over GPUs, and what is sent for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import TYPE_CHECKING

from ...errors import positive_int
from ..experts import Pieces
from .kinds import Part, experts
from .layout import Layout, Machine

if TYPE_CHECKING:
    from .layers import Model
    from .transformer import Transformer


@dataclass(frozen=True)
class ExpertLayers:
    """`count` experts in a layer, of which a token uses `used`, spread over `gpus` GPUs.

    In a Transformer they are in place of every MLP. The experts that a token uses are together as
    wide as the MLP was, rounded down, so its work stays what it was; `shared` of them, beside
    those, every token uses, and every GPU has them. A Model says itself which layers have experts,
    how wide, and which are shared.

    The GPUs are neighbouring context and data ranks of a Layout, each with tokens of its own, and
    each expert is cut over tp. Experts that are `whole` (Megatron-LM's
    `--expert-tensor-parallel-size 1`) aren't cut, and their GPUs are neighbouring tensor, context
    and data ranks. A token's copies go to its experts wherever they are, and come back: each by
    itself, or `once_per_node`, as DeepEP and HybridEP send them, once to every node that has some
    of its experts, and within it to each of those. Routing is balanced: a GPU gets as many copies
    as it sends. Of a Transformer the router isn't counted.

    Raises ValueError unless a token can use that many and the GPUs share the experts evenly.

    >>> from pplab.lab import Transformer
    >>> ExpertLayers(8, gpus=4).all_to_all_bytes(Transformer(1, 4096, 8192)) / 1e6
    100.663296
    """

    count: int = 4
    used: int = 2
    gpus: int = 2
    shared: int = 0
    once_per_node: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        for name in ("count", "used", "gpus"):
            positive_int(name, getattr(self, name))
        positive_int("shared", self.shared, 0)
        if self.used > self.count or self.count % self.gpus:
            raise ValueError(
                "a token uses some of the experts, and each GPU has as many as the next, got "
                f"{self.used} used of "
                f"{self.count} on {self.gpus} GPUs"
            )

    def in_place_of(self, mlp: Part, width: int) -> Part:
        """The experts that a token uses are together what the MLP was; a token's copies are kept at
        them, too.
        """
        said = mlp.said
        wide = positive_int("an expert's width", said["wide"] // (self.used + self.shared))
        of = self.count, self.used, self.shared * wide, said["gated"], said["act"]
        found = experts(width, wide, *of)
        again = {name: replace(part, whole=0) for name, part in found.again.items()}
        return replace(found, whole=0, masks=mlp.masks, again=again)

    def parameters(self, model: Transformer | Model) -> float:
        """Of the whole model, with all experts."""
        return model.long(self).parameters

    def groups(self, layout: Layout) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
        """The ranks that share a layer's experts, and those that have the same ones. ValueError
        where they can't.
        """
        axes = ("tp", "cp", "dp") if self.whole else ("cp", "dp")
        among = layout.groups(*axes)
        if len(among[0]) % self.gpus:
            raise ValueError(
                f"{self.gpus} GPUs that share experts are neighbouring ranks of "
                f"{' x '.join(axes)}, and don't divide these "
                f"{len(among[0])}: change gpus, cp or dp"
                f"{', or let experts be whole' * (not self.whole)}"
            )
        together = [
            group[at : at + self.gpus] for group in among for at in range(0, len(group), self.gpus)
        ]
        return together, [group[at :: self.gpus] for group in among for at in range(self.gpus)]

    def all_to_all_bytes(self, model: Transformer | Model, samples: int = 1) -> float:
        """What a GPU that has all their tokens sends in one: of their copies those whose expert is
        elsewhere, each by itself.
        """
        return model.boundary_bytes(samples) * self.used * (self.gpus - 1) / self.gpus

    def all_to_all_time(
        self,
        model: Transformer | Model,
        machine: Machine,
        samples: int = 1,
        layout: Layout | None = None,
    ) -> float:
        """How long one takes, in seconds: copies within a node and between nodes travel at once,
        each GPU's over its own links, and the GPU with the fewest others in its node is the last. A
        layout that is left out has `gpus` replicas of one GPU.
        """
        if self.gpus == 1:
            return 0.0
        layout = layout or Layout(dp=self.gpus)
        tokens = model.boundary_bytes(samples) / (layout.tp * layout.cp)
        nodes = (
            Counter(rank // machine.ranks_per_node for rank in group)
            for group in self.groups(layout)[0]
        )
        return self.copies_s(
            machine, tokens, *min((min(each.values()), len(each)) for each in nodes)
        )

    def copies_s(self, machine: Machine, tokens: float, here: int, num_nodes: int) -> float:
        """How long the copies of so many bytes of tokens take, where `num_nodes` share the experts
        and one has `here` of the GPUs.
        """
        copies = tokens * self.used
        near, far = copies * (here - 1) / self.gpus, copies * (self.gpus - here) / self.gpus
        if self.once_per_node and far:
            others = self.count - self.count * here // self.gpus  # experts that aren't in one node
            near = copies * (here - 1) / here
            far = (
                tokens
                * (num_nodes - 1)
                * (1 - comb(others, self.used) / comb(self.count, self.used))
            )
        latency = machine.link(far > 0).latency
        return latency + max(near / machine.inside.bandwidth, far / machine.between.bandwidth)

    def pieces(
        self,
        model: Transformer | Model,
        machine: Machine,
        samples: int = 1,
        layout: Layout | None = None,
    ) -> Pieces:
        """What a layer computes and sends, in ms: sums over tensor ranks, and waits for keys and
        values, aside. ValueError where layers differ.
        """
        layout = layout or Layout(dp=self.gpus)
        kind, *others = model.long(self).kinds
        if others:
            raise ValueError(
                "pairs of actions are planned for layers of one kind, got "
                f"{model.long(self).pattern}: take a schedule without pairs, such as "
                "Interleaved1F1B"
            )
        routed, tokens = kind.routed, samples * model.sequence
        experts = 2e3 * routed.used * routed.each * tokens / machine.rate(layout)
        flops, plain = (samples * each(model.sequence) for each in (kind.flops, kind.plain_flops))
        wait = self.all_to_all_time(model, machine, samples, layout) * 1e3
        whole = machine.computing_s(layout, flops, plain) * 1e3
        return Pieces(whole - experts, wait, experts, wait)
