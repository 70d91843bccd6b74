"""Run the whole model in one process, to compare a run's gradients with it, and to find how much
rounding alone changes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import gcd, inf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..schedule import plural
from .context import RankContext
from .options import Job
from .rank import RankReport
from .stage import autocast, listening, unclaimed_losses, why_unclaimed
from .workload import Batch, Workload, loss_shares

Gradients = dict[str, np.ndarray]  # by the parameter's name in the whole model


class Whole(NamedTuple):
    """What one process finds with the whole batch, and how well it knows that.

    Anything may differ by `tolerance`, a share of itself. `rounding` has two norms for every
    parameter: how much further rounding may move its gradient, and the least that any microbatch
    adds to it. `loss_rounding` is how much further rounding may move the loss. `by_microbatch` and
    `unclaimed` are explained in GradientReport.
    """

    loss: float
    gradients: Gradients
    tolerance: float
    rounding: Mapping[str, tuple[float, float]]
    loss_rounding: float
    by_microbatch: float | None = None
    unclaimed: tuple[str, ...] = ()


def train_whole(
    context: RankContext,
    workload: Workload,
    dtype: torch.dtype | None,
    model: nn.Module,
    batch: Batch | None = None,
    share: float = 1.0,
) -> tuple[float, Gradients]:
    """Run the model in one piece, with the whole batch or with a part that counts for `share`.
    Returns loss and gradients.
    """
    batch = workload.batch(0) if batch is None else batch
    return differentiate(model, losses_of(context, workload, dtype, model, batch), share)


def losses_of(
    context: RankContext,
    workload: Workload,
    dtype: torch.dtype | None,
    model: nn.Module,
    batch: Batch,
) -> list[Tensor]:
    """The loss of a batch, followed by what layers add to it."""
    context.watch("running the model in one process")
    batch = batch.to(context.device)
    with autocast(context.device, dtype), listening() as added:
        loss = workload.loss(model(*batch.inputs, **batch.context), batch.target)
    return [loss, *added]


def differentiate(
    model: nn.Module, losses: Sequence[Tensor], share: float = 1.0, again: bool = False
) -> tuple[float, Gradients]:
    """The sum of the losses, which counts for `share`, and its gradients. With `again`, a further
    backward through this graph will follow.
    """
    model.zero_grad()
    loss = sum(losses[1:], losses[0]) * share
    loss.backward(retain_graph=again)
    return loss.item(), collect_gradients(model.named_parameters())


def train_twice(context: RankContext, job: Job) -> Whole | None:
    """On rank 0, run the model in one process twice. The second time it runs by microbatches, and
    every weight is moved by no more than its rounding error, so the change in gradients is due to
    rounding. The other ranks return at once.

    What layers add to the loss is counted by microbatch both times, as in the run, because a
    balancing loss of the batch isn't the mean of its microbatches' losses.
    """
    if context.rank != 0:
        return None
    workload, dtype = job.workload, job.options.autocast
    model = workload.build_whole().to(context.device)
    losses = partial(losses_of, context, workload, dtype, model)
    batch, apart = workload.batch(0), None
    # Equal rows, which every whole model takes: it knows nothing of slices.
    parts = Batch.microbatches(batch, gcd(job.schedule.num_microbatches, len(batch.target)))
    shares = loss_shares(workload, parts)
    # those that count: of others the loss may be no number
    counted = [(part, share) for part, share in zip(parts, shares, strict=True) if share]
    own, *added = losses(batch)
    unclaimed = unclaimed_losses(model, [own, *added], bool(added))
    loss, gradients = differentiate(model, [own], again=bool(added))
    if any(x.requires_grad for x in added):
        of_batch = differentiate(model, added)[1]
        found = (differentiate(model, losses(part)[1:], share) for part, share in counted)
        loss, also, _ = _summed(found, loss)
        apart = norm([norm(also[name] - g) for name, g in of_batch.items()])
        apart /= norm([norm(g) for g in of_batch.values()]) or 1
        names = [*gradients, *(name for name in also if name not in gradients)]
        gradients = {name: gradients.get(name, 0) + also[name] for name in names}
    with _moved(model, dtype):
        found = (differentiate(model, losses(part), share) for part, share in counted)
        again, total, least = _summed(found)
    terms = max((x.shape[:-1] if x.is_floating_point() else x.shape).numel() for x in batch.tensors)
    eps = torch.finfo(dtype or torch.float32).eps
    # Two orders of a sum are 0.4 of the second one apart.
    tolerance = max(1e-5, terms**0.5 * 2**-23, eps / 2)
    # Rounding takes no more of an element: else what microbatches change would pass for rounding.
    most = max(tolerance, 4 * eps) * max(
        norm(g) / max(g.size, 1) ** 0.5 for g in gradients.values()
    )
    rounding = {
        name: (min(2 * norm(g - total[name]), most * g.size**0.5), least[name])
        for name, g in gradients.items()
    }
    loss_rounding = min(tolerance, 2 * abs(again - loss))
    return Whole(loss, gradients, tolerance, rounding, loss_rounding, apart, unclaimed)


@contextmanager
def _moved(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Every weight moved by no more than it is rounded by, and afterwards as it was, since the
    model may be its owner's.
    """
    draw = torch.Generator().manual_seed(0)
    kept = {p: p.data for p in filter(torch.is_floating_point, model.parameters())}
    for p, data in kept.items():
        half = torch.finfo(dtype or p.dtype).eps / 2
        factors = torch.empty(data.shape).uniform_(1 - half, 1 + half, generator=draw)
        p.data = data * factors.to(data)
    try:
        yield
    finally:
        for p, data in kept.items():
            p.data = data


def _summed(
    found: Iterable[tuple[float, Gradients]], loss: float = 0.0
) -> tuple[float, dict[str, Any], dict[str, float]]:
    """Losses and gradients of microbatches, added up, and the least norm that any adds to each."""
    total: dict = defaultdict(float)
    least: dict = defaultdict(lambda: inf)
    for of_part, gradients in found:
        loss += of_part
        for name, gradient in gradients.items():
            total[name] += gradient
            least[name] = min(norm(gradient) or inf, least[name])
    return loss, total, least


def collect_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> Gradients:
    """The gradient of every parameter by name, in single precision or better, on the host."""
    found = {name: p.grad.detach().to_dense() for name, p in named if p.grad is not None}
    return {
        name: g.to("cpu", torch.promote_types(g.dtype, torch.float32)).numpy()
        for name, g in found.items()
    }


def norm(x: np.ndarray | Sequence[float] | float) -> float:
    """The root of the sum of squares, or inf if an element isn't a number."""
    found = float(np.linalg.norm(np.asarray(x, float)))
    return inf if found != found else found


@dataclass(frozen=True)
class Compared:
    """A gradient of a run against that of one process, or the loss. All four fields are norms."""

    size: float  # of one process's
    difference: float  # between the run's and that
    allowed: float  # as a difference: a share of the size, and twice what rounding did
    least: float  # the least that any microbatch adds

    @property
    def relative(self) -> float:
        """difference / size, or 1 where the gradient should be zero."""
        return self.difference / (self.size or self.difference or 1)

    @property
    def equal(self) -> bool:
        """Whether the difference is allowed."""
        return self.difference <= self.allowed < inf

    @property
    def noticed(self) -> bool:
        """Whether the comparison would notice if the gradient were zero, or times 1.1, or short of
        any microbatch's part.
        """
        off = self.difference  # by which a fault may come nearer, at most
        return min(self.size, 0.1 * self.size - 1.1 * off, self.least - off) > self.allowed


