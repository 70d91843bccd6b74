"""The options of a run, and the job that they make. Everything that can be checked before ranks
start is checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import torch
from torch import nn

from ..errors import accept, expect, positive_int, unknown
from ..schedule import Schedule
from ..simulator import validate
from .listener import Extra
from .workload import Workload, check_divides, check_workload

MakeOptimizer = Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
_SGD = "functools.partial(torch.optim.SGD, lr=0.1)"


class Asked(TypedDict, total=False):
    """The fields of `Options`, as keywords for editors and type checkers."""

    steps: int
    warmup: int
    check_gradients: bool
    optimizer: MakeOptimizer | None
    autocast: torch.dtype | None


@dataclass(frozen=True)
class Options:
    """The options of a run, which are also flags of `pplab train`. What the core doesn't have to
    know is an `Extra`, in a file of its own.

    Without an `optimizer` no weight changes. Otherwise it is a function, called on every rank that
    has weights to train, with the (name in the whole model, weight) pairs of all its stages. It
    returns an optimizer of torch's, which the rank steps after every measured row.
    """

    steps: int = 3  # measured ones
    warmup: int = 1  # before them; they change no weight
    check_gradients: bool = False  # compare the first step's gradients with one process's
    optimizer: MakeOptimizer | None = None  # None: weights stay as they are
    autocast: torch.dtype | None = None  # of mixed precision; float32 crosses in torch.bfloat16

    def __post_init__(self) -> None:
        accept(self, steps=positive_int("steps", self.steps))
        accept(self, warmup=positive_int("warmup", self.warmup, 0))
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                f"autocast must be torch.bfloat16, torch.float16 or None, got {self.autocast!r}"
            )
        if self.optimizer is not None and not callable(self.optimizer):
            raise ValueError(
                "optimizer must be a function that makes one on each rank, got a "
                f"{type(self.optimizer).__name__}: give {_SGD}, for example"
            )

    @classmethod
    def of(cls, **options: Any) -> Options:
        """Options from keywords. Raises ValueError with the nearest names for an unknown one."""
        known = [each.name for each in fields(cls)]
        for name in options.keys() - known:
            raise ValueError(
                f"{unknown('option of a run', name, known)}; what else a run can do is an extra, "
                "such as lab.Pace(costs)"
            )
        return cls(**options)


@dataclass(frozen=True)
class Job:
    """A training run, the same for all ranks. `engine(context, job)` carries it out on each rank
    and returns its RankReport. An extra may replace the fields after `engine` in `check`.

    `engine_name` is the engine in the printed Run, and `how` is the timeline's word: "measured" or
    "paced". Where gradients differ, `explain(on_rank_0, job, report, reports, whole)` tells why.
    `first_step` counts the steps that were done before this run.
    """

    schedule: Schedule
    workload: Workload
    options: Options
    engine: Callable
    extras: tuple[Extra, ...] = ()
    engine_name: str = "pplab"
    how: str = "measured"
    explain: Callable | None = None
    first_step: int = 0


def make_job(
    schedule: Schedule,
    workload: Workload,
    num_ranks: int,
    extras: Sequence[Extra] = (),
    **options: object,
) -> Job:
    """The job for `num_ranks` ranks. Raises ScheduleError or ValueError for a job that can't
    run.
    """
    from .rank import train

    expect(Schedule, schedule=schedule)
    check_workload(workload)
    validate(schedule)
    if schedule.num_ranks != num_ranks:
        raise ValueError(
            f"{schedule.name} is for {schedule.num_ranks} ranks and there are {num_ranks}: start "
            f"{schedule.num_ranks} ranks, or build the schedule for {num_ranks}"
        )
    workload.check(schedule.num_stages)
    check_divides(workload.batch_size, schedule.num_microbatches)
    job = Job(schedule, workload, Options.of(**options), train, tuple(extras))
    for extra in job.extras:
        expect(Extra, extra=extra)
        job = extra.check(job)
    last, most = job.first_step + job.options.steps, job.workload.num_batches
    if most is not None and last > most:
        raise ValueError(
            f"there are {most} batches of one size, and the run would end with step {last}: take "
            f"steps={max(0, most - job.first_step)}, or models.epochs(loader), which starts from "
            "the beginning when it has reached the end"
        )
    return job
