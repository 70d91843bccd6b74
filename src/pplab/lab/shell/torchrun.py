"""The same training run under `torchrun`, on one host or several: every process is a rank.

On one host:

    torchrun --standalone --nproc-per-node 4 -m pplab train --schedule 1F1B --ranks 4 --microbatches
    8

On two hosts with two ranks each, where HOST is the first one's name or address, and with
`--node-rank 1` on the second:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST --master-port 29500 \\
        -m pplab train --schedule 1F1B --ranks 4 --microbatches 8

Unless one torchrun has started all ranks, each rank's clock is tied to rank 0's before every step.
The run says how far off that can be.

torchrun's own store listens on all networks of the first host, unencrypted, also with
`--standalone` and with `--rdzv-endpoint localhost:0`; whoever reaches it can make ranks run what
they like. So use a network that only these hosts are in, or a firewall. On one host `pplab train`
without torchrun listens on 127.0.0.1 alone, and the ranks' own connections stay there with
GLOO_SOCKET_IFNAME=lo.

Hosts with several networks may need to be told which one: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME
name the interface. Ranks in one host share no memory here as a pool's do: tensors cross by NCCL
where every rank of every host has a GPU of its own, and by gloo, through the host's memory,
otherwise.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

from ...runtime import (
    Extra,
    RankContext,
    Run,
    Workload,
    check_gradients,
    choose_transport,
    gpu,
    make_job,
    make_run,
    notes,
)
from ...schedule import Schedule
from .hosts import Hosts

_RUNS = count()  # of this process: ranks call `train_here` equally often


def is_torchrun() -> bool:
    """Whether torchrun, or something that sets the same variables, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def several_hosts() -> bool:
    """Whether ranks may be on several hosts, which is so unless one launcher started all."""
    return os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]


def train_here(
    schedule: Schedule,
    workload: Workload,
    *extras: Extra,
    device: str = "auto",
    timeout_s: float = 300.0,
    **options: object,
) -> Run | None:
    """Be one rank of a run. Returns the Run on rank 0 and None on the others.

    `extras` and `options` are those of `Pool.train`.
    """
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hosts = [Hosts()] if several_hosts() else []
    job = make_job(schedule, workload, num_ranks, [*extras, *hosts], **options)
    os.environ.update(gpu.ENVIRONMENT)  # as it may turn out: to ask for devices starts CUDA
    local_rank, local_ranks = (
        int(os.environ.get(f"LOCAL_{x}", os.environ[x])) for x in ("RANK", "WORLD_SIZE")
    )
    devices, transport = choose_transport(local_ranks, device, "auto")
    place = torch.device(devices[local_rank])
    if place.type == "cuda":
        gpu.take(place)
    patience = timedelta(seconds=timeout_s)
    launcher, _, _ = next(dist.rendezvous("env://", timeout=patience))
    # an earlier run's addresses lead nowhere
    store = dist.PrefixStore(f"pplab/{next(_RUNS)}", launcher)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=patience)
    try:
        found: list = [None] * num_ranks
        dist.all_gather_object(found, transport)
        # a host has fewer GPUs than ranks: all take what every host can do
        if set(found) != {"nccl"}:
            transport = "gloo"
        context = RankContext(rank, num_ranks, place, transport, patience, store)
        with ExitStack() as during:
            for extra in job.extras:
                extra.check_devices(job, [str(place)], transport)
                during.enter_context(extra.during(job, lambda: [context.status]))
            reports = None if rank else [None] * num_ranks
            dist.gather_object(job.engine(context, job), reports)
            run = None
            if rank == 0:
                cores = len(os.sched_getaffinity(0))
                here = lambda function, *arguments: function(context, *arguments)  # noqa: E731
                gradients = (
                    check_gradients(here, job, reports) if job.options.check_gradients else None
                )
                run = make_run(job, reports, gradients, devices, notes(devices, cores, device))
                if hosts:
                    tied = (
                        "ranks on several hosts: before every step each host's clock is tied to "
                        "rank 0's"
                    )
                    off = f"a rank's times can be {run.machine.clock_error_ms:.2f} ms off"
                    run = replace(run, notes=(*run.notes, f"{tied}; {off}"))
            dist.barrier()  # no rank goes on, to resume perhaps, before a checkpoint is there
            return run
    finally:
        dist.destroy_process_group()
