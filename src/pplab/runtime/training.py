"""What a rank does for a training run: make its stages, run the schedule some times, report what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..actions import COMPUTE, Action, I, Overlap, parts
from ..deps import incoming, outgoing
from ..lowering import lower
from ..schedule import Schedule
from .clock import Clock, StepTrace
from .comm import Comm, size_of
from .executor import Executor
from .listener import Listener, Listeners
from .meter import Allocator, Counting, RankHeld
from .options import Job
from .reference import collect_gradients
from .shared import Pipes, SharedComm
from .stage import Stage
from .workload import Batch, names_in_whole, tied_weights


@dataclass
class RankContext:
    """Where a rank runs: its number, its device, its ways to the others."""

    rank: int
    num_ranks: int
    device: torch.device
    transport: str  # "shared", "gloo" or "nccl"
    store: dist.Store
    watch: Callable[..., None]  # told the phase, the place in the row, whether the rank waits
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)
    runs: int = 0
    pipes: Pipes | None = None  # of the shared transport
    timeout: timedelta | None = None  # of what ranks do together
    ahead: Callable[[], tuple[int, int]] | None = None  # of rank 0's clock, where ranks may be on several hosts

    def group(self, purpose: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The process group of some ranks for one purpose. Kept for later runs: it has threads, sockets, GPU memory.

        All ranks must call, also those that aren't in it, and in one order.
        """
        key = purpose, tuple(ranks)
        if key not in self.groups:
            backend = "nccl" if self.transport == "nccl" else "gloo"
            self.groups[key] = dist.new_group(list(ranks), timeout=self.timeout, backend=backend)
        return self.groups[key]

    def channels(self, pairs: Sequence[tuple[int, int]]) -> Mapping[tuple[int, int], dist.ProcessGroup]:
        """The process group of every channel. Only NCCL needs one each: its groups keep order. All ranks must call."""
        return {pair: self.group("channel", pair) for pair in pairs} if self.transport == "nccl" else {}

    @property
    def wire(self) -> torch.device:
        """Where tensors must be to cross: the device, or the host's memory."""
        return self.device if self.transport == "nccl" else torch.device("cpu")


@dataclass(frozen=True)
class RankReport:
    """What one rank measured."""

    traces: list[StepTrace]
    losses: list[float]  # of the measured steps: this rank's part of the batch's mean
    first_loss: float
    held: RankHeld
    gradients: dict[str, np.ndarray]
    allocated: tuple[int, int] | None  # the CUDA allocator's bytes before the measured steps, and at their worst
    message_bytes: Mapping[int, int]  # of a stage: what it gives another rank
    unsplit: frozenset[str]  # kinds of layers whose weights' gradients a split backward can't put off
    extras: tuple[object, ...]  # what the extras' listeners report


class Rank:
    """One rank of a run: its stages' modules by number, what it carries from step to step, and who listens."""

    def __init__(self, context: RankContext, job: Job):
        self.context, self.job = context, job
        context.watch("setting up")
        schedule, build = job.schedule, job.workload.build_stage
        stages = schedule.stages_of(context.rank)
        self.modules = {index: build(index, schedule.num_stages).to(context.device) for index in stages}
        self.names = names_in_whole(job.workload, self.modules, schedule.num_stages)
        parameters = [p for p in self.names if p.requires_grad]
        self.optimizer = job.options.optimizer(parameters) if job.options.optimizer and parameters else None
        self.clock = Clock(context.device, context.ahead)
        self.comm: Comm | None = None
        self.stages: Mapping[int, Stage] = {}
        self._buffers = [(b, b.clone()) for module in self.modules.values() for b in module.buffers()]

    @contextmanager
    def doing(self, label: str, phase: str) -> Iterator[None]:
        """Around what the rank does together with others beside its row; it is recorded under `label`."""
        self.context.watch(phase, 0, True)
        with self.clock.span(label):
            yield

    def listen(self, *first: Listener) -> Listeners:
        """Everybody who listens to this rank. Who comes first is told first of what begins, and last of what ended."""
        device, modules = self.context.device, self.modules.values()
        resident = (t for module in modules for t in (*module.parameters(), *module.buffers()))
        self.counting = Counting(self.stages.values(), resident)
        self.allocator = Allocator(device, modules) if device.type == "cuda" else None
        extras = [extra.listen(self) for extra in self.job.extras]
        self._extras = [listener or Listener() for listener in extras]
        listeners = [*first, self.clock, self.counting, *([self.allocator] if self.allocator else []), *self._extras]
        self.around = Listeners([*self._reduction(), *listeners])  # it starts a sum before an item's time begins
        return self.around

    def _reduction(self) -> list[Listener]:
        """What adds up the gradients of weights that are kept in several places, if some are."""
        context, schedule = self.context, self.job.schedule
        tied = tied_weights(self.job.workload, schedule.num_stages)
        if schedule.copies == 1 and not tied:
            return []
        from .reduction import Reducer  # only then

        group = partial(context.group, "copies")
        when = self.job.options.reduction
        return [Reducer(context.rank, schedule, self.modules, tied, group, context.wire, self.doing, when)]

    def train(self, run: Callable[[Batch], Sequence[Tensor]]) -> RankReport:
        """Take all steps; `run(batch)` runs the row once and returns the losses of the microbatches that end here.

        The first pass isn't timed: it agrees on shapes, counts held bytes and collects gradients. None of the passes
        before the measured steps changes a weight.
        """
        options = self.job.options
        first_loss = self.step(run, 0)
        gradients = collect_gradients((name, p) for p, name in self.names.items()) if options.check_gradients else {}
        self.around.remove(self.counting)
        for _ in range(options.warmup):
            self.step(run, 0)
        for buffer, kept in self._buffers:  # running averages: those passes don't count
            buffer.copy_(kept)
        self.clock.traces.clear()
        with self.around("steps"):
            losses = [self.step(run, step, update=True) for step in range(options.steps)]
        self.context.watch("reporting")
        report = RankReport(
            self.clock.traces,
            losses,
            first_loss,
            self.counting.found,
            gradients,
            self.allocator and self.allocator.report(),
            {stage: size_of(spec) for stage, spec in self.comm.specs.items()} if self.comm else {},
            frozenset(name for stage in self.stages.values() if stage.split for name in stage.deferred.unsplit),
            tuple(listener.report() for listener in self._extras),
        )
        self.around.clear()  # listeners know the rank: without them its tensors and slots go now, not at a collection
        self._extras.clear()
        return report

    def step(self, run: Callable[[Batch], Sequence[Tensor]], number: int, update: bool = False) -> float:
        """Take one step; returns this rank's part of the batch's loss."""
        context = self.context
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)
        batch = self.job.workload.batch(number).to(context.device)
        context.watch("at the barrier", 0, True)
        self.clock.tie()
        dist.barrier()
        with self.around("step"):
            with self.around("row", batch):
                losses = run(batch)
            if update:
                with self.around("update"):
                    self._optimize()
        return torch.stack(list(losses)).sum().item() * self.job.loss_scale if losses else 0.0

    def _optimize(self) -> None:
        if self.optimizer is not None:
            self.context.watch("in the optimizer")
            with self.clock.span("optimizer"), self.around("optimizer"):
                self.optimizer.step()


