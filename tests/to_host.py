"""Activations copied to the host's memory while they wait for their backward: what `lab.Offload` simulates, in a run.

What autograd saves of a forward is kept by storage. Once the forward is done, one engine copies storages to the host
and lets the device's go; another brings them back before the backward that needs them. An engine is a thread, with a
stream of its own on a GPU, so copies run beside computation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pplab.actions import INPUT_GRADIENT, Action, F, Overlap, parts
from pplab.costs import PerStage, check_length, of_stage, per_stage
from pplab.errors import accept, positive_int
from pplab.lab import Recompute, readable_bytes
from pplab.lab.streams import Offload, leaving_of
from pplab.runtime import Batch, Extra, Job, Listener, Rank, Stage, cuda

Key = tuple[int, int]  # stage, microbatch


class Home:
    """A storage that forwards save: on the device, or on the host, or on its way."""

    def __init__(self, tensor: Tensor, device: torch.device, hold: Callable[[Tensor], object] | None):
        self.storage, self.nbytes = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
        self.device, self.hold = device, hold
        self.counted = hold and hold(tensor)
        self.host: Tensor | None = None
        self.back: Future | None = None  # of the copy back

    def flat(self) -> Tensor:
        """The device's storage as bytes."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)

    def leave(self) -> None:
        """Copy to the host, and let the device's memory go."""
        self.host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self.host.copy_(self.flat(), non_blocking=True)
        if self.device.type == "cuda":
            cuda.current_stream(self.device).synchronize()
        self.storage = self.counted = None

    def come_back(self, room: Tensor) -> None:
        """Copy into `room` on the device."""
        room.copy_(self.host, non_blocking=True)
        if self.device.type == "cuda":
            cuda.current_stream(self.device).synchronize()
        self.storage, self.host = room.untyped_storage(), None
        self.counted = self.hold and self.hold(room)


@dataclass(frozen=True)
class Saved:
    """What autograd keeps in place of a tensor."""

    home: Home
    dtype: torch.dtype
    place: tuple[int, torch.Size, tuple[int, ...]]  # offset, shape and strides in its storage

    def tensor(self) -> Tensor:
        """The tensor, once its storage is on the device."""
        if self.home.back is not None:
            self.home.back.result()
        return torch.empty(0, dtype=self.dtype, device=self.home.device).set_(self.home.storage, *self.place)


@dataclass(frozen=True)
class OnHost:
    """What was copied, and how long it took: `offload` is what to simulate."""

    copied_bytes: tuple[int, ...]  # per stage, of a microbatch; 0 where none of its microbatches is copied
    peak_on_host: tuple[int, ...]  # per rank, in the first step, whose copies nobody measures and everybody waits for
    out_ms: tuple[float, ...]  # per stage, the median
    back_ms: tuple[float, ...]

    def offload(self, bytes_of: Sequence[int], ahead: int = 1) -> Offload:
        """For `Offload.simulate`: measured times, and the shares of `run.held.bytes_of`, what stages keep."""
        share = [moved / kept if kept else 0 for moved, kept in zip(self.copied_bytes, bytes_of, strict=True)]
        return Offload(self.out_ms, self.back_ms, share=share, ahead=ahead)


@dataclass(frozen=True)
class ToHost(Extra):
    """Copy what stages keep of microbatches to the host and back: see `lab.Offload`, whose words these are.

    Storages are copied whole, first come first, as long as they fit into the `share` of what a forward keeps. What a
    stage received stays. A rank waits for the first step's copies, so its peaks are those of copies that take no time.
    """

    share: PerStage = 1
    ahead: int = 1
    name = "to_host"

    def __post_init__(self) -> None:
        accept(self, share=per_stage("share", self.share, 1))
        positive_int("ahead", self.ahead)

    def check(self, job: Job) -> Job:
        """ValueError for shares that don't fit, and for stages that recompute, which keep nothing to copy."""
        check_length("share", self.share, job.schedule.num_stages)
        if sum(isinstance(extra, ToHost) for extra in job.extras) > 1:
            raise ValueError("a run has one ToHost")
        if any(isinstance(extra, Recompute) for extra in job.extras):
            raise ValueError("ToHost and Recompute don't go together: what is recomputed isn't kept, so leave one out")
        return job

    def check_devices(self, job: Job, devices: Sequence[str], transport: str) -> None:
        """ValueError for torch's runtime."""
        if job.engine_name != "pplab":
            raise ValueError("ToHost needs pplab's engine, which tells of forwards and backwards")

    def listen(self, rank: Rank) -> Listener:
        """The rank's copies."""
        return _Copies(rank, self)

    def finish(self, job: Job, reports: Sequence[dict]) -> OnHost:
        """By rank and by stage."""
        found = {key: value for report in reports for key, value in report["stages"].items()}
        stages = [found.get(stage, (0, 0.0, 0.0)) for stage in range(job.schedule.num_stages)]
        return OnHost(
            tuple(moved for moved, _, _ in stages),
            tuple(report["peak"] for report in reports),
            tuple(out for _, out, _ in stages),
            tuple(back for _, _, back in stages),
        )

    def lines(self, found: OnHost) -> Sequence[str]:
        """What the Run says of it."""
        return [f"peak on the host {', '.join(map(readable_bytes, found.peak_on_host))}"]


