"""The same training run under `torchrun`, on one host or several: every process is a rank.

On one host:

    torchrun --standalone --nproc-per-node 4 -m pplab train --schedule 1F1B --ranks 4 --microbatches 8

On two hosts with two ranks each, where HOST is the first one's name or address, and with `--node-rank 1` on the second:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST --master-port 29500 \\
        -m pplab train --schedule 1F1B --ranks 4 --microbatches 8

Unless one torchrun has started all ranks, each rank's clock is tied to rank 0's before every step. The run says how far
off that can be.

Hosts with several networks may need to be told which one: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface.
Ranks in one host share no memory here as a pool's do: tensors cross by NCCL where every rank of every host has a GPU of
its own, and by gloo, through the host's memory, otherwise.
"""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

from ..runtime.checks import ENGINES, check_job, check_transport
from ..runtime.devices import choose_transport, load_eagerly, notes, paced_notes
from ..runtime.job import RankContext, train_whole
from ..runtime.launch import save_reports
from ..runtime.report import Run, make_run, report_gradients
from ..runtime.workload import Workload
from ..schedule import Schedule

_RUNS = count()  # of this process: ranks call `train_here` equally often


def is_torchrun() -> bool:
    """Whether torchrun, or something that sets the same variables, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def several_hosts() -> bool:
    """Whether ranks may be on several hosts: all but those of one launcher may."""
    return os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]


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
    load_eagerly("nccl")  # as it may turn out: to ask for devices starts CUDA
    devices, transport = choose_transport(local_ranks, device, "auto", one_host=False)
    place = torch.device(devices[local_rank])
    if place.type == "cuda":
        torch.cuda.set_device(place)
    patience = timedelta(seconds=timeout_s)
    launcher, _, _ = next(dist.rendezvous("env://", timeout=patience))
    store = dist.PrefixStore(f"pplab/{next(_RUNS)}", launcher)  # an earlier run's addresses lead nowhere
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=patience)
    try:
        found: list = [None] * num_ranks
        dist.all_gather_object(found, transport)
        if len(set(found)) > 1:  # a host with fewer GPUs than ranks: all take what every host can do
            transport = "gloo"
        check_transport(job, [str(place)], transport)
        quiet = lambda phase, position, waits: None  # noqa: E731
        context = RankContext(
            rank, num_ranks, place, transport, store, quiet, timeout=patience, several_hosts=several_hosts()
        )
        reports = None if rank else [None] * num_ranks
        dist.gather_object(ENGINES[engine](context, job), reports)
        whole = None
        if job.collect_gradients:
            whole = train_whole(context, job.workload, job.schedule.num_microbatches, 0, job.autocast)
        if job.save and rank == 0:  # after that: it may replace the file that the run went on from
            save_reports(options["save"], reports, job)
        dist.barrier()  # no rank goes on, to resume perhaps, before the checkpoint is there
        if rank:
            return None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return make_run(
            job,
            reports,
            whole and report_gradients(reports, whole, job.autocast),
            device=str(place),
            transport=transport,
            notes=paced_notes(devices, notes(devices, cores), job.pace_s is not None),
            several_hosts=context.several_hosts,
        )
    finally:
        dist.destroy_process_group()
