"""The SVG as it grows: points from the figure's upper left corner on, y downwards."""

from html import escape
from zlib import crc32

from ._style import NO_LINE, SOLID, colour, dashes, lacking, number

Box = tuple[float, float, float, float]  # left, top, right, bottom
_SANS = "'DejaVu Sans', 'Bitstream Vera Sans', Verdana, Arial, sans-serif"
_MONO = "'DejaVu Sans Mono', 'Bitstream Vera Sans Mono', Courier, monospace"


def union(boxes: list[Box]) -> Box:
    lefts, tops, rights, bottoms = zip(*boxes, strict=True)
    return min(lefts), min(tops), max(rights), max(bottoms)


class Page:
    def __init__(self) -> None:
        self.definitions: dict[str, str] = {}
        self.lines: list[str] = []

    def _define(self, letter: str, element: str) -> str:
        """The name under which something that is used later is defined, once."""
        name = f"{letter}{crc32(element.encode()):010x}"
        self.definitions[name] = element.replace("@", name, 1)
        return name

    def clip(self, box: Box) -> str:
        """An attribute that cuts off what lies outside."""
        left, top, right, bottom = box
        size = f'width="{number(right - left)}" height="{number(bottom - top)}"'
        rectangle = f'<clipPath id="@"><rect x="{number(left)}" y="{number(top)}" {size}/></clipPath>'
        name = self._define("p", rectangle)
        return f' clip-path="url(#{name})"'

    def path(self, d: str, look: str, clip: str = "") -> None:
        self.lines.append(f'<path d="{d}" {look}{clip}/>')

    def shape(self, d: str, style: dict, clip: str = "") -> None:
        """A filled path, its edge and its hatching."""
        alpha, both = style.get("alpha"), style.get("color")
        face, face_opacity = colour(style.get("facecolor", both if both is not None else "C0"), alpha)
        edge, edge_opacity = colour(style.get("edgecolor", both if both is not None else "none"), alpha)
        look = f'fill="{face}"' + (f' fill-opacity="{number(face_opacity)}"' if face_opacity != 1 else "")
        cap = style.get("capstyle", "butt")
        line = stroke(edge, edge_opacity, style.get("linewidth", 1), style.get("linestyle"), cap, "miter")
        if face != "none" or line:
            self.path(d, look + line, clip)
        if style.get("hatch"):
            self.path(d, f'fill="url(#{self._hatching(style["hatch"], edge, edge_opacity)})"', clip)

    def _hatching(self, kind: str, edge: str, opacity: float) -> str:
        """A square inch of lines or dots: the more signs in `kind`, the denser."""
        if set(kind) not in ({"/"}, {"\\"}, {"-"}, {"."}):
            raise lacking(f"hatch {kind!r}, but '//', '\\\\', '--' and '..'")
        ink, step = "#000000" if edge == "none" else edge, 12 / len(kind)
        steps = [k * step for k in range(6 * len(kind) + 1)]
        if kind[0] == "/":
            lines = [polygon([(x - 36, x + 36), (x + 36, x - 36)], False) for x in steps]
        elif kind[0] == "\\":
            lines = [polygon([(x - 36, 36 - x), (x + 36, 108 - x)], False) for x in steps]
        elif kind[0] == "-":
            lines = [polygon([(0, y - step / 2), (72, y - step / 2)], False) for y in steps[1:]]
        else:
            lines = [
                disc(x - row % 2 * step / 2, y, step / 10) for row, y in enumerate(steps) for x in steps[row % 2 :]
            ]
        look = f'fill="{ink if kind[0] == "." else "none"}" stroke="{ink}" stroke-opacity="{number(opacity)}"'
        return self._define(
            "h",
            '<pattern id="@" patternUnits="userSpaceOnUse" width="72" height="72">'
            f'<path d="{"".join(lines)}" {look}/></pattern>',
        )

    def marks(self, sign: str, places: list, look: str, clip: str) -> None:
        """The same sign at all places."""
        name = self._define("m", f'<path id="@" d="{sign}" {look}/>')
        uses = "".join(f'<use href="#{name}" x="{number(x)}" y="{number(y)}"/>' for x, y in places)
        self.lines.append(f"<g{clip}>{uses}</g>")

    def text(self, line: str, x: float, y: float, style: dict) -> None:
        """One line of text, at its baseline."""
        if not line:
            return
        bold = "bold " if style.get("fontweight") == "bold" else ""
        font = f"{bold}{number(style['fontsize'])}px {_MONO if style.get('family') == 'monospace' else _SANS}"
        anchor = {"left": "start", "center": "middle", "right": "end"}[style["ha"]]
        fill, opacity = colour(style.get("color", "black"), style.get("alpha"))
        look = f'fill="{fill}"' + (f' fill-opacity="{number(opacity)}"' if opacity != 1 else "")
        at = f'x="{number(x)}" y="{number(y)}"'
        if turn := style.get("rotation"):
            look += f' transform="rotate({-turn} {number(x)} {number(y)})"'
        words, _, power = line.partition("^")
        raised = (
            f'<tspan dy="-{number(0.4 * style["fontsize"])}" style="font-size: 70%">{power}</tspan>' if power else ""
        )
        said = f"{escape(words)}{raised}" if style.get("is_power") else escape(line)
        self.lines.append(f'<text {at} style="font: {font}; text-anchor: {anchor}" {look}>{said}</text>')

    def svg(self, box: Box) -> str:
        left, top, right, bottom = box
        return (
            f'<svg viewBox="0 0 {number(right - left)} {number(bottom - top)}" xmlns="http://www.w3.org/2000/svg">'
            f"<defs>{''.join(self.definitions.values())}</defs>"
            f'<g transform="translate({number(-left)} {number(-top)})">{"".join(self.lines)}</g></svg>'
        )


def stroke(ink: str, opacity: float, width: float, linestyle: object, cap: str = "butt", join: str = "round") -> str:
    """Attributes of a line, or none if there is nothing to see. How it ends is style: matplotlib's SVG on the same
    page has a style for all elements, which goes before attributes."""
    if ink == "none" or not width or linestyle in NO_LINE:
        return ""
    found = f' stroke="{ink}" stroke-width="{number(width)}"'
    found += f' stroke-opacity="{number(opacity)}"' if opacity != 1 else ""
    found += f' stroke-dasharray="{dashes(linestyle, width)}"' if linestyle not in SOLID else ""
    return f'{found} style="stroke-linejoin: {join}; stroke-linecap: {cap}"'


def disc(x: float, y: float, r: float) -> str:
    """A circle as a path: two arcs."""
    left, radius, across = number(x - r), number(r), number(2 * r)
    return f"M{left} {number(y)}a{radius} {radius} 0 1 0 {across} 0a{radius} {radius} 0 1 0 -{across} 0z"


def polygon(points: list, closed: bool = True) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points) + "z" * closed
