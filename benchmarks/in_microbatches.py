"""The reference of a run whose whole batch is too much for one GPU: its microbatches, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from pplab.runtime import Extra, Gradients, Job, RankContext, Workload, autocast, collect_gradients, loss_shares


@dataclass(frozen=True)
class InMicrobatches(Extra):
    """Compare the run's gradients with those of one process that takes its microbatches one after the other.

    This process holds what the whole model keeps for one microbatch, where it otherwise holds the whole batch's. It
    relies on the losses' shares, as the run does: what a microbatch changes (batch normalisation, a mean over labels
    that `weight` doesn't count) is found by the whole batch alone.
    """

    name = "in_microbatches"

    def check(self, job: Job) -> Job:
        """Have the job's microbatches be the reference's."""
        return replace(job, reference=partial(train_in_turn, num_microbatches=job.schedule.num_microbatches))


def train_in_turn(
    context: RankContext,
    workload: Workload,
    dtype: torch.dtype | None,
    model: nn.Module,
    num_microbatches: int,
) -> tuple[float, Gradients]:
    """What `train_whole` finds, from microbatches one after the other."""
    context.watch("running the model in one process")
    microbatches, loss = workload.batch(0).microbatches(num_microbatches), 0.0
    for m, share in zip(microbatches, loss_shares(workload, microbatches), strict=True):
        if share:
            m = m.to(context.device)
            with autocast(context.device, dtype):
                counted = workload.loss(model(*m.inputs, **m.context), m.target) * share
            counted.backward()
            loss += counted.item()
    return loss, collect_gradients(model.named_parameters())
