"""Classes of torch's pipelining one after the other on one machine, each with a trace of every rank:

FOLDER=traces RUNS="slow/1F1B slow/GPipe late/1F1B" torchrun --standalone --nproc-per-node 4 two_classes.py

Stages sleep, 10 ms for a forward and 20 for a backward. In what is slow, stage 2 takes twice as long; in what is late,
a message between ranks 1 and 2 takes 30 ms from when it is both sent and asked for."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile

from pplab import lab

MICROBATCHES, LAG_S = 8, 0.03
folders = [Path(os.environ["FOLDER"], each) for each in os.environ["RUNS"].split()]
lab.watch_torch()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
watchers = ThreadPoolExecutor(4 * MICROBATCHES)


class Late:
    def __init__(self, work):
        self.when = watchers.submit(lambda: (work.wait(), time.perf_counter() + LAG_S)[1])

    def wait(self):
        time.sleep(max(0, self.when.result() - time.perf_counter()))


def held_back(ops, *given, **named):
    works = exchange(ops, *given, **named)
    return [*map(Late, works)] if what == "late" and {rank, *(op.peer for op in ops)} == {1, 2} else works


exchange = schedules._batch_p2p
schedules._batch_p2p = held_back
layer = nn.Linear(32, 32)
layer.register_forward_hook(lambda *_: time.sleep(takes_s))
layer.register_full_backward_pre_hook(lambda *_: time.sleep(2 * takes_s))
inputs, targets = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32)
for folder in folders:
    what, name = folder.parts[-2:]
    takes_s = 0.02 if what == "slow" and rank == 2 else 0.01
    stage = PipelineStage(layer, rank, ranks, torch.device("cpu"))
    schedule = schedules.get_schedule_class(name)(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    given = [inputs] if rank == 0 else []
    target = {"target": targets} if rank == ranks - 1 else {}
    schedule.step(*given, **target)  # stages tell each other their shapes
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            schedule.step(*given, **target)
            dist.barrier()
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json.gz")
dist.destroy_process_group()
