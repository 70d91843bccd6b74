"""Run schedules with real processes and paced pieces, and put each next to its simulation."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from ...costs import Costs
from ...errors import positive_int
from ...runtime import Pool, Run, Workload
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Timeline
from ..extras import Pace
from .beside import Beside
from .experts import Experts
from .pieces import Pieces


@dataclass(frozen=True)
class Measured:
    """A schedule's step, simulated and measured."""

    schedule: Schedule
    simulated: Timeline
    measured: Timeline  # the median step
    steps_ms: tuple[float, ...]  # how long all measured steps took

    @property
    def ratio(self) -> float:
        """Measured over simulated."""
        return self.measured.makespan / self.simulated.makespan


@dataclass(frozen=True, repr=False)
class UnderPrediction:
    """What `measure_under` found, a row per schedule."""

    rows: tuple[Measured, ...]
    latency_ms: float
    load: float  # the machine's load average over the last minute, when it was done

    @property
    def timelines(self) -> list[Timeline]:
        """For each schedule the simulated step and the measured one. `pp.compare` draws them one
        above the other.
        """
        return [timeline for row in self.rows for timeline in (row.simulated, row.measured)]

    def order(self, measured: bool) -> list[str]:
        """The schedules' names, fastest first."""
        steps = [(row.measured if measured else row.simulated).makespan for row in self.rows]
        return [
            row.schedule.name
            for _, row in sorted(zip(steps, self.rows, strict=True), key=itemgetter(0))
        ]

    def __str__(self) -> str:
        head = f"{'schedule':34} {'simulated':>10} {'measured':>9} {'ratio':>6} {'all steps':>13}"
        lines = [
            f"in ms; messages take {self.latency_ms:g}; the machine's load was {self.load:.1f}",
            head,
        ]
        for row in self.rows:
            spread = f"{min(row.steps_ms):.0f} to {max(row.steps_ms):.0f}"
            times = f"{row.simulated.makespan:10.0f} {row.measured.makespan:9.0f} {row.ratio:6.3f}"
            lines.append(f"{row.schedule.name:34} {times} {spread:>13}")
        return "\n".join(lines)

    __repr__ = __str__


def measure_under(
    pool: Pool,
    schedules: Sequence[Schedule],
    workload: Workload,
    pieces: Pieces,
    *,
    latency_ms: float = 0,
    steps: int = 3,
    rounds: int = 1,
    **options: object,
) -> UnderPrediction:
    """Run each schedule with paced pieces, `latency_ms` for each message, and the halves of its
    pairs at the same time. Experts are spread if there are replicas. The simulation gets the
    pieces' times, and none of the measured ones.

    Each of `rounds` runs `steps` steps of every schedule in turn, so that a slow spell of the
    machine hits more than one of them. `options` are those of `Pool.train`. Raises ValueError where
    the workload's layers don't divide into a schedule's stages.
    """
    costs = [pieces.costs(schedule, workload.num_layers, latency_ms) for schedule in schedules]
    slow = [Pace(Costs(1e-6, 0, 0, latency=latency_ms, unit="ms"))] * (latency_ms > 0)
    runs: list[list[Run]] = [[] for _ in schedules]
    for _ in range(positive_int("rounds", rounds)):
        for schedule, found in zip(schedules, runs, strict=True):
            extras = [Beside(pieces), *[Experts()] * (len(schedule.replicas) > 1), *slow]
            found.append(
                pool.train(schedule, workload, *extras, steps=steps, **{"warmup": 0, **options})
            )
    simulated = map(simulate, schedules, costs)
    return UnderPrediction(tuple(map(_row, simulated, runs)), latency_ms, os.getloadavg()[0])


def _row(simulated: Timeline, runs: Sequence[Run]) -> Measured:
    timelines = [timeline for run in runs for timeline in run.timelines]
    steps = tuple(timeline.makespan for timeline in timelines)
    median = timelines[steps.index(statistics.median_high(steps))]
    return Measured(simulated.schedule, simulated, median, steps)
