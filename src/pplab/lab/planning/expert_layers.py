"""A mixture of experts in every layer of a plan: what its all-to-alls add, and what a pair of actions hides of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from operator import add
from typing import TYPE_CHECKING

from ...actions import B, F, I, W
from ...costs import Costs, Link
from ...errors import positive_int
from ..experts import Pieces
from ..streams import simulate_sends
from .stage_costs import all_reduce

if TYPE_CHECKING:
    from ...footprint import Memory
    from ...timeline import Timeline
    from .layout import Machine, Plan
    from .transformer import Transformer


@dataclass(frozen=True)
class ExpertLayers:
    """`count` experts in place of every layer's MLP, of which a token uses `used`, spread over `gpus` GPUs.

    The experts that a token uses are together as wide as the MLP was, so its work stays what it was. The GPUs are one
    rank of `gpus` pipelines side by side, each with sequences of its own; a token's copies go to its experts wherever
    they are, and come back. Routing is balanced: a GPU gets as many copies as it sends. The router isn't counted.

    Raises ValueError unless a token can use that many and the GPUs share the experts evenly.

    >>> from pplab.lab import Transformer
    >>> ExpertLayers(8, gpus=4).all_to_all_bytes(Transformer(1, 4096, 8192)) / 1e6
    100.663296
    """

    count: int = 4
    used: int = 2
    gpus: int = 2

    def __post_init__(self) -> None:
        for name in ("count", "used", "gpus"):
            positive_int(name, getattr(self, name))
        if self.used > self.count or self.count % self.gpus:
            raise ValueError(
                f"a token uses some of the experts, and each GPU has as many as the next, got {self.used} used of "
                f"{self.count} on {self.gpus} GPUs"
            )

    def mlp_share(self) -> float:
        """What a GPU holds of a layer's experts, in MLPs."""
        return self.count / self.used / self.gpus

    def parameters(self, model: Transformer) -> int:
        """Of the whole model, with all experts."""
        return model.parameters + model.num_layers * (self.count - self.used) * self._mlp(model) // self.used

    def all_to_all_bytes(self, model: Transformer, samples: int = 1) -> float:
        """What a GPU sends in one: of its tokens' copies those whose expert is elsewhere."""
        return model.boundary_bytes(samples) * self.used * (self.gpus - 1) / self.gpus

    def all_to_all_time(self, model: Transformer, link: Link, samples: int = 1) -> float:
        """How long one takes, over links of the GPUs' own."""
        return link.latency + self.all_to_all_bytes(model, samples) / link.bandwidth if self.gpus > 1 else 0.0

    def pieces(self, model: Transformer, machine: Machine, samples: int = 1) -> Pieces:
        """What a layer computes and sends, in ms. The router isn't counted."""
        experts = 2e3 * self._mlp(model) * samples * model.sequence / machine.flops
        wait = self.all_to_all_time(model, machine.between, samples) * 1e3
        return Pieces(model.layer_flops(samples) / machine.flops * 1e3 - experts, wait, experts, wait)

    def kept_bytes(self, model: Transformer, samples: int = 1) -> int:
        """What a layer keeps for its backward beside what it keeps with an MLP: a token's copies, at their experts."""
        return model.boundary_bytes(samples) * self.used

    def spread(
        self,
        plan: Plan,
        model: Transformer,
        machine: Machine,
        microbatch: int,
        layers: Sequence[int],
        again: Sequence[int],
    ) -> Plan:
        """The plan of a model without experts, with them: its times, its memory, and the reduction of its gradients.

        Pairs have the best order of their pieces. Messages between stages and all-to-alls don't hinder each other.
        """
        pieces, head = self.pieces(model, machine, microbatch), model.head_flops(microbatch) / machine.flops * 1e3
        costs = self._costs(plan.costs, pieces, head, layers, again)
        timeline = simulate_sends(plan.timeline.schedule, costs, plan.sends)
        mlp = self._mlp(model)
        shared = [n * (model.layer_parameters - mlp) for n in layers]
        for end in (0, -1):
            shared[end] += model.table_parameters
        own = [n * mlp * self.mlp_share() for n in layers]
        return replace(
            plan,
            experts=self,
            timeline=timeline,
            costs=costs,
            memory=self._memory(plan, self.kept_bytes(model, microbatch), layers, again, shared, own),
            dp_s=self._reduced(timeline, shared, own, plan.state.gradients, machine.between) - timeline.makespan,
        )

    def _reduced(
        self, timeline: Timeline, shared: Sequence[float], own: Sequence[float], bytes_each: float, link: Link
    ) -> float:
        """When the last rank has its sums: its experts' over a schedule's copies, all others' over all pipelines."""
        rows, last = timeline.schedule, timeline.makespan
        for rank, bound in enumerate(rows.columns.bounds[1:]):
            end = timeline.ends[bound - 1]
            for replicas, weights in ((self.gpus * rows.copies, shared), (rows.copies, own)):
                size = bytes_each * sum(weights[stage] for stage in rows.stages_of(rank))
                end += all_reduce(replicas, size, link) if replicas > 1 else 0
            last = max(last, end)
        return last

    @staticmethod
    def _memory(
        dense: Plan,
        more: float,
        layers: Sequence[int],
        again: Sequence[int],
        shared: Sequence[float],
        own: Sequence[float],
    ) -> Memory:
        """The memory with what a layer keeps `more`, until its backward or until its forward runs again."""

        def plus(name: str, layers: Iterable[int]) -> list[float]:
            return [held + n * more for held, n in zip(getattr(dense.memory, name), layers, strict=True)]

        return replace(
            dense.memory,
            activation=plus("activation", (n - r for n, r in zip(layers, again, strict=True))),
            weight_input=plus("weight_input", layers),
            recomputed=plus("recomputed", (min(r, 1) for r in again)),
            while_input_gradient=plus("while_input_gradient", (max(r - 1, 0) for r in again)),
            parameters=[dense.state.bytes() * sum(both) for both in zip(shared, own, strict=True)],
        )

    @staticmethod
    def _costs(dense: Costs, pieces: Pieces, head: float, layers: Sequence[int], again: Sequence[int]) -> Costs:
        """The costs with what stages wait in a forward, an input gradient and a forward run again, and with pairs."""

        def plus(name: str, layers: Iterable[int]) -> list[float]:
            waits = (n * (pieces.dispatch + pieces.combine) / 1e3 for n in layers)
            return [*map(add, getattr(dense, name), waits)]

        kinds = {F: F, I: I, W: W, B: B if any(dense.backward_weight) else I}
        halves = [
            (f"{stage}{kind}", (runs, layers[stage], again[stage], head * (stage == len(layers) - 1)))
            for stage, (kind, runs) in product(range(len(layers)), kinds.items())
        ]
        return replace(
            dense,
            forward=plus("forward", layers),
            backward_input=plus("backward_input", layers),
            recompute=plus("recompute", again),
            overlap={
                (a, b): pieces.at_best(one, other) / 1e3
                for (a, one), (b, other) in combinations_with_replacement(halves, 2)
            },
        )

    @staticmethod
    def _mlp(model: Transformer) -> int:
        return model.width * model.mlp_columns
