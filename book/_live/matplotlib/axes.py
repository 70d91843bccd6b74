"""Axes: what is drawn in them, how data become places on the page, and the frame around."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ._artists import Across, Artist, Line2D, Patch, Point, Rectangle, Span, Text
from ._legend import Legend
from ._page import Box, Page, polygon, stroke, union
from ._style import CYCLE, NO_LINE, Told, lacking, listed, plain, styled
from ._view import View

_SHAPE = "facecolor edgecolor color linewidth linestyle alpha hatch zorder label"
_SIDES = "left", "bottom", "right", "top"


class Spine(Artist):
    """A side of the frame."""


class Spines(dict):
    """The sides by name; a list of names, or `[:]`, gives several."""

    def __getitem__(self, names: object) -> object:
        if isinstance(names, str):
            return super().__getitem__(names)
        return Several(self[name] for name in (self if isinstance(names, slice) else names))


class Several(list):
    def set_visible(self, visible: bool) -> None:
        for spine in self:
            spine.set_visible(visible)


class Extent:
    def __init__(self, box: Box, dpi: float):
        self.width, self.height = (box[2] - box[0]) * dpi / 72, (box[3] - box[1]) * dpi / 72


class Direction(Told):
    """What is written along the x axis (`at` 0) or the y axis (1)."""

    def __init__(self, at: int):
        self.at, self.view, self.label, self.size, self.length, self.labelled = at, View(), "", 10, 3.5, True


class ScaledTranslation:
    """So many inches to the right and up."""

    def __init__(self, xt: float, yt: float, scale_trans: object):
        self.x, self.y = 72 * xt, 72 * yt


class Transform:
    """From shares of the axes, or data, to the page; `+` moves on from there."""

    def __init__(self, to: Callable[[float, float], Point], x: float = 0, y: float = 0):
        self.to, self.x, self.y = to, x, y

    def __add__(self, moved: ScaledTranslation) -> Transform:
        return Transform(self.to, self.x + moved.x, self.y + moved.y)

    def __call__(self, x: float, y: float) -> Point:
        x, y = self.to(x, y)
        return x + self.x, y - self.y


class Axes(Told):
    def __init__(self, figure: object, box: Box, cell: tuple[int, int] | None = None):
        self.figure, self.box, self.cell = figure, box, cell
        self.artists: list[Artist] = []
        self.feet: tuple[set, set] = (set(), set())  # where bars stand, in both directions
        self.axes_ = Direction(0), Direction(1)
        self.spines = Spines({side: Spine() for side in _SIDES})
        self.legend_, self.name, self.shown, self.turn = None, "", True, 0
        self.title_: dict = {"text": "", "loc": "center"}
        for direction in self.axes_:
            direction.view.axes.append(self)

    # What is drawn

    def add_patch(self, patch: Patch) -> Patch:
        return self._add(patch)

    def _add(self, artist: Artist) -> Artist:
        artist.ax = self
        self.artists.append(artist)
        if artist.points:
            for direction in self.axes_:
                direction.view.grown = []
        return artist

    @property
    def texts(self) -> list[Text]:
        return [artist for artist in self.artists if isinstance(artist, Text)]

    @property
    def patches(self) -> list[Patch]:
        return [artist for artist in self.artists if isinstance(artist, Patch)]

    def text(self, x: float, y: float, s: object, **style: object) -> Text:
        return self._add(Text(x, y, s, **style))

    def annotate(
        self, text: object, xy: Point, xytext: Point = (0, 0), textcoords: str = "data", **style: object
    ) -> Text:
        if textcoords != "offset points":
            raise lacking(f"textcoords={textcoords!r} for annotate, but 'offset points'")
        return self._add(Text(*xy, text, moved=xytext, **style))

    def plot(self, *data: object, **style: object) -> list[Line2D]:
        look = data[-1] if isinstance(data[-1], str) else ""
        numbers = [listed(each) for each in data if not isinstance(each, str)]
        if len(numbers) not in (1, 2):
            raise lacking("plot of several lines at once")
        ys = numbers[-1]
        xs = numbers[0] if len(numbers) == 2 else range(len(ys))
        if len(xs) != len(ys):
            raise ValueError(f"x and y must be equally many, got {len(xs)} and {len(ys)}")
        style = {**_read(look), **styled(style, Line2D.known, "plot")}
        if style.get("color") is None:
            style["color"] = self._next()
        return [self._add(Line2D(xs, ys, **style))]

    def _next(self) -> str:
        self.turn += 1
        return f"C{(self.turn - 1) % len(CYCLE)}"

    def step(self, x: Sequence, y: Sequence, *look: str, where: str = "pre", **style: object) -> list[Line2D]:
        return self.plot(*_stairs(list(x), list(y), where), *look, **style)

    def loglog(self, *data: object, **style: object) -> list[Line2D]:
        for direction in self.axes_:
            direction.view.rescale("log")
        return self.plot(*data, **style)

    def fill_between(self, x: Sequence, y1: object, y2: object = 0, *, step: str = "", **style: object) -> Patch:
        xs = list(x)
        low, high = (y if len(y) > 1 else y * len(xs) for y in (listed(y1), listed(y2)))
        (across, low), (_, high) = (_stairs(xs, ys, step) if step else (xs, ys) for ys in (low, high))
        outline = [*zip(across, low, strict=True), *reversed([*zip(across, high, strict=True)])]
        return self._add(Patch(outline, **styled(style, _SHAPE, "fill_between")))

    def bar(
        self,
        x: object,
        height: object,
        width: object = 0.8,
        bottom: object = 0,
        *,
        align: str = "center",
        **style: object,
    ) -> list[Rectangle]:
        ticks = style.pop("tick_label", None)
        places = self._places(0, x)
        boxes = _boxes(places, width, bottom, height, align)
        self.feet[1].update(foot for _, _, foot, _ in boxes)
        made = self._bars([((a, foot), wide, high) for a, wide, foot, high in boxes], styled(style, _SHAPE, "bar"))
        if ticks is not None:
            self._set_ticks(0, places, ticks)
        return made

    def barh(
        self, y: object, width: object, height: object = 0.8, left: object = 0, **style: object
    ) -> list[Rectangle]:
        boxes = _boxes(self._places(1, y), height, left, width, "center")
        self.feet[0].update(foot for _, _, foot, _ in boxes)
        return self._bars([((foot, a), wide, high) for a, high, foot, wide in boxes], styled(style, _SHAPE, "barh"))

    def _bars(self, boxes: list, style: dict) -> list[Rectangle]:
        label, fill = style.pop("label", None), style.pop("color", style.get("facecolor"))
        fill = self._next() if fill is None else fill
        fills = fill if isinstance(fill, list) else [fill] * len(boxes)
        made = [
            self._add(Rectangle(*box, **style | {"facecolor": each})) for box, each in zip(boxes, fills, strict=True)
        ]
        if label and made:
            made[0].set_label(label)
        return made

    def _places(self, at: int, given: object) -> list:
        """Numbers as they are, words at 0, 1, 2 and so on, with ticks."""
        places = listed(given)
        if any(isinstance(place, str) for place in places):
            self._set_ticks(at, range(len(places)), places)
            return list(range(len(places)))
        return places

    def broken_barh(self, xranges: Sequence[Point], yrange: Point, **style: object) -> Patch:
        bottom, top = yrange[0], yrange[0] + yrange[1]
        outlines = [[(x, bottom), (x, top), (x + wide, top), (x + wide, bottom)] for x, wide in xranges]
        return self._add(Patch(*outlines, **styled(style, _SHAPE, "broken_barh")))

    def hlines(self, y: float, xmin: float, xmax: float, **style: object) -> Line2D:
        return self._add(Line2D([xmin, xmax], [y, y], **{"solid_capstyle": "butt", **style}))

    def vlines(self, x: float, ymin: float, ymax: float, **style: object) -> Line2D:
        return self._add(Line2D([x, x], [ymin, ymax], **{"solid_capstyle": "butt", **style}))

    def axvline(self, x: float = 0, **style: object) -> Line2D:
        return self._add(Across(x, None, **style))

    def axhline(self, y: float = 0, **style: object) -> Line2D:
        return self._add(Across(None, y, **style))

    def axvspan(self, xmin: float, xmax: float, **style: object) -> Patch:
        return self._add(Span(xmin, xmax, **style))

    def legend(self, handles: object = None, labels: object = None, **style: object) -> Legend:
        if handles is None:
            handles = [artist for artist in self.artists if artist.get_label()]
        handles = list(handles)
        names = [handle.get_label() for handle in handles] if labels is None else list(labels)
        self.legend_ = Legend(self, handles, names, **style)
        return self.legend_

    def get_legend(self) -> Legend | None:
        return self.legend_

    # Names, limits and ticks

    def set(self, **values: object) -> None:
        for name, value in values.items():
            if name != "aspect":
                getattr(self, f"set_{name}")(value)

    def set_label(self, label: str) -> None:
        self.name = label

    def get_label(self) -> str:
        return self.name

    def set_title(self, label: str, *, loc: str = "center", **style: object) -> None:
        known = "fontsize fontweight color pad parse_math"
        text = plain(label, style.get("parse_math", True))
        self.title_ = {"text": text, "loc": loc, **styled(style, known, "set_title")}

    def get_title(self, loc: str = "center") -> str:
        return self.title_["text"] if self.title_["loc"] == loc else ""

    def set_xlabel(self, xlabel: str, *, parse_math: bool = True) -> None:
        self.axes_[0].label = plain(xlabel, parse_math)

    def set_ylabel(self, ylabel: str, *, parse_math: bool = True) -> None:
        self.axes_[1].label = plain(ylabel, parse_math)

    def get_xlabel(self) -> str:
        return self.axes_[0].label

    def get_ylabel(self) -> str:
        return self.axes_[1].label

    def set_xlim(self, left: object = None, right: object = None) -> None:
        self.axes_[0].view.limit(left, right, 0)

    def set_ylim(self, bottom: object = None, top: object = None) -> None:
        self.axes_[1].view.limit(bottom, top, 1)

    def get_xlim(self) -> Point:
        return self.axes_[0].view.range(0)

    def get_ylim(self) -> Point:
        return self.axes_[1].view.range(1)

    def invert_yaxis(self) -> None:
        view = self.axes_[1].view
        view.inverted = not view.inverted
        if view.limits:
            view.limits = view.limits[::-1]

    def set_xscale(self, value: str, *, base: int = 10) -> None:
        self.axes_[0].view.rescale(value, base)

    def set_yscale(self, value: str, *, base: int = 10) -> None:
        self.axes_[1].view.rescale(value, base)

    def set_xticks(self, ticks: Sequence, labels: Sequence | None = None) -> None:
        self._set_ticks(0, ticks, labels)

    def set_yticks(self, ticks: Sequence, labels: Sequence | None = None) -> None:
        self._set_ticks(1, ticks, labels)

    def set_xticklabels(self, labels: Sequence, **style: object) -> None:
        self._name_ticks(0, labels, style)

    def set_yticklabels(self, labels: Sequence, **style: object) -> None:
        self._name_ticks(1, labels, style)

    def _set_ticks(self, at: int, ticks: Sequence, labels: Sequence | None) -> None:
        view = self.axes_[at].view
        view.ticks, view.names = list(ticks), None
        if not view.limits:
            view.grown = view.ticks
        if labels is not None:
            self._name_ticks(at, labels, {})

    def _name_ticks(self, at: int, labels: Sequence, style: dict) -> None:
        direction = self.axes_[at]
        direction.view.names = [str(label) for label in labels]
        direction.size = styled(style, "fontsize", "tick labels").get("fontsize", direction.size)

    def minorticks_off(self) -> None:
        for direction in self.axes_:
            direction.view.minor = False

    def tick_params(self, axis: str = "both", *, length: float | None = None, labelsize: float | None = None) -> None:
        for name, direction in zip("xy", self.axes_, strict=True):
            if axis in (name, "both"):
                direction.length = direction.length if length is None else length
                direction.size = labelsize or direction.size

    def margins(self, x: float, y: float | None = None) -> None:
        self.axes_[0].view.margin, self.axes_[1].view.margin = x, x if y is None else y

    def axis(self, arg: str) -> None:
        if arg not in ("on", "off"):
            raise lacking(f"axis({arg!r})")
        self.shown = arg == "on"

    def label_outer(self) -> None:
        row, column = self.cell
        if row < self.figure.rows - 1:
            self.axes_[0].label, self.axes_[0].labelled = "", False
        if column:
            self.axes_[1].label, self.axes_[1].labelled = "", False

    # From data to the page

    @property
    def transAxes(self) -> Transform:  # noqa: N802 (matplotlib's name)
        return Transform(lambda x, y: (self._across(x), self._down(y)))

    def get_yaxis_transform(self) -> Transform:
        return Transform(lambda x, y: (self._across(x), self.to(None, y)[1]))

    def _across(self, share: float) -> float:
        return self.box[0] + share * (self.box[2] - self.box[0])

    def _down(self, share: float) -> float:
        return self.box[3] + share * (self.box[1] - self.box[3])

    def to(self, x: float | None, y: float | None) -> Point:
        """Where on the page a point of the data lies; None stays None."""
        across, down = self.axes_
        return (
            None if x is None else self._across(across.view.share(x, 0)),
            None if y is None else self._down(down.view.share(y, 1)),
        )

    def get_window_extent(self) -> Extent:
        return Extent(self.box, self.figure.dpi)

    def meets(self, box: Box) -> bool:
        return box[0] < self.box[2] and box[2] > self.box[0] and box[1] < self.box[3] and box[3] > self.box[1]

    def in_the_way(self, box: Box) -> float:
        """How much of what is drawn a legend at that place would hide."""
        left, top, right, bottom = box
        found = 0
        for artist in self.artists:
            if isinstance(artist, Text | Rectangle):
                corners = (
                    [self.to(*p) for p in artist.points] if artist.points else [artist.box()[:2], artist.box()[2:]]
                )
                xs, ys = zip(*corners, strict=True)
                found += min(xs) < right and max(xs) > left and min(ys) < bottom and max(ys) > top
            else:
                line = (
                    artist.ends()
                    if isinstance(artist, Line2D)
                    else [self.to(*p) for p in artist.points if None not in p]
                )
                found += sum(left < x < right and top < y < bottom for x, y in line)
                found += any(_crosses(a, b, box) for a, b in zip(line, line[1:], strict=False))
        return found

    # The frame

    def draw(self, page: Page) -> None:
        self._ticks(page) if self.shown else None
        ordered = sorted(self.artists, key=lambda artist: artist.zorder)
        below = [artist for artist in ordered if artist.zorder < 2.5]
        for artist in below:
            artist.visible and artist.draw(page)
        self._sides(page) if self.shown else None
        for artist in [*ordered[len(below) :], *self._words()]:
            artist.visible and artist.draw(page)
        if self.legend_:
            self.legend_.draw(page)

    def _sides(self, page: Page) -> None:
        left, top, right, bottom = self.box
        ends = [
            (left, bottom, left, top),
            (left, bottom, right, bottom),
            (right, bottom, right, top),
            (left, top, right, top),
        ]
        for side, (x1, y1, x2, y2) in zip(_SIDES, ends, strict=True):
            if self.spines[side].visible:
                page.path(
                    polygon([(x1, y1), (x2, y2)], False), 'fill="none"' + stroke("#000000", 1, 0.8, "-", "square")
                )

    def _ticks(self, page: Page) -> None:
        left, _, _, bottom = self.box
        for direction in self.axes_:
            at, view = direction.at, direction.view
            several = [(place, direction.length, 0.8) for place, _ in self._major(direction)]
            for place, length, width in several + [(place, 2, 0.6) for place in view.small(at)]:
                x, y = self.to(place, None) if at == 0 else self.to(None, place)
                ends = [(x, bottom), (x, bottom + length)] if at == 0 else [(left, y), (left - length, y)]
                if length:
                    page.path(polygon(ends, False), 'fill="none"' + stroke("#000000", 1, width, "-"))

    def _major(self, direction: Direction) -> list[tuple[float, str]]:
        left, top, right, bottom = self.box
        long = (right - left) / 3 if direction.at == 0 else (bottom - top) / 2
        return direction.view.major(direction.at, long / direction.size)

    def _words(self) -> Iterator[Text]:
        """Names of ticks and axes, and the title."""
        left, top, right, bottom = self.box
        on_page = {"transform": lambda x, y: (x, y), "parse_math": False}
        if self.shown:
            for direction in self.axes_:
                names = list(self._tick_names(direction, on_page))
                yield from names
                edges = [name.box() for name in names]
                if direction.label and direction.at == 0:
                    under = max([bottom + direction.length, *(edge[3] for edge in edges)]) + 4
                    yield Text((left + right) / 2, under, direction.label, ha="center", va="top", **on_page)
                elif direction.label:
                    before = min([left - direction.length, *(edge[0] for edge in edges)]) - 4
                    middle = (top + bottom) / 2
                    yield Text(before, middle, direction.label, ha="center", va="bottom", rotation=90, **on_page)
        title = self.title_
        if title["text"]:
            x = {"left": left, "center": (left + right) / 2, "right": right}[title["loc"]]
            style = {name: title[name] for name in ("fontsize", "fontweight", "color") if name in title}
            yield Text(
                x, top - title.get("pad", 6), title["text"], ha=title["loc"], **{"fontsize": 12, **style}, **on_page
            )

    def _tick_names(self, direction: Direction, on_page: dict) -> Iterator[Text]:
        if not direction.labelled:
            return
        power = direction.view.log and direction.view.names is None
        style = {"fontsize": direction.size, "is_power": power, **on_page}
        for place, name in self._major(direction):
            if direction.at == 0:
                x, y = self.to(place, None)[0], self.box[3] + direction.length + 3.5
                yield Text(x, y, name, ha="center", va="top", **style)
            else:
                x, y = self.box[0] - direction.length - 3.5, self.to(None, place)[1]
                yield Text(x, y, name, ha="right", va="center_baseline", **style)

    def reach(self, arranging: bool = False) -> Box:
        """How far it all goes; where axes are being arranged, titles and names of axes make no room along them."""
        left, top, right, bottom = self.box
        boxes = [self.box]
        if self.shown:
            ticks = [direction.length if self._major(direction) else 0 for direction in self.axes_]
            boxes.append((left - ticks[1], top, right, bottom + ticks[0]))
        for text in self._words():
            box = text.box()
            if arranging and text.text == self.title_["text"]:
                box = (left, box[1], left, box[3])
            elif arranging and text.text in (self.get_xlabel(), self.get_ylabel()):
                upright = text.style.get("rotation") == 90
                box = (box[0], top, box[2], top) if upright else (left, box[1], left, box[3])
            boxes.append(box)
        boxes += [text.box() for text in self.texts if text.text and not text.style.get("clip_on")]
        return union(boxes + ([self.legend_.box()] if self.legend_ else []))


def _boxes(places: list, across: object, foot: object, along: object, align: str) -> list[tuple]:
    """Per bar: where it begins across, how wide it is, where it stands, how long it is."""
    across, foot, along = (
        each if len(each) > 1 or len(places) == 1 else each * len(places) for each in map(listed, (across, foot, along))
    )
    if align not in ("center", "edge"):
        raise lacking(f"align={align!r} for bar")
    shift = 0.5 if align == "center" else 0
    return [(p - shift * wide, wide, at, long) for p, wide, at, long in zip(places, across, foot, along, strict=True)]


def _stairs(xs: list, ys: list, where: str) -> tuple[list, list]:
    """Points of a line that steps where x changes, to the value after ("post") or before ("pre") it."""
    if where not in ("pre", "post"):
        raise lacking(f"step {where!r}")
    points = list(zip(xs, ys, strict=True))[:1]
    for (x, y), (next_x, next_y) in zip(zip(xs, ys, strict=True), zip(xs[1:], ys[1:], strict=True), strict=False):
        points += [(next_x, y) if where == "post" else (x, next_y), (next_x, next_y)]
    return [x for x, _ in points], [y for _, y in points]


def _read(look: str) -> dict:
    """A look such as "o--" as a style."""
    style: dict = {}
    rest = look
    for line in ("--", "-.", "-", ":"):
        if line in rest:
            style["linestyle"], rest = line, rest.replace(line, "", 1)
            break
    for letter in rest:
        if letter in "kwrgb":
            style["color"] = letter
        else:
            style["marker"] = letter
    if "marker" in style:
        style.setdefault("linestyle", NO_LINE[0])
    return style


def _crosses(a: Point, b: Point, box: Box) -> bool:
    """Whether the line from a to b meets the edges or the inside of the box."""
    low, high = 0.0, 1.0
    for start, end, least, most in ((a[0], b[0], box[0], box[2]), (a[1], b[1], box[1], box[3])):
        if start == end:
            if not least <= start <= most:
                return False
            continue
        first, last = sorted(((least - start) / (end - start), (most - start) / (end - start)))
        low, high = max(low, first), min(high, last)
    return low <= high
