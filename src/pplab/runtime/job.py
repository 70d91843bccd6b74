"""What a rank does for a training run: make its stages, run the schedule some times, report what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ..actions import I, Kind, parts
from ..deps import outgoing
from ..lab.checkpoint import Checkpoint, Saved, collect, names_in_whole
from ..lab.clip import clip_gradients, own_parameters, own_stages
from ..lab.profiles import RankProfile
from ..lab.profiling import NoSpans, Recording
from ..lowering import lower
from ..schedule import Schedule
from .comm import Comm, size_of
from .executor import Executor
from .reduction import Reducer
from .shared import PacedLink, Pipes, SharedComm
from .stage import Stage, autocast
from .trace import Allocator, Meter, Recorder, StepTrace, recorder_for, settle
from .workload import Workload, loss_scale, tied_weights


@dataclass
class RankContext:
    """Where a rank runs: its number, its device, its ways to the others."""

    rank: int
    num_ranks: int
    device: torch.device
    transport: str  # "shared", "gloo" or "nccl"
    store: dist.Store
    watch: Callable[[str, int, bool], None]  # told the phase, the place in the row, whether the rank waits
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)
    runs: int = 0
    pipes: Pipes | None = None  # of the shared transport
    timeout: timedelta | None = None  # of what ranks do together
    several_hosts: bool = False  # whether ranks may be on hosts with clocks of their own

    def recorder(self) -> Recorder:
        """What records this rank's steps, on one clock for all ranks."""
        return recorder_for(self.rank, self.num_ranks, self.device, self.several_hosts)

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


@dataclass(frozen=True)
class Job:
    """A training run, the same for all ranks."""

    schedule: Schedule
    workload: Workload
    steps: int
    warmup: int
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None
    collect_gradients: bool
    pace_s: Mapping[str, Sequence[float]] | None
    autocast: torch.dtype | None = None
    paced_links: Mapping[tuple[int, int], PacedLink] = field(default_factory=dict)
    profile: str | None = None  # the folder for traces of the measured steps
    reduction: str = "end"  # when gradients of weights that are kept in several places are added up
    recompute: frozenset[int] = frozenset()  # the stages that compute their activations again
    clip_norm: float | None = None  # the most that the norm of all gradients may be
    resume: Checkpoint | None = None  # where the workload goes on from
    save: bool = False  # whether to report weights and the optimizer's state
    engine: str = "pplab"  # or "torch"

    @property
    def first_step(self) -> int:
        """How many steps were done before this run."""
        return self.resume.step if self.resume else 0

    @property
    def loss_scale(self) -> float:
        """What a microbatch's loss is multiplied with, so that the batch's loss is their sum."""
        return loss_scale(self.workload, self.schedule.num_microbatches)


@dataclass(frozen=True)
class RankReport:
    """What one rank measured."""

    traces: list[StepTrace]
    losses: list[float]  # of the measured steps: this rank's part of the batch's mean
    peak_in_flight: int
    peak_bytes: int
    bytes_of: dict[tuple[int, Kind], tuple[int, int]]
    gradients: dict[str, np.ndarray]
    first_loss: float
    unsplit: frozenset[str] = frozenset()  # kinds of layers whose weights' gradients a split backward can't put off
    profile: RankProfile | None = None
    allocated: tuple[int, int] | None = None  # the CUDA allocator's bytes before the measured steps, and at their worst
    recomputed_bytes: Mapping[int, int] = field(default_factory=dict)  # of a stage: what computing again adds
    gradient_norms: tuple[float, ...] = ()  # of all ranks, per measured step, before clipping
    message_bytes: Mapping[int, int] = field(default_factory=dict)  # of a stage: what it gives another rank
    saved: Saved | None = None


