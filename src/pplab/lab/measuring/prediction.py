"""Measure one schedule, predict others from its run, and measure these too: how far can the predictions be trusted?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ...actions import Kind
from ...costs import Costs
from ...errors import positive_int
from ...runtime import Pool, Workload, make_job
from ...schedule import Schedule
from ...simulator import simulate
from .attribution import calibrate, calibrating


@dataclass(frozen=True)
class Predicted:
    """A schedule's step, predicted and measured."""

    schedule: str
    predicted_ms: float
    measured_ms: float  # the fastest step
    steps_ms: tuple[float, ...]  # all measured steps, as they came

    @property
    def error(self) -> float:
        """How far the prediction was off: 0.1 when it said 10 % more than was measured."""
        return self.predicted_ms / self.measured_ms - 1


@dataclass(frozen=True, repr=False)
class Prediction:
    """What `predict` found: a row per schedule, that of the calibration first."""

    rows: tuple[Predicted, ...]
    costs: Costs  # what the predictions were made with, in ms
    notes: tuple[str, ...]  # on the data and the machine

    @property
    def errors(self) -> tuple[float, ...]:
        """Of each row. What is predicted to be less apart than these can be the other way round."""
        return tuple(row.error for row in self.rows)

    @property
    def predicted_order(self) -> tuple[str, ...]:
        """The schedules' names, by predicted time, fastest first."""
        return tuple(row.schedule for row in sorted(self.rows, key=lambda row: row.predicted_ms))

    @property
    def measured_order(self) -> tuple[str, ...]:
        """The schedules' names, by measured time, fastest first."""
        return tuple(row.schedule for row in sorted(self.rows, key=lambda row: row.measured_ms))

    def to_dict(self) -> dict:
        """Rows and notes as plain JSON values."""
        return {"rows": [asdict(row) for row in self.rows], "notes": self.notes}

    def __str__(self) -> str:
        worst = max(self.rows, key=lambda row: abs(row.error))
        return "\n".join(
            (
                f"the fastest of {len(worst.steps_ms)} steps each",
                f"{'schedule':22} {'predicted ms':>13} {'measured ms':>12} {'error':>7} {'slowest':>9}",
                *(
                    f"{row.schedule:22} {row.predicted_ms:13.1f} {row.measured_ms:12.1f} {row.error:7.1%} "
                    f"{max(row.steps_ms):9.1f}"
                    for row in self.rows
                ),
                f"largest error {worst.error:.1%}, of {worst.schedule}: "
                "smaller differences between predictions say nothing",
                f"predicted, fastest first: {', '.join(self.predicted_order)}",
                f"measured, fastest first: {', '.join(self.measured_order)}",
                *(f"note: {note}" for note in self.notes),
            )
        )

    __repr__ = __str__


def predict(
    pool: Pool,
    measured: Schedule,
    others: Sequence[Schedule],
    workload: Workload,
    *,
    steps: int = 3,
    rounds: int = 3,
    **options: object,
) -> Prediction:
    """Measure a schedule, predict it and `others` from its run, and measure them all, `rounds` times in turn.

    Each round runs `steps` steps of every schedule, so that a slow spell of the machine hits more than one. The fastest
    step counts, also of `calibrating(measured)`, whose fastest step the costs come from. `options` are a run's, such as
    `autocast=torch.bfloat16`. Raises ValueError before anything starts for what can't be predicted: other stages, or
    halves of a backward that `measured` never splits.
    """
    check(pool.num_ranks, measured, others, workload, steps=steps, rounds=rounds, **options)
    schedules, first = (measured, *others), calibrating(measured)
    runs, found = [], [[] for _ in schedules]
    for _ in range(rounds):
        runs += pool.train(first, workload, steps=steps, **options).timelines
        for schedule, times in zip(schedules, found, strict=True):
            times += (step.makespan for step in pool.train(schedule, workload, steps=steps, **options).timelines)
    costs = calibrate(min(runs, key=lambda step: step.makespan))
    rows = [
        Predicted(schedule.name, simulate(schedule, costs).makespan, min(times), tuple(times))
        for schedule, times in zip(schedules, found, strict=True)
    ]
    return Prediction(tuple(rows), costs, (*workload.notes, *pool.notes))


def check(
    num_ranks: int,
    measured: Schedule,
    others: Sequence[Schedule],
    workload: Workload,
    *,
    steps: int,
    rounds: int,
    **options: object,
) -> None:
    """Raise ValueError unless a run of `measured` tells enough to predict the others, and all can be run."""
    positive_int("rounds", rounds)
    for schedule in (measured, *others):
        if schedule.placement != measured.placement:
            raise ValueError(f"{schedule.name} cuts or places the model otherwise than {measured.name}: measure it")
        if _is_split(schedule) and not _is_split(measured):
            raise ValueError(
                f"{measured.name} splits no backward, so it doesn't tell how long the halves are that "
                f"{schedule.name} runs apart: measure one that does, ZB-H1, say"
            )
        make_job(schedule, workload, num_ranks, steps=steps, **options)


def _is_split(schedule: Schedule) -> bool:
    return Kind.I in schedule.columns.kinds
