"""A workload from modules that you bring."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from ...runtime import Batch
from ...runtime.workload import as_tuple


class Chain(nn.Module):
    """Modules called one after the other, each with what the one before returned and the batch's context."""

    def __init__(self, modules: Mapping[str, nn.Module]):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *x: Tensor, **context: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the chain."""
        for module in self.children():
            x = as_tuple(module(*x, **context))
        return x[0] if len(x) == 1 else x


class Modules:
    """A workload from modules that you bring: one per stage, with a batch and a loss.

    `reduction` says whether the loss is the mean or the sum over the samples. `overlap(forward, backward)` may run the
    two halves of an overlap at once: it is given functions without arguments, and returns what both return.

    The modules travel to the ranks with their weights. Their classes, and the loss, must be importable there: a class
    or function that a notebook defines is not.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        batch: Batch,
        loss: Callable[[Tensor, Tensor], Tensor],
        reduction: str = "mean",
        overlap: Callable | None = None,
    ):
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum", as the loss does it, got {reduction!r}')
        self.stages, self._batch, self._loss = list(stages), batch, loss
        self.reduction, self.overlap = reduction, overlap
        self.name, self.notes = "modules", ()
        self.batch_size = len(batch.target)

    def check(self, num_stages: int) -> None:
        """Raise ValueError unless there is one module per stage."""
        if num_stages != len(self.stages):
            raise ValueError(f"the schedule has {num_stages} stages, and {len(self.stages)} modules were given")

    def build_stage(self, stage: int, num_stages: int) -> nn.Module:
        """The module of one stage, under its number."""
        return Chain({str(stage): copy.deepcopy(self.stages[stage])})

    def build_whole(self) -> nn.Module:
        """All modules in a row."""
        return Chain({str(i): copy.deepcopy(module) for i, module in enumerate(self.stages)})

    def batch(self, step: int) -> Batch:
        """The same batch every step."""
        return self._batch

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss that was given."""
        return self._loss(output, target)
