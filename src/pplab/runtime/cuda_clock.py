"""A GPU's clock: CUDA events, placed on the host's clock by the closest of some pairs of readings per step."""

from __future__ import annotations

import time

import torch

from .listener import Clock

TIES = 5  # pairs of readings that tie one clock to another


class CudaClock(Clock):
    """Marks are events on the compute stream: when the device got there, not when it was asked to."""

    def tie(self) -> None:
        """Tie the stream's time to the host's, too: the event happened between two readings, at best close ones."""
        super().tie()
        torch.cuda.synchronize()
        readings = []
        for _ in range(TIES):
            before, event = time.perf_counter_ns(), self.mark()
            event.synchronize()
            readings.append((event, before, time.perf_counter_ns()))
        self._zero, before, after = min(readings, key=lambda reading: reading[2] - reading[1])
        self._zero_ns, self.error_ns = (before + after) // 2, (after - before + 1) // 2

    def mark(self) -> torch.cuda.Event:
        """The moment at which the stream gets here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, marks: list[torch.cuda.Event]) -> list[int]:
        """The marks in nanoseconds of the host's clock."""
        torch.cuda.synchronize()
        return [self._zero_ns + round(self._zero.elapsed_time(mark) * 1e6) for mark in marks]
