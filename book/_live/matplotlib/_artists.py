"""What is drawn in axes: shapes, lines, arrows, letters. Each knows its points and draws itself."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, hypot, isfinite, pi, sin

from ._page import Box, Page, disc, polygon, stroke
from ._style import ASCENT, DESCENT, NO_LINE, SOLID, Told, colour, lacking, plain, styled, width_of

Point = tuple[float, float]
_PATCH = "facecolor edgecolor color linewidth linestyle alpha hatch zorder label capstyle clip_on"
_LINE = (
    "color linewidth linestyle alpha zorder label gid marker markersize markerfacecolor markeredgecolor "
    "markeredgewidth path_effects solid_capstyle clip_on"
)
_TEXT = (
    "fontsize fontweight family color alpha ha va rotation linespacing zorder clip_on bbox parse_math transform "
    "is_power"
)


class Artist(Told):
    """`ax` is where it was added, `points` what the axes' limits make room for (None: not in this direction)."""

    zorder, known = 1.0, ""

    def __init__(self, points: Sequence = (), **style: object):
        self.style = styled(style, self.known, type(self).__name__)
        self.zorder = self.style.pop("zorder", type(self).zorder)
        self.points, self.ax, self.visible = list(points), None, True

    def get_label(self) -> str:
        return self.style.get("label") or ""

    def set_label(self, label: str) -> None:
        self.style["label"] = label

    def get_visible(self) -> bool:
        return self.visible

    def set_visible(self, visible: bool) -> None:
        self.visible = visible

    def remove(self) -> None:
        self.ax.artists.remove(self)

    def clip(self, page: Page) -> str:
        return page.clip(self.ax.box) if self.ax and self.style.get("clip_on", True) else ""


class Patch(Artist):
    """Filled outlines, each a list of points, in one colour."""

    known, closed = _PATCH, True

    def __init__(self, *outlines: Sequence[Point], **style: object):
        super().__init__([point for outline in outlines for point in outline], **style)
        self.outlines = outlines

    def draw(self, page: Page) -> None:
        to = self.ax.to
        d = "".join(polygon([to(x, y) for x, y in outline], self.closed) for outline in self.outlines)
        page.shape(d, self.style, self.clip(page))


class Rectangle(Patch):
    def __init__(self, xy: Point, width: float, height: float, **style: object):
        (x, y), right, top = xy, xy[0] + width, xy[1] + height
        super().__init__([(x, y), (right, y), (right, top), (x, top)], **style)


class Polygon(Patch):
    def __init__(self, xy: Sequence[Point], **style: object):
        super().__init__(list(xy), **style)


class Path:
    def __init__(self, vertices: Sequence[Point]):
        self.vertices = list(vertices)


class PathPatch(Patch):
    closed = False

    def __init__(self, path: Path, **style: object):
        super().__init__(path.vertices, **style)


class Circle(Patch):
    """In axes whose unit is a point in both directions."""

    def __init__(self, xy: Point, radius: float, **style: object):
        (x, y), r = xy, radius
        super().__init__([(x - r, y - r), (x + r, y + r)], **style)
        self.at, self.radius = xy, radius

    def draw(self, page: Page) -> None:
        (x, y), (edge, _) = self.ax.to(*self.at), self.ax.to(self.at[0] + self.radius, self.at[1])
        page.shape(disc(x, y, edge - x), self.style, self.clip(page))


class FancyArrowPatch(Artist):
    """A curve with a filled head, "-|>": as long as 0.4 of `mutation_scale`, its halves as wide as 0.2."""

    known = "color linewidth linestyle zorder arrowstyle mutation_scale shrinkA shrinkB joinstyle connectionstyle"

    def __init__(self, posA: Point, posB: Point, **style: object):  # noqa: N803 (matplotlib's names)
        super().__init__([posA, posB], **style)
        kind, bend = self.style.get("arrowstyle", "-|>"), self.style.get("connectionstyle", "arc3")
        if kind != "-|>" or not bend.startswith("arc3") or self.style.get("shrinkA") or self.style.get("shrinkB"):
            raise lacking(f"arrow {kind!r} with {bend!r}")
        self.bend = float(bend.partition("rad=")[2] or 0)

    def draw(self, page: Page) -> None:
        (x1, y1), (x2, y2) = (self.ax.to(*point) for point in self.points)
        width, scale = self.style.get("linewidth", 1), self.style.get("mutation_scale", 1)
        middle = (x1 + x2) / 2 - self.bend * (y2 - y1), (y1 + y2) / 2 + self.bend * (x2 - x1)
        away = hypot(middle[0] - x2, middle[1] - y2) or 1
        back = (middle[0] - x2) / away, (middle[1] - y2) / away  # from the tip, as long as a point
        long, half = 0.4 * scale, 0.2 * scale
        pad = 0.5 * width * hypot(long, half) / half  # so that the head's point ends at the end
        tip = x2 + pad * back[0], y2 + pad * back[1]
        ink, opacity = colour(self.style.get("color", "black"))
        look, clip = stroke(ink, opacity, width, self.style.get("linestyle"), "butt", "miter"), self.clip(page)
        curve = polygon([(x1, y1)], False) + "Q" + polygon([middle], False)[1:] + " " + polygon([tip], False)[1:]
        page.path(curve, 'fill="none"' + look, clip)
        sides = [
            (tip[0] + long * back[0] + s * half * back[1], tip[1] + long * back[1] - s * half * back[0])
            for s in (1, -1)
        ]
        page.path(polygon([sides[0], tip, sides[1]]), f'fill="{ink}"' + look, clip)


