"""Draw time against memory: lines for the best orders found, and marks for the published
schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from pplab import palette
from pplab.lab import Frontier, Point, Problem, floor
from pplab.lab.forms import MARKS
from pplab.lab.searches import CLOSE, PLACEMENTS
from pplab.optional import bring

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The line of a placement, whole backwards apart, and how heavy it is.
_LINES = {
    "one stage per rank": ("-", 1.2),
    "one stage per rank, whole": (":", 1.6),
    "loop": ("--", 1.6),
    "V": ("-", 3),
    "bidirectional": ("-.", 1.2),
}
# of the axes' width: where the plot ends, where names and bars begin
_PLOT, _NAMES, _BARS = 0.4, 0.46, 0.85
_SIZE, _ROW = 10, 22  # points: of letters, which a phone shows whole, and of what a finger finds


def bound_of(frontier: Frontier, point: Point) -> float:
    """The time below which no order of the point's placement can be in the memory that it holds.

    It is the bound of the smallest limit that is no less, or of the last limit where more memory
    makes no order shorter. A whole backward is a split one whose halves stay together, so the
    proofs for halves hold for it, too. Where `lab.floor` is higher, or no bound was recorded, it is
    that floor.
    """
    of = [each for each in frontier.found if each.placement == point.placement]
    alike = [each for each in of if each.split == point.split] or [
        each for each in of if each.split
    ]
    limits = sorted(
        (each.limit, each.bound) for each in alike if each.limit >= point.held * (1 - CLOSE)
    )
    of_any = min((each.bound for each in alike if each.final), default=0)
    problem = Problem(
        frontier.num_ranks,
        frontier.num_microbatches,
        point.placement,
        costs=frontier.costs[point.placement],
        split=point.split,
    )
    return max(floor(problem).value, limits[0][1] if limits else of_any)


def frontier_chart(frontier: Frontier, *, most: float | None = None) -> Axes:
    """Draw time against what the fullest rank holds.

    For each placement, a line shows how short the best order is that was found in so much memory.
    It has a dot where that is proved. The area below it, which isn't proved, is shaded. Marks are
    published schedules. A line leads from each to its name, and a bar shows how far it is above the
    bound for its placement, in its memory.

    `most` is the memory at which the axis ends. Whatever lies beyond is left out, and so are orders
    that take more than 1.6 times as long as the best.
    """
    best = min(point.time for point in frontier.points)
    slowest = 1.6 * best
    shown = [
        p
        for p in frontier.points
        if p.time <= slowest and (most is None or (p.limit or p.held) <= most)
    ]
    right = most or 1.04 * max(point.limit or point.held for point in shown)
    left = 0.9 * min(point.limit or point.held for point in shown)
    steep = 0.6 * (slowest - best) / (right - left)  # so that hardly a line crosses another
    published = sorted((p for p in shown if p.limit is None), key=lambda p: steep * p.held - p.time)
    ax = bring("matplotlib.pyplot").subplots(figsize=(5.4, 5.5), layout="constrained")[1]
    ax.set_xlim(left, left + (right - left) / _PLOT)
    ax.set_ylim(0.97 * best, 1.01 * slowest)
    for look, (style, width) in _LINES.items():
        steps = sorted(
            (p for p in shown if p.limit is not None and _look(p) == look), key=lambda p: p.limit
        )
        if steps:
            at, times, bounds = _known(
                steps, [p for p in shown if _look(p) == look], frontier.held_in, right
            )
            ax.fill_between(at, bounds, times, step="post", color=("black", 0.13), lw=0, zorder=1)
            copies = "(two copies)" * (look == "bidirectional")
            ax.step(
                at,
                times,
                ls=style,
                where="post",
                color=palette.IDLE,
                lw=width,
                label=f"{look} {copies}",
                zorder=2,
            )
        for point in steps:
            _mark(
                ax,
                point,
                point.held,
                "." if point.proved else "",
                f"point-{frontier.points.index(point)}",
            )
    _rows(ax, frontier, published)
    _finish(ax, frontier, right)
    return ax


def _mark(ax: Axes, point: Point, x: float, marker: str, name: str) -> None:
    """The sign of a point, and around it an area to point at on a page, whose parts have this
    `name` as their id.
    """
    ax.plot(x, point.time, marker, color="black", ms=7, zorder=4)
    ax.plot(x, point.time, "o", alpha=0, ms=16, gid=name, zorder=9)


def _rows(ax: Axes, frontier: Frontier, published: Sequence[Point]) -> None:
    """Marks of published schedules, and to the right of the plot, in as many rows, their names and
    bars.
    """
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    wide, tall = right - left, (high - low) / (len(published) + 1)
    start, text, bar = (left + share * wide for share in (_NAMES, _NAMES + 0.03, _BARS))
    middle, ink, seen = {"va": "center", "fontsize": _SIZE}, ("black", 0.4), []
    ax.text(right, high - tall / 2, "above the bound", ha="right", **middle)
    for row, point in enumerate(published):
        y, marker, name = (
            high - (row + 1.5) * tall,
            MARKS.get(point.name, "o"),
            f"point-{frontier.points.index(point)}",
        )
        # beside others that are there
        x = point.held + 0.03 * wide * seen.count((point.held, point.time))
        seen.append((point.held, point.time))
        _mark(ax, point, x, marker, name)
        ax.plot([x, start - 0.03 * wide], [point.time, y], color=ink, lw=0.7)
        ax.plot(start, y, marker, color="black", ms=7)
        ax.text(text, y, point.name, **middle)
        above = point.time / bound_of(frontier, point) - 1
        ax.barh(y, above * wide / 3, left=bar, height=tall / 2, color=ink)
        said = f"{above:.1%}" if above > CLOSE else "proved"
        ax.text(bar + (above / 3 + 0.01) * wide, y, said, **middle)
        ax.plot([text, right], [y, y], alpha=0, lw=_ROW, gid=name, zorder=9)


def _known(
    steps: Sequence[Point], orders: Sequence[Point], held_in: str, right: float
) -> tuple[list, list, list]:
    """Where a placement's line steps, its height from there on, and the bound's height. More memory
    makes nothing longer.

    Activations come whole, so between two limits a rank can hold no more than at the lower one.
    Bytes don't, so up to the next limit only that limit's bound is known.
    """
    last = right if steps[-1].final else steps[-1].limit
    at = sorted({x for p in orders for x in (p.held, p.limit or p.held) if x < last} | {last})
    times = [min(p.time for p in orders if p.held <= x * (1 + CLOSE)) for x in at]
    passed = [sum(p.limit <= x * (1 + CLOSE) for p in steps) - (held_in != "GB") for x in at]
    return at, times, [steps[min(max(which, 0), len(steps) - 1)].bound for which in passed]


def _look(point: Point) -> str:
    """How to draw it. Some published schedules of a loop, or both ways, have whole backwards,
    too.
    """
    return point.placement + ", whole" * (not point.split and point.placement == PLACEMENTS[0])


def _finish(ax: Axes, frontier: Frontier, right: float) -> None:
    (left, _), (low, high) = ax.get_xlim(), ax.get_ylim()
    step = 10 if frontier.held_in == "GB" else 1
    ax.set_xticks(range(step * ceil(left / step), int(right) + 1, step))
    ax.plot([left, left, right], [high, low, low], color="black", lw=1.6)
    ax.set_title(frontier.title, fontsize=_SIZE, loc="left", parse_math=False)
    ax.set_xlabel(f"what the fullest rank holds ({frontier.held_in})")
    ax.set_ylabel(f"makespan ({frontier.unit})" if frontier.unit else "makespan")
    ax.spines[["top", "right", "bottom", "left"]].set_visible(False)
    below = {"loc": "upper left", "bbox_to_anchor": (-0.08, -0.12), "ncols": 2}
    ax.legend(frameon=False, fontsize=_SIZE, **below)
    fastest = min(frontier.points, key=lambda p: (p.time, p.held))
    ax.set_label(
        f"Time against memory, {frontier.title}: {len(frontier.published)} published schedules, "
        "and the best orders found in "
        f"{len(frontier.found)} placements and limits, "
        f"{sum(not p.proved for p in frontier.found)} of them not proved. The shortest takes "
        f"{fastest.time:.4g}{frontier.unit and ' ' + frontier.unit} and holds {fastest.held:.4g} "
        f"{frontier.held_in}."
    )
