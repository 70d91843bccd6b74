"""Run weight gradients later: Linears whose backward computes the input's gradient now and leaves
the weight's for later.

For its weight's gradient, a Linear needs only its input and its output's gradient, so both are kept
until then. Other layers (norms, embeddings, weights used in a different way) can't wait. They get
their gradients together with the input's, and in a transformer this takes next to no time.

In mixed precision autograd's own Linear keeps, with every forward, a copy of its weight in the
lower precision. These Linears keep the weight itself and cast it a second time in the backward. So
a microbatch holds the same amount in both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# What a weight's gradient will be made of: the layer, its inputs, its outputs' gradients, and what
# `hold` gave for both.
Product = tuple[nn.Linear, Tensor, Tensor, object]


class Deferred:
    """The Linears of a module. Their backward leaves in `pending` what their weights' gradients
    need.

    While `pending` is None, the backward computes the weights' gradients at once.
    """

    def __init__(self, module: nn.Module):
        self.pending: list[Product] | None = None
        self.hold: Callable[[Tensor], object] | None = None  # see `Stage`
        self.unsplit: set[str] = set()  # the kinds of the other layers with weights
        for layer in module.modules():
            own = [*layer.parameters(False)]
            hooked = any(p._backward_hooks for p in own)
            if type(layer) is nn.Linear and "weight" in layer._parameters and not hooked:
                # No cycle: weights go when the stage does.
                layer.forward = partial(self._forward, weakref.ref(layer))
            elif any(p.requires_grad for p in own):
                self.unsplit.add(type(layer).__name__)

    def _forward(self, of: Callable[[], nn.Linear], x: Tensor) -> Tensor:
        layer = of()
        if torch.is_autocast_enabled(x.device.type):
            # What the product needs is kept, as by autograd.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return SplitLinear.apply(x, layer.weight, layer.bias, layer, self)

    def keep(self, layer: nn.Linear, inputs: Tensor, gradients: Tensor) -> None:
        """Leave a weight's gradient for later, or compute it now if nothing may be left."""
        if self.pending is None:
            accumulate([(layer, inputs, gradients, None)])
        else:
            counted = self.hold and (self.hold(inputs), self.hold(gradients))
            self.pending.append((layer, inputs, gradients, counted))


class SplitLinear(torch.autograd.Function):
    """A Linear, (..., C_in) to (..., C_out), whose backward computes the input's gradient and
    leaves the weight's for later.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: nn.Linear,
        deferred: Deferred,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.deferred = layer, deferred
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = gradients @ weight.to(gradients.dtype) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            ctx.deferred.keep(ctx.layer, x, gradients)
        return of_x, None, None, None, None


@torch.no_grad()  # or the gradients would keep what they were made of
def accumulate(products: list[Product]) -> None:
    """Add the gradients of the weights, and free what was kept for each as soon as it is used."""
    while products:
        layer, *both, _ = products.pop(0)
        inputs, gradients = (x.reshape(x.shape[:-1].numel(), x.shape[-1]) for x in both)
        weight, bias = layer.weight, layer.bias
        if weight.requires_grad:
            if weight.grad is not None and weight.grad.dtype == inputs.dtype:
                weight.grad.addmm_(gradients.t(), inputs)
            else:
                _add(weight, gradients.t() @ inputs)
        if bias is not None and bias.requires_grad:
            _add(bias, gradients.sum(0))


def _add(p: nn.Parameter, gradient: Tensor) -> None:
    p.grad = gradient.to(p.dtype) if p.grad is None else p.grad.add_(gradient)
