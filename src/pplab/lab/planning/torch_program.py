"""A program by torch.distributed.pipelining that runs a plan."""

from __future__ import annotations

from ..forms import CLASSES
from .planner import Plan


def program(plan: Plan, name: str, writes: str) -> str:
    """It takes torch's class of that name, or rows from a file, which the lines `writes` make."""
    rows, replicas, axes = plan.timeline.schedule, plan.layout.dp, plan.layout.axes
    kind, load = (
        (CLASSES[name], "") if name else ("_PipelineScheduleRuntime", "\nschedule._load_csv(rows)")
    )
    adam = "torch.optim.AdamW(parts.parameters(), lr=1e-3)"
    if plan.shard_optimizer:
        adam = (
            f"ZeroRedundancyOptimizer(parts.parameters(), {adam[:17]}, "
            'process_group=mesh.get_group("dp"), lr=1e-3)'
        )
    return f'''\
"""{rows.name} on {rows.num_ranks} ranks. torchrun --nproc-per-node {rows.num_ranks * replicas} train.py"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import {kind}
from torch.utils.checkpoint import checkpoint

{writes}LAYERS = {plan.layers}  # of each stage
RECOMPUTED = {plan.recomputed}  # of them
STAGES = {[*map(rows.stages_of, range(rows.num_ranks))]}  # of each rank

# Yours, in place of these: a model in three parts, a replica's batch, a microbatch's loss.
torch.manual_seed(0)
embedding, head = nn.Embedding(256, 64), nn.Linear(64, 256)
layers = [nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(sum(LAYERS))]


def batch(step, replica):
    seed = torch.Generator().manual_seed(1000 * step + replica)
    tokens = torch.randint(256, ({plan.microbatch * rows.num_microbatches}, 17), generator=seed)
    return tokens[:, :-1], tokens[:, 1:]


def loss(scores, target):
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


class Stage(nn.Module):
    def __init__(self, stage):
        super().__init__()
        before = sum(LAYERS[:stage])
        self.embedding = embedding if stage == 0 else nn.Identity()
        self.layers = nn.ModuleList(layers[before : before + LAYERS[stage]])
        self.head = head if stage == len(LAYERS) - 1 else nn.Identity()
        self.recomputed = RECOMPUTED[stage]

    def forward(self, x):
        x = self.embedding(x)
        for at, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if at < self.recomputed else layer(x)
        return self.head(x)


device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda" and torch.__version__ >= "2.15":
    dist.init_process_group("nccl-lazy")  # "nccl" would put all messages of a rank in one queue
sizes = {{"pp": len(STAGES), "dp": {replicas}}}
axes = {("dp", "pp") if axes.index("dp") > axes.index("pp") else ("pp", "dp")}
mesh = init_device_mesh(device.type, [sizes[axis] for axis in axes], mesh_dim_names=axes)
replica, mine = mesh.get_local_rank("dp"), STAGES[mesh.get_local_rank("pp")]
parts = nn.ModuleList(map(Stage, mine)).to(device)
group = mesh.get_group("pp")
stages = [PipelineStage(part, stage, len(LAYERS), device, group=group) for part, stage in zip(parts, mine)]
schedule = {kind}({"stages[0]" if name in ("GPipe", "1F1B") else "stages"}, {rows.num_microbatches}, loss_fn=loss){load}
optimizer = {adam}

for step in range(3):
    tokens, target = (each.to(device) for each in batch(step, replica))
    losses = []
    last = {{"target": target, "losses": losses}} if len(LAYERS) - 1 in mine else {{}}
    schedule.step(*([tokens] if 0 in mine else []), **last)
    for parameter in parts.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= {replicas}
    optimizer.step()
    optimizer.zero_grad()
    if losses:
        print(f"step {{step}}, replica {{replica}}: loss {{torch.stack(losses).mean().item():.5f}}\\n", end="")
dist.destroy_process_group()
'''
