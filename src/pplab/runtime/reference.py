"""One process with the whole model: what a run's gradients are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from ..schedule import plural
from .stage import autocast
from .workload import Workload

if TYPE_CHECKING:
    from .devices import RankContext
    from .training import RankReport

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}

Gradients = dict[str, np.ndarray]  # by the parameter's name in the whole model


def train_whole(
    context: RankContext, workload: Workload, dtype: torch.dtype | None = None, model: nn.Module | None = None
) -> tuple[float, Gradients] | None:
    """Run the model in one piece on rank 0, with the whole batch: loss and gradients. The others return at once."""
    if context.rank != 0:
        return None
    context.watch("running the model in one process")
    model = workload.build_whole().to(context.device) if model is None else model
    batch = workload.batch(0).to(context.device)
    with autocast(context.device, dtype):
        loss = workload.loss(model(*batch.inputs, **batch.context), batch.target)
    loss.backward()
    return loss.item(), collect_gradients(model.named_parameters())


def collect_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> Gradients:
    """Every parameter's gradient by name, in single precision or better, on the host."""
    found = {}
    for name, parameter in named:
        if parameter.grad is not None:
            gradient = parameter.grad.detach().cpu()
            found[name] = (gradient if gradient.dtype == torch.float64 else gradient.float()).numpy()
    return found


@dataclass(frozen=True)
class GradientReport:
    """Gradients of a run against those of one process, which ran the whole batch through the whole model."""

    difference: float  # the largest |run - one process| over all elements of all parameters
    scale: float  # the largest |one process|
    tolerance: float  # on difference / scale, for the dtype
    worst: str  # the parameter that differs most
    parameters: dict[str, float] = field(repr=False)  # name -> largest difference
    loss_difference: float

    @property
    def relative(self) -> float:
        """difference / scale."""
        return self.difference / self.scale if self.scale else self.difference

    @property
    def equal(self) -> bool:
        """Whether every parameter's gradient is that of one process, to the tolerance."""
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "NOT equal"
        count = plural(len(self.parameters), "parameter")
        return f"{verdict} to one process ({count}, largest difference {self.difference:.1e})"


def compare_gradients(
    run: Gradients, one_process: Gradients, loss_difference: float, dtype: torch.dtype = torch.float32
) -> GradientReport:
    """Compare per parameter; ValueError when the two don't have the same parameters."""
    if run.keys() != one_process.keys():
        missing, extra = sorted(one_process.keys() - run.keys()), sorted(run.keys() - one_process.keys())
        raise ValueError(
            "the stages don't have the parameters of the whole model: "
            f"without a gradient {missing[:5] or 'none'}, unknown {extra[:5] or 'none'}"
        )
    differences = {name: _apart(run[name], one_process[name]) for name in sorted(run)}
    worst = max(differences, key=differences.__getitem__)
    scale = max(float(np.abs(g).max()) for g in one_process.values())
    return GradientReport(differences[worst], scale, TOLERANCE[dtype], worst, differences, loss_difference)


def report_gradients(
    reports: Sequence[RankReport], whole: tuple[float, Gradients], dtype: torch.dtype | None = None
) -> GradientReport:
    """Compare what all ranks collected with one process. Of copies of a parameter, the one that differs most counts."""
    loss, one = whole
    merged: Gradients = {}
    for name, gradient in (item for report in reports for item in report.gradients.items()):
        if name not in merged or (name in one and _apart(gradient, one[name]) > _apart(merged[name], one[name])):
            merged[name] = gradient
    first_loss = sum(report.first_loss for report in reports)
    return compare_gradients(merged, one, abs(first_loss - loss), dtype or torch.float32)


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())
