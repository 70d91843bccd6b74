"""Measure what ranks hold in the first pass over the schedule: bytes that forwards keep, and
forwards in flight.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...actions import F, I, Kind, W
from ...footprint import Memory
from ...runtime import Extra, Job, Listener, Rank, Spec, cuda
from ...schedule import Schedule


@dataclass(frozen=True)
class Meter(Extra):
    """Count the bytes that forwards keep for their backwards, and the forwards in flight. The
    result is `run.held`.

    It counts in the first pass, which isn't timed. On a GPU it also counts what the allocator hands
    out in the measured steps.
    """

    name = "held"

    def listen(self, rank: Rank) -> Listener:
        return Counting(rank)

    def finish(self, job: Job, reports: Sequence[RankHeld]) -> Held:
        return together(job.schedule, reports)

    def lines(self, found: Held) -> list[str]:
        lines = [f"peak held        {', '.join(map(readable_bytes, found.peak_bytes))}"]
        if any(found.peak_in_flight):
            lines.insert(
                0, f"peak in flight   {', '.join(map(str, found.peak_in_flight))} forwards"
            )
        if found.allocated_bytes:
            both = zip(found.allocated_bytes, found.resident_bytes, strict=True)
            shown = ", ".join(
                f"{readable_bytes(peak)} ({readable_bytes(before)} before)" for peak, before in both
            )
            lines.append(f"allocator peak   {shown}")
        return lines


class Allocator:
    """The CUDA allocator's count for a rank in the measured steps, after the gradients have been
    dropped.

    Unlike `SavedBytes` it counts everything: weights, gradients, the optimizer's state, workspaces.
    Each process has its own, so it is valid on a shared GPU, too. The CPU's allocator has no such
    count.
    """

    def __init__(self, device: torch.device, modules: Iterable[nn.Module]):
        self._device, self._modules = device, list(modules)

    def begin(self) -> None:
        """Count from here on."""
        for module in self._modules:
            module.zero_grad(set_to_none=True)
        gc.collect()  # what earlier runs left would be freed in this one's steps
        cuda.synchronize(self._device)
        cuda.reset_peak_memory_stats(self._device)
        self._before = cuda.memory_allocated(self._device)

    def report(self) -> tuple[int, int]:
        """Bytes at the start, and at the worst moment since."""
        return self._before, cuda.max_memory_allocated(self._device)


@dataclass
class RankHeld:
    """What one rank held."""

    peak_in_flight: int = 0
    peak_bytes: int = 0
    # By how much an F or I of a stage changes what is held, and how far above the start it rises.
    changes: dict[tuple[int, Kind], tuple[int, int]] = field(default_factory=dict)
    # of a stage: what a forward that runs again adds
    recomputed: dict[int, int] = field(default_factory=dict)
    # of a stage: what it gives another rank
    message_bytes: dict[int, int] = field(default_factory=dict)
    # the CUDA allocator's before the measured steps, and at their worst
    allocated: tuple[int, int] | None = None
    # of a stage: weights, gradients and the optimizer's state
    state: dict[int, int] = field(default_factory=dict)


class Counting(Listener):
    """Counts one pass of all stages together: bytes by action, and forwards whose activations are
    held.

    An engine without pplab's stages (torch's) reports no actions, so it is counted as a whole.
    """

    events = frozenset(("row", "action", "again", "steps"))

    def __init__(self, rank: Rank):
        self.rank, self.found = rank, RankHeld()
        # before the first, torch learns the shapes in one
        self._passes = 2 if rank.job.engine_name == "torch" else 1
        on_gpu = rank.context.device.type == "cuda"
        self._allocator = Allocator(rank.context.device, rank.modules.values()) if on_gpu else None

    @property
    def stages(self) -> Iterable:
        return self.rank.stages.values()

    @property
    def keepers(self) -> list:
        """What keeps tensors for backwards that autograd doesn't save: stages, and what carries
        between slices.
        """
        return [
            *self.stages,
            *(c for module in self.rank.modules.values() for c in getattr(module, "carried", ())),
        ]

    def begin(self, event: str, what: Any) -> None:
        """Start a new count for a row, or note what is held before an action."""
        if event == "steps":
            if self._allocator:
                self._allocator.begin()
            return
        if event == "row":
            modules = self.rank.modules.values()
            resident = (t for module in modules for t in (*module.parameters(), *module.buffers()))
            self.meter = SavedBytes(
                [*resident, *(x for microbatch in what for x in microbatch.tensors)]
            )
            for keeper in self.keepers:
                keeper.hold = self.meter.hold
        elif event == "again":
            self._held = self.meter.held
        else:
            self._before = self.meter.watch()
        if self._saves(event, what):
            self.meter.__enter__()

    def end(self, event: str, what: Any) -> None:
        if event == "steps":
            return
        meter, found = self.meter, self.found
        if self._saves(event, what):
            meter.__exit__()
        if event == "row":
            found.peak_bytes = meter.peak
            for keeper in self.keepers:
                keeper.hold = None
            self._passes -= 1
            if not self._passes:
                self.rank.around.remove(self, "row", "action", "again")
        elif event == "again":
            found.recomputed.setdefault(what, meter.held - self._held)
        else:
            if what.kind is not W:
                change = (meter.held - self._before, meter.lately - self._before)
                found.changes.setdefault((what.stage, what.kind), change)
            # backwards, or weight gradients
            to_come = sum(len(stage.held) + len(stage.due) for stage in self.stages)
            found.peak_in_flight = max(found.peak_in_flight, to_come)

    def report(self) -> RankHeld:
        if self._allocator:
            self.found.allocated = self._allocator.report()
        if self.rank.comm is not None:
            sent = self.found.message_bytes
            # of microbatches of other lengths, the largest
            for (stage, _), spec in self.rank.comm.specs.items():
                sent[stage] = max(sent.get(stage, 0), size_of(spec))
        return self.found

    def _saves(self, event: str, what: Any) -> bool:
        """Whether autograd saves tensors for a backward in the meantime."""
        return (
            event == "again"
            or (event == "action" and what.kind is F)
            or (event == "row" and not self.stages)
        )


class SavedBytes:
    """The bytes that forwards keep for their backwards, counted while autograd holds them.

    Every tensor that autograd saves is wrapped, and once autograd lets go of the wrapper, the bytes
    are free. A storage counts once, however many tensors share it. `resident` tensors don't count:
    parameters, buffers, the batch.
    """

    def __init__(self, resident: Iterable[Tensor]):
        self._resident = {t.untyped_storage().data_ptr() for t in resident}
        self._users: dict[int, int] = {}
        # now, at the worst moment, and at the worst since `watch`
        self.held = self.peak = self.lately = 0

    def watch(self) -> int:
        """Forget the worst moment so far, and return what is held now."""
        self.lately = self.held
        return self.held

    def hold(self, tensor: Tensor) -> _Held | Tensor:
        """Count a tensor for as long as the returned object lives."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._resident:
            return tensor
        return _Held(self, tensor, storage.data_ptr(), storage.nbytes())

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.hold, _unwrap)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


