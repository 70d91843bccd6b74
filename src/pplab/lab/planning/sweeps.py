"""One schedule under many costs: the figures of a simulation as arrays with a value per setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...costs import Costs
from ...optional import bring
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import total

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Sweep:
    """What `simulate` says under each setting, as arrays with a value per setting."""

    schedule: Schedule
    settings: tuple[Costs, ...]
    makespan: np.ndarray  # (settings,)
    busy: np.ndarray  # (settings, ranks)
    spans_per_rank: np.ndarray  # (settings, ranks)

    @property
    def idle(self) -> np.ndarray:
        """Per setting and rank, the time not spent in actions."""
        return self.makespan[:, None] - self.busy

    @property
    def bubble_fraction(self) -> np.ndarray:
        """Per setting, idle / (P * makespan)."""
        return total(self.idle.T) / (self.schedule.num_ranks * self.makespan)

    @property
    def bubble_ratio(self) -> np.ndarray:
        """Per setting, idle / ideal."""
        return total(self.idle.T) / total(self.busy.T)

    @property
    def span_bubble_fraction(self) -> np.ndarray:
        """Per setting, 1 - work / span of the rank whose span is the longest."""
        longest = range(len(self.settings)), self.spans_per_rank.argmax(axis=1)
        return 1 - self.busy[longest] / self.spans_per_rank[longest]


def sweep(schedule: Schedule, settings: Sequence[Costs]) -> Sweep:
    """Simulate `schedule` under every one of `settings`.

    Raises as `simulate` does, ValueError when there are no settings.

    >>> from pplab import build
    >>> sweep(build("1F1B", num_ranks=4, num_microbatches=8), [Costs(latency=c) for c in (0, 1)]).makespan
    array([33., 49.])
    """
    np = bring("numpy")
    settings = tuple(settings)
    if not settings:
        raise ValueError("settings is empty: give at least one pplab.Costs")
    timelines = [simulate(schedule, costs) for costs in settings]
    figures = zip(*((t.makespan, t.busy, t.spans_per_rank) for t in timelines), strict=True)
    return Sweep(schedule, settings, *(np.array(values, float) for values in figures))
