"""One process with the whole model: what a run's gradients are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from ..schedule import plural
from .context import RankContext
from .options import Job
from .rank import RankReport
from .stage import autocast
from .workload import Workload

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
    exact = torch.float64
    return {name: (g if g.dtype == exact else g.float()).numpy() for name, g in found.items()}


@dataclass(frozen=True)
class GradientReport:
    """Gradients of a run against those of one process, which ran the whole batch through the whole
    model.
    """

    difference: float  # the largest |run - one process| of all elements; inf where one is no number
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
        count = plural(len(self.parameters), "parameter")
        found = f"{count}, largest difference {self.difference:.1e}"
        if self.equal:
            return f"equal to one process ({found})"
        differs = f"NOT equal to one process ({found}, in {self.worst})"
        return "\n  cause: ".join([differs, *self.causes])


def count_terms(context: RankContext, workload: Workload) -> int:
    """How many tokens, or samples, a weight's gradient is a sum over."""
    return max(
        (x.shape[:-1] if x.is_floating_point() else x.shape).numel()
        for x in workload.batch(0).tensors
    )


def check_gradients(on_rank_0: Callable, job: Job, reports: Sequence[RankReport]) -> GradientReport:
    """Compare what all ranks collected with one process: `on_rank_0(function,
    *arguments)` calls there, at least.
    """
    dtype = job.options.autocast
    whole = on_rank_0(job.reference or train_whole, job.workload, dtype)
    report = report_gradients(reports, whole, dtype, on_rank_0(count_terms, job.workload))
    if report.equal:
        return report
    causes = ("not looked for: pool.train(schedule, workload, lab.Causes()) does",)
    if job.explain:
        causes = job.explain(on_rank_0, job, report, reports, whole)
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
    names = {name for report in reports for name in report.gradients}
    if names != one.keys():
        missing, extra = sorted(one.keys() - names), sorted(names - one.keys())
        raise ValueError(
            "the stages don't have the parameters of the whole model: without a gradient "
            f"{missing[:5] or 'none'}, unknown {extra[:5] or 'none'}. A layer has in its stage the "
            "name that it has in the whole, and tied() returns weights that several stages share"
        )
    found = {}
    for name in sorted(names):
        copies = [report.gradients[name] for report in reports if name in report.gradients]
        found[name] = max(_apart(gradient, one[name]) for gradient in copies)
    worst = max(found, key=found.__getitem__)
    scale = max(float(np.abs(g).max()) for g in one.values())
    apart = abs(sum(report.first_loss for report in reports) - loss)
    by_order = terms**0.5 * 2**-23  # two orders of a sum are 0.4 of it apart
    tolerance = max(TOLERANCE[dtype or torch.float32], by_order)
    return GradientReport(found[worst], scale, tolerance, worst, found, apart)


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.nan_to_num(np.abs(a - b).max(), nan=np.inf, posinf=np.inf))