class Line2D(Artist):
    zorder, known = 2.0, _LINE

    def __init__(self, xs: Sequence[float], ys: Sequence[float], **style: object):
        super().__init__(zip(xs, ys, strict=True), **style)

    def ends(self) -> list[Point]:
        """Its points on the page."""
        return [self.ax.to(x, y) for x, y in self.points if isfinite(x) and isfinite(y)]

    def draw(self, page: Page) -> None:
        self.drawn(page, self.ends(), self.ends(), self.clip(page))

    def drawn(self, page: Page, line: list[Point], marked: list[Point], clip: str) -> None:
        """The line through points of the page, and its sign at some."""
        style = self.style
        ink, opacity = colour(style.get("color", "C0"), style.get("alpha"))
        width, kind = style.get("linewidth", 1.5), style.get("linestyle", "-")
        cap = style.get("solid_capstyle", "square") if kind in SOLID else "butt"
        if gid := style.get("gid"):
            page.lines.append(f'<g id="{gid}">')
        if len(line) > 1 and kind not in NO_LINE:
            for effect in style.get("path_effects", ()):
                page.path(polygon(line, False), 'fill="none"' + effect.look(), clip)
            page.path(polygon(line, False), 'fill="none"' + stroke(ink, opacity, width, kind, cap), clip)
        if marked and style.get("marker") not in (None, *NO_LINE):
            face, face_opacity = colour(style.get("markerfacecolor", ink), style.get("alpha"))
            edge, edge_opacity = colour(style.get("markeredgecolor", ink), style.get("alpha"))
            look = f'fill="{face}"' + (f' fill-opacity="{face_opacity:g}"' if face_opacity != 1 else "")
            look += stroke(edge, edge_opacity, style.get("markeredgewidth", 1), "-", "butt", "miter")
            shape = sign(style["marker"], style.get("markersize", 6))
            for effect in style.get("path_effects", ()):
                page.marks(shape, marked, f'fill="{face}"' + effect.look(), clip)
            page.marks(shape, marked, look, clip)
        page.lines += ["</g>"] if gid else []


class Across(Line2D):
    """A line through the whole axes, at `x` or at `y`."""

    def __init__(self, x: float | None, y: float | None, **style: object):
        super().__init__([x], [y], **style)

    def ends(self) -> list[Point]:
        (x, y), (left, top, right, bottom) = self.points[0], self.ax.box
        if y is None:
            return [(self.ax.to(x, None)[0], bottom), (self.ax.to(x, None)[0], top)]
        return [(left, self.ax.to(None, y)[1]), (right, self.ax.to(None, y)[1])]


class Span(Patch):
    """A strip of the axes from `x0` to `x1`."""

    def __init__(self, x0: float, x1: float, **style: object):
        super().__init__([(x0, None), (x1, None)], **style)

    def draw(self, page: Page) -> None:
        (left, right), (_, top, _, bottom) = [self.ax.to(x, None)[0] for x, _ in self.points], self.ax.box
        outline = polygon([(left, bottom), (left, top), (right, top), (right, bottom)])
        page.shape(outline, self.style, self.clip(page))


class withStroke(Told):  # noqa: N801 (matplotlib's name)
    """Under a line, a wider one."""

    def __init__(self, linewidth: float, foreground: object):
        self.linewidth, self.foreground = linewidth, foreground

    def look(self) -> str:
        return stroke(*colour(self.foreground), self.linewidth, "-", "square")


