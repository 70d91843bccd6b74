"""Items for the simulator's loop that are made one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...simulator import run


@dataclass
class Items:
    """What `pplab.simulator.run` takes in addition to the rows, while it is being made."""

    needs: list[int | None] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)

    def new(self, duration: float = 0, need: int | None = None, lag: float = 0) -> int:
        """Add an item, and return its number. An item without a duration only waits."""
        self.durations.append(duration)
        self.needs.append(need)
        self.lags.append(lag)
        return len(self.needs) - 1

    def split(self, item: int, pieces: int) -> list[int]:
        """Divide the item into equal pieces that take turns. It becomes the last of them, and the
        first one waits.
        """
        self.durations[item] /= pieces
        found = [self.new(self.durations[item]) for _ in range(pieces - 1)] + [item]
        for each in (self.needs, self.lags):
            each[found[0]], each[item] = each[item], each[found[0]]
        return found

    def run(self, rows: Sequence[Sequence[int]]) -> tuple[list, list]:
        """When every item starts, and when it ends."""
        return run(rows, self.needs, self.durations, self.lags)
