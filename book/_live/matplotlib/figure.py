"""Figures: how axes are arranged, and the SVG."""

from __future__ import annotations

from typing import TextIO

from ._artists import Text
from ._page import Page, union
from ._style import Told, lacking
from .axes import Axes

_PAD, _AROUND = 3.0, 7.2  # points: around axes that are arranged, around a figure
_LEFT, _BOTTOM, _RIGHT, _TOP, _BETWEEN = 0.125, 0.11, 0.9, 0.88, 0.2  # where nothing is arranged: shares


class Figure(Told):
    dpi, dpi_scale_trans = 100, None

    def __init__(self, figsize: tuple[float, float] = (6.4, 4.8), layout: str | None = None):
        if layout not in (None, "constrained"):
            raise lacking(f"layout={layout!r}, but 'constrained'")
        self.width, self.height = (72 * inches for inches in figsize)
        self.layout, self.number = layout, 0
        self.axes: list[Axes] = []
        self.texts: list[Text] = []
        self.rows = self.columns = 1
        self.heights, self.widths = [1], [1]

    def add_axes(self, rect: tuple[float, float, float, float]) -> Axes:
        left, bottom, width, height = rect
        box = left * self.width, (1 - bottom - height) * self.height
        return self._add(Axes(self, (*box, box[0] + width * self.width, box[1] + height * self.height)))

    def add_subplot(self) -> Axes:
        return self._add(self._in_cell(0, 0))

    def gca(self) -> Axes:
        return self.axes[-1] if self.axes else self.add_subplot()

    def _add(self, ax: Axes) -> Axes:
        self.axes.append(ax)
        return ax

    def _in_cell(self, row: int, column: int) -> Axes:
        across = _cuts(self.widths, (_RIGHT - _LEFT) * self.width)[column]
        down = _cuts(self.heights, (_TOP - _BOTTOM) * self.height)[row]
        left, top = _LEFT * self.width, (1 - _TOP) * self.height
        return Axes(self, (left + across[0], top + down[0], left + across[1], top + down[1]), (row, column))

    def text(self, x: float, y: float, s: object, **style: object) -> Text:
        def to(x: float, y: float) -> tuple[float, float]:
            return x * self.width, (1 - y) * self.height

        self.texts.append(Text(x, y, s, transform=to, **style))
        return self.texts[-1]

    def findobj(self, match: type) -> list[Text]:
        """All letters of the figure."""
        found = [text for ax in self.axes for text in (*ax._words(), *ax.texts)] + self.texts
        legends = [ax.legend_ for ax in self.axes if ax.legend_]
        return found + [Text(0, 0, name, fontsize=of.size) for of in legends for rows in of.columns for _, name in rows]

    def _arrange(self) -> None:
        """Give axes what titles, names and legends leave, as matplotlib's constrained layout does."""
        inner_x = max(_PAD, 0.01 * self.width / self.columns)
        inner_y = max(_PAD, 0.01 * self.height / self.rows)
        for _ in range(2):  # sizes change what ticks there are
            needs = {ax.cell: _overhang(ax) for ax in self.axes if ax.cell}
            lefts, rights = (
                [max(needs[cell][side] for cell in needs if cell[1] == c) for c in range(self.columns)]
                for side in (0, 2)
            )
            tops, bottoms = (
                [max(needs[cell][side] for cell in needs if cell[0] == r) for r in range(self.rows)] for side in (1, 3)
            )
            across = _spread(self.width, lefts, rights, self.widths, inner_x)
            down = _spread(self.height, tops, bottoms, self.heights, inner_y)
            for ax in self.axes:
                if ax.cell:
                    (left, right), (top, bottom) = across[ax.cell[1]], down[ax.cell[0]]
                    ax.box = left, top, right, bottom

    def savefig(
        self,
        fname: TextIO,
        *,
        format: str = "svg",
        transparent: bool = True,
        bbox_inches: str | None = None,
        metadata: dict | None = None,
    ) -> None:
        if format != "svg":
            raise lacking(f"format {format!r}, but 'svg'")
        if self.layout:
            self._arrange()
        page = Page()
        for each in (*self.axes, *self.texts):
            each.draw(page)
        box = 0, 0, self.width, self.height
        if bbox_inches == "tight":
            left, top, right, bottom = union([ax.reach() for ax in self.axes] + [text.box() for text in self.texts])
            box = left - _AROUND, top - _AROUND, right + _AROUND, bottom + _AROUND
        fname.write(page.svg(box))


def _overhang(ax: Axes) -> tuple[float, float, float, float]:
    (left, top, right, bottom), (x1, y1, x2, y2) = ax.reach(arranging=True), ax.box
    return x1 - left, y1 - top, right - x2, bottom - y2


def _cuts(ratios: list, whole: float) -> list[tuple[float, float]]:
    """Start and end of each part, with a fifth of a mean part in between."""
    mean = whole / (len(ratios) + _BETWEEN * (len(ratios) - 1))
    found, start = [], 0.0
    for ratio in ratios:
        end = start + mean * len(ratios) * ratio / sum(ratios)
        found.append((start, end))
        start = end + _BETWEEN * mean
    return found


def _spread(whole: float, before: list, after: list, ratios: list, inner: float) -> list[tuple[float, float]]:
    """Start and end of each of several axes in a row, whose sizes are as the ratios."""
    count = len(ratios)
    free = whole - sum(before) - sum(after) - 2 * _PAD - 2 * inner * (count - 1)
    found, at = [], _PAD
    for k, ratio in enumerate(ratios):
        start = at + before[k]
        end = start + max(free * ratio / sum(ratios), 1)
        found.append((start, end))
        at = end + after[k] + 2 * inner
    return found
