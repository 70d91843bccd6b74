"""A frontier to point at: on the book's page, you see the chart of the schedule that you point at
or choose.

The choice is a row of radio buttons, so it works with keyboards, fingers and screen readers.
Without scripts the page names the chosen schedule but can't draw it. Other viewers show the chart
of time against memory, and its points as lines of text.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from pplab import palette
from pplab.actions import parts
from pplab.lab import Frontier, Point, explore
from pplab.plot import shade
from pplab.timeline import Timeline

from . import figures
from .frontier_chart import bound_of, frontier_chart

# of a small chart: how long it takes, and its parts' colours, one above the other
Item = tuple[float | str, ...]
EXPLORER = "../book/explorer.html"  # from a chapter's page
# A point that is pointed at is chosen; a click of a mouse, which has pointed before, opens it.
_POINT = "const g=event.target.closest('.pplab-point');if(g)this.querySelectorAll('input')[g.dataset.point]?.click()"
_OPEN = (
    "if(event.pointerType=='mouse'&&event.target.closest('.pplab-point'))"
    "this.querySelector('input:checked+label+.pplab-chosen a').click()"
)
_MARK = (
    "const i=[...this.querySelectorAll('input')].findIndex(x=>x.checked);"
    "this.querySelectorAll('.pplab-point').forEach(g=>g.classList.toggle('pplab-on',g.dataset.point==i));"
    "this.querySelector('.pplab-small').onload()"
)
# Draw the chosen schedule's Gantt chart, of a text for each rank (a hundred charts weigh six times
# as much): an item is a letter, after the time for which the rank idles before it, if it does. Idle
# is a line.
_DRAW = r"""
const [label, said] = this.parentElement.querySelectorAll('input:checked+label,input:checked+label+.pplab-chosen');
const items = JSON.parse(this.dataset.items), left = 50, right = 640, scale = (right - left) / this.dataset.until;
let bars = '', makespan = 0;
const drawRow = (row, rank) => {
  let now = 0;
  for (const [, idle, letter] of row.matchAll(/([\d.]*)(\D)/g)) {
    const [takes, ...fills] = items[letter.charCodeAt() - 65], high = 18 / fills.length;
    now += Number(idle);
    fills.forEach((fill, half) => bars += `<rect x="${left + now * scale}" y="${22 * rank + half * high}"
      width="${takes * scale - 0.6}" height="${high}" fill="${fill}"/>`);
    now += takes;
  }
  makespan = Math.max(makespan, now);
};
const ranks = said.lastChild.dataset.chart.split(' ');
ranks.forEach(drawRow);
this.innerHTML = ranks.map((_, rank) => `<text y="${22 * rank + 13}" font-size="12">rank ${rank}</text>
  <path stroke="currentColor" opacity=".5" d="M${left} ${22 * rank + 9}H${left + makespan * scale}"/>`).join('') + bars;