def train(context: RankContext, job: Job) -> RankReport:
    """Run the job's steps on this rank.

    The first pass over the schedule isn't timed: it agrees on shapes, counts held bytes and collects gradients; none of
    the passes before the measured steps changes a weight.
    """
    rank, schedule, workload, device = context.rank, job.schedule, job.workload, context.device
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    context.watch("setting up", 0, False)
    split = {action.stage for item in schedule.rows[rank] for action in parts(item) if action.kind is I}
    stages = {
        index: Stage(
            module,
            index,
            num_stages,
            workload.loss,
            job.loss_scale,
            index in split,
            job.autocast,
            index in job.recompute,
        )
        for index, module in stage_modules(context, job).items()
    }
    home = schedule.home()
    context.runs += 1
    pairs = channels_of(schedule, home)
    staged = device.type == "cuda" and context.transport != "nccl"
    ends = (rank, device, home, context.store, f"run{context.runs}", context.channels(pairs), staged)
    comm = Comm(*ends) if context.pipes is None else SharedComm(*ends, pipes=context.pipes, links=job.paced_links)
    comm.warm_up(pairs)
    tied = tied_weights(workload, num_stages)
    wire = torch.device("cpu") if staged else device
    copies = Reducer(rank, schedule, stages, tied, partial(context.group, "copies"), wire, job.reduction)
    recorder = context.recorder()
    watch = lambda position, waits: context.watch("step", position, waits)  # noqa: E731
    executor = Executor(
        rank,
        lower(schedule, ahead=1)[rank],
        stages,
        num_stages,
        home,
        comm,
        recorder,
        watch,
        job.pace_s,
        getattr(workload, "overlap", None),
        done=copies.done if copies else None,
    )
    modules = [stage.module for stage in stages.values()]
    state = State(context, job, {index: stage.module for index, stage in stages.items()})
    recording = Recording(job.profile, rank, schedule.rows[rank], device, modules)

    def run_pass(step: int, count: bool = False, update: bool = False) -> tuple[StepTrace, float]:
        nonlocal meter
        for module in modules:
            module.zero_grad(set_to_none=True)
        microbatches = [m.to(device) for m in workload.batch(step).split(num_microbatches)]
        if count:
            weights = (t for module in modules for t in (*module.parameters(), *module.buffers()))
            meter = Meter([*weights, *(t for m in microbatches for t in m.tensors())])
        context.watch("at the barrier", 0, True)
        recorder.tie()
        dist.barrier()
        recorder.begin()
        copies.begin()
        with executor.spans.named("pp.step"):
            executor.run(microbatches, meter if count else None)
            comm.flush()
            if copies:
                context.watch("adding the copies' gradients", 0, True)
                start = recorder.clock.mark()
                copies.finish()
                recorder.other(copies.label, start, recorder.clock.mark())
            if update:
                state.update(recorder, executor.spans)
            settle(device, job.profile)
        return recorder.finish(), _loss(stages) * job.loss_scale

    meter: Meter | None = None
    _, first_loss = run_pass(0, count=True)
    gradients = state.gradients()
    for _ in range(job.warmup):
        run_pass(0)
    state.restore_buffers()
    executor.peak_in_flight = 0
    executor.spans = recording.spans
    allocator = Allocator(device, modules)
    with recording:
        measured = [run_pass(step, update=True) for step in range(job.steps)]
    context.watch("reporting", 0, False)
    return RankReport(
        [trace for trace, _ in measured],
        [loss for _, loss in measured],
        executor.peak_in_flight,
        meter.peak,
        executor.bytes_of,
        gradients,
        first_loss,
        frozenset(name for stage in stages.values() if stage.split for name in stage.deferred.unsplit),
        profile=recording.summary,
        allocated=allocator.read(),
        recomputed_bytes=executor.recomputed_bytes,
        gradient_norms=tuple(state.norms),
        message_bytes={stage: size_of(spec) for stage, spec in comm.specs.items()},
        saved=state.saved() if job.save else None,
    )


def stage_modules(context: RankContext, job: Job) -> dict[int, nn.Module]:
    """The modules of a rank's stages on its device, by the stages' numbers."""
    schedule = job.schedule
    return {
        index: job.workload.build_stage(index, schedule.num_stages).to(context.device)
        for index in schedule.stages_of(context.rank)
    }


