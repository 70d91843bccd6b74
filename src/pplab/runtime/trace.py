"""What a rank did and when, and what it held: recorded while it runs, read afterwards.

Times of all ranks of one host are on one clock: `time.perf_counter_ns` reads the host's monotonic clock. On a GPU the
marks are CUDA events, placed on that clock by the closest of some pairs of readings per step. Another host's clock
started when that host did: there, times are put on rank 0's clock, which is asked for its time before every step.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..actions import Action, Overlap

_TIES = 5  # pairs of readings that tie one clock to another
_TIES_TAG = 2**31 - 1  # of the messages that ask for the time


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
        readings = [self._reading() for _ in range(_TIES)]
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


def ahead_of_rank_0(rank: int, num_ranks: int) -> tuple[int, int]:
    """By how many nanoseconds this rank's host clock is ahead of rank 0's, and how far off that can be.

    Rank 0 read its clock between this rank's two readings around the question; the closest pair of some says best when.
    All ranks must call. Rank 0 answers one after the other: a few round trips for each. How the clocks drift apart
    until the next call isn't in the error.
    """
    message = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        for other in range(1, num_ranks):
            for _ in range(_TIES):
                dist.recv(message, other, tag=_TIES_TAG)
                message[0] = time.perf_counter_ns()
                dist.send(message, other, tag=_TIES_TAG)
        return 0, 0
    readings = []
    for _ in range(_TIES):
        before = time.perf_counter_ns()
        dist.send(message, 0, tag=_TIES_TAG)
        dist.recv(message, 0, tag=_TIES_TAG)
        readings.append((before, message.item(), time.perf_counter_ns()))
    before, there, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return (before + after) // 2 - there, (after - before + 1) // 2


@dataclass
class StepTrace:
    """One step of one rank, in nanoseconds of its host's clock, or of rank 0's host where there are several."""

    actions: list[tuple[Action | Overlap, int, int]]
    others: list[tuple[Action | str, int, int]]
    start: int
    end: int
    again: list[tuple[int, int, int]] = field(default_factory=list)  # stage, start, end of a forward run again
    error_ns: int = 0  # how far off that clock these times can be


@dataclass
class Recorder:
    """Collects (what, mark, mark) while a step runs. `ahead` says how far the host's clock is ahead of rank 0's."""

    clock: HostClock | CudaClock
    ahead: Callable[[], tuple[int, int]] = lambda: (0, 0)
    _actions: list = field(default_factory=list)
    _others: list = field(default_factory=list)
    _again: list = field(default_factory=list)
    _ahead_ns: int = 0
    _ahead_error_ns: int = 0

    def tie(self) -> None:
        """Tie the clocks: before the barrier at which a step starts, because it takes ranks different times."""
        self.clock.tie()
        self._ahead_ns, self._ahead_error_ns = self.ahead()

    def begin(self) -> None:
        """Start a step."""
        self._actions, self._others, self._again = [], [], []
        self._start = self.clock.mark()

    def action(self, item: Action | Overlap, start: object, end: object) -> None:
        """An action of the schedule ran from `start` to `end`."""
        self._actions.append((item, start, end))

    def other(self, what: Action | str, start: object, end: object) -> None:
        """Something beside the schedule: waiting for a receive, the optimizer."""
        self._others.append((what, start, end))

    def again(self, stage: int, start: object, end: object) -> None:
        """A forward ran again, inside a backward."""
        self._again.append((stage, start, end))

    def finish(self) -> StepTrace:
        """End the step and read the clock's marks."""
        end = self.clock.mark()
        flat = [m for _, a, b in (*self._actions, *self._others, *self._again) for m in (a, b)]
        marks = self.clock.resolve([*flat, self._start, end])
        *times, first, last = (mark - self._ahead_ns for mark in marks)
        spans = iter(zip(times[::2], times[1::2], strict=True))
        actions = [(item, *next(spans)) for item, _, _ in self._actions]
        others = [(what, *next(spans)) for what, _, _ in self._others]
        again = [(stage, *next(spans)) for stage, _, _ in self._again]
        return StepTrace(actions, others, first, last, again, self.clock.error_ns + self._ahead_error_ns)


