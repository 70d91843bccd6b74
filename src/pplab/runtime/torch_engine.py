"""The same stages and batches under PyTorch's own pipelining runtime, for comparison."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from .job import Job, RankContext

CLASSES = {"GPipe": "ScheduleGPipe", "1F1B": "Schedule1F1B"}


def train_torch(context: RankContext, job: Job) -> list[tuple[int, int]]:
    """Run the job's steps with `torch.distributed.pipelining`; returns each measured step's start and end on this rank,
    in nanoseconds of the host's clock."""
    from torch.distributed import pipelining  # takes a second: only where it is used

    schedule, workload, device = job.schedule, job.workload, context.device
    if schedule.name not in CLASSES:
        raise ValueError(f"can run {', '.join(CLASSES)} with torch's runtime, got {schedule.name}")
    context.watch("setting up", 0, False)
    module = workload.build_stage(context.rank, schedule.num_stages).to(device)
    stage = pipelining.PipelineStage(module, context.rank, schedule.num_stages, device)
    runner = getattr(pipelining, CLASSES[schedule.name])(stage, schedule.num_microbatches, loss_fn=workload.loss)
    parameters = list(module.parameters())
    optimizer = job.optimizer(parameters) if job.optimizer and parameters else None
    times = []
    for step in range(-1 - job.warmup, job.steps):
        module.zero_grad(set_to_none=True)
        batch = workload.batch(max(step, 0)).to(device)
        inputs = batch.inputs if stage.is_first else ()
        target = {"target": batch.target} if stage.is_last else {}
        context.watch("at the barrier", 0, True)
        dist.barrier()
        start = time.perf_counter_ns()
        runner.step(*inputs, **target, **batch.context)
        if step >= 0 and optimizer is not None:
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((start, time.perf_counter_ns()))
    return times[-job.steps :]
