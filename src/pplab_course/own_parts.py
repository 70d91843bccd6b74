"""Parts of the exercises on a model of one's own: a model with a way around its layers, a loss, and
four models with a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pplab.lab.models import TransformersModel
from pplab.runtime import Batch, as_tuple

from .answers import drawn
from .own_model import ILL
from .verdict import Wrong, readers_code

IGNORED = -100


@dataclass(frozen=True)
class CountsRows(TransformersModel):
    """A model in which every row of the batch counts the same, however many labels it has."""

    @classmethod
    def of(cls, workload: TransformersModel) -> CountsRows:
        """The model, otherwise unchanged."""
        return cls(**{field.name: getattr(workload, field.name) for field in fields(workload)})

    def weight(self, batch: Batch) -> int:
        """The number of its rows."""
        return len(batch.target)


class Drops(nn.Module):
    """Dropout of a fifth. It isn't torch's, which drops other numbers on an Intel processor than
    elsewhere, because what these models look like is recorded.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6) to (B, 6)."""
        return x * (torch.rand_like(x, dtype=torch.float64) < 0.8) / 0.8


class Skip(nn.Module):
    """Four layers and a way around them, because the output of `first` is needed again at the
    end.
    """

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 5)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 5) to (B, 5)."""
        kept = y = self.first(x)
        for layer in self.layers:
            y = layer(y)
        return self.last(y + kept)


def handshakes(stages: Sequence[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    """Run stages from x towards y, and back, in this process, as ranks would, and return the
    output. Raises `Wrong` where one fails.
    """
    given, sent = [(x,)], []
    for number, stage in enumerate(stages):
        with readers_code(f"stage {number} raised"):
            made = as_tuple(stage(*given[-1]))
        sent.append(made)
        given.append(tuple(t.detach().requires_grad_() for t in made))
    if len(sent[-1]) != 1:
        raise Wrong(f"the last stage returned {len(sent[-1])} tensors: expected the model's output")
    backward_from: Sequence[Tensor | None] = ()
    for made, inputs in zip(reversed(sent), reversed(given[:-1]), strict=True):
        if made is sent[-1]:
            nn.functional.mse_loss(made[0], y).backward()
        else:
            pairs = [
                (t, g)
                for t, g in zip(made, backward_from, strict=True)
                if g is not None and t.requires_grad
            ]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        backward_from = [t.grad for t in inputs]
    return sent[-1][0]


def mean_loss(scores: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy of every token's scores (B, T, V) for the next token, where target (B,
    T) isn't -100.
    """
    following = target[:, 1:].flatten()
    total = cross_entropy(
        scores[:, :-1].flatten(0, 1), following, ignore_index=IGNORED, reduction="sum"
    )
    return total / (following != IGNORED).sum().clamp(min=1)


@dataclass(frozen=True)
class Patient:
    """How far a model's gradients are from those of the whole batch, relative to the largest of
    all.
    """

    whole: float  # with M = 1
    cut: float  # with M = 4
    again: float  # between two runs with M = 4
    full: float  # with M = 4 and a batch in which no label is missing
    parameters: int  # that differ with M = 4

    def __str__(self) -> str:
        far = (
            f"{x:9.0e}" if x > 1e-5 else "    equal"
            for x in (self.whole, self.cut, self.again, self.full)
        )
        return f"{'  '.join(far)}{self.parameters:8}"


def all_examined() -> dict[str, Patient]:
    """The models of `ILL`, with the same random numbers at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {letter: _examined(what) for letter, what in ILL.items()}


def _examined(what: str) -> Patient:
    gaps, full = _batch(gaps=True), _batch(gaps=False)
    one = _gradients(what, gaps, 1, healthy=True)
    cut = _gradients(what, gaps, 4)
    return Patient(
        _apart(_gradients(what, gaps, 1), one),
        _apart(cut, one),
        _apart(_gradients(what, gaps, 4), cut),
        _apart(_gradients(what, full, 4), _gradients(what, full, 1, healthy=True)),
        sum(_apart([a], [b]) > 1e-5 for a, b in zip(cut, one, strict=True)),
    )


def _batch(gaps: bool) -> tuple[Tensor, Tensor]:
    """Rows (16, 6) and a label for each, or -100."""
    (x,) = drawn(3, (16, 6))
    target = torch.arange(16) % 6
    return x, target.masked_fill(torch.arange(16) < 5, IGNORED) if gaps else target


def _gradients(
    what: str, batch: tuple[Tensor, Tensor], num_microbatches: int, healthy: bool = False
) -> list[Tensor]:
    """The gradients of a step that is cut into microbatches. With `healthy` they are those of one
    process.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        middle = {ILL["A"]: nn.BatchNorm1d(6), ILL["D"]: Drops()}.get(what, nn.Tanh())
        first, second, last = (
            nn.Linear(6, 6, bias=False),
            nn.Linear(6, 6),
            nn.Linear(6, 6, bias=False),
        )
    tied = what == ILL["B"]
    if tied:
        last.weight = first.weight if healthy else nn.Parameter(first.weight.detach().clone())
    model = nn.Sequential(first, second, middle, last)
    x, target = batch
    for rows, labels in zip(x.chunk(num_microbatches), target.chunk(num_microbatches), strict=True):
        counted = int((labels != IGNORED).sum())
        share = counted / int((target != IGNORED).sum())
        if what == ILL["C"] and not healthy:
            share = 1 / num_microbatches
        if counted:
            (share * cross_entropy(model(rows), labels)).backward()
    return [first.weight.grad, second.weight.grad, second.bias.grad, last.weight.grad]


def _apart(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    scale = max(float(x.abs().max()) for x in b)
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True)) / scale