def recorder_for(rank: int, num_ranks: int, device: torch.device, several_hosts: bool) -> Recorder:
    """A recorder with the clock of the device, put on rank 0's where ranks may be on hosts with clocks of their own."""
    clock = CudaClock() if device.type == "cuda" else HostClock()
    return Recorder(clock, partial(ahead_of_rank_0, rank, num_ranks)) if several_hosts else Recorder(clock)


def settle(device: torch.device, wanted: object) -> None:
    """Wait until a GPU has done what it was given to compute, if that is wanted: for a pace, or for a profile's step.

    Not for all its streams: one may hold a receive that was posted early.
    """
    if wanted is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@contextmanager
def paced(device: torch.device, seconds: float | None) -> Iterator[None]:
    """Make what runs inside last at least that long, until a GPU has done it; nothing at all where it is None."""
    settle(device, seconds)
    begun = time.perf_counter()
    yield
    if seconds is not None:
        settle(device, seconds)
        time.sleep(max(0.0, begun + seconds - time.perf_counter()))


class Allocator:
    """The CUDA allocator's count of a rank from here on, with the gradients dropped first.

    Unlike a `Meter` it counts all: weights, gradients, the optimizer's state, workspaces. Each process has its own, so
    it is valid on a shared GPU, too. The CPU's allocator keeps no such count.
    """

    def __init__(self, device: torch.device, modules: Iterable[nn.Module]):
        self._device = device if device.type == "cuda" else None
        if self._device is None:
            return
        for module in modules:
            module.zero_grad(set_to_none=True)
        gc.collect()  # what earlier runs left would be freed in this one's steps
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def read(self) -> tuple[int, int] | None:
        """Bytes at the start and at the worst moment since; None on the CPU."""
        return None if self._device is None else (self._before, torch.cuda.max_memory_allocated(self._device))


class Meter:
    """Bytes that forwards keep for their backwards, counted while autograd holds them.

    Every tensor that autograd saves is wrapped; when autograd lets go of the wrapper, the bytes are free. A storage
    counts once, however many tensors share it. `resident` tensors don't count: parameters, buffers, the batch.
    """

    def __init__(self, resident: Iterable[Tensor]):
        self._resident = {t.untyped_storage().data_ptr() for t in resident}
        self._users: dict[int, int] = {}
        self.held = self.peak = self.lately = 0  # now, at the worst moment, and at the worst since `watch`

    def watch(self) -> int:
        """Start to look for the worst moment anew; returns what is held now."""
        self.lately = self.held
        return self.held

    def hold(self, tensor: Tensor) -> _Held | Tensor:
        """Count a tensor for as long as the returned object lives."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._resident:
            return tensor
        return _Held(self, tensor, storage.data_ptr(), storage.nbytes())

    def __enter__(self) -> Meter:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.hold, unwrap)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


class _Held:
    """A tensor that a meter counts."""

    __slots__ = ("meter", "tensor", "storage", "nbytes")

    def __init__(self, meter: Meter, tensor: Tensor, storage: int, nbytes: int):
        self.meter, self.tensor, self.storage, self.nbytes = meter, tensor, storage, nbytes
        users = meter._users.get(storage, 0)
        meter._users[storage] = users + 1
        if not users:
            meter.held += nbytes
            meter.lately = max(meter.lately, meter.held)
            meter.peak = max(meter.peak, meter.held)

    def __del__(self) -> None:
        users = self.meter._users.pop(self.storage) - 1
        if users:
            self.meter._users[self.storage] = users
        else:
            self.meter.held -= self.nbytes


def unwrap(kept: _Held | Tensor) -> Tensor:
    """The tensor that a meter holds, or the tensor itself."""
    return kept.tensor if isinstance(kept, _Held) else kept
