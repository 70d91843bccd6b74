"""One process with the whole model: its loss and gradients, and how long its steps take."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from ...errors import positive_int
from ...runtime import (
    Extra,
    Gradients,
    Job,
    Pool,
    RankContext,
    Workload,
    autocast,
    check_divides,
    collect_gradients,
    cuda,
    loss_shares,
    train_whole,
)


@dataclass(frozen=True)
class Reference:
    """One process with the whole model."""

    loss: float
    gradients: dict[str, np.ndarray] = field(repr=False)
    step_times_ms: tuple[float, ...]

    @property
    def step_time_ms(self) -> float:
        """The median step."""
        return statistics.median(self.step_times_ms)


def reference(pool: Pool, workload: Workload, num_microbatches: int = 1, *, steps: int = 3) -> Reference:
    """Train `workload` in one process: loss and gradients of the whole batch, then `steps` timed steps in which the
    microbatches run one after the other, with the threads of a rank of `pool`."""
    check_divides(workload.batch_size, positive_int("num_microbatches", num_microbatches))
    return Reference(*pool.run(train_and_time, workload, num_microbatches, steps)[0])


def train_and_time(context: RankContext, workload: Workload, num_microbatches: int, steps: int) -> tuple | None:
    """On rank 0: what `train_whole` finds, and the time of every step. The other ranks return at once."""
    if context.rank != 0:
        return None
    model = workload.build_whole().to(context.device)
    whole = train_whole(context, workload, model=model)
    microbatches = workload.batch(0).to(context.device).microbatches(num_microbatches)
    shares, times = loss_shares(workload, microbatches), []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        _synchronize(context.device)
        start = time.perf_counter()
        for m, share in zip(microbatches, shares, strict=True):
            if share:
                (workload.loss(model(*m.inputs, **m.context), m.target) * share).backward()
        _synchronize(context.device)
        times.append((time.perf_counter() - start) * 1e3)
    return *whole, tuple(times)


@dataclass(frozen=True)
class InMicrobatches(Extra):
    """Compare the run's gradients with those of one process that takes its microbatches one after the other.

    This process holds what the whole model keeps for one microbatch, where it otherwise holds the whole batch's. It
    relies on the losses' shares, as the run does: what a microbatch changes (batch normalisation, a mean over labels
    that `weight` doesn't count) is found by the whole batch alone.
    """

    name = "in_microbatches"

    def check(self, job: Job) -> Job:
        """Have the job's microbatches be the reference's."""
        return replace(job, reference=partial(train_in_turn, num_microbatches=job.schedule.num_microbatches))


def train_in_turn(
    context: RankContext, workload: Workload, dtype: torch.dtype | None, num_microbatches: int
) -> tuple[float, Gradients] | None:
    """What `train_whole` finds, from microbatches one after the other."""
    if context.rank != 0:
        return None
    context.watch("running the model in one process")
    model = workload.build_whole().to(context.device)
    microbatches, loss = workload.batch(0).microbatches(num_microbatches), 0.0
    for m, share in zip(microbatches, loss_shares(workload, microbatches), strict=True):
        if share:
            m = m.to(context.device)
            with autocast(context.device, dtype):
                counted = workload.loss(model(*m.inputs, **m.context), m.target) * share
            counted.backward()
            loss += counted.item()
    return loss, collect_gradients(model.named_parameters())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        cuda.synchronize()
