"""Small measurements that run on a pool."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .job import RankContext


def message_times(context: RankContext, num_bytes: int, count: int = 20) -> list[float]:
    """Rank 0 sends `num_bytes` to rank 1 and back, `count` times, over a fresh channel; returns, on rank 0, each round
    trip's half in milliseconds. The first one shows what a channel costs that nobody has warmed up."""
    pair = context.channels([(0, 1), (1, 0)])
    on_device = context.transport == "nccl"
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=context.device if on_device else "cpu")
    times = []
    for _ in range(count):
        dist.barrier()
        start = time.perf_counter()
        if context.rank == 0:
            dist.send(message, 1, group=pair.get((0, 1)))
            dist.recv(message, 1, group=pair.get((1, 0)))
        elif context.rank == 1:
            dist.recv(message, 0, group=pair.get((0, 1)))
            dist.send(message, 0, group=pair.get((1, 0)))
        if on_device:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 2 * 1e3)
    return times


def multiply_times(context: RankContext, ranks: Sequence[int], size: int = 512, count: int = 20) -> list[float]:
    """The ranks in `ranks` multiply matrices at the same time; returns each product's time in milliseconds. Against
    one rank alone it says how much of another core, or of the GPU, there really is."""
    x = torch.randn(size, size, device=context.device)
    times = []
    dist.barrier()
    for _ in range(count if context.rank in ranks else 0):
        start = time.perf_counter()
        x @ x
        if context.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    dist.barrier()
    return times
