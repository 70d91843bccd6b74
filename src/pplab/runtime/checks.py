"""What can be checked of a run before anything starts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path

import torch
from torch import nn

from ..actions import Kind, parts
from ..costs import Costs, Link
from ..errors import positive_int, unknown
from ..lab.checkpoint import Checkpoint, Resumed, check_place
from ..lab.replicas import replicate
from ..lab.torch_engine import train_torch
from ..schedule import Schedule
from ..simulator import validate
from .job import Job, train
from .reduction import REDUCTIONS
from .shared import PacedLink
from .workload import Workload, check_divides, tied_weights

ENGINES = {"pplab": train, "torch": train_torch}


def check_job(
    schedule: Schedule,
    workload: Workload,
    num_ranks: int,
    *,
    steps: int = 3,
    warmup: int = 1,
    check_gradients: bool = False,
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None = None,
    pace: Costs | None = None,
    autocast: torch.dtype | None = None,
    engine: str = "pplab",
    profile: str | Path | None = None,
    replicas: int = 1,
    reduction: str = "end",
    recompute: bool | Iterable[int] = False,
    clip_norm: float | None = None,
    resume: str | os.PathLike | None = None,
    save: str | os.PathLike | None = None,
) -> Job:
    """The job for `num_ranks` ranks, with everything checked that can be before anything starts."""
    validate(schedule)
    ranks, microbatches = schedule.num_ranks, schedule.num_microbatches
    schedule = replicate(schedule, replicas)
    if schedule.num_ranks != num_ranks:
        times = f" times {replicas} replicas" if replicas > 1 else ""
        raise ValueError(
            f"{schedule.name} is for {ranks} ranks{times} and there are {num_ranks}: "
            f"start {schedule.num_ranks} ranks, or build the schedule for "
            + (f"{num_ranks // replicas}" if num_ranks % replicas == 0 else "another number")
        )
    workload.check(schedule.num_stages)
    if replicas > 1 and workload.batch_size % schedule.num_microbatches:
        raise ValueError(
            f"a batch of {workload.batch_size} doesn't divide into {replicas} replicas of {microbatches} equal "
            f"microbatches: make it a multiple of {schedule.num_microbatches}"
        )
    check_divides(workload.batch_size, schedule.num_microbatches)
    if reduction not in REDUCTIONS:
        raise unknown("reduction", reduction, REDUCTIONS)
    if engine == "torch" and len(schedule.replicas) > 1:
        raise ValueError('replicas need engine="pplab": with torch\'s runtime, reduce gradients yourself (DDP, FSDP)')
    if engine == "torch" and tied_weights(workload, schedule.num_stages):
        raise ValueError("tied weights need engine=\"pplab\": torch's runtime doesn't add up their gradients")
    if not isinstance(warmup, int) or warmup < 0:
        raise ValueError(f"warmup must be an integer of at least 0, got {warmup!r}")
    paces = _pace_s(pace, schedule)
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    if engine == "torch" and schedule.copies > 1:
        raise ValueError(f"{schedule.name} is bidirectional, which torch's runtime doesn't know: take engine=\"pplab\"")
    if engine == "torch":
        _check_order_of_losses(schedule)
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"autocast must be torch.bfloat16, torch.float16 or None, got {autocast!r}")
    if clip_norm is not None and not (type(clip_norm) in (int, float) and 0 < clip_norm < math.inf):
        raise ValueError(f"clip_norm must be a number of more than 0, or None, got {clip_norm!r}")
    again = _stages_that_recompute(recompute, schedule.num_stages)
    if engine == "torch" and again:
        raise ValueError('recompute needs engine="pplab"; for torch\'s runtime wrap the modules in its checkpoint')
    steps, links = positive_int("steps", steps), _paced_links(pace, schedule)
    if engine == "torch" and links:
        raise ValueError("pace with latency or bandwidth needs engine=\"pplab\": torch's messages can't be delayed")
    if save is not None:
        check_place(save)
    checkpoint = None
    if resume is not None:
        checkpoint = Checkpoint.open(resume)
        checkpoint.check_fits(workload)
        if save is not None and optimizer is None and checkpoint.optimizer is not None:
            raise ValueError(
                f"{checkpoint.path} holds the state of {checkpoint.optimizer}, which would be lost in {save}, since "
                f"this run has no optimizer: resume with {checkpoint.optimizer}, or don't save"
            )
        workload = Resumed(workload, checkpoint)
    if profile is not None:
        Path(profile).mkdir(parents=True, exist_ok=True)
        profile = str(Path(profile).resolve())
    return Job(
        schedule,
        workload,
        steps,
        warmup,
        optimizer,
        check_gradients,
        paces,
        autocast,
        links,
        profile=profile,
        reduction=reduction,
        recompute=again,
        clip_norm=clip_norm,
        resume=checkpoint,
        save=save is not None,
        engine=engine,
    )


def check_transport(job: Job, devices: Sequence[str], transport: str) -> None:
    """Raise ValueError for a job that these devices, with tensors crossing this way, can't do."""
    if job.paced_links and transport != "shared":
        raise ValueError(f'pace with latency or bandwidth needs transport="shared", and these ranks have {transport}')
    if job.engine == "torch" and devices[0] != "cpu" and transport != "nccl":
        raise ValueError(
            "torch's runtime can't send between ranks that share a GPU: use a GPU for each rank, or the CPU"
        )