class _Held:
    """A tensor that a meter counts."""

    __slots__ = ("meter", "tensor", "storage", "nbytes")

    def __init__(self, meter: SavedBytes, tensor: Tensor, storage: int, nbytes: int):
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


def _unwrap(kept: _Held | Tensor) -> Tensor:
    """The tensor that a meter holds, or the tensor itself."""
    return kept.tensor if isinstance(kept, _Held) else kept


@dataclass(frozen=True)
class Held:
    """Bytes that ranks and stages held and sent, and how many forwards were in flight."""

    peak_in_flight: tuple[int, ...]  # per rank, counted while running
    peak_bytes: tuple[int, ...]  # per rank: kept by forwards for backwards at the worst moment
    bytes_of: tuple[int, ...]  # per stage: kept by one forward
    # per stage: what of it is kept after an input gradient, with what is kept for the weights
    kept_of: tuple[int, ...]
    # per stage: how far an input gradient rises above what was held at its start
    extra_of: tuple[int, ...]
    # per stage: what comes on top when a forward is run again; none: no stage does
    recomputed_of: tuple[int, ...] = ()
    # per stage: what it gives a stage on another rank; none by torch's runtime
    message_bytes: tuple[int, ...] = ()
    # per stage: weights, gradients, optimizer's state; none unless there is a Budget
    state_of: tuple[int, ...] = ()
    # Per rank, the CUDA allocator's peak in the measured steps (weights, gradients, optimizer and
    # all), and what of it was there before them (the weights); None on the CPU.
    allocated_bytes: tuple[int, ...] | None = None
    resident_bytes: tuple[int, ...] | None = None

    @property
    def memory(self) -> Memory:
        """What the stages hold for a microbatch, in bytes, and what they hold all the time, if a
        Budget has counted that.
        """
        again, state = self.recomputed_of or 0, self.state_of or 0
        return Memory(self.bytes_of, self.kept_of, again, state, self.extra_of, unit="bytes")

    def to_dict(self) -> dict:
        """All fields as a dict."""
        return asdict(self)


def together(schedule: Schedule, reports: Sequence[RankHeld]) -> Held:
    """Join what the ranks counted, by rank and by stage."""
    stages = range(schedule.num_stages)
    changes = {key: change for report in reports for key, change in report.changes.items()}
    recomputed = {stage: size for report in reports for stage, size in report.recomputed.items()}
    sent = {stage: size for report in reports for stage, size in report.message_bytes.items()}
    state = {stage: size for report in reports for stage, size in report.state.items()}
    bytes_of = [changes.get((stage, F), (0, 0))[0] for stage in stages]
    of_input = [changes.get((stage, I), (0, 0)) for stage in stages]
    allocated = [report.allocated for report in reports if report.allocated]
    return Held(
        tuple(report.peak_in_flight for report in reports),
        tuple(report.peak_bytes for report in reports),
        tuple(bytes_of),
        tuple(held + change for held, (change, _) in zip(bytes_of, of_input, strict=True)),
        tuple(max(0, rise - recomputed.get(stage, 0)) for stage, (_, rise) in enumerate(of_input)),
        tuple(recomputed.get(stage, 0) for stage in stages) if recomputed else (),
        tuple(sent.get(stage, 0) for stage in stages) if sent else (),
        tuple(state[stage] for stage in stages) if state else (),
        tuple(peak for _, peak in allocated) or None,
        tuple(before for before, _ in allocated) or None,
    )


def size_of(spec: Spec) -> int:
    """The bytes of a message."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in spec)


def readable_bytes(count: float) -> str:
    """`34.8 MB`, `512 B`: powers of ten, three digits."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
