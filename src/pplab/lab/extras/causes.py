"""Find out why a run's gradients aren't those of one process. This file is opened only then, and
every cause that it names was measured.

If all gradients differ by one factor, it comes first and explains all differences. Otherwise one
process gets the whole model and the whole batch, and looks for what a pipeline can't do in the same
way: random numbers drawn in a different order, modules that look at all samples that they are
given, mean losses that don't count alike, digits lost to rounding, and weights or batches that
every process makes for itself, and differently.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...runtime import (
    Batch,
    Extra,
    GradientReport,
    Job,
    RankContext,
    Workload,
    as_tuple,
    autocast,
    listening,
    loss_shares,
    names_in_whole,
    norm,
)
from .random_numbers import random_state

if TYPE_CHECKING:
    from ...runtime import RankReport, Whole

# What rounding takes of outputs and gradients, relative to the largest.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
NOTHING = "none found: one process shows none of those that lab.Causes looks for"
_LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Causes(Extra):
    """Compare gradients with those of one process, and explain where they differ. Every cause was
    measured.
    """

    name = "causes"

    def check(self, job: Job) -> Job:
        """The job with the comparison switched on."""
        return replace(job, options=replace(job.options, check_gradients=True), explain=find_causes)


def find_causes(
    on_rank_0: Callable,
    job: Job,
    report: GradientReport,
    reports: Sequence[RankReport],
    whole: Whole,
) -> tuple[str, ...]:
    """The causes of different gradients, given what the ranks report and what one process found.
    `on_rank_0` calls a function at least on rank 0.
    """
    if names := _names(reports, whole):
        return (names,)
    if factor := _factor(job, report, reports, whole):
        return (factor,)
    return on_rank_0(_look_for_causes, job, report)


def _names(reports: Sequence[RankReport], whole: Whole) -> str:
    """The cause if the stages' parameters with gradients aren't those of the whole model, otherwise
    "".
    """
    ours = {name: gradient for each in reports for name, gradient in each.gradients.items()}
    missing = sorted(
        name for name, gradient in whole.gradients.items() if name not in ours and gradient.any()
    )
    extra = sorted(
        name for name, gradient in ours.items() if name not in whole.gradients and gradient.any()
    )
    if not missing and not extra:
        return ""
    return (
        "the stages don't have the parameters of the whole model: without a gradient "
        f"{_few(missing) or 'none'}, unknown {_few(extra) or 'none'}. A layer has in its stage the "
        "name that it has in the whole, and tied() returns weights that several stages share"
    )


@np.errstate(all="ignore")
def _factor(job: Job, report: GradientReport, reports: Sequence[RankReport], whole: Whole) -> str:
    """The cause if all gradients are too large or too small by one factor, otherwise ""."""
    M, loss, one, noise = (
        job.schedule.num_microbatches,
        whole.loss,
        whole.gradients,
        3 * report.tolerance,
    )
    pairs = [
        (name, ours, one[name])
        for each in reports
        for name, ours in each.gradients.items()
        if name in one
    ]
    factor = float(sum((a * b).sum() for _, a, b in pairs) / sum((b**2).sum() for *_, b in pairs))
    allowed = {name: 3 * each.allowed for name, each in report.parameters.items()}
    if not (factor > 0 and all(norm(a / factor - b) <= allowed[name] for name, a, b in pairs)):
        return ""
    times, size = (factor, "large") if factor > 1 else (1 / factor, "small")
    by_microbatches = abs(times - M) <= noise * M
    ours = sum(each.first_loss for each in reports)
    if abs(times - 1) <= noise:
        return (
            f"all gradients are right, and the loss is {ours:.6g} for {loss:.6g}: look for a term "
            "without a weight"
        )
    said = f"all gradients are {times:.4g} times too {size}"
    if by_microbatches:
        said = f"all gradients are {M} times too {size}, and {M} is the number of microbatches"
    if abs(ours - loss) <= noise * abs(loss):
        return f"the loss is right, and {said}: look for what scales them"
    losses = f"the loss, {ours:.6g} for {loss:.6g}, and {said}"
    if abs(ours / factor - loss) > noise * abs(loss):
        return f"{said}; the loss is {ours:.6g} for {loss:.6g}: look for what scales them"
    if by_microbatches and job.workload.reduction == "mean" and factor < 1:
        return f'{losses}: they are those of a sum, and the run takes a mean; give reduction="sum"'
    if by_microbatches and job.workload.reduction == "sum" and factor > 1:
        return f'{losses}: they are those of a mean, and the run takes a sum; give reduction="mean"'
    return f"{losses}: look for what scales the loss"


def _look_for_causes(context: RankContext, job: Job, report: GradientReport) -> tuple[str, ...]:
    """On rank 0, what one process finds that makes gradients differ, and () on the others."""
    if context.rank != 0:
        return ()
    context.watch("looking why gradients differ")
    found = []
    try:
        found += filter(None, _causes(context, job, report))
    except Exception as error:  # the run is over, and what it measured is worth more than this
        found.append(f"not known: looking for it ended in {type(error).__name__}: {error}")
    return tuple(found) or (NOTHING,)


def _causes(context: RankContext, job: Job, report: GradientReport) -> Iterator[str]:
    """Look for the causes one after the other, and give "" for each that doesn't apply."""
    workload, num_stages = job.workload, job.schedule.num_stages
    model, batch = workload.build_whole().to(context.device), workload.batch(0).to(context.device)
    anew = [*_another_batch(workload, batch), *_other_weights(workload, model, num_stages)]
    yield from anew
    whole = _Whole(
        workload,
        model,
        batch.microbatches(job.schedule.num_microbatches),
        batch,
        job.options.autocast,
    )
    if strange := [name for name, each in report.parameters.items() if math.isinf(each.difference)]:
        if first := whole.not_finite():
            yield first
            return
        yield (
            f"numbers that aren't finite: the run's gradients of {_few(strange)}; in one process "
            "all are finite"
        )
    if unasked := whole.unasked():
        yield unasked
        return
    yield whole.random()
    if not whole.steady and not whole.draws:
        return
    yield whole.across_samples()
    yield whole.uneven()
    yield whole.rounded()
    if not anew and not strange:  # else the output is another one for that
        yield whole.otherwise(num_stages)


