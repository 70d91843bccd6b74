"""One process with the whole model: its loss and gradients, and how long its steps take."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from ...errors import positive_int
from ...runtime import (
    Pool,
    RankContext,
    Workload,
    check_divides,
    cuda,
    listening,
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


def reference(
    pool: Pool, workload: Workload, num_microbatches: int = 1, *, steps: int = 3
) -> Reference:
    """Train `workload` in one process: loss and gradients of the whole batch, then `steps` timed
    steps in which the microbatches run one after the other, with as many threads as a rank of
    `pool`.
    """
    check_divides(workload.batch_size, positive_int("num_microbatches", num_microbatches))
    return Reference(*pool.run(train_and_time, workload, num_microbatches, steps)[0])


def train_and_time(
    context: RankContext, workload: Workload, num_microbatches: int, steps: int
) -> tuple | None:
    """On rank 0, what `train_whole` finds and the time of every step. The other ranks return at
    once.
    """
    if context.rank != 0:
        return None
    model = workload.build_whole().to(context.device)
    whole = train_whole(context, workload, None, model)
    microbatches = workload.batch(0).to(context.device).microbatches(num_microbatches)
    shares, times = loss_shares(workload, microbatches), []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        _synchronize(context.device)
        start = time.perf_counter()
        for m, share in zip(microbatches, shares, strict=True):
            if share:
                with listening() as added:
                    loss = workload.loss(model(*m.inputs, **m.context), m.target)
                (sum(added, loss) * share).backward()
        _synchronize(context.device)
        times.append((time.perf_counter() - start) * 1e3)
    return *whole, tuple(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        cuda.synchronize()
