"""Clip by the norm of all gradients of the model, whichever ranks they are on, with each parameter
counted once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ...runtime import Extra, Job, Listener, Rank, Workload, naming
from ...schedule import Schedule


@dataclass(frozen=True)
class Clip(Extra):
    """Scale the gradients of a step so that their norm, over all ranks, is at most `max_norm`.

    The norms before that are the Run's `extras["gradient_norms"]`, one per measured step.
    """

    max_norm: float
    name = "gradient_norms"
    flag = {
        "name": "--clip-norm",
        "type": float,
        "metavar": "X",
        "help": "scale gradients down where the norm of all of them is above X",
    }

    def check(self, job: Job) -> Job:
        """Raise ValueError unless the limit is a number above 0."""
        if not (type(self.max_norm) in (int, float) and 0 < self.max_norm < math.inf):
            raise ValueError(
                f"Clip's max_norm must be a number of more than 0, got {self.max_norm!r}"
            )
        return job

    def lines(self, found: tuple[float, ...]) -> list[str]:
        return [f"gradient norm    {' '.join(f'{norm:.4f}' for norm in found)}"]

    def listen(self, rank: Rank) -> Listener:
        return _Clipping(rank, self.max_norm)


class _Clipping(Listener):
    events = frozenset(("update",))

    def __init__(self, rank: Rank, max_norm: float):
        self.rank, self.max_norm, self.norms = rank, max_norm, []
        self._own = own_parameters(
            rank.context.rank, rank.job.schedule, rank.job.workload, rank.modules
        )

    def begin(self, event: str, what: object) -> None:
        """Called when all gradients are there and no weight has changed."""
        context = self.rank.context
        with self.rank.doing("clipping", "clipping gradients"):
            norm = clip_gradients(
                list(self.rank.names), self._own, self.max_norm, context.rank, context.num_ranks
            )
        self.norms.append(norm)

    def report(self) -> tuple[float, ...]:
        return tuple(self.norms)


def own_parameters(
    rank: int, schedule: Schedule, workload: Workload, modules: Mapping[int, nn.Module]
) -> list[nn.Parameter]:
    """The parameters among this rank's `modules` that this rank counts. Over all ranks, each
    parameter is counted once.

    A stage that several ranks keep is counted by the first of them, and a weight that several
    stages keep is counted for the first stage.
    """
    tied = workload.tied(schedule.num_stages)
    elsewhere = {tuple(place) for places in tied.values() for place in places[1:]}
    return [
        p
        for stage in own_stages(rank, schedule)
        for name, p in modules[stage].named_parameters()
        if p.requires_grad and (stage, name) not in elsewhere
    ]


def own_stages(rank: int, schedule: Schedule) -> list[int]:
    """The stages of which this rank is the first holder."""
    places = enumerate(schedule.placement)
    return [
        stage for stage, place in places if rank == (place if isinstance(place, int) else place[0])
    ]


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    own: Iterable[nn.Parameter],
    max_norm: float,
    rank: int,
    num_ranks: int,
) -> float:
    """Scale this rank's gradients so that the norm over all ranks is at most `max_norm`, and return
    the norm before.

    `own` are the parameters that this rank adds to the norm, and `parameters` are those whose
    gradients it scales. All ranks must call this, because they exchange one number each. As with
    `torch.nn.utils.clip_grad_norm_` in one process, gradients under the limit keep their values.
    Raises FloatingPointError on all ranks when the norm isn't finite.
    """
    gradients = [p.grad for p in own if p.grad is not None]
    # each rank writes its own: the sum is the same everywhere
    squares = torch.zeros(num_ranks, dtype=torch.float64)
    if gradients:
        squares[rank] = torch.stack(torch._foreach_norm(gradients)).double().square().sum().cpu()
    with naming("adding up the gradients' norm"):
        dist.all_reduce(squares)
    norm = math.sqrt(squares.sum().item()) if squares.isfinite().all() else math.nan
    if math.isnan(norm):
        where = [r for r in range(num_ranks) if not squares[r].isfinite()]
        raise FloatingPointError(
            f"the gradients of rank{'s' * (len(where) > 1)} {', '.join(map(str, where))} aren't "
            "finite: look at the loss of this step, lower the learning rate, or compute in a wider "
            "dtype"
        )
    scale = max_norm / (norm + 1e-6)
    if scale < 1 and (scaled := [p.grad for p in parameters if p.grad is not None]):
        torch._foreach_mul_(scaled, scale)
    return norm
