"""What a rank holds, counted in the first pass over the schedule: bytes that forwards keep, and forwards in flight."""

from __future__ import annotations

import gc
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..actions import F, I, Kind, W
from ..footprint import Memory
from ..schedule import Schedule
from .listener import Listener

if TYPE_CHECKING:
    from .training import RankReport


class Allocator(Listener):
    """The CUDA allocator's count of a rank in the measured steps, with the gradients dropped first.

    Unlike a `Meter` it counts all: weights, gradients, the optimizer's state, workspaces. Each process has its own, so
    it is valid on a shared GPU, too. The CPU's allocator keeps no such count.
    """

    events = frozenset(("steps",))

    def __init__(self, device: torch.device, modules: Iterable[nn.Module]):
        self._device, self._modules = device, list(modules)

    def begin(self, event: str, what: object) -> None:
        """Count from here on."""
        for module in self._modules:
            module.zero_grad(set_to_none=True)
        gc.collect()  # what earlier runs left would be freed in this one's steps
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def report(self) -> tuple[int, int]:
        """Bytes at the start, and at the worst moment since."""
        return self._before, torch.cuda.max_memory_allocated(self._device)


@dataclass
class RankHeld:
    """What one rank held."""

    peak_in_flight: int = 0
    peak_bytes: int = 0
    # By how much an F or I of a stage changes what is held, and how far above the start it rises.
    changes: dict[tuple[int, Kind], tuple[int, int]] = field(default_factory=dict)
    recomputed: dict[int, int] = field(default_factory=dict)  # of a stage: what a forward that runs again adds


class Counting(Listener):
    """Counts one pass, with a meter in every stage: bytes by action, and forwards whose activations are held.

    An engine without stages of pplab's (torch's) tells of no actions, and is counted as a whole.
    """

    events = frozenset(("row", "action", "again"))

    def __init__(self, stages: Iterable, resident: Iterable[Tensor]):
        self.stages, self._resident = list(stages), list(resident)
        self.found = RankHeld()

    def begin(self, event: str, what: object) -> None:
        """A row starts with a new meter, an action with what is held so far."""
        if event == "row":
            self.meter = Meter([*self._resident, *what.tensors()])
            for stage in self.stages:
                stage.meter = self.meter
        elif event == "again":
            self._held = self.meter.held
        else:
            self._before = self.meter.watch()
        if self._saves(event, what):
            self.meter.__enter__()

    def end(self, event: str, what: object) -> None:
        """Note what it changed."""
        meter, found = self.meter, self.found
        if self._saves(event, what):
            meter.__exit__()
        if event == "row":
            found.peak_bytes = meter.peak
            for stage in self.stages:
                stage.meter = None
        elif event == "again":
            found.recomputed.setdefault(what, meter.held - self._held)
        else:
            if what.kind is not W:
                change = (meter.held - self._before, meter.lately - self._before)
                found.changes.setdefault((what.stage, what.kind), change)
            found.peak_in_flight = max(found.peak_in_flight, sum(stage.in_flight for stage in self.stages))

    def _saves(self, event: str, what: object) -> bool:
        """Whether autograd saves tensors for a backward meanwhile."""
        return event == "again" or (event == "action" and what.kind is F) or (event == "row" and not self.stages)


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


@dataclass(frozen=True)
class Held:
    """Bytes that ranks and stages held and sent, and how many forwards were in flight."""

    peak_in_flight: tuple[int, ...]  # per rank, counted while running
    peak_bytes: tuple[int, ...]  # per rank: kept by forwards for backwards at the worst moment
    bytes_of: tuple[int, ...]  # per stage: kept by one forward
    kept_of: tuple[int, ...]  # per stage: what of it is kept after an input gradient, with what is kept for the weights
    extra_of: tuple[int, ...]  # per stage: how far an input gradient rises above what was held at its start
    recomputed_of: tuple[int, ...] = ()  # per stage: what comes on top when a forward is run again; none: no stage does
    recompute_ms: tuple[float, ...] = ()  # per stage: the median time of that
    message_bytes: tuple[int, ...] = ()  # per stage: what it gives a stage on another rank; none by torch's runtime
    # Per rank, the CUDA allocator's peak in the measured steps (weights, gradients, optimizer and all), and what of it
    # was there before them (the weights); None on the CPU.
    allocated_bytes: tuple[int, ...] | None = None
    resident_bytes: tuple[int, ...] | None = None

    @property
    def memory(self) -> Memory:
        """What the stages hold for a microbatch, in bytes, without parameters."""
        again = self.recomputed_of or 0
        return Memory(self.bytes_of, self.kept_of, again, while_input_gradient=self.extra_of, unit="bytes")


def together(schedule: Schedule, reports: Sequence[RankReport]) -> Held:
    """What the ranks counted, by rank and by stage."""
    stages = range(schedule.num_stages)
    changes = {key: change for report in reports for key, change in report.held.changes.items()}
    recomputed = {stage: size for report in reports for stage, size in report.held.recomputed.items()}
    sent = {stage: size for report in reports for stage, size in report.message_bytes.items()}
    bytes_of = [changes.get((stage, F), (0, 0))[0] for stage in stages]
    of_input = [changes.get((stage, I), (0, 0)) for stage in stages]
    again: dict[int, list[float]] = defaultdict(list)
    for stage, start, end in (each for report in reports for trace in report.traces for each in trace.again):
        again[stage].append((end - start) / 1e6)
    allocated = [report.allocated for report in reports if report.allocated]
    return Held(
        tuple(report.held.peak_in_flight for report in reports),
        tuple(report.held.peak_bytes for report in reports),
        tuple(bytes_of),
        tuple(held + change for held, (change, _) in zip(bytes_of, of_input, strict=True)),
        tuple(max(0, rise - recomputed.get(stage, 0)) for stage, (_, rise) in enumerate(of_input)),
        tuple(recomputed.get(stage, 0) for stage in stages) if again else (),
        tuple(statistics.median(again[s]) if s in again else 0 for s in stages) if again else (),
        tuple(sent.get(stage, 0) for stage in stages) if sent else (),
        tuple(peak for _, peak in allocated) or None,
        tuple(before for before, _ in allocated) or None,
    )


def readable_bytes(count: float) -> str:
    """`34.8 MB`, `512 B`: powers of ten, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError
