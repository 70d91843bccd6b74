"""Time against memory on the book's page: point at a schedule, and its chart stands below."""

from __future__ import annotations

import html
import json

from ..actions import parts
from ..lab.frontier import Frontier, Point, frontier_chart
from ..timeline import Timeline
from . import figures

_TARGET = 16  # points across: what a finger meets


class FrontierView:
    """`lab.frontier_chart` of settings. On the book's page one is shown at a time, and every order can be picked, on
    the chart or from a list; without scripts, and elsewhere, the charts stand one above the other.
    """

    def __init__(self, *frontiers: Frontier):
        from matplotlib import pyplot as plt

        if not frontiers:
            raise ValueError("give at least one frontier, of those that lab.frontiers() has")
        self.frontiers, self._pages, self._pictures, self._said = frontiers, [], [], []
        for frontier in frontiers:
            ax = frontier_chart(frontier)
            self._pictures.append(figures.figure_picture(ax.figure))
            self._said.append(figures.alternative_text(ax.figure))
            low, high = ax.get_ylim()
            shown = {p: t for p, t in frontier.timelines().items() if low <= p.time <= high}
            for number, point in reversed([*enumerate(shown)]):  # the published ones on top
                x = point.held if point.limit is None else point.limit
                ax.plot(x, point.time, "o", ms=_TARGET, alpha=0, gid=f"point-{frontier.name}-{number}", zorder=9)
            chart = figures.figure_html(ax.figure)
            plt.close(ax.figure)
            self._pages.append(_panel(frontier, chart, shown))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> figures.Bundle:
        return figures.bundle(self._page(), self._pictures, "\n".join(self._said))

    def _page(self) -> str:
        titles = "".join(f"<option>{html.escape(f.title)}</option>" for f in self.frontiers)
        return (
            f'<div class="pplab-frontier pplab-live">'
            f'<label class="pplab-of-all" hidden>Times <select>{titles}</select></label>'
            f"{''.join(self._pages)}</div>"
        )

    def __repr__(self) -> str:
        return f"<frontiers: {', '.join(f.name for f in self.frontiers)}>"


def _panel(frontier: Frontier, chart: str, shown: dict[Point, Timeline]) -> str:
    """A setting's chart, the list of its orders, and where the picked one's chart goes."""
    orders = [_order(frontier, point, timeline) for point, timeline in shown.items()]
    groups: dict[str, list[str]] = {}
    for number, (point, order) in enumerate(zip(shown, orders, strict=True)):
        group = "published" if point.limit is None else f"shortest found, {point.placement}"
        groups.setdefault(group, []).append(f'<option value="{number}">{html.escape(order["name"])}</option>')
    listed = "".join(f'<optgroup label="{group}">{"".join(each)}</optgroup>' for group, each in groups.items())
    data = json.dumps(orders, separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<div class="pplab-panel" data-name="{frontier.name}">{chart}'
        f"<label hidden>Order <select>{listed}</select></label>"
        f'<p class="pplab-told" aria-live="polite"></p><div class="pplab-scroll"></div>'
        f'<script type="application/json">{data}</script></div>'
    )


def _order(frontier: Frontier, point: Point, timeline: Timeline) -> dict[str, object]:
    """What the page draws: rows, when each item starts, and how long each takes by its actions' kinds and stages."""
    unit = f" {frontier.unit}" * bool(frontier.unit)
    name = point.name
    if point.limit is not None:
        whole = "" if point.split else ", whole backwards"
        name = f"{point.time:g}{unit} in {point.limit:g}{whole}, {'proved' if point.proved else 'not proved'}"
    says = f"{point.time:.4g}{unit}, the fullest rank holds {point.held:.3g} {frontier.held_in}."
    if point.proved:
        says += " No order of this placement is shorter in that memory."
    elif point.bound is not None:
        says += f" No order can be below {point.bound:.4g}{unit}: between the two nobody knows."
    starts: list[list[float]] = [[] for _ in timeline.schedule.rows]
    lasting: dict[str, float] = {}
    for span in timeline.spans:
        starts[span.rank].append(_short(span.start))
        lasting["".join(f"{a.stage}{a.kind}" for a in parts(span.action))] = _short(span.end - span.start)
    rows = [" ".join(map(str, row)) for row in timeline.schedule.rows]
    return {"name": name, "says": says, "unit": frontier.unit, "rows": rows, "starts": starts, "lasting": lasting}


def _short(time: float) -> float:
    return float(f"{time:.6g}")
