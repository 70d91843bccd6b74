"""One process with the whole model: what a run's gradients are compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from ..schedule import plural
from .stage import autocast
from .workload import Workload

if TYPE_CHECKING:
    from .options import Job
    from .rank import RankContext
    from .training import RankReport

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}

Gradients = dict[str, np.ndarray]  # by the parameter's name in the whole model


def train_whole(
    context: RankContext,
    workload: Workload,
    dtype: torch.dtype | None = None,
    model: nn.Module | None = None,
) -> tuple[float, Gradients] | None:
    """Run the model in one piece on rank 0, with the whole batch: loss and gradients. The others
    return at once.
    """
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
    found = {name: p.grad.detach().cpu() for name, p in named if p.grad is not None}
    return {
        name: (g if g.dtype == torch.float64 else g.float()).numpy() for name, g in found.items()
    }


@dataclass(frozen=True)
class GradientReport:
    """Gradients of a run against those of one process, which ran the whole batch through the whole
    model.
    """

    difference: float  # the largest |run - one process| over all elements of all parameters; inf where one is no number
    scale: float  # the largest |one process|
    tolerance: float  # on difference / scale, for the dtype
    worst: str  # the parameter that differs most
    parameters: dict[str, float] = field(repr=False)  # name -> largest difference
    loss_difference: float
    causes: tuple[str, ...] = ()  # of a difference: what was measured that makes one

    @property
    def relative(self) -> float:
        """difference / scale."""
        return self.difference / self.scale if self.scale else self.difference

    @property
    def equal(self) -> bool:
        """Whether every parameter's gradient is that of one process, to the tolerance."""
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        count = (
            f"{plural(len(self.parameters), 'parameter')}, largest difference {self.difference:.1e}"
        )
        if self.equal:
            return f"equal to one process ({count})"
        return "\n  cause: ".join(
            [f"NOT equal to one process ({count}, in {self.worst})", *self.causes]
        )


def count_terms(context: RankContext, workload: Workload) -> int:
    """How many tokens, or samples, a weight's gradient is a sum over."""
    return max(
        (x.shape[:-1] if x.is_floating_point() else x.shape).numel()
        for x in workload.batch(0).tensors
    )


def check_gradients(run: Callable, job: Job, reports: Sequence[RankReport]) -> GradientReport:
    """Compare what all ranks collected with one process: `run(function, *arguments)` calls on rank
    0, at least.
    """
    dtype = job.options.autocast
    whole = run(job.reference or train_whole, job.workload, dtype)
    report = report_gradients(reports, whole, dtype, run(count_terms, job.workload))
    if report.equal:
        return report
    lab = sys.modules.get("pplab.lab")  # which looks for them, once it is imported
    causes = (
        lab.find_causes(run, job, report, reports, whole)
        if lab
        else ("not looked for: import pplab.lab does",)
    )
    return replace(report, causes=causes)


def report_gradients(
    reports: Sequence[RankReport],
    whole: tuple[float, Gradients],
    dtype: torch.dtype | None = None,
    terms: int = 1,
) -> GradientReport:
    """Compare per parameter; of copies, that which differs most counts. ValueError for others than
    the model's.
    """
    loss, one = whole
    found = dict.fromkeys(sorted(name for report in reports for name in report.gradients), 0.0)
    for name, gradient in (item for report in reports for item in report.gradients.items()):
        found[name] = max(found[name], _apart(gradient, one[name]) if name in one else 0.0)
    if found.keys() != one.keys():
        missing, extra = sorted(one.keys() - found.keys()), sorted(found.keys() - one.keys())
        which = f"without a gradient {missing[:5] or 'none'}, unknown {extra[:5] or 'none'}"
        raise ValueError(f"the stages don't have the parameters of the whole model: {which}")
    worst = max(found, key=found.__getitem__)
    scale = max(float(np.abs(g).max()) for g in one.values())
    apart = abs(sum(report.first_loss for report in reports) - loss)
    tolerance = max(
        TOLERANCE[dtype or torch.float32], terms**0.5 * 2**-23
    )  # of that, two orders of sums take 0.4
    return GradientReport(found[worst], scale, tolerance, worst, found, apart)


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.nan_to_num(np.abs(a - b).max(), nan=np.inf, posinf=np.inf))
