"""Small measurements that run on a pool."""

from __future__ import annotations

import time

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
