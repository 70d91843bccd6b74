"""A learning rate that changes from step to step, by one of torch's schedulers."""

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
    """Change the learning rate after every step, by the scheduler of torch.optim.lr_scheduler that
    `factory(optimizer)` makes on every rank, such as `functools.partial(StepLR, step_size=100)`, or
    by `LearningRate.cosine(warmup, total)`.

    A run that goes on from a checkpoint takes the schedule up at its step, to the last bit, on any
    number of ranks. The rates of the measured steps, of the optimizer's first group, are the Run's
    `extras["learning_rates"]`.
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
        """A rate that rises evenly over `warmup` steps to the optimizer's, then falls as a cosine
        to 0 at `total`.
        """
        if not (type(warmup) is type(total) is int and 0 <= warmup < total):
            raise ValueError(
                f"cosine needs whole numbers of steps, warmup < total, got {warmup!r} and {total!r}"
            )
        return cls(partial(LambdaLR, lr_lambda=partial(cosine_share, warmup=warmup, total=total)))

    @classmethod
    def from_flag(cls, given: str) -> LearningRate:
        """ValueError unless it is two numbers of steps."""
        steps = given.split(":")
        if len(steps) != 2 or not all(each.isdigit() for each in steps):
            raise ValueError(
                f"--cosine needs the steps of the rise and of all, such as 100:2000, got {given}"
            )
        return cls.cosine(*map(int, steps))

    def check(self, job: Job) -> Job:
        """ValueError without an optimizer, or for something that makes no scheduler."""
        if job.options.optimizer is None:
            raise ValueError(
                "a learning rate needs an optimizer: pass "
                "optimizer=functools.partial(torch.optim.SGD, lr=1)"
            )
        if not callable(self.factory):
            raise ValueError(
                "LearningRate takes a function of an optimizer that makes a scheduler, got "
                f"{self.factory!r}: each rank makes its own, by "
                "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=100), say"
            )
        return job

    def listen(self, rank: Rank) -> Listener | None:
        """Make the scheduler, if this rank has something to learn, and bring it to the step that
        comes first.

        Its state isn't read from a checkpoint: another number of ranks has other groups of
        parameters. Taking the same steps leads to the same rates. Raises TypeError for what takes
        no steps by itself.
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
        """The rates of a rank that has parameters."""
        return next((report for report in reports if report is not None), ())

    def lines(self, found: tuple[float, ...]) -> list[str]:
        """The rates."""
        return [f"learning rate    {' '.join(f'{rate:.3g}' for rate in found)}"]


class _Changing(Listener):
    events = frozenset(("optimizer",))

    def __init__(self, rank: Rank, scheduler: LRScheduler):
        self.rank, self.scheduler, self.rates = rank, scheduler, []

    def begin(self, event: str, what: object) -> None:
        """The rate of this step."""
        self.rates.append(float(self.rank.optimizer.param_groups[0]["lr"]))

    def end(self, event: str, what: object) -> None:
        """The next step has another one."""
        self.scheduler.step()

    def report(self) -> tuple[float, ...]:
        """The rates, which are the same on all ranks."""
        return tuple(self.rates)


def cosine_share(step: int, warmup: int, total: int) -> float:
    """The share of the highest rate that a step has.

    >>> [round(cosine_share(step, 2, 6), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1, (step - warmup) / (total - warmup))))
