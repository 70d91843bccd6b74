"""Small measurements that run on a pool."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from ...costs import Link
from ...runtime import RankContext, cuda

if TYPE_CHECKING:
    from ...runtime import Pool


def message_times(
    context: RankContext, num_bytes: int, count: int = 20, pair: tuple[int, int] = (0, 1)
) -> list[float]:
    """Send `num_bytes` from the first rank of a pair to the second and back, `count` times, over a
    fresh channel. Returns, on the first rank, half of each round trip in milliseconds. The first
    trip shows what a channel costs before it is warmed up.
    """
    one, other = pair
    down, up = context.channel(one, other), context.channel(other, one)
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=context.wire)
    times = []
    for _ in range(count):
        dist.barrier()
        start = time.perf_counter()
        if context.rank == one:
            dist.send(message, other, group=down)
            dist.recv(message, other, group=up)
        elif context.rank == other:
            dist.recv(message, one, group=down)
            dist.send(message, one, group=up)
        if context.wire.type == "cuda":
            cuda.synchronize()
        times.append((time.perf_counter() - start) / 2 * 1e3)
    return times


def multiply_times(
    context: RankContext, ranks: Sequence[int], size: int = 512, count: int = 20
) -> list[float]:
    """Multiply matrices on the ranks in `ranks` at the same time, and return each product's time in
    milliseconds. Compared with one rank alone, it shows how much of a second core, or of the GPU,
    there really is.
    """
    x = torch.randn(size, size, device=context.device)
    times = []
    dist.barrier()
    for _ in range(count if context.rank in ranks else 0):
        start = time.perf_counter()
        x @ x
        if context.device.type == "cuda":
            cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    dist.barrier()
    return times


def fit_link(times_ms: Mapping[int, float]) -> Link:
    """The latency (ms) and bandwidth (bytes per ms) by which messages of these sizes in bytes take
    these times.

    It is a straight line with the least sum of squared relative errors. With absolute errors the
    largest size would decide alone. Raises ValueError for fewer than two sizes.
    """
    if len(times_ms) < 2:
        raise ValueError(f"a line needs messages of at least two sizes, got {len(times_ms)}")
    sizes, times = np.array(list(times_ms), float), np.array(list(times_ms.values()), float)
    columns = np.stack([1 / times, sizes / times], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)
    return Link(max(0.0, float(latency)), float(1 / per_byte) if per_byte > 0 else inf)


def measure_link(
    pool: Pool, sizes: Sequence[int] | None = None, count: int = 20, pair: tuple[int, int] = (0, 1)
) -> Link:
    """The link between two ranks of a pool, as `torch.distributed` uses it, from the median time of
    each size in bytes.

    By default sizes go up to 2 MiB, and over NCCL to 64 MiB. Raises ValueError for a pair that
    isn't in the pool.
    """
    if len(set(pair)) != 2 or not set(pair) <= set(range(pool.num_ranks)):
        raise ValueError(
            f"pair must be two different ranks of 0 to {pool.num_ranks - 1}, got {pair!r}"
        )
    sizes = sizes or (64, 2**12, 2**16, 2**19, 2**21, *(2**24, 2**26) * (pool.transport == "nccl"))
    times = {size: pool.run(message_times, size, count, pair)[pair[0]][1:] for size in sizes}
    return fit_link({size: statistics.median(found) for size, found in times.items()})