class State:
    """What a rank carries from step to step: weights, buffers, its optimizer's state. Restored when the job resumes."""

    def __init__(self, context: RankContext, job: Job, modules: Mapping[int, nn.Module]):
        self.context, self.job, self.modules = context, job, modules
        self.names = names_in_whole(job.workload, modules, job.schedule.num_stages)
        self.norms: list[float] = []  # of the gradients, before clipping
        self._own = own_parameters(context.rank, job.schedule, job.workload, modules)
        self._buffers = [(b, b.clone()) for module in modules.values() for b in module.buffers()]
        parameters = [p for p in self.names if p.requires_grad]
        self.optimizer = job.optimizer(parameters) if job.optimizer and parameters else None
        if job.resume is not None and self.optimizer is not None:
            job.resume.load_optimizer(self.optimizer, self.names)

    def restore_buffers(self) -> None:
        """Undo what passes that don't count as steps did to running averages."""
        for buffer, kept in self._buffers:
            buffer.copy_(kept)

    def gradients(self) -> dict[str, np.ndarray]:
        """The gradients by their names in the whole model, if the job collects them."""
        return collect_gradients((name, p) for p, name in self.names.items()) if self.job.collect_gradients else {}

    def update(self, recorder: Recorder, spans: NoSpans) -> None:
        """Clip the gradients by the norm over all ranks, and take the optimizer's step: what of it the job asks for."""
        context, limit = self.context, self.job.clip_norm
        if limit is not None:
            context.watch("clipping gradients", 0, True)
            start = recorder.clock.mark()
            self.norms.append(clip_gradients(list(self.names), self._own, limit, context.rank, context.num_ranks))
            recorder.other("clipping", start, recorder.clock.mark())
        if self.optimizer is not None:
            context.watch("in the optimizer", 0, False)
            start = recorder.clock.mark()
            with spans.named("pp.optimizer_step"):
                self.optimizer.step()
            recorder.other("optimizer", start, recorder.clock.mark())

    def saved(self) -> Saved:
        """What this rank saves of the stages that it answers for."""
        own = own_stages(self.context.rank, self.job.schedule)
        return collect((self.modules[stage] for stage in own), self.optimizer, self.names)


@dataclass(frozen=True)
class WholeReport:
    """What one process measured with the whole model."""

    loss: float
    gradients: dict[str, np.ndarray]
    step_times_ms: list[float]


def train_whole(
    context: RankContext, workload: Workload, num_microbatches: int, steps: int, dtype: torch.dtype | None = None
) -> WholeReport | None:
    """Run the model in one piece on rank 0: the whole batch for loss and gradients, then steps of microbatches in turn
    for time. The other ranks return at once."""
    if context.rank != 0:
        return None
    context.watch("running the model in one process", 0, False)
    model = workload.build_whole().to(context.device)
    batch = workload.batch(0).to(context.device)
    with autocast(context.device, dtype):
        loss = workload.loss(model(*batch.inputs, **batch.context), batch.target)
    loss.backward()
    gradients = collect_gradients(model.named_parameters())
    times = []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        _synchronize(context.device)
        start = time.perf_counter()
        for m in batch.split(num_microbatches):
            with autocast(context.device, dtype):
                part = workload.loss(model(*m.inputs, **m.context), m.target)
            (part * loss_scale(workload, num_microbatches)).backward()
        _synchronize(context.device)
        times.append((time.perf_counter() - start) * 1e3)
    return WholeReport(loss.item(), gradients, times)


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


def _loss(stages: Mapping[int, Stage]) -> float:
    """The sum of this rank's microbatches' losses: 0 where the last stage isn't."""
    losses = [loss for stage in stages.values() for loss in stage.losses.values()]
    for stage in stages.values():
        stage.losses.clear()
    return torch.stack(losses).sum().item() if losses else 0.0


def collect_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, np.ndarray]:
    """Every parameter's gradient by name, in single precision or better, on the host."""
    found = {}
    for name, parameter in named:
        if parameter.grad is not None:
            gradient = parameter.grad.detach().cpu()
            found[name] = (gradient if gradient.dtype == torch.float64 else gradient.float()).numpy()
    return found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
