"""A legend: handles and names in columns, and where it goes."""

from __future__ import annotations

from ._artists import Artist, Line2D, Text
from ._page import Box, Page, polygon
from ._style import lacking, width_of

_KNOWN = (
    "loc bbox_to_anchor bbox_transform ncols frameon fontsize title handlelength columnspacing labelspacing "
    "borderaxespad borderpad handletextpad"
)
# In matplotlib's order, the one in which a place is looked for: shares of the room to the right and down.
_PLACES = {
    "upper right": (1, 0),
    "upper left": (0, 0),
    "lower left": (0, 1),
    "lower right": (1, 1),
    "right": (1, 0.5),
    "center left": (0, 0.5),
    "center right": (1, 0.5),
    "lower center": (0.5, 1),
    "upper center": (0.5, 0),
    "center": (0.5, 0.5),
}


class Legend(Artist):
    known, zorder = _KNOWN, 5.0

    def __init__(self, ax: object, handles: list, names: list[str], **style: object):
        super().__init__(**style)
        self.ax, s = ax, self.style
        if s.get("title"):
            raise lacking("title= for legend")
        size = self.size = s.get("fontsize", 10)
        rows, most = list(zip(handles, names, strict=False)), max(1, min(s.get("ncols", 1), len(names)))
        each, more = divmod(len(rows), most)
        starts = [k * each + min(k, more) for k in range(most + 1)]
        self.columns = [rows[a:b] for a, b in zip(starts, starts[1:], strict=False)]
        self.handle, self.gap = s.get("handlelength", 2) * size, s.get("handletextpad", 0.8) * size
        self.pad, self.apart = s.get("borderpad", 0.4) * size, s.get("columnspacing", 2) * size
        self.between = s.get("labelspacing", 0.5) * size

    def remove(self) -> None:
        self.ax.legend_ = None

    def widths(self) -> list[float]:
        names = [[max(width_of(line, self.size) for line in name.split("\n")) for _, name in c] for c in self.columns]
        return [self.handle + self.gap + max(column, default=0) for column in names]

    def _high(self, name: str) -> float:
        lines = 1 + name.count("\n")
        return self.size * (1 if lines == 1 else 1.2 * lines)

    def box(self) -> Box:
        widths = self.widths()
        wide = sum(widths) + self.apart * (len(widths) - 1) + 2 * self.pad
        heights = [sum(self._high(name) + self.between for _, name in column) for column in self.columns]
        high = max(heights) - self.between + 2 * self.pad
        left, top = self._corner(wide, high)
        return left, top, left + wide, top + high

    def _corner(self, wide: float, high: float) -> tuple[float, float]:
        style, (left, top, right, bottom) = self.style, self.ax.box
        loc = style.get("loc", "best")
        if isinstance(loc, tuple):
            return left + loc[0] * (right - left), bottom - loc[1] * (bottom - top) - high
        if anchor := style.get("bbox_to_anchor"):
            left, top = right, bottom = (style.get("bbox_transform") or self.ax.transAxes)(*anchor)
        air = style.get("borderaxespad", 0.5) * self.size
        across, down = right - left - 2 * air - wide, bottom - top - 2 * air - high
        corners = {name: (left + air + x * across, top + air + y * down) for name, (x, y) in _PLACES.items()}
        if loc == "best":
            return min(corners.values(), key=lambda at: self.ax.in_the_way((at[0], at[1], at[0] + wide, at[1] + high)))
        if loc not in corners:
            raise lacking(f"loc={loc!r} for legend")
        return corners[loc]

    def draw(self, page: Page) -> None:
        left, top, right, bottom = self.box()
        if self.style.get("frameon", True):
            frame = {"facecolor": "none", "edgecolor": "0.8"}
            page.shape(polygon([(left, top), (right, top), (right, bottom), (left, bottom)]), frame)
        x = left + self.pad
        for column, wide in zip(self.columns, self.widths(), strict=True):
            y = top + self.pad
            for handle, name in column:
                under, lines = y + self._high(name), name.count("\n")
                baseline = under - (0.34 if lines else 0.24) * self.size
                for artist in handle if isinstance(handle, tuple) else (handle,):
                    self._key(page, artist, x, baseline)
                place = {"transform": lambda x, y: (x, y), "va": "top"}
                Text(x + self.handle + self.gap, y, name, fontsize=self.size, **place).draw(page)
                y = under + self.between
            x += wide + self.apart

    def _key(self, page: Page, artist: Artist, x: float, y: float) -> None:
        high, right = 0.7 * self.size, x + self.handle
        if isinstance(artist, Line2D):
            middle = y - high / 2
            artist.drawn(page, [(x, middle), (right, middle)], [((x + right) / 2, middle)], "")
        else:
            page.shape(polygon([(x, y), (right, y), (right, y - high), (x, y - high)]), artist.style)
