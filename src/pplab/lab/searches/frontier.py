"""Time against memory: every published schedule, the best orders that were found, and how short one
can be at all.

`make frontier` records it in `results/`, and `frontiers` reads that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...costs import Costs, Link
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Timeline
from ..forms import load
from .exact import CLOSE

COMMAND = "make frontier"


@dataclass(frozen=True)
class Point:
    """An order, or a bound, of a setting."""

    name: str
    placement: str
    held: float  # by the fullest rank
    time: float
    limit: float | Any = None  # in which it was looked for; None: it is a published schedule
    bound: float | None = None  # in that limit no order is shorter
    proved: bool = False  # whether the order meets the bound
    final: bool = False  # whether more memory makes none shorter
    split: bool = True
    rows: tuple[str, ...] = ()
    seconds: float = 0  # of a processor, that it has had
    # after so many: the best order so far, and the bound
    progress: tuple[tuple[float, float, float], ...] = ()

    @property
    def schedule(self) -> Schedule:
        """The order itself."""
        return Schedule([row.split() for row in self.rows], self.name)


@dataclass(frozen=True)
class Frontier:
    """The points of one setting: a number of ranks and microbatches, and times."""

    name: str
    title: str
    num_ranks: int
    num_microbatches: int
    unit: str  # of time
    held_in: str  # unit of memory
    points: tuple[Point, ...]
    costs: Mapping[str, Costs] = field(repr=False, default_factory=dict)  # of each placement

    @property
    def published(self) -> tuple[Point, ...]:
        """The schedules that `pplab.build` knows."""
        return tuple(point for point in self.points if point.limit is None)

    @property
    def found(self) -> tuple[Point, ...]:
        """The best order found for each limit, placement by placement."""
        return tuple(point for point in self.points if point.limit is not None)

    def beaten(self) -> tuple[tuple[Point, Point], ...]:
        """Every published schedule that some found order beats, with the shortest order of the same
        placement that holds no more. Both are whole, or both split.
        """
        pairs = []
        for point in self.published:
            others = (
                found
                for found in self.found
                if (found.placement, found.split) == (point.placement, point.split)
                and found.held <= point.held * (1 + CLOSE)
                and found.time < point.time * (1 - CLOSE)
            )
            if better := min(others, key=lambda each: (each.time, each.held), default=None):
                pairs.append((point, better))
        return tuple(pairs)

    def timelines(self) -> dict[Point, Timeline]:
        """Every point's order at the setting's times."""
        return {
            point: simulate(point.schedule, self.costs[point.placement]) for point in self.points
        }


def frontiers(folder: Path | str | None = None) -> dict[str, Frontier]:
    """What `make frontier` has recorded, by name, by default from the repository's `results`.

    Raises FileNotFoundError where there is none.
    """
    found = {}
    for recording in load(folder):
        if recording.data["command"] == COMMAND:
            for part in recording.data["parts"]:
                points = tuple(_point(row) for row in part["rows"])
                about = {
                    key: part[key]
                    for key in ("title", "num_ranks", "num_microbatches", "unit", "held_in")
                }
                costs = {placement: _costs(said) for placement, said in part["costs"].items()}
                found[part["name"]] = Frontier(part["name"], points=points, costs=costs, **about)
    if not found:
        where = folder or "a folder `results` here or above"
        raise FileNotFoundError(
            f"no recording of `{COMMAND}` in {where}: name the repository's `results`, or record "
            "one"
        )
    return found


def _costs(said: Mapping) -> Costs:
    links = {(source, target): Link(*of) for source, target, *of in said.get("links", ())}
    return Costs(**{**said, "links": links})


def _point(row: Mapping) -> Point:
    progress = tuple(map(tuple, row.get("progress", ())))
    return Point(**{**row, "rows": tuple(row.get("rows", ())), "progress": progress})