@dataclass(frozen=True)
class GradientReport:
    """Loss and gradients of a run against those of one process that ran the whole batch through the
    whole model.
    """

    loss: Compared
    parameters: dict[str, Compared]  # by the name in the whole model
    tolerance: float  # the share of its size that may always differ
    causes: tuple[str, ...] = ()  # of a difference: what was measured that makes one
    # How far the gradient of what layers add to the loss, taken by microbatch, is from the batch's,
    # as a share of that; None where they add nothing.
    by_microbatch: float | None = None
    unclaimed: tuple[str, ...] = ()  # modules' attributes: losses, it seems, that nobody adds

    @property
    def equal(self) -> bool:
        """Whether the loss and every parameter's gradient equal those of one process, and the loss
        includes what layers keep for it.
        """
        compared = [self.loss, *self.parameters.values()]
        return not self.unclaimed and all(each.equal for each in compared)

    @property
    def worst(self) -> str:
        """The parameter with the largest relative difference among those worth comparing."""
        noise = self.noise
        apart = {
            name: (not each.equal, name not in noise, each.relative)
            for name, each in self.parameters.items()
        }
        return max(apart, key=apart.__getitem__)

    @property
    def relative(self) -> float:
        """How far that parameter is off, as a share of its gradient's norm."""
        return self.parameters[self.worst].relative

    @property
    def loss_difference(self) -> float:
        """How far the loss is from one process's."""
        return self.loss.difference

    @property
    def noticed(self) -> int:
        """In how many parameters each of three planted faults would be noticed."""
        return sum(each.noticed for each in self.parameters.values())

    @property
    def noise(self) -> list[str]:
        """The parameters without a gradient worth comparing, because a third of it may be
        rounding.
        """
        return [name for name, each in self.parameters.items() if each.size <= 3 * each.allowed]

    def __str__(self) -> str:
        apart = f"up to {self.relative:.1e} apart in {self.worst}"
        found = (
            f"equal to one process ({plural(len(self.parameters), 'parameter')}, "
            f"{apart if self.relative else 'none apart'}, the loss {self.loss.relative:.1e})"
        )
        if not self.equal:
            return "\n  cause: ".join([f"NOT {found}", *self.causes])
        found += "\n  a gradient zeroed, times 1.1 or short of a microbatch would be noticed in "
        found += f"{self.noticed} of {len(self.parameters)}"
        if self.noise:
            found += f"\n  without a gradient worth comparing: {len(self.noise)}, "
            found += f"such as {self.noise[0]}"
        if self.by_microbatch is not None:
            found += (
                "\n  the losses that layers add are means over microbatches: their gradient is "
            )
            found += f"{self.by_microbatch:.0%} off the batch's"
        return found

    __repr__ = __str__


def check_gradients(on_rank_0: Callable, job: Job, reports: Sequence[RankReport]) -> GradientReport:
    """Compare what all ranks collected with one process. `on_rank_0(function, *arguments)` calls a
    function at least on rank 0.
    """
    whole = on_rank_0(train_twice, job)
    report = report_gradients(reports, whole)
    if report.equal:
        return report
    causes = ("not looked for: pool.train(schedule, workload, lab.Causes()) does",)
    if report.unclaimed:
        causes = (why_unclaimed(report.unclaimed),)
    elif job.explain:
        causes = job.explain(on_rank_0, job, report, reports, whole)
    return replace(report, causes=causes)


@np.errstate(all="ignore")
def report_gradients(reports: Sequence[RankReport], whole: Whole) -> GradientReport:
    """Compare each parameter. Of several copies, the one that differs most counts. A missing
    gradient counts as zero.
    """
    loss, one, tolerance, rounding, loss_rounding, by_microbatch, unclaimed = whole
    ours, none, found = [report.gradients for report in reports], np.zeros(1), {}
    for name in sorted(set(one).union(*ours)):
        truth = one.get(name, none)
        copies = [each[name] for each in ours if name in each] or [none]
        more, least = rounding.get(name, (0, inf))
        size, apart = norm(truth), max(norm(copy - truth) for copy in copies)
        found[name] = Compared(size, apart, tolerance * size + more, least)
    size, apart = norm(loss), norm(sum(report.first_loss for report in reports) - loss)
    of_loss = Compared(size, apart, tolerance * size + loss_rounding, inf)
    return GradientReport(of_loss, found, tolerance, (), by_microbatch, unclaimed)
