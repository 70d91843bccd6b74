"""A frontier to point at: the book's page shows the chart of whichever schedule the reader points at, or chooses.

The choice is a row of radio buttons, so that keyboards, fingers and readers of screens have it too, and a page without
scripts. Other viewers show the chart of time against memory, and its points as lines of text.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Mapping
from math import isclose
from typing import NamedTuple

from pplab import palette
from pplab.actions import parts
from pplab.lab import Frontier, Point, frontier_chart
from pplab.plot import shade
from pplab.timeline import Timeline

from . import figures

_WIDTH, _ROW, _BAR, _LEFT = 640, 22, 18, 50  # of a small chart: in pixels, the left margin for the ranks' names
_POINT = "const g=event.target.closest('.pplab-point');if(g)this.querySelectorAll('input')[g.dataset.point].click()"
_MARK = (
    "const i=[...this.querySelectorAll('input')].findIndex(x=>x.checked);"
    "this.querySelectorAll('.pplab-point').forEach(g=>g.classList.toggle('pplab-on',g.dataset.point==i))"
)
_STYLE = (
    ".pplab-choice{display:flex;flex-wrap:wrap;gap:.2em .4em;align-items:center;border:0;padding:0;margin:0;"
    "min-width:0}"
    ".pplab-choice legend{padding:0;font-size:.9em;margin:0 0 .2em}"
    ".pplab-choice input{position:absolute;opacity:0;width:1px;height:1px}"
    ".pplab-choice label{border:1px solid currentColor;border-radius:1em;padding:.05em .6em;font-size:.8em;"
    "cursor:pointer}.pplab-choice input:checked+label{font-weight:700;box-shadow:0 0 0 1px currentColor}"
    ".pplab-choice input:focus-visible+label{outline:3px solid currentColor;outline-offset:2px}"
    ".pplab-choice .pplab-chosen{display:none;order:1;width:100%;min-width:0;margin-top:.4em}"
    ".pplab-choice input:checked+label+.pplab-chosen{display:block}"
    ".pplab-point{cursor:pointer}.pplab-point.pplab-on use{fill-opacity:.5!important}"
)


class Shown(NamedTuple):
    """Points that are one order in time and memory, with its chart."""

    names: str
    point: Point
    bound: float | None  # no order of its placement, in its memory, is shorter
    timeline: Timeline

    def said(self, frontier: Frontier) -> str:
        """What it takes and holds, and how far it is from the shortest there can be."""
        unit = frontier.unit and f" {frontier.unit}"
        takes = f"{self.names}: {self.point.time:.5g}{unit}, holds {self.point.held:.4g} {frontier.held_in}. "
        if self.bound is None:
            return takes + "No bound is recorded for it."
        if isclose(self.point.time, self.bound, rel_tol=1e-6):
            return takes + f"Proved: {_kind(self.point)} in this memory, none is shorter."
        above = self.point.time / self.bound - 1
        return takes + f"{above:.1%} above the bound, {self.bound:.5g}{unit}, {_kind(self.point)} in this memory."


def bound_of(frontier: Frontier, point: Point) -> float | None:
    """The time below which no order of the point's placement is, in what it holds; None where none was recorded.

    That of the smallest limit which is no less, or of the last where more memory makes no order shorter. A whole
    backward is a split one whose halves stay together, so that what is proved of halves is true of it, too.
    """
    of = [each for each in frontier.found if each.placement == point.placement]
    alike = [each for each in of if each.split == point.split] or [each for each in of if each.split]
    limits = sorted((each.limit, each.bound) for each in alike if each.limit >= point.held * (1 - 1e-6))
    if limits:
        return limits[0][1]
    return min((each.bound for each in alike if each.final), default=None)


class FrontierView:
    """A recorded frontier, one of `lab.frontiers()`; `most`: how much memory the axis reaches."""

    def __init__(self, frontier: Frontier, most: float | None = None):
        from matplotlib import pyplot as plt

        self.frontier, self.shown, timelines = frontier, [], frontier.timelines()
        slowest = 1.6 * min(point.time for point in frontier.points)
        groups: dict[tuple, list[Point]] = defaultdict(list)
        for point in sorted(frontier.points, key=lambda p: (p.limit is not None, p.held, p.time)):
            if point.time <= slowest and (most is None or point.held <= most) and not _is_beaten(point, frontier):
                groups[(point.placement, point.held, point.time)].append(point)
        for points in groups.values():
            names = [p.name for p in points if p.limit is None] or [_placed(points[0])]
            names = ", ".join(dict.fromkeys(names))
            self.shown.append(Shown(names, points[0], bound_of(frontier, points[0]), timelines[points[0]]))
        ax = frontier_chart(frontier, most=most, slowest=slowest)
        for number, each in enumerate(self.shown):
            look = {"ms": 16, "alpha": 0, "color": palette.IDLE, "mew": 0, "zorder": 9 + (each.point.limit is None)}
            ax.plot(each.point.held, each.point.time, "o", gid=f"pplab-point-{number}", **look)
        self._chart, self._picture = figures.figure_html(ax.figure), figures.figure_picture(ax.figure)
        self._alt = figures.alternative_text(ax.figure)
        plt.close(ax.figure)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> figures.Bundle:
        return figures.bundle(self._page(), [self._picture], f"{self._alt}\n{self!r}")

    def _page(self) -> str:
        chart = self._chart
        for number, _ in enumerate(self.shown):
            chart = chart.replace(f'id="pplab-point-{number}"', f'class="pplab-point" data-point="{number}"')
        own = f"frontier-{self.frontier.name}"
        until = max(each.timeline.makespan for each in self.shown)
        choices = "".join(
            f'<input type="radio" name="{own}" id="{own}-{number}"{" checked" if not number else ""}>'
            f'<label for="{own}-{number}">{html.escape(_label(each))}</label>'
            f'<div class="pplab-chosen">{html.escape(each.said(self.frontier))}'
            f"{small_chart(each.timeline, until, each.names)}</div>"
            for number, each in enumerate(self.shown)
        )
        legend = "Point at the chart, or choose, to see an order:"
        return (
            f'<style>{_STYLE}</style><div class="pplab-frontier" onpointerover="{_POINT}" oninput="{_MARK}" '
            f'onchange="{_MARK}">{chart}<fieldset class="pplab-choice"><legend>{legend}</legend>{choices}'
            "</fieldset></div>"
        )

    def __repr__(self) -> str:
        return "\n".join(each.said(self.frontier) for each in self.shown)


class FrontierViews:
    """Frontiers of several settings behind a switch, by the names that it has for them; elsewhere, the first chart."""

    def __init__(self, views: Mapping[str, FrontierView]):
        if not views:
            raise ValueError("expected at least one setting's FrontierView")
        self.views = dict(views)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> figures.Bundle:
        first = next(iter(self.views.values()))
        return figures.bundle(self._page(), [first._picture], f"{first._alt}\n{first!r}")

    def _page(self) -> str:
        own = "frontier-setting-" + "-".join(view.frontier.name for view in self.views.values())
        choices = "".join(
            f'<input type="radio" name="{own}" id="{own}-{number}"{" checked" if not number else ""}>'
            f'<label for="{own}-{number}">{html.escape(name)}</label><div class="pplab-chosen">{view._page()}</div>'
            for number, (name, view) in enumerate(self.views.items())
        )
        return f'<style>{_STYLE}</style><fieldset class="pplab-choice"><legend>Times:</legend>{choices}</fieldset>'

    def __repr__(self) -> str:
        return "\n\n".join(f"{name}\n{view!r}" for name, view in self.views.items())


def _is_beaten(point: Point, frontier: Frontier) -> bool:
    """Whether another order that was found, of the same placement, is shorter and holds no more."""
    alike = (p for p in frontier.found if (p.placement, p.split) == (point.placement, point.split))
    return point.limit is not None and any(p.time < point.time and p.held <= point.held for p in alike)


def _kind(point: Point) -> str:
    return f"for {point.placement}{'' if point.split else ', whole backwards,'}"


def _placed(point: Point) -> str:
    """What to call an order that was found."""
    return f"{'best' if point.proved else 'found'}, {point.placement}{'' if point.split else ', whole'}"


def _label(shown: Shown) -> str:
    return shown.names if shown.point.limit is None else f"{shown.names}, {shown.point.held:.4g}"


def small_chart(timeline: Timeline, until: float, name: str) -> str:
    """A Gantt chart as SVG of few bytes: colours for kinds, lighter ones for a rank's later stages, grey for idle."""
    scale, schedule = (_WIDTH - _LEFT) / until, timeline.schedule
    paths: dict[str, list[str]] = defaultdict(list)
    for span in timeline.spans:
        stages = schedule.stages_of(span.rank)
        each = parts(span.action)
        high = _BAR / len(each)
        for number, action in enumerate(each):
            fill = shade(palette.FILL[action.kind], stages.index(action.stage), len(stages))
            left, wide = _LEFT + span.start * scale, (span.end - span.start) * scale - 0.6
            top = span.rank * _ROW + number * high
            paths[fill].append(f"M{left:.4g} {top:g}h{wide:.3g}v{high:g}h-{wide:.3g}z")
    ranks = range(schedule.num_ranks)
    names = "".join(f'<text x="0" y="{rank * _ROW + 13}" font-size="12">rank {rank}</text>' for rank in ranks)
    ground = "".join(
        f'<rect x="{_LEFT}" y="{rank * _ROW}" width="{timeline.makespan * scale:.4g}" height="{_BAR}" opacity=".14"/>'
        for rank in ranks
    )
    drawn = "".join(f'<path fill="{fill}" d="{"".join(parts_)}"/>' for fill, parts_ in paths.items())
    alt = html.escape(f"Gantt chart of {name}, which takes {timeline.makespan:.5g}", quote=True)
    return (
        f'<svg role="img" aria-label="{alt}" viewBox="0 0 {_WIDTH} {_ROW * len(ranks)}" fill="currentColor" '
        f'style="display:block;width:100%;height:auto;margin:.3em 0">{names}{ground}{drawn}</svg>'
    )
