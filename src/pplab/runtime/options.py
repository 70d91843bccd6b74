"""What a run may be asked for, and the job that becomes of it: everything that can be checked
before ranks start is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import positive_int, shown, unknown
from ..schedule import Schedule
from ..simulator import validate
from .workload import Workload, check_divides, check_workload

if TYPE_CHECKING:
    from .listener import Extra


def option(default: object, says: str) -> object:
    """A field of `Options` that says what it is for."""
    return field(default=default, metadata={"says": says})


@dataclass(frozen=True)
class Options:
    """The options of a run, flags of `pplab train`. What the core needn't know is an `Extra`, in a
    file of its own.
    """

    steps: int = option(3, "measured steps")
    warmup: int = option(1, "steps before them, which change no weight")
    check_gradients: bool = option(
        False, "compare the first step's gradients with those of one process"
    )
    optimizer: Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None = (
        option(
            None,
            "makes an optimizer of (name, weight) pairs (functools.partial(torch.optim.SGD, lr=0.1)); none: weights stay",
        )
    )
    autocast: torch.dtype | None = option(
        None, "dtype of mixed precision; by torch.bfloat16, float32 crosses in it"
    )

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("warmup", 0)):
            if type(value := getattr(self, name)) is not int or value < least:
                vars(self)[name] = positive_int(name, value, least)
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                f"autocast must be torch.bfloat16, torch.float16 or None, got {self.autocast!r}"
            )
        if self.optimizer is not None and not callable(self.optimizer):
            how = f"must be a function that makes one on each rank, got a {type(self.optimizer).__name__}"
            raise ValueError(
                f"optimizer {how}: give functools.partial(torch.optim.SGD, lr=0.1), say"
            )

    @classmethod
    def of(cls, **options: object) -> Options:
        """Options from keywords; ValueError with the nearest names for one that there isn't."""
        known = [each.name for each in fields(cls)]
        for name in options.keys() - known:
            extra = "what else a run can do is an extra, such as lab.Pace(costs)"
            raise ValueError(f"{unknown('option of a run', name, known)}; {extra}")
        return cls(**options)


@dataclass(frozen=True)
class Job:
    """A training run, the same for all ranks. `engine(context, job)` carries it out on each."""

    schedule: Schedule
    workload: Workload
    options: Options
    engine: Callable
    extras: tuple[Extra, ...] = ()
    engine_name: str = "pplab"
    how: str = "measured"  # or "paced"
    reference: Callable | None = None  # in place of `train_whole`
    first_step: int = 0  # how many steps were done before this run


def make_job(
    schedule: Schedule,
    workload: Workload,
    num_ranks: int,
    extras: Sequence[Extra] = (),
    **options: object,
) -> Job:
    """The job for `num_ranks` ranks. Raises ScheduleError or ValueError for what can't be done."""
    from .training import train

    if isinstance(workload, Schedule) or not isinstance(schedule, Schedule):
        how = 'pplab.build("1F1B", num_ranks=2, num_microbatches=8) makes a schedule'
        got = f"{shown(schedule)} and {type(workload).__name__}"
        raise ValueError(f"a run takes a pplab.Schedule, then a workload, got {got}: {how}")
    check_workload(workload)
    validate(schedule)
    if schedule.num_ranks != num_ranks:
        remedy = f"start {schedule.num_ranks} ranks, or build the schedule for {num_ranks}"
        raise ValueError(
            f"{schedule.name} is for {schedule.num_ranks} ranks and there are {num_ranks}: {remedy}"
        )
    workload.check(schedule.num_stages)
    check_divides(workload.batch_size, schedule.num_microbatches)
    job = Job(schedule, workload, Options.of(**options), train, tuple(extras))
    for extra in job.extras:
        job = extra.check(job)
    return job
