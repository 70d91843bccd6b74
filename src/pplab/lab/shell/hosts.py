"""Ranks on several hosts, whose clocks started when their hosts did: how far each is ahead of rank 0's."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ...runtime import gpu

_TAG = 2**31 - 1  # of the messages that ask for the time


def ahead_of_rank_0(rank: int, num_ranks: int) -> tuple[int, int]:
    """By how many nanoseconds this rank's host clock is ahead of rank 0's, and how far off that can be.

    Rank 0 read its clock between this rank's two readings around the question; the closest pair of some says best when.
    All ranks must call. Rank 0 answers one after the other: a few round trips for each. How the clocks drift apart
    until the next call isn't in the error.
    """
    message = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        for other in range(1, num_ranks):
            for _ in range(gpu.TIES):
                dist.recv(message, other, tag=_TAG)
                message[0] = time.perf_counter_ns()
                dist.send(message, other, tag=_TAG)
        return 0, 0
    readings = []
    for _ in range(gpu.TIES):
        before = time.perf_counter_ns()
        dist.send(message, 0, tag=_TAG)
        dist.recv(message, 0, tag=_TAG)
        readings.append((before, message.item(), time.perf_counter_ns()))
    before, there, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return (before + after) // 2 - there, (after - before + 1) // 2
