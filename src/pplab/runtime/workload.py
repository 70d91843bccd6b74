"""What a pipeline trains: stages of a model, batches and a loss. The runtime needs nothing beyond
this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import itemgetter
from zlib import crc32

import torch
from torch import Tensor, nn

from ..errors import expect, positive_int, shown

Tensors = tuple[Tensor, ...]  # what crosses between stages; each (samples of a microbatch, ...)
Places = Sequence[tuple[int, str]]  # of a tied weight: stages, and its name there


@dataclass(frozen=True)
class Batch:
    """A batch as the ranks see it. The first dimension of every tensor is that of the batch.

    `inputs` is a tuple of tensors for the first stage, and `target` is the tensor for the loss.
    `context`, for example an attention mask, maps names to tensors that every stage gets as
    keywords.
    """

    inputs: Tensors
    target: Tensor
    context: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        expect(Sequence, inputs=self.inputs)
        expect(Tensor, target=self.target)
        expect(Mapping, context=self.context)

    def microbatches(self, num_microbatches: int) -> list[Batch]:
        """Cut the batch into equal microbatches. A subclass may cut differently. Raises ValueError
        when the batch can't be divided equally.
        """
        samples = len(self.target)
        check_divides(samples, num_microbatches)
        size = samples // num_microbatches
        return [self.each(itemgetter(slice(i, i + size))) for i in range(0, samples, size)]

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`."""
        return self.each(lambda x: x.to(device))

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with `change` applied to every tensor."""
        inputs = tuple(change(x) for x in self.inputs)
        context = {name: change(x) for name, x in self.context.items()}
        return replace(self, inputs=inputs, target=change(self.target), context=context)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in the same order on all ranks."""
        return [*self.inputs, self.target, *(x for _, x in sorted(self.context.items()))]

    def digest(self) -> int:
        """A number that distinguishes batches by all bits of their elements, or of some thousand
        elements of a large tensor.
        """
        found = 0
        for x in self.tensors:
            some = x.detach().reshape(-1)[:: x.numel() // 4096 | 1].cpu().contiguous()
            found = crc32(f"{x.dtype} {x.shape}".encode(), found)
            found = crc32(some.view(torch.uint8).numpy(), found)
        return found


class EndOfBatches(ValueError):
    """Raise this in `Workload.batch` for a step that has no batch. The run then ends before that
    step on all ranks.
    """


class Workload(ABC):
    """A model, its data and its loss, described so that every rank can make its own part. Inherit
    from this class.

    All ranks see the same batches, and a parameter has the same value and name whatever the number
    of stages. A workload must be picklable. You write `build_stage`, `build_whole`, `batch` and
    `loss`, and give it a `name` and a `batch_size`.
    """

    name: str
    batch_size: int
    # What a reader of the results should know: where the data and the weights came from.
    notes: tuple[str, ...] = ()
    num_layers: int | None = None  # None where the model isn't made of layers that can be counted
    reduction: str = "mean"  # what the loss does with its samples, or "sum"
    num_batches: int | None = None  # the steps for which there are some; None where nobody knows
    # Given an overlap's halves, functions without arguments, it returns both results.
    overlap: Callable | None = None

    def check(self, num_stages: int) -> None:
        """Raise ValueError when the model can't be cut into `num_stages` stages, because it has
        fewer layers.
        """
        most = self.num_layers
        if most is not None and num_stages > most:
            raise ValueError(f"{most} layers make at most {most} stages, not {num_stages}")

    @abstractmethod
    def build_stage(self, stage: int, num_stages: int) -> nn.Module:
        """Build the module of one stage. It is called with the first stage's inputs or the outputs
        of the previous stage.
        """

    @abstractmethod
    def build_whole(self) -> nn.Module:
        """Build the model in one piece, to compare a run with one process."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """Return the batch of a training step."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss over the samples of `output`, or their sum if `reduction` is
        "sum".
        """

    def tied(self, num_stages: int) -> Mapping[str, Places]:
        """Return the weights that several of `num_stages` stages keep: for each name in the whole
        model, the (stage, name in that stage) pairs.
        """
        return {}

    def weight(self, batch: Batch) -> float:
        """How much a microbatch's mean loss counts among those of its batch. By default it is the
        number of samples. If the loss is a mean over tokens, return how many of `batch.target` it
        takes.
        """
        return len(batch.target)


def check_workload(given: object) -> None:
    """Raise ValueError unless it is a Workload, and none of its attributes hides a method that a
    run calls.
    """
    kind = type(given).__name__
    if not isinstance(given, Workload):
        raise ValueError(
            f"{kind} is not a pplab.runtime.Workload, which describes model, data and loss: make "
            "one with pplab.lab.models.Modules(model, batches, loss), or inherit that class"
        )
    for name, method in vars(Workload).items():
        if callable(method) and not callable(value := getattr(given, name)):
            raise ValueError(
                f"{kind}.{name} is {shown(value)}, where a run calls a method: rename it"
            )
    if not isinstance(getattr(given, "name", None), str) or given.reduction not in ("mean", "sum"):
        raise ValueError(
            f'{kind} needs a name in words, a batch_size, and a reduction that is "mean" or "sum"'
        )


def names_in_whole(
    workload: Workload, modules: Mapping[int, nn.Module], num_stages: int
) -> dict[nn.Parameter, str]:
    """The name in the whole model of every parameter of these stages. Raises ValueError for a tied
    weight that isn't there.
    """
    own = {(s, name): p for s, module in modules.items() for name, p in module.named_parameters()}
    also = {}
    for name, places in workload.tied(num_stages).items():
        also |= {tuple(place): name for place in places}
    for stage, name in also.keys() - own.keys():
        if stage in modules or stage not in range(num_stages):
            known = shown([each for at, each in own if at == stage])
            raise ValueError(
                f"tied({num_stages}) names {name!r} of stage {stage}, which has the parameters "
                f"{known}"
            )
    return {p: also.get(place, place[1]) for place, p in own.items()}


def loss_shares(workload: Workload, microbatches: Sequence[Batch]) -> list[float]:
    """What share the loss of each microbatch has in the loss of the batch: its part of the weights
    for a mean, and 1 for a sum.
    """
    if workload.reduction == "sum":
        return [1] * len(microbatches)
    weights = [float(workload.weight(each)) for each in microbatches]
    if not (min(weights) >= 0 and 0 < sum(weights) < inf):
        raise ValueError(
            f"weights of microbatches must be at least 0, and not all 0, got {weights}: give the "
            "batch targets that count, or correct the workload's weight()"
        )
    return [weight / sum(weights) for weight in weights]


def as_tuple(output: Tensor | Sequence[Tensor]) -> Tensors:
    """A stage's output as a tuple of tensors. Raises TypeError for anything else."""
    items = (output,) if isinstance(output, Tensor) else output
    if isinstance(items, tuple | list) and items and all(isinstance(x, Tensor) for x in items):
        return tuple(items)
    got = type(output).__name__
    raise TypeError(f"a stage must return a tensor or a tuple of tensors, got {got}")


def check_divides(batch_size: int, num_microbatches: int) -> None:
    """Raise ValueError unless the batch can be cut into equal microbatches."""
    batch_size = positive_int("batch_size", batch_size)
    if num_microbatches < 1 or batch_size % num_microbatches:
        fits = [m for m in range(1, min(batch_size, 10_000) + 1) if batch_size % m == 0]
        raise ValueError(
            f"a batch of {batch_size} doesn't divide into {num_microbatches} equal microbatches: "
            f"use {', '.join(map(str, fits))} microbatches, or change the batch size"
        )
