"""Torch's 1F1B on gloo, in one pipeline or several replicas, with faults planted in it, and a trace of every rank:

RANKS=4 REPLICAS=1 STEPS=4 PLANT=late@2:250,link@1:30 FOLDER=traces \
    python -m pplab.watch torchrun --standalone --nproc-per-node 4 planted.py

It knows nothing of pplab: `pplab.watch` names its actions. With STAGES=2, each rank has two stages, and interleaved
1F1B runs.

A forward sleeps 20 ms, a backward 40. A plant is KIND@PLACE:VALUE, and PLACE is a rank of the job unless it says so:

    slow@r:1.8         rank r computes that many times as long
    stage@s:1.6        all ranks of stage s do
    late@r:250         rank r sleeps so many ms before each step
    tenth@r:250        the same before every tenth step alone
    data@r:250         the same before each step, inside a span of a DataLoader
    pauses@r:150       in every ninth forward of rank r
    nap@r:400          once, in the last forward of step 2
    link@r:30          each message between rank r and the rank before it in its pipeline takes so many ms more
    optimizer@0:250    all ranks sleep after each step
    checkpoint@k:900   all ranks sleep once, after step k
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile, record_function

RANKS, REPLICAS, STEPS, MICROBATCHES = (
    int(os.environ["RANKS"]),
    int(os.environ["REPLICAS"]),
    int(os.environ["STEPS"]),
    6,
)
STAGES = int(os.environ.get("STAGES", "1"))  # of each rank
FORWARD_S, BACKWARD_S = 0.02, 0.04
PLANTS: dict[tuple[str, int], float] = {}
for text in filter(None, os.environ["PLANT"].split(",")):
    kind, _, rest = text.partition("@")
    place, _, value = rest.partition(":")
    PLANTS[kind, int(place)] = float(value)

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (RANKS, REPLICAS), mesh_dim_names=("pp", "dp"))
pipeline, replicas = mesh.get_group("pp"), mesh.get_group("dp")
stage_index = dist.get_rank(pipeline)
factor = PLANTS.get(("slow", rank), 1) * PLANTS.get(("stage", stage_index), 1)
forwards, step = 0, -1


def sleep_ms(kind: str, place: int = rank) -> None:
    time.sleep(PLANTS.get((kind, place), 0) / 1e3)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD_S * factor)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD_S * factor)
        return gradient * 1


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        global forwards
        forwards += 1
        if forwards % (MICROBATCHES + 3) == 0:
            sleep_ms("pauses")
        if step == 2 and forwards % MICROBATCHES == 0:
            sleep_ms("nap")
        return Sleep.apply(self.linear(x))


class Held:
    """A message that leaves later, from a thread that keeps the order."""

    def __init__(self, future):
        self.future = future

    def wait(self):
        self.future.result()


def with_slow_links(operations, desc=None):
    works = []
    for each in operations:
        target = each.peer if each.group_peer is None else each.group_peer
        held_ms = PLANTS.get(("link", max(stage_index, target) * REPLICAS + rank % REPLICAS), 0)

        def later(each=each, target=target, held_ms=held_ms):
            time.sleep(held_ms / 1e3)
            each.op(each.tensor, group=each.group, tag=each.tag, group_dst=target).wait()

        if each.op == dist.isend and held_ms:
            works.append(Held(sender.submit(later)))
        elif each.op == dist.isend:
            works.append(each.op(each.tensor, group=each.group, tag=each.tag, group_dst=target))
        else:
            works.append(each.op(each.tensor, group=each.group, tag=each.tag, group_src=target))
    return works


if any(kind == "link" for kind, _ in PLANTS):
    sender = ThreadPoolExecutor(1)
    schedules._batch_p2p = with_slow_links
model = nn.ModuleList(Stage() for _ in range(STAGES))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
stages = [
    PipelineStage(part, stage_index + i * RANKS, STAGES * RANKS, torch.device("cpu"), group=pipeline)
    for i, part in enumerate(model)
]
if STAGES == 1:
    schedule = schedules.Schedule1F1B(stages[0], MICROBATCHES, loss_fn=nn.MSELoss())
else:
    schedule = schedules.ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=nn.MSELoss())


def iterate() -> None:
    sleep_ms("late")
    if step % 10 == 3:
        sleep_ms("tenth")
    if ("data", rank) in PLANTS:
        with record_function("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
            sleep_ms("data")
    batch = torch.randn(MICROBATCHES * 4, 32)
    optimizer.zero_grad()
    given = [batch] if stage_index == 0 else []
    schedule.step(*given, **({"target": batch} if stage_index == RANKS - 1 else {}))
    if REPLICAS > 1:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=replicas)
    optimizer.step()
    sleep_ms("optimizer", 0)
    sleep_ms("checkpoint", step)


iterate()
iterate()
dist.barrier()
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for step in range(STEPS):  # noqa: B007
        iterate()
folder = Path(os.environ["FOLDER"])
folder.mkdir(parents=True, exist_ok=True)
profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
dist.barrier()
dist.destroy_process_group()
