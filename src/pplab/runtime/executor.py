"""The one executor: it runs whatever a lowered row says. No schedule has a training loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from ..actions import COMPUTE, INPUT_GRADIENT, RECV_B, RECV_F, Action, Kind, Overlap, W, parts
from ..deps import incoming, outgoing
from ..lab.profiling import NoSpans
from .comm import Comm
from .stage import Stage
from .trace import Meter, Recorder, paced, settle
from .workload import Batch


@dataclass
class Executor:
    """Runs one rank's lowered row on its stages."""

    rank: int
    row: Sequence[Action | Overlap]
    stages: Mapping[int, Stage]
    num_stages: int
    home: Mapping[tuple[int, int], int]  # (stage, microbatch) -> rank
    comm: Comm
    recorder: Recorder
    watch: Callable[[int, bool], None]  # told the place in the row, and whether it waits there
    pace_s: Mapping[str, Sequence[float]] | None = None  # seconds that a kind lasts at least, per stage
    overlap: Callable | None = None  # runs the halves of an overlap, given as functions; returns what each made
    spans: NoSpans = field(default_factory=NoSpans)  # what a profiler sees
    done: Callable[[Action | Overlap], None] | None = None  # told of every item that has run, when its sends are gone
    peak_in_flight: int = 0
    # Where a meter ran: by how much an F or I of a stage changes what is held, and how far above the start it rises.
    bytes_of: dict[tuple[int, Kind], tuple[int, int]] = field(default_factory=dict)
    recomputed_bytes: dict[int, int] = field(default_factory=dict)  # of a stage: what computing again adds

    def run(self, microbatches: Sequence[Batch], meter: Meter | None = None) -> None:
        """Run the row once; a meter counts the bytes that forwards keep."""
        self.local: dict[Action, tuple[Tensor, ...]] = {}  # for another stage on this rank
        self.outbox: dict[Action, tuple[Tensor, ...]] = {}  # for the sends that come next
        self.meter = meter
        last = None
        for position, item in enumerate(self.row):
            self.watch(position, False)
            if isinstance(item, Overlap) or item.kind in COMPUTE:
                self._compute(position, item, microbatches)
                last = item
            elif item.kind in (RECV_F, RECV_B):
                self.comm.post(item)
            else:
                with self.spans.named("pp.send"):
                    self.comm.send(item, self.outbox.pop(item))
            if self.done is not None and last is not None and not self.outbox:
                self.done(last)
                last = None
        assert not self.local and not self.outbox, "everything made in a step is used in it"

    def _compute(self, position: int, item: Action | Overlap, microbatches: Sequence[Batch]) -> None:
        """Fetch what the action needs, run it, keep what it makes for its send or for a stage on this rank."""
        halves = parts(item)
        run = [partial(self._run, action, self._fetch(position, action), microbatches) for action in halves]
        start = self.recorder.clock.mark()
        with self.spans.action(item):
            if len(run) > 1 and self.overlap is not None:
                made = self.overlap(*run)
            else:
                made = [each() for each in run]
        self.recorder.action(item, start, self.recorder.clock.mark())
        for action, tensors in zip(halves, made, strict=True):
            self._keep(action, tensors)

    def _run(self, action: Action, received: tuple[Tensor, ...], microbatches: Sequence[Batch]) -> tuple[Tensor, ...]:
        """Run one action, at least as long as its pace; returns what it made for another stage."""
        with paced(self.comm.device, self.pace_s and self.pace_s[action.kind][action.stage]):
            before = self.meter.watch() if self.meter else 0
            made = self._apply(action, received, microbatches[action.microbatch])
            if self.meter and action.kind is not W:
                change = (self.meter.held - before, self.meter.lately - before)
                self.bytes_of.setdefault((action.stage, action.kind), change)
            self.peak_in_flight = max(self.peak_in_flight, sum(stage.in_flight for stage in self.stages.values()))
        return made

    def _apply(self, action: Action, received: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, ...]:
        stage = self.stages[action.stage]
        if stage.recompute and action.kind in INPUT_GRADIENT:
            self._recompute(stage, action, batch)
        match action.kind:
            case Kind.F if self.meter is None:
                return stage.forward(action.microbatch, received, batch)
            case Kind.F:
                with self.meter:
                    return stage.forward(action.microbatch, received, batch, self.meter)
            case Kind.B:
                return stage.backward(action.microbatch, received)
            case Kind.I:
                return stage.backward_input(action.microbatch, received, self.meter)
            case _:
                stage.backward_weight(action.microbatch)
                return ()

    def _recompute(self, stage: Stage, action: Action, batch: Batch) -> None:
        """Run a forward again: part of its backward, timed and counted by itself as well."""
        start, held = self.recorder.clock.mark(), self.meter.held if self.meter else 0
        with self.meter or nullcontext():
            stage.again(action.microbatch, batch)
        self.recorder.again(action.stage, start, self.recorder.clock.mark())
        if self.meter:
            self.recomputed_bytes.setdefault(action.stage, self.meter.held - held)

    def _fetch(self, position: int, action: Action) -> tuple[Tensor, ...]:
        """What `action` needs of another stage: from this rank, or received (and then the wait is recorded)."""
        receive = incoming(action, self.num_stages)
        if receive is None:
            return ()
        if receive in self.local:
            return self.local.pop(receive)
        self.watch(position, True)
        start = self.recorder.clock.mark()
        with self.spans.named("pp.receive"):
            tensors = self.comm.receive(receive)
            settle(self.comm.device, self.pace_s)
        self.recorder.other(receive, start, self.recorder.clock.mark())
        self.watch(position, False)
        return tensors

    def _keep(self, action: Action, made: tuple[Tensor, ...]) -> None:
        """Put what `action` made where its send, or the stage on this rank that needs it, finds it."""
        message = outgoing(action, self.num_stages)
        if message is None:
            return
        if self.home[message.receive.stage, action.microbatch] == self.rank:
            self.local[message.receive] = made
        else:
            self.outbox[message.send] = made
