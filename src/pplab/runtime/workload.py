"""What a pipeline trains: stages of a model, batches and a loss. The runtime asks for no more than
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

from ..errors import positive_int, shown

Tensors = tuple[Tensor, ...]  # what crosses between stages; each (samples of a microbatch, ...)
Places = Sequence[tuple[int, str]]  # of a tied weight: stages, and its name there


@dataclass(frozen=True)
class Batch:
    """What the ranks see of a batch. Every tensor's first dimension is the batch's.

    `inputs` go to the first stage, `context` (an attention mask, say) to every stage as keywords,
    `target` to the loss.
    """

    inputs: Tensors
    target: Tensor
    context: Mapping[str, Tensor] = field(default_factory=dict)

    def microbatches(self, num_microbatches: int) -> list[Batch]:
        """Cut the batch into equal microbatches, as a subclass needn't do; ValueError when it
        doesn't divide.
        """
        samples = len(self.target)
        check_divides(samples, num_microbatches)
        size = samples // num_microbatches
        return [self.each(itemgetter(slice(i, i + size))) for i in range(0, samples, size)]

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`."""
        return self.each(lambda x: x.to(device))

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with every tensor changed."""
        inputs = tuple(change(x) for x in self.inputs)
        context = {name: change(x) for name, x in self.context.items()}
        return replace(self, inputs=inputs, target=change(self.target), context=context)

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in one order for all ranks."""
        return [*self.inputs, self.target, *(x for _, x in sorted(self.context.items()))]

    def digest(self) -> int:
        """A number that tells batches apart, by all bits of the elements: some thousand of a large
        tensor.
        """
        found = 0
        for x in self.tensors:
            some = x.detach().reshape(-1)[:: x.numel() // 4096 | 1].cpu().contiguous()
            found = crc32(f"{x.dtype} {x.shape}".encode(), found)
            found = crc32(some.view(torch.uint8).numpy(), found)
        return found


class EndOfBatches(ValueError):
    """What `Workload.batch` raises for a step that has no batch: the run ends before it, on all
    ranks.
    """


class Workload(ABC):
    """A model, its data and its loss, described so that every rank can make its own part: what you
    inherit from.

    All ranks see the same batches, and a parameter has the same value and name whatever the number
    of stages. Must be picklable. `build_stage`, `build_whole`, `batch` and `loss` are yours to
    write, with a `name` and a `batch_size`.
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
        """Raise ValueError when the model can't be cut into `num_stages` stages: it has fewer
        layers.
        """
        most = self.num_layers
        if most is not None and num_stages > most:
            raise ValueError(f"{most} layers make at most {most} stages, not {num_stages}")

    @abstractmethod
    def build_stage(self, stage: int, num_stages: int) -> nn.Module:
        """The module of one stage: called with the first stage's inputs or the previous stage's
        outputs.
        """

    @abstractmethod
    def build_whole(self) -> nn.Module:
        """The model in one piece, for comparison with one process."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """The batch of a training step."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss over the samples of `output`; their sum where `reduction` is "sum"."""

    def tied(self, num_stages: int) -> Mapping[str, Places]:
        """Weights that several of `num_stages` stages keep: (stage, name there), by the name in the
        whole.
        """
        return {}

    def weight(self, batch: Batch) -> float:
        """What a microbatch's mean loss counts for among those of its batch: samples; where the
        loss is a mean over tokens, return how many of `batch.target` it takes.
        """
        return len(batch.target)


def check_workload(given: object) -> None:
    """Raise ValueError unless it is a Workload, and nothing else has the name of something that a
    run calls.
    """
    kind = type(given).__name__
    if not isinstance(given, Workload):
        raise ValueError(
            f"{kind} is not a pplab.runtime.Workload, which describes model, data and loss: "
            "inherit that class (pplab.lab.models.Modules makes one of a module)"
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
    """The name in the whole model of every parameter of these stages. ValueError for a tied weight
    that isn't there.
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
    """What the microbatches' losses count for in that of the batch: their weights' shares of a
    mean, all of a sum.
    """
    if workload.reduction == "sum":
        return [1] * len(microbatches)
    weights = [float(workload.weight(each)) for each in microbatches]
    if not (min(weights) >= 0 and 0 < sum(weights) < inf):
        raise ValueError(
            f"weights of microbatches must be at least 0, and not all 0 (no label?), got {weights}"
        )
    return [weight / sum(weights) for weight in weights]


def as_tuple(output: Tensor | Sequence[Tensor]) -> Tensors:
    """A stage's output as a tuple of tensors; TypeError for anything else."""
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
            f"use {', '.join(map(str, fits))} microbatches, or another batch size"
        )
