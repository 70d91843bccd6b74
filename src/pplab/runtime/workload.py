"""What a pipeline trains: stages of a model, batches and a loss. The runtime asks for no more than this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor, nn

from ..errors import positive_int

Places = Sequence[tuple[int, str]]  # of a tied weight: stages, and its name there


@dataclass(frozen=True)
class Batch:
    """What the ranks see of a batch. Every tensor's first dimension is the batch's.

    `inputs` go to the first stage, `context` (an attention mask, say) to every stage as keywords, `target` to the loss.
    """

    inputs: tuple[Tensor, ...]
    target: Tensor
    context: Mapping[str, Tensor] = field(default_factory=dict)

    def microbatches(self, num_microbatches: int) -> list[Batch]:
        """Cut the batch into equal microbatches; ValueError when it doesn't divide.

        A subclass may cut it in another way: into microbatches of unequal lengths, say, or numbers of samples.
        """
        samples = len(self.target)
        check_divides(samples, num_microbatches)
        size = samples // num_microbatches
        return [self.each(lambda x, i=i: x[i : i + size]) for i in range(0, samples, size)]

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`."""
        return self.each(lambda x: x.to(device))

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with every tensor changed."""
        context = {name: change(x) for name, x in self.context.items()}
        return replace(self, inputs=tuple(map(change, self.inputs)), target=change(self.target), context=context)

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in one order for all ranks."""
        return [*self.inputs, self.target, *(x for _, x in sorted(self.context.items()))]

    @property
    def kind(self) -> str:
        """The shapes, from which those of all that stages make of the batch follow."""
        return " ".join("x".join(map(str, x.shape)) for x in self.tensors)

    def digest(self) -> int:
        """A number that tells batches apart. Of a large tensor it sees some thousand elements, evenly spread."""
        found = 0
        for x in self.tensors:
            some = x.detach().reshape(-1)[:: x.numel() // 4096 | 1].cpu().contiguous()
            found = crc32(some.view(torch.uint8).numpy(), crc32(f"{x.dtype} {x.shape}".encode(), found))
        return found


class Workload(Protocol):
    """A model, its data and its loss, described so that every rank can make its own part. Must be picklable.

    All ranks see the same batches, and a parameter has the same value and name whatever the number of stages.
    """

    name: str
    batch_size: int
    notes: tuple[str, ...]  # what a reader of the results should know: where the data and the weights came from

    def check(self, num_stages: int) -> None:
        """Raise ValueError when the model can't be cut into `num_stages` stages."""

    def build_stage(self, stage: int, num_stages: int) -> nn.Module:
        """The module of one stage: called with the first stage's inputs or the previous stage's outputs."""

    def build_whole(self) -> nn.Module:
        """The model in one piece, for comparison with one process."""

    def batch(self, step: int) -> Batch:
        """The batch of a training step."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss over the samples of `output`; their sum when the workload has `reduction = "sum"`."""


def tied_weights(workload: Workload, num_stages: int) -> Mapping[str, Places]:
    """Weights that several of `num_stages` stages keep: the whole model's name for it, and (stage, its name there)."""
    return workload.tied(num_stages) if hasattr(workload, "tied") else {}


def names_in_whole(workload: Workload, modules: Mapping[int, nn.Module], num_stages: int) -> dict[nn.Parameter, str]:
    """The name in the whole model of every parameter of these stages."""
    tied = tied_weights(workload, num_stages)
    also = {tuple(place): name for name, places in tied.items() for place in places}
    return {
        p: also.get((stage, name), name) for stage, module in modules.items() for name, p in module.named_parameters()
    }


def weight_of(workload: Workload, batch: Batch) -> float:
    """What a microbatch's mean loss counts for among those of its batch: `workload.weight`, or its samples."""
    return workload.weight(batch) if hasattr(workload, "weight") else len(batch.target)


def loss_shares(workload: Workload, microbatches: Sequence[Batch]) -> list[float]:
    """What the microbatches' losses count for in that of the batch: their weights' shares of a mean, all of a sum."""
    if getattr(workload, "reduction", "mean") == "sum":
        return [1] * len(microbatches)
    weights = [float(weight_of(workload, each)) for each in microbatches]
    if not (min(weights) >= 0 and 0 < sum(weights) < inf):
        raise ValueError(f"weights of microbatches must be at least 0, and not all 0 (no label?), got {weights}")
    return [weight / sum(weights) for weight in weights]


def as_tuple(output: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A stage's output as a tuple of tensors; TypeError for anything else."""
    items = (output,) if isinstance(output, Tensor) else tuple(output) if isinstance(output, (tuple, list)) else ()
    if not items or not all(isinstance(x, Tensor) for x in items):
        raise TypeError(f"a stage must return a tensor or a tuple of tensors, got {type(output).__name__}")
    return items


def check_divides(batch_size: int, num_microbatches: int) -> None:
    """Raise ValueError unless the batch can be cut into equal microbatches."""
    if type(batch_size) is not int or batch_size < 1:
        batch_size = positive_int("batch_size", batch_size)
    if num_microbatches < 1 or batch_size % num_microbatches:
        fits = [m for m in range(1, min(batch_size, 10_000) + 1) if batch_size % m == 0]
        raise ValueError(
            f"a batch of {batch_size} doesn't divide into {num_microbatches} equal microbatches: "
            f"use {', '.join(map(str, fits))} microbatches, or another batch size"
        )
