"""Change the learning rate from step to step, by one of torch's schedulers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from ...runtime import Extra, Job, Listener, Rank


@dataclass(frozen=True)
class LearningRate(Extra):
    """Change the learning rate after every step. The scheduler of torch.optim.lr_scheduler is made
    on every rank by `factory(optimizer)`, such as `functools.partial(StepLR, step_size=100)`, or by
    `LearningRate.cosine(warmup, total)`.

    A run that goes on from a checkpoint continues the schedule at its step, to the last bit, on any
    number of ranks. The Run's `extras["learning_rates"]` has the rates of the measured steps, of
    the optimizer's first group.
    """

    factory: Callable[[Optimizer], LRScheduler]
    name = "learning_rates"
    flag = {
        "name": "--cosine",
        "metavar": "W:T",
        "help": "let the learning rate rise over W steps, then fall along a cosine, to 0 at step T",
    }

    @classmethod
    def cosine(cls, warmup: int, total: int) -> LearningRate:
        """A rate that rises evenly over `warmup` steps to the optimizer's, then falls along a
        cosine to 0 at `total`.
        """
        if not (type(warmup) is type(total) is int and 0 <= warmup < total):
            raise ValueError(
                f"cosine needs whole numbers of steps, warmup < total, got {warmup!r} and {total!r}"
            )
        return cls(partial(LambdaLR, lr_lambda=partial(cosine_share, warmup=warmup, total=total)))

    @classmethod
    def from_flag(cls, given: str) -> LearningRate:
        """The extra for the flag's values. Raises ValueError unless they are two numbers of
        steps.
        """
        steps = given.split(":")
        if len(steps) != 2 or not all(each.isdigit() for each in steps):
            raise ValueError(
                f"--cosine needs the steps of the rise and of all, such as 100:2000, got {given}"
            )
        return cls.cosine(*map(int, steps))

    def check(self, job: Job) -> Job:
        """Raise ValueError without an optimizer, or for something that makes no scheduler."""
        if job.options.optimizer is None:
            raise ValueError(
                "a learning rate needs an optimizer: pass "
                "optimizer=functools.partial(torch.optim.SGD, lr=1)"
            )
        if not callable(self.factory):
            raise ValueError(
                "LearningRate takes a function of an optimizer that makes a scheduler, got "
                f"{self.factory!r}: each rank makes its own, for example by "
                "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=100)"
            )
        return job

    def listen(self, rank: Rank) -> Listener | None:
        """Make the scheduler, if this rank has something to learn, and bring it to the step that
        comes first.

        Its state isn't read from a checkpoint, because groups of parameters differ with the number
        of ranks. Taking the same steps leads to the same rates. Raises TypeError for a scheduler
        that can't take steps by itself.
        """
        if rank.optimizer is None:
            return None
        scheduler = self.factory(rank.optimizer)
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "LearningRate needs a scheduler whose rates follow from the number of steps, got a "
                f"{type(scheduler).__name__}: take one of torch.optim.lr_scheduler's others"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for _ in range(rank.job.first_step):
                scheduler.step()
        return _Changing(rank, scheduler)

    def finish(self, job: Job, reports: Sequence[tuple[float, ...] | None]) -> tuple[float, ...]:
        return next((report for report in reports if report is not None), ())

    def lines(self, found: tuple[float, ...]) -> list[str]:
        return [f"learning rate    {' '.join(f'{rate:.3g}' for rate in found)}"]


class _Changing(Listener):
    events = frozenset(("optimizer",))

    def __init__(self, rank: Rank, scheduler: LRScheduler):
        self.rank, self.scheduler, self.rates = rank, scheduler, []

    def begin(self, event: str, what: object) -> None:
        self.rates.append(float(self.rank.optimizer.param_groups[0]["lr"]))

    def end(self, event: str, what: object) -> None:
        self.scheduler.step()

    def report(self) -> tuple[float, ...]:
        return tuple(self.rates)


def cosine_share(step: int, warmup: int, total: int) -> float:
    """The share of the highest rate that a step has.

    >>> [round(cosine_share(step, 2, 6), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1, (step - warmup) / (total - warmup))))
