"""Recomputation: a forward runs without autograd and keeps only its input, then runs a second time
before the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...runtime import Batch, Extra, Job, Rank, Stage, roots_of
from .random_numbers import random_state, set_random_state


@dataclass(frozen=True)
class Recompute(Extra):
    """Let some stages, such as [0], or all of them keep only what they receive, and run their
    forwards a second time for the backwards.
    """

    stages: Iterable[int] | None = None  # all
    name = "recompute"
    needs_pplab = (
        "Recompute needs pplab's engine; for torch's runtime wrap the modules in torch's checkpoint"
    )
    flag = {
        "name": "--recompute",
        "action": "store_true",
        "help": "keep no activations, and run each forward again in its backward",
    }

    def __post_init__(self) -> None:
        if isinstance(self.stages, Iterable):
            object.__setattr__(self, "stages", tuple(self.stages))  # a generator lasts only once

    def check(self, job: Job) -> Job:
        """Raise ValueError unless the stages are among the schedule's."""
        num_stages = job.schedule.num_stages
        given = (
            self.stages
            if isinstance(self.stages, tuple)
            else ()
            if self.stages is None
            else (None,)
        )
        if any(type(s) is not int or not 0 <= s < num_stages for s in given):
            some = f"some of the stages 0 to {num_stages - 1}, such as [0]"
            raise ValueError(
                f"Recompute takes {some}, or nothing for all of them, got {self.stages!r}"
            )
        return job

    def listen(self, rank: Rank) -> None:
        """Put others in the place of this rank's stages."""
        for index, stage in rank.stages.items():
            if self.stages is None or index in self.stages:
                rank.stages[index] = Recomputing(stage)

    def notes(self, devices: Sequence[str], notes: Sequence[str]) -> Sequence[str]:
        """The note that names the forwards that run a second time."""
        which = (
            "all stages" if self.stages is None else f"stages {', '.join(map(str, self.stages))}"
        )
        return (
            notes if self.stages == () else [*notes, f"forwards run again in the backward: {which}"]
        )


class Recomputing(Stage):
    """A `Stage` that keeps only what it receives. `around("again", index)` hears of forwards that
    run a second time.
    """

    def __init__(self, stage: Stage):
        vars(self).update(vars(stage))
        # microbatch -> its batch, and where the random numbers stood, if the forward drew some
        self.again: dict[int, tuple[Batch, Sequence[Tensor]]] = {}

    def forward(
        self, microbatch: int, received: tuple[Tensor, ...], batch: Batch
    ) -> tuple[Tensor, ...]:
        """Run the forward like a stage, but keep only what is needed to run it again."""
        before = random_state(batch.target.device)
        with torch.no_grad():
            made = super().forward(microbatch, received, batch)
        drew = not all(map(torch.equal, before, random_state(batch.target.device)))
        self.again[microbatch] = (batch, before if drew else [])
        return made

    def backward(self, microbatch: int, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the forward as it ran the first time, then the backward.

        Random numbers and buffers, for example of batch normalisation, are left as if the forward
        had run once.
        """
        batch, random = self.again.pop(microbatch)
        held, device = self.held[microbatch], batch.target.device
        with self.around("again", self.index):
            now = random_state(device) if random else ()
            buffers = [(b, b.clone()) for b in self.module.buffers()]
            set_random_state(device, random)
            try:
                outputs, losses = self.compute(held.leaves, batch)
                held.roots = roots_of((*outputs, *losses))
            finally:
                set_random_state(device, now)
            with torch.no_grad():
                for buffer, value in buffers:
                    # by .data: what autograd saved of it isn't marked as changed
                    buffer.data.copy_(value)
        del held, outputs, losses  # so that they go as soon as the backward has used them
        return super().backward(microbatch, gradients)
