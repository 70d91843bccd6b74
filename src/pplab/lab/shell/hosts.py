"""Clocks of ranks on several hosts, which started when their hosts did: how far each is ahead of
rank 0's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ...runtime import Extra, Listener, Rank, gpu

_TAG = 2**31 - 1  # of the messages that ask for the time


def ahead_of_rank_0(rank: int, num_ranks: int) -> tuple[int, int]:
    """By how many nanoseconds this rank's host clock is ahead of rank 0's, and how far off that can
    be.

    This rank reads its clock, asks rank 0 for its own, and reads it again. The closest pair of
    several gives the best answer. All ranks must call this. Rank 0 answers one after the other,
    with a few round trips for each. The error doesn't include how far the clocks drift apart until
    the next call.
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


@dataclass(frozen=True)
class Hosts(Extra):
    """Before every measured step, tie each rank's clock to rank 0's, for ranks on several hosts."""

    name = "hosts"

    def listen(self, rank: Rank) -> Listener:
        return _Tying(rank)


class _Tying(Listener):
    """Puts the times that a rank's clock recorded in a step on the clock of rank 0's host."""

    events = frozenset(("turn",))

    def __init__(self, rank: Rank):
        self.rank = rank
        self._ahead = self._error_ns = 0

    def begin(self, event: str, what: object) -> None:
        context = self.rank.context
        self._ahead, self._error_ns = ahead_of_rank_0(context.rank, context.num_ranks)

    def end(self, event: str, what: object) -> None:
        traces = self.rank.clock.traces
        trace = traces[-1]
        lists = {
            name: [self._moved(*each) for each in getattr(trace, name)]
            for name in ("actions", "others")
        }
        _, start, end = self._moved(None, trace.start, trace.end)
        traces[-1] = replace(
            trace, start=start, end=end, error_ns=trace.error_ns + self._error_ns, **lists
        )

    def _moved(self, what: object, start: int, end: int) -> tuple[object, int, int]:
        return what, start - self._ahead, end - self._ahead
