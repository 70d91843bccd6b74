"""The same training run under `torchrun`, on one host or several: every process is a rank."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ..schedule import Schedule
from .job import RankContext, train_whole
from .launch import ENGINES, check_job, choose_transport, report_gradients, save_reports
from .report import Run, make_run
from .workload import Workload


def is_torchrun() -> bool:
    """Whether torchrun, or something that sets the same variables, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def train_here(
    schedule: Schedule,
    workload: Workload,
    *,
    device: str = "auto",
    timeout_s: float = 300.0,
    engine: str = "pplab",
    **options: object,
) -> Run | None:
    """Be one rank of a run; returns the Run on rank 0 and None on the others. Options are those of `Pool.train`."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_ranks = (
        int(os.environ.get("LOCAL_RANK", rank)),
        int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)),
    )
    job = check_job(schedule, workload, num_ranks, engine=engine, **options)
    workload = job.workload
    devices, transport = choose_transport(local_ranks, device, "auto", one_host=False)
    place = torch.device(devices[local_rank])
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    try:
        store = dist.distributed_c10d._get_default_store()
        context = RankContext(rank, num_ranks, place, transport, store, watch=lambda phase, position, waits: None)
        reports: list = [None] * num_ranks
        dist.all_gather_object(reports, ENGINES[engine](context, job))
        whole = None
        if job.collect_gradients:
            whole = train_whole(context, workload, schedule.num_microbatches, 0, job.autocast)
        if job.save and rank == 0:
            save_reports(options["save"], reports, job)
        if rank:
            return None
        notes = list(workload.notes)
        if local_ranks < num_ranks:
            notes.append(
                "ranks on several hosts: each host's clock is its own, so times of different hosts don't align"
            )
        return make_run(
            schedule,
            workload,
            reports,
            whole and report_gradients(reports, whole, job.autocast),
            device=str(place),
            transport=transport,
            how="measured" if job.pace_s is None else "paced",
            notes=notes,
            engine=engine,
            first_step=job.first_step,
        )
    finally:
        dist.destroy_process_group()
