"""Items for the simulator's loop that are made one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...simulator import run


@dataclass
class Items:
    """What `pplab.simulator.run` takes beside the rows, as far as it is made."""

    needs: list[int | None] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)

    def new(self, duration: float = 0, need: int | None = None, lag: float = 0) -> int:
        """The number of a new item. One of no duration only waits."""
        self.durations.append(duration)
        self.needs.append(need)
        self.lags.append(lag)
        return len(self.needs) - 1

    def run(self, rows: Sequence[Sequence[int]]) -> tuple[list, list]:
        """When every item starts, and when it ends."""
        return run(rows, self.needs, self.durations, self.lags)
