"""Dropout that doesn't depend on how a model is cut: random numbers by microbatch and layer instead
of by rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from math import gcd
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from ...actions import F, W
from ...errors import positive_int
from ...runtime import Batch, Extra, Job, Listener, Rank, Workload, listening, loss_shares
from .random_numbers import random_state, seed_random_numbers, set_random_state


@dataclass(frozen=True)
class SeededDropout(Extra):
    """Draw a module's random numbers by the seed, the step, the microbatch, the module's name and
    its use there. So they don't depend on the schedule, the number of ranks or recomputation.

    A run then drops the same as one process that takes the batch microbatch by microbatch, and
    `check_gradients` compares it with that. Without this extra each rank draws in the order of its
    row. Don't wrap layers in torch's checkpoint. Let `lab.Recompute()` run them again instead.
    """

    seed: int = 0
    name = "seeded dropout"

    def check(self, job: Job) -> Job:
        """Raise ValueError where two forwards of a rank would draw at once."""
        positive_int("seed", self.seed, 0)
        again = any(extra.name == "recompute" for extra in job.extras)
        if again and job.workload.overlap and job.schedule.columns.overlaps:
            raise ValueError(
                "SeededDropout and Recompute can't go together where the workload's overlap runs "
                "both halves of a pair at once: leave out one of the three"
            )
        by_microbatch: Any = _ByMicrobatch(job, self.seed)
        return replace(job, workload=by_microbatch)

    def listen(self, rank: Rank) -> Listener:
        return _Seeding(rank, self.seed)

    def notes(self, devices: Sequence[str], notes: Sequence[str]) -> Sequence[str]:
        """The note on what the numbers depend on."""
        return [*notes, f"dropout draws by microbatch and module, from seed {self.seed}"]


class _Forward:
    """A microbatch's forward in a step, which `at` names. It counts how often each module has
    begun.
    """

    def __init__(self, at: str, device: torch.device):
        self.at, self.device, self.uses = at, device, Counter()
        # where the random numbers stood that go on when a module ends
        self.before: list[Sequence[Tensor]] = []


# at the end the one that runs; before it the one whose backward may run it again
_forwards: list[_Forward] = []


def _begin(name: str, *_: object) -> None:
    if _forwards:
        forward = _forwards[-1]
        forward.uses[name] += 1
        forward.before.append(random_state(forward.device))
        seed_random_numbers(
            forward.device, crc32(f"{forward.at} {name} {forward.uses[name]}".encode())
        )


def _end(*_: object) -> None:
    if _forwards:
        set_random_state(_forwards[-1].device, _forwards[-1].before.pop())


def _hook(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if name:  # a stage's own forward isn't the whole model's
            module.register_forward_pre_hook(partial(_begin, name))
            module.register_forward_hook(_end)


class _Seeding(Listener):
    """Keeps track of which forward runs on a rank."""

    events = frozenset(("turn", "action", "call"))

    def __init__(self, rank: Rank, seed: int):
        self.rank, self.seed, self.done = rank, seed, 0
        for module in rank.modules.values():
            _hook(module)

    def begin(self, event: str, what: Any) -> None:
        if event == "turn":
            self.done = len(what)
        elif what.kind is not W:
            step, device = self.rank.job.first_step + self.done, self.rank.context.device
            forward = _Forward(f"{self.seed} {step} {what.microbatch}", device)
            _forwards.insert(len(_forwards) if what.kind is F else 0, forward)

    def end(self, event: str, what: Any) -> None:
        if event != "turn" and what.kind is not W:
            _forwards.pop(-1 if what.kind is F else 0)


@Workload.register
class _ByMicrobatch:
    """A workload whose whole model takes a batch by microbatches, and draws as stages do.
    Everything else is the original workload's.
    """

    def __init__(self, job: Job, seed: int):
        self.workload, self.seed, self.first = job.workload, seed, job.first_step
        self.num_microbatches = job.schedule.num_microbatches

    def __getattr__(self, name: str) -> Any:
        # not there yet: an instance is being unpickled
        if name == "workload" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.workload, name)

    def batch(self, step: int) -> Batch:
        """The batch of a step, which the whole model is given next."""
        self.step, self.given, self.turns = self.first + step, self.workload.batch(step), cycle([0])
        return self.given

    def build_whole(self) -> nn.Module:
        """The whole model."""
        model = self.workload.build_whole()
        _hook(model)
        model.forward = partial(self.run, model.forward)
        return model

    def run(self, forward: Callable, *inputs: Tensor, **context: Tensor) -> Any:
        """The output for a batch, or for its next microbatch. One more forward follows for what
        layers add to a batch's loss.
        """
        count = gcd(self.num_microbatches, len(self.given.target))
        if len(inputs[0]) * count == len(self.given.target):
            return self.run_one(forward, next(self.turns), inputs, context)
        shares = loss_shares(self.workload, Batch.microbatches(self.given, count))
        # the others are left out
        self.turns = cycle([m for m, share in enumerate(shares) if share])
        parts = Batch(inputs, inputs[0], context).microbatches(count)
        with listening() as added:
            made = [
                self.run_one(forward, m, part.inputs, part.context) for m, part in enumerate(parts)
            ]
        if added:
            self.run_one(forward, -1, inputs, context)
        return torch.cat([getattr(output, "logits", output) for output in made])

    def run_one(
        self, forward: Callable, m: int, inputs: Sequence[Tensor], context: Mapping[str, Tensor]
    ) -> Any:
        """Run microbatch m."""
        _forwards.append(_Forward(f"{self.seed} {self.step} {m}", inputs[0].device))
        try:
            return forward(*inputs, **context)
        finally:
            _forwards.pop()
