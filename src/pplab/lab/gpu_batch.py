"""A batch with which a GPU has enough to do: where a stage's forward takes a millisecond, launches set the pace."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import positive_int
from ..runtime import Pool, RankError, Workload
from ..schedule import Schedule

MOST = 4096  # sequences


def long_enough(
    pool: Pool, schedule: Schedule, make: Callable[..., Workload], *, batch_size: int, least_ms: float = 5.0
) -> Workload:
    """`make(batch_size=n)` with the first n of batch_size, twice, four times it, ... for which every stage's forward of
    a microbatch takes `least_ms` milliseconds on the pool's GPUs, in bfloat16: each n is measured by two steps.

    Where the next n doesn't fit the memory, or would be over 4,096, it is the last that did. On the CPU, which launches
    nothing, nothing is measured, and it is the first n.

    >>> import pplab as pp
    >>> from pplab.lab import models
    >>> from pplab.runtime import Pool
    >>> s = pp.build("1F1B", num_ranks=2, num_microbatches=8)
    >>> print(long_enough(Pool(2, device="cpu"), s, models.gpt, batch_size=8).batch_size)
    8
    """
    n, fits = positive_int("batch_size", batch_size), None
    while True:
        workload = make(batch_size=n)
        if pool.devices[0] == "cpu":
            return workload
        try:
            costs = pool.train(schedule, workload, steps=2, autocast=torch.bfloat16).costs
        except RankError as error:
            if fits is None or "OutOfMemory" not in error.cause:
                raise
            return fits
        fits, n = workload, 2 * n
        if n > MOST or all(costs.of("F", stage) >= least_ms for stage in range(schedule.num_stages)):
            return fits
