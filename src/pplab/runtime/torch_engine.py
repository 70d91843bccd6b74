"""The same stages and batches under PyTorch's own pipelining runtime, for comparison."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from ..actions import Action, B, F, I, W, parts
from ..schedule import Schedule
from .job import Job, RankContext, RankReport, State, collect_gradients, stage_modules
from .stage import autocast
from .trace import Meter, StepTrace, recorder_for

CLASSES = {
    "GPipe": "ScheduleGPipe",
    "1F1B": "Schedule1F1B",
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "LoopedBFS": "ScheduleLoopedBFS",
    "InterleavedZeroBubble": "ScheduleInterleavedZeroBubble",
    "ZBVZeroBubble": "ScheduleZBVZeroBubble",
    "DualPipeV": "ScheduleDualPipeV",
}


def train_torch(context: RankContext, job: Job) -> RankReport:
    """Run the job's steps with `torch.distributed.pipelining`: its class for the schedule's name, or its interpreter.

    Times are those of its calls into the stages, without the waits between them. Bytes are what autograd saves.
    """
    schedule, workload, device = job.schedule, job.workload, context.device
    if device.type == "cuda" and context.transport != "nccl":
        raise ValueError(
            "torch's runtime can't send between ranks that share a GPU: use a GPU for each rank, or the CPU"
        )
    context.watch("setting up", 0, False)
    recorder = recorder_for(device)
    times: dict[Action, tuple[object, object]] = {}
    modules = stage_modules(context, job)
    runner = _runner(schedule, job, modules, device, recorder.clock.mark, times)
    parameters = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
    optimizer = job.optimizer(parameters) if job.optimizer and parameters else None
    state = State(context, job, modules, optimizer)

    def run_pass(step: int, meter: Meter | None = None, update: bool = False) -> tuple[StepTrace, float]:
        for module in modules.values():
            module.zero_grad(set_to_none=True)
        batch = workload.batch(step).to(device)
        inputs = batch.inputs if 0 in modules else ()
        losses: list[torch.Tensor] = []
        last = {"target": batch.target, "losses": losses} if schedule.num_stages - 1 in modules else {}
        context.watch("at the barrier", 0, True)
        dist.barrier()
        times.clear()
        recorder.begin()
        context.watch("step", 0, False)
        with autocast(device, job.autocast), meter or nullcontext():
            runner.step(*inputs, **last, **batch.context)
        if update and job.clip_norm is not None:
            start = recorder.clock.mark()
            state.clip()
            recorder.other("clipping", start, recorder.clock.mark())
        if update and optimizer is not None:
            start = recorder.clock.mark()
            optimizer.step()
            recorder.other("optimizer", start, recorder.clock.mark())
        for item in schedule.rows[context.rank]:
            halves = [times[action] for action in parts(item)]
            recorder.action(item, halves[0][0], halves[-1][1])
        loss = torch.stack([x.detach() for x in losses]).sum().item() * job.loss_scale if losses else 0.0
        return recorder.finish(), loss

    run_pass(0)  # torch learns the shapes in its first step, with an extra pass
    meter = Meter(t for module in modules.values() for t in (*module.parameters(), *module.buffers()))
    _, first_loss = run_pass(0, meter)
    gradients = collect_gradients(modules.values()) if job.collect_gradients else {}
    for _ in range(job.warmup):
        run_pass(0)
    state.restore_buffers()
    measured = [run_pass(step, update=True) for step in range(job.steps)]
    traces, losses = [trace for trace, _ in measured], [loss for _, loss in measured]
    norms, saved = tuple(state.norms), state.saved() if job.save else None
    return RankReport(traces, losses, 0, meter.peak, {}, gradients, first_loss, gradient_norms=norms, saved=saved)


def _runner(schedule: Schedule, job: Job, modules: dict, device: torch.device, mark, times: dict):
    """torch's runtime on stages that note when each action runs."""
    from torch.distributed import pipelining  # takes a second: only where it is used
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    class Timed(pipelining.PipelineStage):
        def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
            return self._time(F, fwd_chunk_id, super().forward_one_chunk, *args, **kwargs)

        def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, **kwargs):
            kind = B if full_backward else I
            call = super().backward_one_chunk
            return self._time(kind, bwd_chunk_id, call, loss=loss, full_backward=full_backward, **kwargs)

        def backward_weight_one_chunk(self, bwd_chunk_id, **kwargs):
            return self._time(W, bwd_chunk_id, super().backward_weight_one_chunk, **kwargs)

        def _time(self, kind, chunk, call, *args, **kwargs):
            start = mark()
            made = call(chunk, *args, **kwargs)
            times[Action(self.stage_index, kind, chunk)] = (start, mark())
            return made

    group = dist.new_group(backend="nccl") if device.type == "cuda" else None
    stages = [Timed(module, index, schedule.num_stages, device, group=group) for index, module in modules.items()]
    options = {"loss_fn": job.workload.loss, "scale_grads": job.loss_scale != 1}
    name = CLASSES.get(schedule.name)
    if name is None:
        runner = _PipelineScheduleRuntime(stages, schedule.num_microbatches, **options)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "schedule.csv")
            path.write_text(schedule.to_csv())
            runner._load_csv(str(path))
        return runner
    only_one = schedule.num_stages == schedule.num_ranks and name in ("ScheduleGPipe", "Schedule1F1B")
    return getattr(pipelining, name)(stages[0] if only_one else stages, schedule.num_microbatches, **options)
