"""1F1B by PyTorch's own pipelining, on a network as slow as you say: its class, or the same rows from a CSV file.

M=8 LAG=0.02 CSV=1 OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 pipe_torch.py"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from tempfile import NamedTemporaryFile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules

import pplab as pp
from pplab import lab

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # every rank draws the same model and batch ...
model = nn.Sequential()
for _ in range(12):
    model.append(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()))
inputs, targets = torch.randn(2, 24, 32)
inputs.requires_grad_()  # so that the hook on the first stage's backward is called
stage = model[12 * rank // ranks : 12 * (rank + 1) // ranks]  # ... and trains this
M = int(os.environ.get("M", 8))
pace = float(os.environ.get("PACE", 0.4))  # seconds, as if layers were large
pace *= len(stage) / len(model) / M  # for a forward of this stage
stage.register_forward_hook(lambda *_: time.sleep(pace))
stage.register_full_backward_pre_hook(lambda *_: time.sleep(2 * pace))
lag = float(os.environ.get("LAG", 0))  # seconds, as if the network were slow
watchers = ThreadPoolExecutor(4 * M)  # threads that wait for messages while we compute


class Late:
    """A message that counts as there so long after it was both sent and asked for."""

    def __init__(self, work):
        self.when = watchers.submit(lambda: (work.wait(), time.perf_counter() + lag)[1])

    def wait(self):
        time.sleep(max(0, self.when.result() - time.perf_counter()))


exchange = schedules._batch_p2p  # torch's own: what it returns is waited for
schedules._batch_p2p = lambda *given, **named: [Late(work) for work in exchange(*given, **named)]


def loss(y, target):
    return nn.functional.mse_loss(y, target) * len(y) / len(inputs)  # a microbatch's share


one = torch.empty(len(inputs) // M, 32, requires_grad=True)  # so large is a message
part = PipelineStage(stage, rank, ranks, torch.device("cpu"), input_args=one, output_args=one)
if int(os.environ.get("CSV", 0)):
    schedule = schedules._PipelineScheduleRuntime([part], M, loss_fn=loss, scale_grads=False)
    with NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(lab.to_csv(pp.build("1F1B", num_ranks=ranks, num_microbatches=M)))
        file.flush()
        schedule._load_csv(file.name)
else:
    schedule = Schedule1F1B(part, M, loss_fn=loss, scale_grads=False)

for _ in range(4):  # the first step takes longer: stages tell each other their shapes
    stage.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    schedule.step(*([inputs] if rank == 0 else []), target=targets if rank == ranks - 1 else None)
    dist.barrier()
    seconds = time.perf_counter() - start

gradients = [p.grad for p in stage.parameters()]
truth = torch.autograd.grad(nn.functional.mse_loss(model(inputs), targets), list(stage.parameters()))
pairs = zip(gradients, truth, strict=True)
off = max((ours - one).abs().max() / one.abs().max() for ours, one in pairs)
print(f"rank {rank}: step {seconds:.3f} s, gradients within {off:.0e} of one process's\n", end="")
