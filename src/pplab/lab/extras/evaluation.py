"""Evaluation next to training: held-out batches go through the same stages on the same ranks,
forward only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from ...actions import F, parts
from ...errors import positive_int, shown
from ...lowering import lower
from ...runtime import (
    Batch,
    Executor,
    Extra,
    Job,
    Listener,
    Listeners,
    Rank,
    Stage,
    Whereabouts,
    check_divides,
    connect,
    loss_shares,
    naming,
)
from ...schedule import Schedule

_NEEDED = (
    "Evaluate needs held-out batches: a list, a DataLoader, or one such as the workload takes for "
    "training"
)


@dataclass(frozen=True)
class Evaluate(Extra):
    """Find the mean loss over held-out batches after every so many steps (counted from the first
    run's), and after the last one. The Run's `extras["evaluations"]` has pairs of a number of steps
    and a loss. If an extra ends the run, as `Save` does when it is interrupted, the last evaluation
    is left out.

    Between two steps, the batches run through the forwards of the run's own schedule, without
    dropout and gradients. What layers add to the loss counts, as in training, unless a layer adds
    it only while it trains. Training isn't changed by it. `batches` are such as the workload takes
    for training. They can be a list or a DataLoader of batches, of pairs, or of dicts, which is
    read at once and sent to the ranks. Or they can be an object with a length and items, each a
    Batch, that loads them where they are needed.
    """

    every: int
    batches: Sequence[Batch] | Iterable[object]
    name = "evaluations"
    needs_pplab = (
        "Evaluate needs pplab's engine: for torch's runtime, save, and evaluate the checkpoint"
    )

    def check(self, job: Job) -> Job:
        """The job with these batches as `Batch`es. Raises ValueError for none, and for batches that
        don't divide into the schedule's microbatches.
        """
        positive_int("every", self.every)
        batches = self.batches
        if not hasattr(batches, "__getitem__") or not batches or not isinstance(batches[0], Batch):
            make = getattr(job.workload, "as_batch", None)
            if make is None or not hasattr(batches, "__iter__"):
                raise ValueError(f"{_NEEDED}, got a {type(batches).__name__}")
            batches = [
                make(found, number) for number, found in enumerate(islice(batches, 10_000))
            ]  # a stream may have no end
            if len(sizes := {len(each.target) for each in batches}) != 1:
                raise ValueError(
                    f"{_NEEDED}, all of one size (a DataLoader's drop_last=True), got "
                    f"{shown(sizes)}"
                )
        check_divides(len(batches[0].target), job.schedule.num_microbatches)
        own = tuple(
            replace(self, batches=batches) if extra is self else extra for extra in job.extras
        )
        return replace(job, extras=own)

    def listen(self, rank: Rank) -> Listener:
        return _Evaluating(rank, self)

    def finish(
        self, job: Job, reports: Sequence[list[tuple[int, float]]]
    ) -> tuple[tuple[int, float], ...]:
        return tuple(
            (parts[0][0], sum(loss for _, loss in parts)) for parts in zip(*reports, strict=True)
        )

    def lines(self, found: tuple[tuple[int, float], ...]) -> list[str]:
        return [
            f"held-out loss    {', '.join(f'{loss:.4f} after step {step}' for step, loss in found)}"
        ]


class _Evaluating(Listener):
    events = frozenset(("turn",))

    def __init__(self, rank: Rank, asked: Evaluate):
        self.rank, self.asked, self.found, self.step = rank, asked, [], rank.job.first_step
        self.samples = len(asked.batches[0].target)
        context, schedule = rank.context, rank.job.schedule
        rows = [[a for item in row for a in parts(item) if a.kind is F] for row in schedule.rows]
        forwards = Schedule(rows, f"the forwards of {schedule.name}")
        lowered, home = lower(forwards, ahead=1), forwards.home()
        row, stages = (
            lowered[context.rank],
            {index: _Forwards(stage) for index, stage in rank.stages.items()},
        )
        around = Listeners([Whereabouts(row, schedule.num_stages, context.watch)])
        # shapes of its own, on the same channels
        self.comm, self.stages = connect(context, lowered, home), stages
        self.executor = Executor(
            context.rank, row, stages, schedule.num_stages, home, self.comm, around
        )

    def end(self, event: str, losses: Sequence[float]) -> None:
        self.step = self.rank.job.first_step + len(losses)
        if self.step % self.asked.every == 0:
            self._evaluate()

    @torch.no_grad()
    def _evaluate(self) -> None:
        rank, device = self.rank, self.rank.context.device
        training = {
            each: each.training for module in rank.modules.values() for each in module.modules()
        }
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            try:
                for module in rank.modules.values():
                    module.eval()
                found = [self._loss(number) for number in range(len(self.asked.batches))]
            finally:
                for each, was in training.items():
                    each.training = was
        self.found.append(
            (
                self.step,
                sum(loss * weight for loss, weight in found) / sum(weight for _, weight in found),
            )
        )

    def _loss(self, number: int) -> tuple[float, float]:
        """This rank's part of a batch's loss, and what the batch counts for (samples or tokens, as
        in training).
        """
        self.rank.context.watch(f"loading held-out batch {number}")
        batch, job = self.asked.batches[number], self.rank.job
        if (samples := len(batch.target)) != self.samples:
            said = f"held-out batch {number} has {samples} samples and the first one {self.samples}"
            raise ValueError(f"{said}: give batches of one size")
        self.rank.context.watch("starting together", True)
        with naming("starting together"):
            # messages don't say of which batch they are: so one batch, or step, at a time
            dist.barrier()
        microbatches = batch.microbatches(job.schedule.num_microbatches)
        self.comm.expect(microbatches)
        self.executor.run([each.to(self.rank.context.device) for each in microbatches])
        self.comm.flush()
        shares = loss_shares(job.workload, microbatches)
        part = sum(
            loss.item() * shares[m]
            for stage in self.stages.values()
            for m, loss in stage.losses
            if shares[m]
        )
        for stage in self.stages.values():
            stage.losses.clear()
        weight = (
            1.0 if job.workload.reduction == "sum" else sum(map(job.workload.weight, microbatches))
        )
        return part, weight

    def report(self) -> list[tuple[int, float]]:
        """This rank's parts by the number of steps, including the last step's."""
        if not self.rank.last and self.step not in dict(self.found):
            self._evaluate()
        return self.found


class _Forwards:
    """A stage that keeps nothing for a backward. Its part of the loss includes what layers add, as
    in training.
    """

    def __init__(self, stage: Stage):
        self.stage, self.losses = stage, []

    def forward(
        self, microbatch: int, received: tuple[Tensor, ...], batch: Batch
    ) -> tuple[Tensor, ...]:
        """Compute what the next stage needs."""
        outputs, losses = self.stage.compute(received, batch)
        self.losses += [(microbatch, loss) for loss in losses]
        return outputs
