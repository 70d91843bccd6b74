"""What a run may be asked for, and the job that becomes of it: everything that can be checked before ranks start is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..costs import Costs
from ..errors import positive_int, unknown
from ..schedule import Schedule
from ..simulator import validate
from .workload import Workload, check_divides, loss_scale

if TYPE_CHECKING:
    from .listener import Extra

REDUCTIONS = ("end", "drain")


def option(default: object, says: str, /, **flag: object) -> object:
    """A field of `Options` that says what it is for.

    With words of argparse's `add_argument`, it is a flag of `pplab train`, which takes name, default and help from the
    field where `flag` has no other.
    """
    return field(default=default, metadata={"says": says, "flag": flag})


def adamw(learning_rate: str) -> Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]:
    """What makes an AdamW, from the text of its learning rate."""
    return partial(torch.optim.AdamW, lr=float(learning_rate))


def stages(text: str) -> list[int]:
    """Numbers with commas between."""
    return [int(part) for part in text.split(",")]


@dataclass(frozen=True)
class Options:
    """The options of a run.

    A new one that the core has to know is a field here; whatever else a run can do is an `Extra`, a file of its own.
    """

    steps: int = option(3, "measured steps", type=int, metavar="N", default=5)
    warmup: int = option(1, "steps before them, which change no weight", type=int, metavar="N")
    check_gradients: bool = option(
        False,
        "compare the first step's gradients with those of one process (pplab train exits with 1 where they differ)",
        action="store_true",
    )
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None = option(
        None,
        "makes an optimizer from a rank's parameters (functools.partial(torch.optim.SGD, lr=0.1)); none: weights stay",
        name="--learning-rate",
        type=adamw,
        metavar="R",
        default="0.001",
        help="of AdamW",
    )
    autocast: torch.dtype | None = option(
        None,
        "dtype of mixed precision, such as torch.bfloat16",
        name="--bf16",
        action="store_const",
        const=torch.bfloat16,
        help="compute in bfloat16 where that is safe",
    )
    recompute: bool | Iterable[int] = option(
        False,
        "stages that run their forward again in the backward: some, or all (which is True, or the flag by itself)",
        type=stages,
        metavar="S,S",
        nargs="?",
        const=True,
    )
    reduction: str = option(
        "end", 'when gradients of copies of a stage are added up: "end" of the row, or "drain"', metavar="WHEN"
    )
    pace: Costs | None = option(None, "durations, with a unit of time, that actions and messages last at least")

    def __post_init__(self) -> None:
        positive_int("steps", self.steps)
        if isinstance(self.recompute, Iterable) and not isinstance(self.recompute, Sequence):
            object.__setattr__(self, "recompute", tuple(self.recompute))  # a generator lasts only once
        if not isinstance(self.warmup, int) or self.warmup < 0:
            raise ValueError(f"warmup must be an integer of at least 0, got {self.warmup!r}")
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"autocast must be torch.bfloat16, torch.float16 or None, got {self.autocast!r}")
        if self.reduction not in REDUCTIONS:
            raise unknown("reduction", self.reduction, REDUCTIONS)

    @classmethod
    def of(cls, **options: object) -> Options:
        """Options from keywords; ValueError with the nearest names for one that there isn't."""
        known = [each.name for each in fields(cls)]
        for name in options:
            if name not in known:
                raise unknown("option of a run", name, known)
        return cls(**options)

    def recomputed(self, num_stages: int) -> frozenset[int]:
        """The stages that recompute; ValueError unless they are among the schedule's."""
        if isinstance(self.recompute, bool):
            return frozenset(range(num_stages) if self.recompute else ())
        stages = list(self.recompute) if isinstance(self.recompute, Iterable) else [None]
        if any(type(s) is not int or not 0 <= s < num_stages for s in stages):
            raise ValueError(
                f"recompute must be True, False or some of the stages 0 to {num_stages - 1}, such as [0], "
                f"got {self.recompute!r}"
            )
        return frozenset(stages)


@dataclass(frozen=True)
class Job:
    """A training run, the same for all ranks. `engine(context, job)` carries it out on each."""

    schedule: Schedule
    workload: Workload
    options: Options
    engine: Callable
    extras: tuple[Extra, ...] = ()
    engine_name: str = "pplab"
    first_step: int = 0  # how many steps were done before this run

    @property
    def loss_scale(self) -> float:
        """What a microbatch's loss is multiplied with, so that the batch's loss is their sum."""
        return loss_scale(self.workload, self.schedule.num_microbatches)


def make_job(
    schedule: Schedule, workload: Workload, num_ranks: int, extras: Sequence[Extra] = (), **options: object
) -> Job:
    """The job for `num_ranks` ranks. Raises ScheduleError or ValueError for what can't be done."""
    from .training import train

    validate(schedule)
    if schedule.num_ranks != num_ranks:
        raise ValueError(
            f"{schedule.name} is for {schedule.num_ranks} ranks and there are {num_ranks}: "
            f"start {schedule.num_ranks} ranks, or build the schedule for {num_ranks}"
        )
    workload.check(schedule.num_stages)
    check_divides(workload.batch_size, schedule.num_microbatches)
    job = Job(schedule, workload, Options.of(**options), train, tuple(extras))
    job.options.recomputed(schedule.num_stages)
    if job.options.pace is not None:
        from .pace import Pace  # only a paced run needs it

        job = replace(job, extras=(Pace(job.options.pace), *job.extras))
    for extra in job.extras:
        job = extra.check(job)
    return job