this.setAttribute('viewBox', `0 0 ${right} ${22 * ranks.length}`);
this.setAttribute('aria-label', `Gantt chart of ${label.textContent}, which takes ${Number(makespan.toPrecision(5))}`);
"""
_STYLE = (
    ".pplab-choice{display:flex;flex-wrap:wrap;gap:.2em "
    ".4em;align-items:center;border:0;padding:0;margin:0;"
    "min-width:0}"
    ".pplab-choice legend{padding:0;font-size:.9em;margin:0 0 .2em}"
    ".pplab-choice input{position:absolute;opacity:0;width:1px;height:1px}"
    ".pplab-choice label{border:1px solid currentColor;border-radius:1em;padding:.05em "
    ".6em;font-size:.8em;"
    "cursor:pointer}.pplab-choice input:checked+label{font-weight:700;box-shadow:0 0 0 1px "
    "currentColor}"
    ".pplab-choice input:focus-visible+label{outline:3px solid currentColor;outline-offset:2px}"
    ".pplab-choice .pplab-chosen{display:none;order:1;width:100%;min-width:0;margin-top:.4em}"
    ".pplab-choice input:checked+label+.pplab-chosen{display:block}"
    ".pplab-points label{position:absolute;opacity:0;pointer-events:none}"
    ".pplab-frontier:has(:focus-visible)>.pplab-figure{outline:3px solid currentColor}"
    ".pplab-point{cursor:pointer}.pplab-on use"
    "{fill-opacity:.4!important}.pplab-on>path{stroke-opacity:.3!important}"
)
# Of what a page's script puts there, no svg is told that it is loaded, and a style is.
_BEGIN = (
    '<style onload="this.previousSibling.onload()">'
    ".pplab-small{display:block;width:100%;height:auto;margin:.3em 0}</style>"
)
_NO_SCRIPTS = (
    "<noscript><style>.pplab-points label"
    "{position:static;opacity:1;pointer-events:auto}</style></noscript>"
)


class Shown(NamedTuple):
    """A point of the chart, with its own bound."""

    number: int  # among the frontier's points
    point: Point
    bound: float  # no order of its placement, in its memory, is shorter
    timeline: Timeline

    @property
    def name(self) -> str:
        """The name of a published schedule, or a description of an order that was found."""
        of, state = self.point, "best" if self.point.proved else "found"
        return (
            of.name
            if of.limit is None
            else f"{state}, {of.placement}{'' if of.split else ', whole'}, {of.held:.4g}"
        )

    def said(self, frontier: Frontier) -> str:
        """What it takes and holds, and how far it is from the shortest possible."""
        point, unit = self.point, frontier.unit and f" {frontier.unit}"
        takes = f"{self.name}: {point.time:.5g}{unit}, holds {point.held:.4g} {frontier.held_in}. "
        kind = f"for {point.placement}{'' if point.split else ', whole backwards,'} in this memory"
        above = point.time / self.bound - 1
        if above < 1e-6:
            return takes + f"Proved: {kind}, none is shorter."
        return takes + f"{above:.1%} above the bound, {self.bound:.5g}{unit}, {kind}."


class FrontierView:
    """A recorded frontier, which is one of `lab.frontiers()`. `most` is the memory at which the
    axis ends.
    """

    def __init__(self, frontier: Frontier, most: float | None = None):
        from matplotlib import pyplot as plt

        figure = frontier_chart(frontier, most=most).figure
        self._chart, self._picture = figures.figure_html(figure), figures.figure_picture(figure)
        plt.close(figure)
        self.frontier, timelines = frontier, frontier.timelines()
        published = [(point.held, point.time) for point in frontier.published]
        self.shown = [
            Shown(number, point, bound_of(frontier, point), timelines[point])
            for number, point in enumerate(frontier.points)
            if f'id="point-{number}"' in self._chart
            and (point.limit is None or (point.held, point.time) not in published)
        ]
        self._text = f"{figures.alternative_text(figure)}\n{self!r}"

    def _repr_mimebundle_(self, **_: object) -> figures.Bundle:
        return figures.bundle(self._page(), [self._picture], self._text)

    def _page(self) -> str:
        places = {f'id="point-{each.number}"': place for place, each in enumerate(self.shown)}
        chart = re.sub(
            r'id="point-\d+"',
            lambda m: f'class="pplab-point" data-point="{places.get(m[0])}"',
            self._chart,
        )
        until = max(each.timeline.makespan for each in self.shown)
        letters: dict[Item, str] = {}
        said = {
            each.name: f"{html.escape(each.said(self.frontier))} {self._link(each)}"
            f'<i data-chart="{_rows(each.timeline, letters)}"></i>'
            for each in self.shown
        }
        points = _choice(
            f"frontier-{self.frontier.name}",
            said,
            "Point at a mark or a name, or use the arrow keys:",
            "points",
        )
        return (
            f'<style>{_STYLE}</style>{_NO_SCRIPTS}<div class="pplab-frontier" onpointerover="'
            f'{_POINT}" onclick="'
            f'{_OPEN}" onchange="{_MARK}">{chart}{points}'
            '<svg class="pplab-small" role="img" aria-label="Gantt chart of the chosen one" '
            'fill="currentColor" viewBox="0 0 640 1" data-until="'
            f'{until:.5g}" data-items="'
            f'{html.escape(json.dumps([*letters]))}" onload="'
            f'{html.escape(_DRAW)}"></svg>{_BEGIN}</div>'
        )

    def _link(self, each: Shown) -> str:
        """A link to its rows in the explorer, with these times if the page's fields can show
        them.
        """
        costs, schedule = self.frontier.costs[each.point.placement], each.timeline.schedule
        try:
            address, said = explore(schedule, costs=costs).link(EXPLORER), ""
        except ValueError:
            address, said = explore(schedule).link(EXPLORER), ", at equal times"
        # its own fragment isn't a selector
        opens = html.escape(address).replace("#", '#explorer" data-rows="')
        return (
            f'<a href="{opens}" onclick="this.hash=this.dataset.rows">Its rows in the '
            f"explorer{said}</a>"
        )

    def __repr__(self) -> str:
        return "\n".join(each.said(self.frontier) for each in self.shown)


class FrontierViews(FrontierView):
    """Frontiers of several settings behind a switch, by name. Other viewers show the first
    chart.
    """

    def __init__(self, views: Mapping[str, FrontierView]):
        if not views:
            raise ValueError("expected at least one setting's FrontierView")
        self.views, first = dict(views), next(iter(views.values()))
        self._picture, self._text = first._picture, first._text

    def _page(self) -> str:
        own = "frontier-setting-" + "-".join(view.frontier.name for view in self.views.values())
        return _choice(own, {name: view._page() for name, view in self.views.items()}, "Times:")

    def __repr__(self) -> str:
        return "\n\n".join(f"{name}\n{view!r}" for name, view in self.views.items())


def _choice(own: str, choices: Mapping[str, str], legend: str, of: str = "settings") -> str:
    """A row of radio buttons, each with what is shown while it is chosen. The first one is
    chosen.
    """
    shown = "".join(
        f'<input type="radio" name="{own}" id="{own}-{number}"{"" if number else " checked"}>'
        f'<label for="{own}-{number}">{html.escape(name)}</label><div class="pplab-chosen">'
        f"{page}</div>"
        for number, (name, page) in enumerate(choices.items())
    )
    return f'<fieldset class="pplab-choice pplab-{of}"><legend>{legend}</legend>{shown}</fieldset>'


def _rows(timeline: Timeline, letters: dict[Item, str]) -> str:
    """A timeline's rows as `_DRAW` reads them. Items without a letter get the next one."""
    schedule = timeline.schedule
    rows, now = [""] * schedule.num_ranks, [0.0] * schedule.num_ranks
    for span in timeline.spans:
        rank, stages = span.rank, schedule.stages_of(span.rank)
        idle = float(f"{span.start - now[rank]:.4g}")
        if idle > 1e-4 * timeline.makespan:
            rows[rank] += f"{idle:g}"
            now[rank] += idle
        fills = (
            shade(palette.FILL[a.kind], stages.index(a.stage), len(stages))
            for a in parts(span.action)
        )
        takes = float(f"{span.end - span.start:.5g}")
        rows[rank] += letters.setdefault((takes, *fills), chr(ord("A") + len(letters)))
        now[rank] += takes
    return " ".join(rows)