def _another_batch(workload: Workload, batch: Batch) -> Iterator[str]:
    """Whether the batch is different when it is made a second time."""
    again = workload.batch(0).to(batch.target.device)
    if len(batch.tensors) != len(again.tensors) or not all(
        map(_same, batch.tensors, again.tensors)
    ):
        yield (
            "batch(0) isn't the same when it is made again: make it from the step's number alone, "
            "with a seed"
        )


def _other_weights(workload: Workload, model: nn.Module, num_stages: int) -> Iterator[str]:
    """Whether stages built here begin with weights that the whole model doesn't have."""
    own, other = dict(model.named_parameters()), []
    for stage in range(num_stages):
        built = {stage: workload.build_stage(stage, num_stages)}
        for p, name in names_in_whole(workload, built, num_stages).items():
            if name in own and not _same(p.to(own[name].device), own[name]):
                other.append(name)
    if other:
        what = (
            f"{len(other)} of {len(own)} weights, such as {other[0]}, start from other values in "
            "the stages"
        )
        yield f"{what} than in the whole model: seed build_stage and build_whole alike"


@dataclass
class _Whole:
    """The whole model in one process, with the batch. Each question sets the modes of its
    modules.
    """

    workload: Workload
    model: nn.Module
    microbatches: list[Batch]
    batch: Batch
    dtype: torch.dtype | None
    draws: bool = False  # whether its forward draws random numbers
    steady: bool = True  # whether it gives the same output twice

    def run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The output (the first of several), and the loss with what layers add."""
        with autocast(batch.target.device, self.dtype), listening() as added:
            found = self.model(*batch.inputs, **batch.context)
            loss = sum(added, self.workload.loss(found, batch.target))
        found = getattr(found, "logits", found)
        return found if isinstance(found, Tensor) else found[0], loss

    def not_finite(self) -> str:
        """Where the first number appears that isn't finite, forward and then backward."""
        given = {"the batch's inputs": self.batch.inputs, "the batch's target": self.batch.target}
        given |= {f"the weight {name}": p for name, p in self.model.named_parameters()}
        found = [what for what, value in given.items() if not _finite(value)]
        hooks = [
            module.register_forward_hook(
                _look(f"the output of {name} ({type(module).__name__})", found)
            )
            for name, module in self.model.named_modules()
            if name
        ]
        _, loss = self.run(self.batch)
        for hook in hooks:
            hook.remove()
        if not found and not _finite(loss):
            found.append("the loss")
        if not found:
            loss.backward()
            named = [
                (name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None
            ]
            found = [
                f"the gradient of {name}, in the backward"
                for name, g in reversed(named)
                if not _finite(g)
            ]
        self.model.zero_grad()
        return f"numbers that aren't finite: {found[0]} has the first" if found else ""

    def unasked(self) -> str:
        """Whether a layer gives a loss of its own a gradient by itself, whatever gradient comes to
        the layer.
        """
        (self.run(self.batch)[1] * 0).backward()
        found = [
            name for name, p in self.model.named_parameters() if p.grad is not None and p.grad.any()
        ]
        self.model.zero_grad()
        if not found:
            return ""
        M = len(self.microbatches)
        return (
            "a layer gives a loss of its own a gradient by itself: a backward that starts from 0 "
            "reaches "
            f"{_few(found)}. A microbatch's backward starts from what it counts for, such as 1/"
            f"{M}, and that gradient doesn't: over "
            f"{M} microbatches it comes {M} times too large. Let the layer call "
            "pplab.runtime.add_loss(x) instead"
        )

    @torch.no_grad()
    def random(self) -> str:
        """Whether the forward differs the second time, since it draws random numbers."""
        device = self.batch.target.device
        before, first = random_state(device)[-1], self.run(self.batch)[0]
        self.draws = not torch.equal(before, random_state(device)[-1])
        self.steady = _relative(self.run(self.batch)[0], first) <= self._noise()
        if self.steady:
            return ""
        if not self.draws:
            return (
                "the forward gives another output for the same batch the second time: a module "
                "keeps something"
            )
        found = [
            name
            for name, module in self.model.named_modules()
            if "Dropout" in type(module).__name__
            and module.training
            and getattr(module, "p", 0) > 0
        ]
        what = (
            f"dropout is active (in {_few(found)})" if found else "the forward draws random numbers"
        )
        return (
            f"{what}: microbatches draw others than a batch does; compare with "
            "lab.SeededDropout(), or without (p=0)"
        )

    @torch.no_grad()
    def across_samples(self) -> str:
        """Whether a sample's output depends on the other samples that a module is given with it."""
        norms = {
            n: m for n, m in self.model.named_modules() if isinstance(m, _BatchNorm) and m.training
        }
        if not self.steady:  # without what is random, the statistics are all that is left
            self.model.eval()
            for norm in norms.values():
                norm.train()
        far = self._between_microbatches()
        if far <= self._noise():
            return ""
        what = f"batch normalisation (in {_few(list(norms))}) takes" if norms else "a module takes"
        return (
            f"{what} the statistics of a microbatch instead of the batch's: outputs change by "
            f"{far:.0e} of the largest"
        )

    def _between_microbatches(self) -> float:
        parts = [self.run(each)[0] for each in self.microbatches]
        together = self.run(self.batch)[0]
        if (
            not parts[0].ndim
            or sum(map(len, parts)) != len(together)
            or len({x.shape[1:] for x in parts}) > 1
        ):
            return 0.0
        return _relative(torch.cat(parts), together)

    def uneven(self) -> str:
        """Whether the microbatches' losses don't add up to the batch's, although every output is
        the same. Gradients tell, because a model that has learned nothing yet has the same loss on
        every sample.
        """
        self.model.eval()
        with torch.no_grad():
            if self._between_microbatches() > self._noise():
                return ""
        shares = loss_shares(self.workload, self.microbatches)
        parts = [
            (share, each) for share, each in zip(shares, self.microbatches, strict=True) if share
        ]
        (joined, ours), (loss, whole) = self._learned(parts), self._learned([(1.0, self.batch)])
        scale = max((float(g.abs().max()) for g in whole.values()), default=0.0) or 1.0
        far = max(
            (float((ours[name] - g).abs().max()) for name, g in whole.items() if name in ours),
            default=0.0,
        )
        if far / scale <= self._noise() and abs(joined - loss) <= self._noise() * abs(loss):
            return ""
        if self.workload.reduction == "sum":
            return (
                f"the microbatches' losses add up to {joined:.4g}, and the batch's is {loss:.4g}: "
                "is the loss a sum?"
            )
        added, _ = self._learned([(1.0, each) for each in self.microbatches])
        if abs(added - loss) <= self._noise() * abs(loss):
            return (
                f"the microbatches' losses add up to the batch's, {loss:.6g}: it is a sum; give "
                'reduction="sum"'
            )
        return (
            f"the microbatches' mean losses average to {joined:.6g}, and the batch's is "
            f"{loss:.6g}; gradients change by "
            f"{far / scale:.0e} of the largest: the losses are means over different numbers "
            "(ignored labels, padded rows): let weight(batch) count them; or the loss compares "
            "samples, which no microbatch can"
        )

    def _learned(self, parts: list[tuple[float, Batch]]) -> tuple[float, dict[str, Tensor]]:
        """The loss of batches that count for so much each, and its gradients."""
        self.model.zero_grad()
        losses = [share * self.run(batch)[1] for share, batch in parts]
        torch.stack(losses).sum().backward()
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return math.fsum(x.item() for x in losses), found

    def rounded(self) -> str:
        """How much rounding alone changes the gradients of weights in low precision."""
        low = [p.dtype for p in self.model.parameters() if p.dtype in _LOW]
        if not low:
            return ""
        self.model.eval()
        batch = self.batch
        gradients, name = self._gradients(self.model, batch), str(low[0]).removeprefix("torch.")
        single = batch.each(lambda x: x.float() if x.is_floating_point() else x)
        try:
            exact = self._gradients(copy.deepcopy(self.model).float(), single)
        except RuntimeError:
            return (
                f"weights in {name}, and the model casts to it by itself: build it in float32, and "
                "compare again"
            )
        scale = max(float(g.abs().max()) for g in exact) or 1.0
        far = (
            max(float((g.float() - e).abs().max()) for g, e in zip(gradients, exact, strict=True))
            / scale
        )
        if far <= TOLERANCE[torch.float32]:
            return ""
        return (
            f"weights in {name}: rounding alone changes gradients by {far:.0e} of the largest; "
            "compare in float32"
        )

    @torch.no_grad()
    def otherwise(self, num_stages: int) -> str:
        """Whether the stages, one after the other, compute something different from the whole
        model.
        """
        # with averages as they were
        self.model = self.workload.build_whole().to(self.batch.target.device).eval()
        x = self.batch.inputs
        for stage in range(num_stages):
            module = (
                self.workload.build_stage(stage, num_stages).to(self.batch.target.device).eval()
            )
            with autocast(self.batch.target.device, self.dtype):
                x = as_tuple(module(*x, **self.batch.context))
        output = self.run(self.batch)[0]
        if x[0].shape == output.shape and (far := _relative(x[0], output)) <= self._noise():
            return ""
        far = (
            f"by {far:.0e} of the largest"
            if x[0].shape == output.shape
            else f"in shape: {[*x[0].shape]}"
        )
        return (
            f"the stages, one after the other, give another output than build_whole's model, {far}"
        )

    def _gradients(self, model: nn.Module, batch: Batch) -> list[Tensor]:
        model.zero_grad()
        _Whole(self.workload, model, [], batch, self.dtype).run(batch)[1].backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    def _noise(self) -> float:
        """How much a different order of sums can change at most, relatively, in the dtype of the
        computation.
        """
        low = [p.dtype for p in self.model.parameters() if p.dtype in _LOW]
        dtype = low[0] if low else self.dtype
        return 3 * TOLERANCE[dtype] if dtype else 10 * TOLERANCE[torch.float32]


def _look(what: str, found: list[str]) -> Callable:
    def look(module: nn.Module, given: object, output: object) -> None:
        if not found and not _finite(output):
            found.append(what)

    return look


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same elements, where NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _finite(value: object) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    return all(map(_finite, value)) if isinstance(value, (tuple, list)) else True


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) / (float(b.abs().max()) or 1.0)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)
