"""pipe_gpipe.py in another order: as few forwards ahead as will do, then a backward after each.

M=8 OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 pipe_1f1b.py"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # who waits stands still
backend, own = ("nccl", device) if gpu else ("gloo", None)
dist.init_process_group(backend, timeout=timedelta(seconds=60), device_id=own)
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # every rank draws the same model and batch ...
model = nn.Sequential()
for _ in range(12):
    model.append(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()))
model.to(device)
inputs, targets = torch.randn(2, 24, 32).to(device)
stage = model[12 * rank // ranks : 12 * (rank + 1) // ranks]  # ... and trains this
M = int(os.environ.get("M", 8))
parts = list(zip(inputs.tensor_split(M), targets.tensor_split(M), strict=True))
pace = float(os.environ.get("PACE", 0.4))  # seconds, as if layers were large
pace *= len(stage) / len(model) / M  # for a forward of this stage
stage.register_forward_hook(lambda *_: time.sleep(pace))
stage.register_full_backward_pre_hook(lambda *_: time.sleep(2 * pace))
held, counts = {}, []  # held: input and output of forwards whose backward is to come
messages = []  # that go out and come in at once


def send(tensor, to):
    if 0 <= to < ranks:  # beyond the ends of the pipeline there is nobody
        messages.append(dist.P2POp(dist.isend, tensor, to))  # goes out with the next receive


def receive(source, tensor):
    if 0 <= source < ranks:
        tensor = torch.empty_like(tensor)  # a message doesn't tell its shape
        messages.append(dist.P2POp(dist.irecv, tensor, source))
    exchange()
    return tensor


def exchange():
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    messages.clear()


def forward(m):
    x = receive(rank - 1, parts[m][0]).requires_grad_()  # what comes has no history
    y = stage(x)
    if rank == ranks - 1:
        y = nn.functional.mse_loss(y, parts[m][1]) * len(x) / len(inputs)  # its share
    held[m] = x, y
    counts.append(len(held))
    send(y, rank + 1)


def backward(m):
    x, y = held.pop(m)
    y.backward(receive(rank + 1, torch.ones_like(y)))  # the loss's own is 1
    send(x.grad, rank - 1)


def step():
    ahead = min(ranks - 1 - rank, M)
    for m in range(ahead):  # warm-up: one forward for every rank behind us
        forward(m)
    for m in range(ahead, M):  # steady state: one forward, one backward
        forward(m)
        backward(m - ahead)
    for m in range(M - ahead, M):  # cool-down: the backwards that are left
        backward(m)


for _ in range(3):  # the first step takes longer: it opens the connections
    stage.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    step()
    exchange()  # the last action's message
    dist.barrier()
    seconds = time.perf_counter() - start

gradients = [p.grad for p in stage.parameters()]
assert all(g is not None for g in gradients), f"rank {rank} has no gradients"
loss = nn.functional.mse_loss(model(inputs), targets)  # of one process
truth = torch.autograd.grad(loss, list(stage.parameters()))
pairs = zip(gradients, truth, strict=True)
off = max((ours - one).abs().max() / one.abs().max() for ours, one in pairs)
said = f"gradients within {off:.0e} of one process's"
print(f"rank {rank}: step {seconds:.3f} s, held {max(counts)}, {said}\n", end="")