@dataclass
class _Copies(Listener):
    """One rank's engines, and which microbatches they copy when."""

    rank: Rank
    asked: ToHost
    events = frozenset(("row", "item"))
    homes: dict[Key, list[Home]] = field(default_factory=dict)  # of a forward that has run: what of it shall leave
    gone: dict[Key, tuple[list[Home], Future]] = field(default_factory=dict)
    moved: dict[int, int] = field(default_factory=dict)
    took: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # "out" or "back", and a stage: ms

    def __post_init__(self) -> None:
        row = self.rank.job.schedule.rows[self.rank.context.rank]
        self.leaving, turns = leaving_of(row, self.asked.share)
        self.turns = {key: turn for turn, key in enumerate(turns)}
        self.device, self.first = self.rank.context.device, True
        self.engines = {way: self._engine() for way in ("out", "back")}
        self.on_host = self.peak = 0
        self._lock = threading.Lock()
        for stage in self.rank.stages.values():
            stage.forward = partial(self._forward, stage, stage.forward)

    def _engine(self) -> ThreadPoolExecutor:
        start = partial(_use_stream, self.device) if self.device.type == "cuda" else None
        return ThreadPoolExecutor(1, initializer=start)

    def _forward(self, stage: Stage, forward: Callable, m: int, received: tuple[Tensor, ...], batch: Batch) -> tuple:
        """The stage's forward, and what it saves by storage."""
        resident = {t.untyped_storage().data_ptr() for t in (*received, *batch.tensors)}
        resident |= {t.untyped_storage().data_ptr() for t in (*stage.module.parameters(), *stage.module.buffers())}
        homes: dict[int, Home] = {}

        def pack(tensor: Tensor) -> Tensor | Saved:
            place = tensor.untyped_storage().data_ptr()
            if place in resident or not tensor.untyped_storage().nbytes():
                return tensor
            if place not in homes:
                homes[place] = Home(tensor, self.device, stage.hold)
            return Saved(homes[place], tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride()))

        def unpack(kept: Tensor | Saved) -> Tensor:
            return kept.tensor() if isinstance(kept, Saved) else kept

        with saved_tensors_hooks(pack, unpack):
            made = forward(m, received, batch)
        if homes and (key := (stage.index, m)) in self.leaving:
            chosen, room = [], of_stage(self.asked.share, stage.index) * sum(home.nbytes for home in homes.values())
            for home in homes.values():
                if home.nbytes <= room:
                    room -= home.nbytes
                    chosen.append(home)
            self.homes[key] = chosen
            self.moved[stage.index] = max(self.moved.get(stage.index, 0), sum(home.nbytes for home in chosen))
        homes.clear()  # autograd keeps `pack`, and with it this, until the last of the graph has gone
        return made

    def begin(self, event: str, what: Action | Overlap | None) -> None:
        """A backward begins: those that follow it may have their activations back."""
        if event == "row":
            self.due = self.asked.ahead  # how many of the turns may
        elif event == "item":
            for part in parts(what):
                if part.kind in INPUT_GRADIENT:
                    self.due = max(self.due, self.turns[part.stage, part.microbatch] + self.asked.ahead + 1)
            self._bring()

    def end(self, event: str, what: Action | Overlap | None) -> None:
        """A forward has ended: what it keeps leaves."""
        if event == "item":
            for part in parts(what):
                if part.kind is F and (homes := self.homes.pop((part.stage, part.microbatch), None)):
                    out = self._start("out", part.stage, homes, [home.leave for home in homes])
                    self.gone[part.stage, part.microbatch] = homes, out
            self._bring()
        elif event == "row":
            self.first = False

    def _bring(self) -> None:
        """Ask for what is due and gone."""
        for key in [key for key in self.gone if self.turns[key] < self.due]:
            homes, out = self.gone.pop(key)
            room = [torch.empty(home.nbytes, dtype=torch.uint8, device=self.device) for home in homes]
            steps = [partial(home.come_back, each) for home, each in zip(homes, room, strict=True)]
            back = self._start("back", key[0], homes, steps, out)
            for home in homes:
                home.back = back

    def _start(
        self, way: str, stage: int, homes: list[Home], steps: list[Callable], out: Future | None = None
    ) -> Future:
        """Let an engine take these steps, after those that `out` stands for and what the GPU was given so far."""
        ready = cuda.Event() if self.device.type == "cuda" else None
        if ready:
            ready.record()
        size = sum(home.nbytes for home in homes)
        future = self.engines[way].submit(self._copy, way, stage, size, steps, out, ready)
        if self.first:
            future.result()
        return future

    def _copy(
        self, way: str, stage: int, size: int, steps: list[Callable], out: Future | None, ready: cuda.Event | None
    ) -> None:
        if out:
            out.result()
        if ready:
            ready.synchronize()
        self._count(size if way == "out" else 0)
        began = time.perf_counter()
        for step in steps:
            step()
        if not self.first:
            self.took.setdefault((way, stage), []).append((time.perf_counter() - began) * 1e3)
        self._count(0 if way == "out" else -size)

    def _count(self, change: int) -> None:
        with self._lock:
            self.on_host += change
            if self.first:
                self.peak = max(self.peak, self.on_host)

    def report(self) -> dict:
        """What was moved, in which time."""
        for engine in self.engines.values():
            engine.shutdown()
        for stage in self.rank.stages.values():
            del stage.forward  # which knows the rank, and with it all tensors
        each = {s: tuple(median(self.took.get((way, s), [0.0])) for way in ("out", "back")) for s in self.moved}
        return {"peak": self.peak, "stages": {s: (moved, *each[s]) for s, moved in self.moved.items()}}


def _use_stream(device: torch.device) -> None:
    cuda.set_device(device)
    cuda.set_stream(cuda.Stream(device))
