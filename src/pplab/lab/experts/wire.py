"""Send tokens to their experts and back: by all-to-alls between the ranks that share a stage's
experts, or, where a rank has all of them, only by waiting as long as that takes.

A layer with experts has an attribute `wire`, which is None until an extra of a run sets it. To use
the time while tokens are under way, set the `turns` of the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...actions import F
from ...runtime import Rank, naming
from .pieces import COMBINE, DISPATCH

if TYPE_CHECKING:
    from .turns import Turns


@dataclass
class Plan:
    """Where the tokens of one layer go: `given[rank][expert]` counts this rank's, and
    `taken[rank][expert]` counts those of all ranks for the experts that this rank has.
    """

    given: Tensor
    taken: Tensor


class Wire:
    """The way of one rank's tokens. `groups` are two groups of the ranks that share experts, one
    for forwards and one for backwards, because two halves of an overlap may send at once and their
    messages must not mix.
    """

    def __init__(self, rank: Rank):
        self.device, self.crosses = rank.context.device, rank.context.wire
        self.groups: Sequence[dist.ProcessGroup] = ()
        self.turns: Turns | None = None
        self.sent = 0  # copies of tokens that forwards have sent to other ranks

    def dispatch(self, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Plan]:
        """Send out tokens that are sorted by expert, so many for each. Returns those for this
        rank's experts, by rank, then by expert.
        """
        given = counts.view(self.groups[0].size() if self.groups else 1, -1)
        plan = Plan(given, given if not self.groups else torch.empty_like(given))
        return Crossing.apply(tokens, self, DISPATCH, plan), plan

    def combine(self, tokens: Tensor, plan: Plan) -> Tensor:
        """Send what the experts made of them back to where the tokens came from."""
        return Crossing.apply(tokens, self, COMBINE, plan)

    def cross(self, x: Tensor, name: str, plan: Plan, backward: bool, key: object) -> Tensor:
        """Send tokens or their gradients one way. Meanwhile the other half may compute."""
        half = self.turns and self.turns.half(key)
        if half:
            self.turns.give(half, name, backward)
        made, work = self._start(x, name, plan, backward, half)
        on_host = self.crosses.type == "cpu"
        if work and on_host:
            with naming(f"the all-to-all of a {name}"):
                work.wait()
        if half:
            self.turns.take_back(half, name)
        if work and not on_host:
            # lets the compute stream wait, behind what the other half has put there meanwhile
            work.wait()
        return made.to(self.device)

    def _start(
        self, x: Tensor, name: str, plan: Plan, backward: bool, half: Any
    ) -> tuple[Tensor, dist.Work | None]:
        if not self.groups:
            return x.view_as(x), None
        # a forward that runs again, too
        group = self.groups[backward if half is None else half.action.kind is not F]
        with naming(f"the all-to-all of a {name}"):
            if name == DISPATCH and not backward:
                given, taken = plan.given.to(self.crosses), plan.taken.to(self.crosses)
                dist.all_to_all_single(taken, given, group=group)
                plan.taken = taken
                self.sent += int(given.sum() - given[group.rank()].sum())
            splits = [each.sum(1).tolist() for each in (plan.given, plan.taken)]
            if (name == DISPATCH) == backward:
                splits.reverse()
            leaves, comes = splits
            x = x.contiguous().to(self.crosses)
            made = x.new_empty((sum(comes), *x.shape[1:]))
            return made, dist.all_to_all_single(made, x, comes, leaves, group=group, async_op=True)


class Crossing(torch.autograd.Function):
    """Sends tokens (N, C) in the forward and their gradients back in the backward."""

    @staticmethod
    def forward(ctx, x: Tensor, wire: Wire, name: str, plan: Plan) -> Tensor:
        ctx.wire, ctx.name, ctx.plan = wire, name, plan
        ctx.key = wire.turns and wire.turns.key
        return wire.cross(x, name, plan, False, ctx.key)

    @staticmethod
    def backward(ctx, gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.wire.cross(gradients, ctx.name, ctx.plan, True, ctx.key), None, None, None


def wire_of(rank: Rank) -> Wire:
    """The wire of a rank, which all its layers with experts share."""
    layers = layers_of(rank)
    wire = next((layer.wire for layer in layers if layer.wire), None) or Wire(rank)
    for layer in layers:
        layer.wire = wire
    return wire


def layers_of(rank: Rank) -> list[torch.nn.Module]:
    """The layers of a rank's stages whose tokens cross a wire."""
    return [
        layer
        for module in rank.modules.values()
        for layer in module.modules()
        if hasattr(layer, "wire")
    ]