class Whereabouts(Listener):
    """Tells `watch` where in its lowered row a rank is, for whoever must say where it failed or waits."""

    events = frozenset(("item", "receive", "send"))

    def __init__(self, row: Sequence[Action | Overlap], num_stages: int, watch: Callable[..., None]):
        self._watch = watch
        self._at: dict[object, int] = {item: position for position, item in enumerate(row)}
        computed = [(position, item) for position, item in enumerate(row) if parts(item)[0].kind in COMPUTE]
        self._waits = {incoming(a, num_stages): position for position, item in computed for a in parts(item)}

    def begin(self, event: str, what: object) -> None:
        """It has come to an item, or waits for a message."""
        waits = event == "receive"
        self._watch("step", self._waits[what] if waits else self._at[what], waits)

    def end(self, event: str, what: object) -> None:
        """It waits no longer."""
        if event == "receive":
            self._watch("step", self._waits[what])


def train(context: RankContext, job: Job) -> RankReport:
    """Run the job's steps on this rank by the executor."""
    rank, schedule, workload = Rank(context, job), job.schedule, job.workload
    num_stages, again = schedule.num_stages, job.options.recomputed(schedule.num_stages)
    split = {a.stage for item in schedule.rows[context.rank] for a in parts(item) if a.kind is I}
    rank.stages = stages = {
        s: Stage(m, s, num_stages, workload.loss, job.loss_scale, s in split, job.options.autocast, s in again)
        for s, m in rank.modules.items()
    }
    home = schedule.home()
    rank.comm = comm = _connect(context, schedule, home)
    row = lower(schedule, ahead=1)[context.rank]
    around = rank.listen(Whereabouts(row, num_stages, context.watch))
    for stage in stages.values():
        stage.around = around
    overlap = getattr(workload, "overlap", None)
    executor = Executor(context.rank, row, stages, num_stages, home, comm, around, overlap)

    def run(batch: Batch) -> list[Tensor]:
        executor.run(batch.split(schedule.num_microbatches))
        comm.flush()
        losses = [loss for stage in stages.values() for loss in stage.losses.values()]
        for stage in stages.values():
            stage.losses.clear()
        return losses

    return rank.train(run)


def _connect(context: RankContext, schedule: Schedule, home: Mapping[tuple[int, int], int]) -> Comm:
    """This rank's ends of the channels that the schedule needs, each of which has carried something."""
    context.runs += 1
    pairs = channels_of(schedule, home)
    staged = context.device.type == "cuda" and context.transport != "nccl"
    key = f"run{context.runs}"
    ends = (context.rank, context.device, home, context.store, key, context.channels(pairs), staged)
    comm = Comm(*ends) if context.pipes is None else SharedComm(*ends, pipes=context.pipes)
    comm.warm_up(pairs)
    return comm


def channels_of(schedule: Schedule, home: Mapping[tuple[int, int], int]) -> list[tuple[int, int]]:
    """The ordered pairs of ranks between which messages go, in one order for all ranks."""
    pairs = {
        (rank, home[message.receive.stage, message.receive.microbatch])
        for rank, row in enumerate(schedule.rows)
        for item in row
        for action in parts(item)
        if (message := outgoing(action, schedule.num_stages))
    }
    return sorted((source, target) for source, target in pairs if source != target)
