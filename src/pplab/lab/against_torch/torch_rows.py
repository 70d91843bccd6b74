"""Look at PyTorch's runtime more closely: its own lowering, and what its `step` does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...lowering import LoweredRow
from ...runtime import Batch, RankContext, Workload
from ...schedule import Schedule
from ..streams import parse_lowered
from .torch_engine import CLASSES, check_pairs


def lower_by_torch(schedule: Schedule, *, defer: bool = False) -> tuple[LoweredRow, ...]:
    """The rows of `schedule` with the sends and receives that torch adds, without FSDP's actions.

    `defer` moves receives later, as torch's `defer_pp_recv` does. Raises ValueError for a
    bidirectional schedule.
    """
    from torch.distributed.pipelining import schedules  # takes a second: only where it is used

    if schedule.copies > 1:
        raise ValueError(
            f"{schedule.name} is bidirectional, which torch can't lower: take pplab.lower"
        )
    check_pairs(schedule)
    rows = {}
    for rank, row in enumerate(schedule.rows):
        actions = schedules._add_unshard_reshard(
            [schedules._Action.from_str(str(item)) for item in row]
        )
        rows[rank] = schedules._add_reduce_grad(actions, schedule.num_microbatches)
    home = dict(enumerate(schedule.placement))
    lowered = schedules._add_send_recv(rows, home.__getitem__, schedule.num_stages)
    if defer:
        lowered = schedules._defer_recv_ops(lowered, home.__getitem__)
    return parse_lowered([map(str, lowered[rank]) for rank in sorted(lowered)])


def take_steps(
    context: RankContext,
    workload: Workload,
    name: str,
    num_microbatches: int,
    steps: int = 1,
    scale_grads: bool = True,
) -> dict:
    """On a rank, take steps by one of torch's classes with one stage per rank, without clearing the
    gradients in between.

    Returns what the last `step` returned (its shape, or None), the losses that it left, how often
    each step called the module, and the gradient of the stage's first parameter after every step.
    Raises ValueError for ranks on GPUs.
    """
    if context.device.type != "cpu":
        raise ValueError(
            f"take_steps needs ranks on the CPU, and this one is on {context.device}: Pool(2, "
            'device="cpu")'
        )
    batch, losses = workload.batch(0), []
    module = workload.build_stage(context.rank, context.num_ranks)
    weight = next((p for p in module.parameters() if p.requires_grad), None)
    if weight is None:
        raise ValueError(
            f"stage {context.rank} has no weight that is trained, and so no gradient to return: "
            "give it one"
        )
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    schedule = make_schedule(
        context, module, workload, name, num_microbatches, scale_grads=scale_grads
    )
    seen: dict = {"calls": [], "gradients": []}
    for _ in range(steps):
        calls.clear()
        returned = step(context, schedule, batch, losses)
        seen["calls"].append(len(calls))
        seen["gradients"].append(weight.grad.clone().numpy())
    return {
        "returned": None if returned is None else tuple(returned.shape),
        "losses": [*map(float, losses)],
        **seen,
    }


def make_schedule(
    context: RankContext,
    module: nn.Module,
    workload: Workload,
    name: str,
    num_microbatches: int,
    **options: object,
) -> object:
    """One of torch's schedules on a stage that is made by hand from the module, its number, how
    many there are, and its device.
    """
    from torch.distributed import pipelining

    stage = pipelining.PipelineStage(module, context.rank, context.num_ranks, context.device)
    several = name not in ("GPipe", "1F1B")  # these classes take a list of the rank's stages
    kind = getattr(pipelining, CLASSES[name])
    return kind([stage] if several else stage, num_microbatches, loss_fn=workload.loss, **options)


def step(
    context: RankContext, schedule: Any, batch: Batch, losses: list[torch.Tensor]
) -> torch.Tensor | None:
    """Take one step. The first rank gives the inputs, and the last one the targets and a list for
    the losses.
    """
    inputs = batch.inputs if context.rank == 0 else ()
    last = (
        {"target": batch.target, "losses": losses} if context.rank == context.num_ranks - 1 else {}
    )
    return schedule.step(*inputs, **last, **batch.context)
