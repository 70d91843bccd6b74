"""Time against memory: every published schedule, the best orders that were found, and how short one can be at all.

`make frontier` records it in `results/`; `frontiers` reads that, `frontier_chart` draws a setting of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import palette
from ...actions import Kind
from ...costs import Costs, Link
from ...optional import bring
from ...plot import LABEL_SIZE, WIDTH
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Timeline
from ..forms import CATEGORIES, load
from .exact import CLOSE
from .problem import PLACEMENTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    progress: tuple[tuple[float, float, float], ...] = ()  # after so many: the best order so far, and the bound

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
        """The best order in each limit, placement by placement."""
        return tuple(point for point in self.points if point.limit is not None)

    def beaten(self) -> tuple[tuple[Point, Point], ...]:
        """Every published schedule that some found order beats, with the shortest one of the same placement that holds
        no more. Both are whole, or both split."""
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
        return {point: simulate(point.schedule, self.costs[point.placement]) for point in self.points}


def frontiers(folder: Path | str | None = None) -> dict[str, Frontier]:
    """What `make frontier` has recorded, by name; of the repository's `results` when no folder is named.

    FileNotFoundError where there is none."""
    found = {}
    for recording in load(folder):
        if recording.data["command"] == COMMAND:
            for part in recording.data["parts"]:
                points = tuple(_point(row) for row in part["rows"])
                about = {key: part[key] for key in ("title", "num_ranks", "num_microbatches", "unit", "held_in")}
                costs = {placement: _costs(said) for placement, said in part["costs"].items()}
                found[part["name"]] = Frontier(part["name"], points=points, costs=costs, **about)
    if not found:
        where = folder or "a folder `results` here or above"
        raise FileNotFoundError(
            f"no recording of `{COMMAND}` in {where}: name the repository's `results`, or record one"
        )
    return found


def _costs(said: Mapping) -> Costs:
    links = {(source, target): Link(*of) for source, target, *of in said.get("links", ())}
    return Costs(**{**said, "links": links})


def _point(row: Mapping) -> Point:
    progress = tuple(map(tuple, row.get("progress", ())))
    return Point(**{**row, "rows": tuple(row.get("rows", ())), "progress": progress})


# The look of a placement, whole backwards apart: a marker, and a colour.
_LOOK = {
    "one stage per rank": ("o", palette.FILL[Kind.F]),
    "one stage per rank, whole": ("s", palette.FILL[Kind.B]),
    "loop": ("^", CATEGORIES[5]),
    "V": ("v", palette.FILL[Kind.I]),
    "bidirectional": ("D", palette.OTHER),
}


def frontier_chart(frontier: Frontier, *, most: float | None = None, slowest: float | None = None) -> Axes:
    """Draw time against what the fullest rank holds.

    A line says, for a placement, how short the best order is that was found in so much memory. It is marked where that
    is proved, and below it lies, shaded, what isn't. Rings are published schedules, with their names.

    `most`: how much memory the axis reaches; `slowest`: how much time. What lies beyond is left out.
    """
    plt = bring("matplotlib.pyplot")
    ax = plt.subplots(figsize=(WIDTH, 4.8), layout="constrained")[1]
    best = min(point.time for point in frontier.points)
    slowest = slowest or 1.8 * best
    shown = [p for p in frontier.points if p.time <= slowest and (most is None or (p.limit or p.held) <= most)]
    right = most or 1.04 * max(point.limit or point.held for point in shown)
    for look, (marker, colour) in _LOOK.items():
        steps = sorted((p for p in shown if p.limit is not None and _look(p) == look), key=lambda p: p.limit)
        if steps:
            at, times, bounds = _known(steps, [p for p in shown if _look(p) == look], frontier.held_in, right)
            ax.step(at, times, where="post", color=colour, lw=1.5, zorder=2)
            ax.fill_between(at, bounds, times, step="post", color=colour, alpha=0.3, lw=0, zorder=1)
            proved = [(p.held, p.time) for p in steps if p.proved]
            if proved:
                ax.plot(*zip(*proved, strict=True), marker, color=colour, ms=5, zorder=3)
        copies = " (two copies)" * (look == "bidirectional")
        if any(_look(point) == look for point in shown):
            ax.plot([], [], marker, color=colour, ls="-", ms=5, label=look + copies)
    _rings(ax, [point for point in shown if point.limit is None])
    left = 0.9 * min(point.limit or point.held for point in shown)
    _finish(ax, frontier, (left, right), (0.97 * best, 1.01 * slowest))
    return ax


def _known(steps: Sequence[Point], orders: Sequence[Point], held_in: str, right: float) -> tuple[list, ...]:
    """Where a placement's line steps, its height from there on, and the bound's: in more memory nothing gets longer.

    Activations come whole, so that between two limits a rank can hold no more than in the lower one. Bytes don't: up
    to the next limit only that one's bound is known.
    """
    last = right if steps[-1].final else steps[-1].limit
    at = sorted({x for p in orders for x in (p.held, p.limit or p.held) if x < last} | {last})
    times = [min((p.time for p in orders if p.held <= x * (1 + CLOSE)), default=inf) for x in at]
    bounds = []
    for x in at:
        below = [p.bound for p in steps if p.limit <= x * (1 + CLOSE)]
        above = [p.bound for p in steps if p.limit > x * (1 + CLOSE)]
        bounds.append((above or below)[0] if held_in == "GB" and above else (below or above)[-1])
    known = [i for i, time in enumerate(times) if time < inf]
    return tuple([each[i] for i in known] for each in (at, times, bounds))


def _look(point: Point) -> str:
    """What it is drawn as. Of the published schedules some of a loop, or both ways, have whole backwards, too."""
    return point.placement + ", whole" * (not point.split and point.placement == PLACEMENTS[0])


def _rings(ax: Axes, points: Sequence[Point]) -> None:
    """Schedules at one place share a label."""
    names: dict[tuple[float, float], list[Point]] = {}
    for point in sorted(points, key=lambda p: (p.held, p.time)):
        names.setdefault((point.held, point.time), []).append(point)
    near, before = 0.03 * max((point.time for point in points), default=0), (-1, 0, False)
    for (held, time), there in names.items():
        marker, colour = _LOOK[_look(there[0])]
        ax.plot(held, time, marker, mfc="none", mec=colour, ms=9, mew=1.4, zorder=4)
        text = ",\n".join(point.name for point in there)
        left = not before[2] and held == before[0] and time - before[1] < near  # else it lies on the one below
        where = {"xytext": (-7, -3), "ha": "right"} if left else {"xytext": (6, 4)}
        ax.annotate(text, (held, time), textcoords="offset points", fontsize=LABEL_SIZE, zorder=5, **where)
        before = held, time, left


def _finish(ax: Axes, frontier: Frontier, memory: tuple[float, float], times: tuple[float, float]) -> None:
    ax.set_xlim(*memory)
    ax.set_ylim(*times)
    ax.set_title(frontier.title, fontsize=10, loc="left", parse_math=False)
    ax.set_xlabel(f"what the fullest rank holds ({frontier.held_in})")
    ax.set_ylabel(f"makespan ({frontier.unit})" if frontier.unit else "makespan")
    ax.spines[["top", "right"]].set_visible(False)
    below = {"loc": "upper left", "bbox_to_anchor": (-0.08, -0.14), "ncols": 5, "columnspacing": 1.2}
    ax.legend(frameon=False, fontsize=LABEL_SIZE, **below)
    fastest = min(frontier.points, key=lambda p: (p.time, p.held))
    open_ = sum(not p.proved for p in frontier.found)
    ax.set_label(
        f"Time against memory, {frontier.title}: {len(frontier.published)} published schedules, and the best orders "
        f"found in {len(frontier.found)} placements and limits, {open_} of them not proved. The shortest takes "
        f"{fastest.time:.4g}{frontier.unit and ' ' + frontier.unit} and holds {fastest.held:.4g} {frontier.held_in}."
    )