class Text(Artist):
    """Letters at a point of `transform`, the data's unless given, and `moved` from there, in points."""

    zorder, known = 3.0, _TEXT

    def __init__(self, x: float, y: float, text: object, moved: Point = (0, 0), **style: object):
        super().__init__(**{"fontsize": 10, "ha": "left", "va": "baseline", **style})
        self.at, self.moved = (x, y), moved
        self.set_text(text)

    def get_text(self) -> str:
        return self.text

    def set_text(self, text: object) -> None:
        self.text = plain(text, self.style.get("parse_math", True))

    def get_position(self) -> Point:
        return self.at

    def set_x(self, x: float) -> None:
        self.at = x, self.at[1]

    def set_y(self, y: float) -> None:
        self.at = self.at[0], y

    def get_fontsize(self) -> float:
        return self.style["fontsize"]

    def set_clip_on(self, clip: bool) -> None:
        self.style["clip_on"] = clip

    def clip(self, page: Page) -> str:
        return ""  # what is half outside is still to be read

    def _block(self) -> tuple[list[str], float, float, float]:
        """Its lines, how wide they are, from line to line, and from the point up to the upper edge."""
        style, lines = self.style, self.text.split("\n")
        size, bold = style["fontsize"], style.get("fontweight") == "bold"
        wide = max(width_of(line.replace("^", ""), size, bold, style.get("family") == "monospace") for line in lines)
        spacing = style.get("linespacing", 1.2 if len(lines) > 1 else 1)
        step, air = spacing * size, (spacing - 1) * size / 2
        high, ascent = step * len(lines), ASCENT * size + air
        above = {
            "top": 0,
            "bottom": high,
            "center": high / 2,
            "baseline": high - DESCENT * size - air,
            "center_baseline": ((len(lines) - 1) * step + ascent) / 2,
        }
        if style["va"] not in above:
            raise lacking(f"va={style['va']!r}")
        return lines, wide, step, above[style["va"]]

    def place(self) -> Point:
        x, y = (self.style.get("transform") or self.ax.to)(*self.at)
        return x + self.moved[0], y - self.moved[1]

    def box(self) -> Box:
        (x, y), (lines, wide, step, above) = self.place(), self._block()
        left = {"left": 0, "center": wide / 2, "right": wide}[self.style["ha"]]
        high = step * len(lines)
        if self.style.get("rotation") == 90:
            return x - above, y - wide + left, x - above + high, y + left
        return x - left, y - above, x - left + wide, y - above + high

    def draw(self, page: Page) -> None:
        (x, y), (lines, _, step, above) = self.place(), self._block()
        left, top, right, bottom = self.box()
        if self.ax and self.style.get("clip_on") and not self.ax.meets((left, top, right, bottom)):
            return
        if around := self.style.get("bbox"):
            self._circle(page, around, (left + right) / 2, (top + bottom) / 2, max(right - left, bottom - top))
        size = self.style["fontsize"]
        first = ASCENT * size + (step - size) / 2 - above
        for number, line in enumerate(lines):
            down = first + number * step
            turned = self.style.get("rotation") == 90
            page.text(line, x + down * turned, y + down * (not turned), self.style)

    def _circle(self, page: Page, around: dict, x: float, y: float, across: float) -> None:
        style, size = dict(around), self.style["fontsize"]
        kind, _, pad = style.pop("boxstyle", "").partition(",pad=")
        if kind != "circle":
            raise lacking(f"boxstyle {kind!r}")
        page.shape(disc(x, y, across / 2 + float(pad or 0.3) * size), styled(style, _PATCH, "bbox"))


def sign(marker: str, size: float) -> str:
    """A marker around the origin, as a path."""
    r = size / 2
    if marker in ("o", "."):
        return disc(0, 0, r / 2 if marker == "." else r)
    if marker == "x":
        return polygon([(-r, -r), (r, r)], False) + polygon([(-r, r), (r, -r)], False)
    if marker == "s":
        return polygon([(-r, r), (r, r), (r, -r), (-r, -r)])
    if marker in ("1", "2"):  # three legs, one down or up
        legs = [pi / 2 + 2 * pi * k / 3 for k in range(3)]
        return "".join(polygon([(0, 0), (r * cos(a), (r if marker == "1" else -r) * sin(a))], False) for a in legs)
    if marker == "+":
        return polygon([(-r, 0), (r, 0)], False) + polygon([(0, -r), (0, r)], False)
    if marker in ("P", "X"):  # a plus of three thirds, upright or turned
        plus = [(1, 3), (1, 1), (3, 1), (3, -1), (1, -1), (1, -3)]
        plus = [(x * r / 3, y * r / 3) for x, y in plus + [(-x, -y) for x, y in plus]]
        return polygon(plus if marker == "P" else [((x - y) * 0.75, (x + y) * 0.75) for x, y in plus])
    if marker in ("p", "h", "8"):
        corners = {"p": 5, "h": 6, "8": 8}[marker]
        turns = [2 * pi * (k + (marker == "8") / 2) / corners for k in range(corners)]
        return polygon([(-r * sin(turn), -r * cos(turn)) for turn in turns])
    if marker == "*":
        spikes = [(r if k % 2 == 0 else 0.381966 * r, k * pi / 5) for k in range(10)]
        return polygon([(-s * sin(turn), -s * cos(turn)) for s, turn in spikes])
    outlines = {
        "^": [(0, -r), (-r, r), (r, r)],
        "v": [(0, r), (r, -r), (-r, -r)],
        "<": [(-r, 0), (r, -r), (r, r)],
        ">": [(r, 0), (-r, r), (-r, -r)],
        "d": [(0, -r * 2**0.5), (r * 2**0.5 * 0.6, 0), (0, r * 2**0.5), (-r * 2**0.5 * 0.6, 0)],
        "D": [(0, -r * 2**0.5), (r * 2**0.5, 0), (0, r * 2**0.5), (-r * 2**0.5, 0)],
    }
    if marker not in outlines:
        raise lacking(f"marker {marker!r}, but o . x + s * ^ v < > d D p h 8 P X 1 2")
    return polygon(outlines[marker])
