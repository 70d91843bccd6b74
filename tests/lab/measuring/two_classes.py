"""Classes of torch's pipelining one after the other on one machine, each with a trace of every rank:

SLOW=2 LAG=0.03 torchrun --standalone --nproc-per-node 4 two_classes.py FOLDER 1F1B GPipe

Stages sleep, 10 ms for a forward and 20 for a backward. Stage SLOW takes twice as long, and between ranks 1 and 2 a
message takes LAG seconds from when it is both sent and asked for."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile

from pplab import lab

MICROBATCHES = 8
folder, *names = sys.argv[1:]
lab.watch_torch()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
takes = 0.01 * (2 if rank == int(os.environ.get("SLOW", -1)) else 1)
lag = float(os.environ.get("LAG", 0))
watchers = ThreadPoolExecutor(4 * MICROBATCHES)


class Late:
    def __init__(self, work):
        self.when = watchers.submit(lambda: (work.wait(), time.perf_counter() + lag)[1])

    def wait(self):
        time.sleep(max(0, self.when.result() - time.perf_counter()))


def held_back(ops, *given, **named):
    works = exchange(ops, *given, **named)
    return [*map(Late, works)] if {rank, *(op.peer for op in ops)} == {1, 2} else works


exchange = schedules._batch_p2p
if lag:
    schedules._batch_p2p = held_back
layer = nn.Linear(32, 32)
layer.register_forward_hook(lambda *_: time.sleep(takes))
layer.register_full_backward_pre_hook(lambda *_: time.sleep(2 * takes))
inputs, targets = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32)
for name in names:
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
    Path(folder, name).mkdir(exist_ok=True)
    profiler.export_chrome_trace(f"{folder}/{name}/rank{rank}.json.gz")
dist.destroy_process_group()
