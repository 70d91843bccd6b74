"""pipe_1f1b.py with messages that travel while ranks compute, on a network as slow as you say.

M=8 LAG=0.02 TICKETS=7,5,3,1 OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 pipe_early.py"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

# On CPUs, also beside GPUs: there, a receive that is asked for early can stand in the way of a send.
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # every rank draws the same model and batch ...
model = nn.Sequential()
for _ in range(12):
    model.append(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()))
inputs, targets = torch.randn(2, 24, 32)
stage = model[12 * rank // ranks : 12 * (rank + 1) // ranks]  # ... and trains this
M = int(os.environ.get("M", 8))
parts = list(zip(inputs.tensor_split(M), targets.tensor_split(M), strict=True))
pace = float(os.environ.get("PACE", 0.4))  # seconds, as if layers were large
pace *= len(stage) / len(model) / M  # for a forward of this stage
stage.register_forward_hook(lambda *_: time.sleep(pace))
stage.register_full_backward_pre_hook(lambda *_: time.sleep(2 * pace))
held, counts = {}, []  # held: input and output of forwards whose backward is to come
tickets = os.environ.get("TICKETS")  # the most forwards that each rank holds, such as 7,5,3,1
tickets = int(tickets.split(",")[rank]) if tickets else ranks - rank
lag = float(os.environ.get("LAG", 0))  # seconds, as if the network were slow
watchers = ThreadPoolExecutor(2 * M)  # threads that wait for messages while we compute
early = int(os.environ.get("EARLY", 1))  # how many messages each way a rank has asked for before it needs them
ways = {-1: dist.new_group(), 1: dist.new_group()}  # up and down: neither waits for the other
sent, asked = [], {}


def send(tensor, to):
    if 0 <= to < ranks:  # beyond the ends of the pipeline there is nobody
        sent.append((dist.isend(tensor, to, ways[to - rank]), tensor))  # which stays as it is until it has left


def ask(source, m):
    if 0 <= source < ranks and m < M:
        tensor = torch.empty_like(parts[m][0])  # a message doesn't tell its shape
        asked[source, m] = tensor, watchers.submit(comes, dist.irecv(tensor, source, ways[rank - source]))


def comes(work):  # in a thread of its own
    work.wait()
    return time.perf_counter() + lag  # when it would be there on the slow network


def receive(source, m):
    ask(source, m + early)  # may travel while we compute
    tensor, when = asked.pop((source, m))
    time.sleep(max(0, when.result() - time.perf_counter()))
    return tensor


def forward(m):
    x = (receive(rank - 1, m) if rank else parts[m][0]).requires_grad_()  # what comes has no history
    y = stage(x)
    if rank == ranks - 1:
        y = nn.functional.mse_loss(y, parts[m][1]) * len(x) / len(inputs)  # its share
    held[m] = x, y
    counts.append(len(held))
    send(y.detach(), rank + 1)  # its history stays here


def backward(m):
    x, y = held.pop(m)
    y.backward(receive(rank + 1, m) if rank < ranks - 1 else None)  # the loss's own is 1
    send(x.grad, rank - 1)


def step():
    for m in range(early):
        ask(rank - 1, m)
        ask(rank + 1, m)
    ahead = min(tickets - 1, M)
    for m in range(ahead):  # warm-up: one forward less than there are tickets
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
    while sent:
        sent.pop()[0].wait()
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
