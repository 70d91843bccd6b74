"""One stage of the model on its rank, and what happens at its boundary.

Autograd doesn't cross processes. So a stage detaches what it receives and marks it as a leaf that
needs a gradient. The stage's backward starts from the gradient that the next stage sent, and leaves
in that leaf the gradient to send back.

In mixed precision with bfloat16, float32 crosses as bfloat16 in both directions. It is float32
again in the leaf and where autograd takes up the gradient. With float16 it crosses as float32,
because nobody scales small gradients here and they would be lost.

The last stage computes the loss, and any layer of any stage may add to it. A stage's own part of
the loss is one more place from which its backward starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .deferred import Deferred, accumulate
from .listener import Listeners
from .workload import Batch, Tensors, as_tuple

# What layers have added in the forward that runs, and whether it keeps gradients.
_heard: ContextVar[tuple[list[Tensor], bool] | None] = ContextVar("heard", default=None)


def add_loss(loss: Tensor) -> None:
    """Add one number to the loss from inside a layer's forward on any stage, for example a router's
    balancing loss.

    For each microbatch it counts as much as the main loss of that microbatch. So the run takes the
    mean over microbatches (or the sum, if the workload's `reduction` is "sum"). Without pplab, run
    the forward inside `with listening() as added:` and add the numbers yourself. Raises
    RuntimeError if nobody adds it.
    """
    if loss.numel() != 1:
        raise ValueError(f"add_loss takes one number, got shape {tuple(loss.shape)}: take its mean")
    heard, keeps = _heard.get(), torch.is_grad_enabled()
    if heard and keeps >= heard[1]:
        heard[0].append(loss.reshape(()))
    elif heard or (keeps and torch._C._current_graph_task_id() < 0):  # else it is run again
        raise RuntimeError(
            "what a layer gives to add_loss would be lost: give torch's checkpoint "
            "use_reentrant=False"
            if heard
            else "what a layer gives to add_loss would be lost: run the forward inside "
            "`with pplab.runtime.listening() as added:`, and add sum(added) to the loss"
        )


@contextmanager
def listening() -> Iterator[list[Tensor]]:
    """A context that gives the list of what layers inside it add to the loss."""
    added: list[Tensor] = []
    before = _heard.set((added, torch.is_grad_enabled()))
    try:
        yield added
    finally:
        _heard.reset(before)


@dataclass
class _Held:
    """What a forward leaves for its backward. The output itself isn't kept, only its place in the
    graph.
    """

    leaves: Tensors
    counted: object  # what `hold` gave for the leaves
    roots: list[GradientEdge | None]  # of the floating-point outputs, and of its part of the loss


@dataclass(eq=False, repr=False)
class Stage:
    """A module as stage `index` of `num_stages`. The last stage also computes the loss. The
    gradient of the loss, and of what layers add to it, starts from the microbatch's entry in
    `shares`, which is what its loss counts for in that of the batch.

    With `split`, a backward may come in two halves, I and W. `autocast` is the dtype to compute in.
    `hold` is for counting what is kept: what it returns for a tensor lives as long as the tensor is
    kept.
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
        self.unclaimed: tuple[str, ...] | None = None  # see `unclaimed_losses`
        self.losses: dict[int, Tensor] = {}  # this stage's part, where it has one
        self.around = Listeners(())

    def forward(self, microbatch: int, received: Tensors, batch: Batch) -> Tensors:
        """Run the module on a microbatch, and return what the next stage needs, cut from the graph.

        `received` is what the previous stage returned, where each tensor is (samples, ...), such as
        (B, T, C). The first stage takes the batch's inputs instead. The last stage computes the
        loss and returns nothing.
        """
        received = () if self.is_first else self.recast(received, torch.bfloat16, torch.float32)
        leaves = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in received)
        outputs, losses = self.compute(leaves, batch)
        if self.unclaimed is None:  # in the first pass, which isn't measured
            self.unclaimed = unclaimed_losses(self.module, (*outputs, *losses), True)
        counted = self.hold and [self.hold(x) for x in leaves]
        self.held[microbatch] = _Held(leaves, counted, roots_of((*outputs, *losses)))
        if losses:
            self.losses[microbatch] = losses[0].detach()
        return self.recast([x.detach() for x in outputs], torch.float32, torch.bfloat16)

    def compute(self, leaves: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        """The module's outputs (the last stage has none), and this stage's part of the loss, if it
        has one.
        """
        with autocast(batch.target.device, self.autocast), listening() as losses:
            given = batch.inputs if self.is_first else leaves
            outputs = as_tuple(self.module(*given, **batch.context))
            if self.is_last:
                losses.append(self.loss(outputs[0], batch.target))
                outputs = ()
        return outputs, (sum(losses[1:], losses[0]),) if losses else ()

    def backward(self, microbatch: int, gradients: Tensors) -> Tensors:
        """Accumulate the gradients of the weights, and return those of what was received.

        There is one gradient, of the same shape, for every floating-point tensor that crosses.
        `gradients` are those of the stage's outputs. The last stage has none.
        """
        held, loss = self.held.pop(microbatch), self.losses.get(microbatch)
        if loss is not None and self.shares[microbatch]:  # otherwise it may be no number
            gradients = (*gradients, torch.full_like(loss, self.shares[microbatch]))
        starts = [(root, g) for root, g in zip(held.roots, gradients, strict=False) if root]
        if starts:
            torch.autograd.backward(*zip(*starts, strict=True))
        leaves = [x for x in held.leaves if x.requires_grad]
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        return self.recast(found, torch.float32, torch.bfloat16)

    def recast(self, tensors: Sequence[Tensor], old: torch.dtype, new: torch.dtype) -> Tensors:
        """Cast the tensors that cross the boundary from dtype `old` to `new`, under bfloat16 only.
        Other dtypes stay.
        """
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
        """Add the weights' gradients that `backward_input` left. No other rank waits for them."""
        accumulate(self.due.pop(microbatch))
        return ()


def unclaimed_losses(
    module: nn.Module, roots: Sequence[Tensor], added: bool = False
) -> tuple[str, ...]:
    """After a forward, the attributes of modules that are one number with a gradient and from which
    none of `roots` is made. Unless something was `added`, also the configs of transformers that ask
    for routers' logits.
    """
    seen, ahead = set(), [root.grad_fn for root in roots]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [before for before, _ in node.next_functions]
    found = []
    for at, each in module.named_modules():
        for name, x in vars(each).items():
            number = isinstance(x, Tensor) and x.numel() == 1 and x.grad_fn
            asked = not added and getattr(x, "output_router_logits", False)
            if asked or (number and x.grad_fn not in seen):
                found.append(f"{at}.{name}".strip("."))
    return tuple(found)


def why_unclaimed(names: Sequence[str]) -> str:
    """The text about such attributes."""
    return (
        f"nobody adds what layers announce as a loss, in {', '.join(names[:3])}: let their forward "
        "call pplab.runtime.add_loss(x); if it is none, x.detach(), or output_router_logits=False"
    )


def roots_of(outputs: Tensors) -> list[GradientEdge | None]:
    """Where the gradients of floating-point tensors enter the graph, or None for a tensor without a
    gradient.
    """
    floating = [x for x in outputs if x.is_floating_point()]
    return [get_gradient_edge(x) if x.requires_grad else None for x in floating]


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager:
    """Compute in `dtype` where that is safe, or in the weights' dtype when it is None."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
