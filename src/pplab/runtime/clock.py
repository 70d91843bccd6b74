"""When a rank did what: marks on one clock for all ranks, set while a step runs and read afterwards.

`time.perf_counter_ns` reads the host's monotonic clock, which all processes of the host share. On a GPU the marks are
CUDA events, placed on that clock by the closest of some pairs of readings per step. A rank on another host is told how
far its host's clock is ahead of rank 0's (`ahead`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..actions import Action, Overlap
from .listener import Listener

TIES = 5  # pairs of readings that tie one clock to another


class HostClock:
    """Marks are nanoseconds of the host's clock."""

    error_ns = 0

    def tie(self) -> None:
        """Before a step: it is the host's clock already."""

    mark = staticmethod(time.perf_counter_ns)

    def resolve(self, marks: list[int]) -> list[int]:
        """The marks in nanoseconds of the host's clock."""
        return marks


class CudaClock:
    """Marks are events on the compute stream: when the device got there, not when it was asked to."""

    error_ns = 0  # how far off the host's clock this step's marks can be

    def tie(self) -> None:
        """Before a step: tie the stream's time to the host's. The event happened between the two readings around it;
        the closest pair of some says best when."""
        torch.cuda.synchronize()
        readings = [self._reading() for _ in range(TIES)]
        self._zero, before, after = min(readings, key=lambda reading: reading[2] - reading[1])
        self._zero_ns, self.error_ns = (before + after) // 2, (after - before + 1) // 2

    def _reading(self) -> tuple[torch.cuda.Event, int, int]:
        before = time.perf_counter_ns()
        event = self.mark()
        event.synchronize()
        return event, before, time.perf_counter_ns()

    def mark(self) -> torch.cuda.Event:
        """The moment at which the stream gets here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, marks: list[torch.cuda.Event]) -> list[int]:
        """The marks in nanoseconds of the host's clock."""
        torch.cuda.synchronize()
        return [self._zero_ns + round(self._zero.elapsed_time(mark) * 1e6) for mark in marks]


@dataclass
class StepTrace:
    """One step of one rank, in nanoseconds of its host's clock, or of rank 0's host where there are several."""

    actions: list[tuple[Action | Overlap, int, int]]
    others: list[tuple[Action | str, int, int]]
    start: int
    end: int
    again: list[tuple[int, int, int]] = field(default_factory=list)  # stage, start, end of a forward run again
    error_ns: int = 0  # how far off that clock these times can be


class Clock(Listener):
    """Records, of every step, when its items ran, when the rank waited for messages, and what else took time.

    `ahead()` says by how many nanoseconds the host's clock is ahead of rank 0's, and how far off that can be.
    """

    events = frozenset(("step", "item", "receive", "again"))

    def __init__(self, device: torch.device, ahead: Callable[[], tuple[int, int]] | None = None):
        self.marks = CudaClock() if device.type == "cuda" else HostClock()
        self.mark = self.marks.mark
        self.ahead = ahead
        self.traces: list[StepTrace] = []
        self._offset = (0, 0)

    def tie(self) -> None:
        """Tie the clocks: before the barrier at which a step starts, because it takes ranks different times."""
        self.marks.tie()
        if self.ahead is not None:
            self._offset = self.ahead()

    def begin(self, event: str, what: object) -> None:
        """Mark the start."""
        if event == "step":
            self._found: dict[str, list] = {"item": [], "receive": [], "again": []}
            self._open: list[object] = []
        self._open.append(self.mark())

    def end(self, event: str, what: object) -> None:
        """Mark the end; at the end of a step, read all marks."""
        if event == "step":
            self._finish(self._open.pop(), self.mark())
        else:
            self._found[event].append((what, self._open.pop(), self.mark()))

    @contextmanager
    def span(self, label: str) -> Iterator[None]:
        """Record what runs inside as something that the rank did beside its row."""
        start = self.mark()
        yield
        self.add(label, start, self.mark())

    def add(self, label: Action | str, start: object, end: object) -> None:
        """Record something that the rank did beside its row, from mark to mark."""
        self._found["receive"].append((label, start, end))

    def item(self, item: Action | Overlap, start: object, end: object) -> None:
        """Record an item of the row, from mark to mark."""
        self._found["item"].append((item, start, end))

    def _finish(self, start: object, end: object) -> None:
        found = [span for spans in self._found.values() for span in spans]
        times = self.marks.resolve([start, end, *(mark for _, *both in found for mark in both)])
        ahead, error = self._offset
        first, last, *rest = (each - ahead for each in times)
        spans = iter(zip(rest[::2], rest[1::2], strict=True))
        read = {event: [(what, *next(spans)) for what, _, _ in each] for event, each in self._found.items()}
        error_ns = self.marks.error_ns + error
        self.traces.append(StepTrace(read["item"], read["receive"], first, last, read["again"], error_ns))