def _stages_that_recompute(recompute: bool | Iterable[int], num_stages: int) -> frozenset[int]:
    if isinstance(recompute, bool):
        return frozenset(range(num_stages) if recompute else ())
    stages = list(recompute) if isinstance(recompute, Iterable) else [recompute]
    if not isinstance(recompute, Iterable) or any(type(s) is not int or not 0 <= s < num_stages for s in stages):
        raise ValueError(
            f"recompute must be True, False or some of the stages 0 to {num_stages - 1}, such as [0], got {recompute!r}"
        )
    return frozenset(stages)


def _check_order_of_losses(schedule: Schedule) -> None:
    """torch finds a microbatch's loss by its place in a list that grows with the last stage's forwards."""
    last = schedule.num_stages - 1
    halves = (a for row in schedule.rows for item in row for a in parts(item))
    order = [a.microbatch for a in halves if a.stage == last and a.kind is Kind.F]
    if order != sorted(order):
        raise ValueError(
            f"{schedule.name} runs the forwards of its last stage in the order {', '.join(map(str, order))}, and "
            "torch's runtime would take one microbatch's loss for another's: run them as 0, 1, 2, ..., or take "
            'engine="pplab"'
        )


def _pace_s(pace: Costs | None, schedule: Schedule) -> Mapping[str, list[float]] | None:
    if pace is None:
        return None
    pace.check(schedule.num_stages, schedule.num_ranks)
    if _seconds(pace) is None:
        raise ValueError(f'pace needs costs in a unit of time, such as Costs(forward=20, unit="ms"), got {pace!r}')
    stages = range(schedule.num_stages)
    return {kind: [_seconds(pace) * pace.of(kind, stage) for stage in stages] for kind in "FBIW"}


def _paced_links(pace: Costs | None, schedule: Schedule) -> dict[tuple[int, int], PacedLink]:
    if pace is None or not (pace.has_latency or pace.has_queues):
        return {}

    def paced(link: Link) -> PacedLink:
        passing = (pace.occupancy(Kind.F, stage, link.bandwidth) for stage in range(schedule.num_stages))
        return PacedLink(_seconds(pace) * link.latency, tuple(_seconds(pace) * each for each in passing))

    return {pair: paced(pace.link(*pair)) for pair in permutations(range(schedule.num_ranks), 2)}


def _seconds(costs: Costs) -> float | None:
    """The unit of these costs in seconds."""
    return {"s": 1.0, "ms": 1e-3, "us": 1e-6}.get(costs.unit)
