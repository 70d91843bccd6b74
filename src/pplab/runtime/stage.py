"""One stage of the model on its rank, and the handshake at its boundary.

Autograd doesn't cross processes. So a stage detaches what it receives and marks it as a leaf that
wants a gradient; its backward starts from the gradient that the next stage sent, and leaves the
gradient to send back in that leaf.

In mixed precision by bfloat16, float32 crosses in it, both ways, and is float32 again in the leaf,
and where autograd takes up the gradient. By float16 it crosses as it is: small gradients, which
nobody scales here, would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .deferred import Deferred, accumulate
from .listener import Listeners
from .workload import Batch, Tensors, as_tuple


@dataclass
class _Held:
    """What a forward leaves for its backward. The output itself isn't among it: only its place in
    the graph is.
    """

    leaves: Tensors
    counted: object  # what `hold` gave for the leaves
    roots: tuple[GradientEdge, ...]
    differentiable: tuple[bool, ...]  # of the floating-point outputs: a gradient flows into it


@dataclass(eq=False, repr=False)
class Stage:
    """A module as stage `index` of `num_stages`. The last stage also computes the loss, and starts
    its gradient from the microbatch's of `shares`: what its loss counts for in the batch's.

    `split`: whether a backward may come in two halves, I and W. `autocast`: the dtype to compute
    in. Who counts what is kept sets `hold`: what it returns for a tensor lives as long as the
    tensor is kept.
    """

    module: nn.Module
    index: int
    num_stages: int
    loss: Callable[[Tensor, Tensor], Tensor]
    shares: Sequence[float]
    split: bool = False
    autocast: torch.dtype | None = None
    hold: Callable[[Tensor], object] | None = None

    def __post_init__(self) -> None:
        self.is_first, self.is_last = self.index == 0, self.index == self.num_stages - 1
        self.held: dict[int, _Held] = {}
        self.deferred: Any = Deferred(self.module) if self.split or self.autocast else None
        self.due: dict[int, list] = {}  # microbatch -> what its weights' gradients will be made of
        self.losses: dict[int, Tensor] = {}
        self.around = Listeners(())

    def forward(self, microbatch: int, received: Tensors, batch: Batch) -> Tensors:
        """Run the module on a microbatch; returns what the next stage needs, cut from the graph.

        `received` is what the previous stage returned, each tensor (samples, ...), such as (B, T,
        C); the first stage takes the batch's inputs instead. The last stage computes the loss and
        returns nothing.
        """
        received = () if self.is_first else self.recast(received, torch.bfloat16, torch.float32)
        leaves = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in received)
        outputs = self.compute(leaves, batch)
        counted = self.hold and [self.hold(x) for x in leaves]
        self.held[microbatch] = _Held(leaves, counted, *roots_of(outputs))
        cut = [x.detach() for x in outputs]
        if self.is_last:
            (self.losses[microbatch],) = cut
            return ()
        return self.recast(cut, torch.float32, torch.bfloat16)

    def compute(self, leaves: Tensors, batch: Batch) -> Tensors:
        """The module's outputs, or its loss."""
        with autocast(batch.target.device, self.autocast):
            given = batch.inputs if self.is_first else leaves
            outputs = as_tuple(self.module(*given, **batch.context))
            return (self.loss(outputs[0], batch.target),) if self.is_last else outputs

    def backward(self, microbatch: int, gradients: Tensors) -> Tensors:
        """Accumulate the gradients of the weights; returns those of what was received.

        One gradient for every floating-point tensor that crosses, of its shape. `gradients` are
        those of the stage's outputs; the last stage starts from its loss instead.
        """
        held, share = self.held.pop(microbatch), self.shares[microbatch] if self.is_last else 1
        if held.roots and share:  # a loss that counts for nothing may be no number
            if self.is_last:
                gradients = (torch.full_like(self.losses[microbatch], share),)
            flowing = [g for g, flows in zip(gradients, held.differentiable, strict=True) if flows]
            torch.autograd.backward(held.roots, flowing)
        leaves = [x for x in held.leaves if x.requires_grad]
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        return self.recast(found, torch.float32, torch.bfloat16)

    def recast(self, tensors: Sequence[Tensor], old: torch.dtype, new: torch.dtype) -> Tensors:
        """What crosses the boundary, in another dtype where that is one of these."""
        if self.autocast is not torch.bfloat16:
            return tuple(tensors)
        return tuple(x.to(new) if x.dtype is old else x for x in tensors)

    def backward_input(self, microbatch: int, gradients: Tensors) -> Tensors:
        """`backward` without the gradients of Linears' weights, which `backward_weight` adds
        later.
        """
        self.due[microbatch] = self.deferred.pending = []
        self.deferred.hold = self.hold
        try:
            return self.backward(microbatch, gradients)
        finally:
            self.deferred.pending = None

    def backward_weight(self, microbatch: int) -> tuple[()]:
        """Add the weights' gradients that `backward_input` left. Nobody waits for them."""
        accumulate(self.due.pop(microbatch))
        return ()


def roots_of(outputs: Tensors) -> tuple[tuple[GradientEdge, ...], tuple[bool, ...]]:
    """Where gradients enter the graph, and which of the floating-point outputs they are for."""
    roots = tuple(get_gradient_edge(x) for x in outputs if x.requires_grad)
    return roots, tuple(x.requires_grad for x in outputs if x.is_floating_point())


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager:
    """Compute in `dtype` where that is safe, or as the weights are when it is None."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
