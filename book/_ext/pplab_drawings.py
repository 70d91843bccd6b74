"""Prepare for the page what matplotlib, and the page's stand-in for it, have drawn: `dress` a drawing.

Hatches become lines, because on paper each area with a pattern would be a picture, and a chapter would have 30 MB of
them. A chart of time lists in its metadata, as JSON, what its shapes show, and playhead.js plays that. The builder
dresses the drawings in notebooks, and the page's kernel dresses those that a reader's cells make.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from functools import cache
from itertools import pairwise
from math import ceil, floor, log10
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from pplab import palette
from pplab.plot import shade

SVG = "{http://www.w3.org/2000/svg}"
ElementTree.register_namespace("", SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")

FIGURE = re.compile(r'(?<=<div class="pplab-figure" style="overflow-x:auto">)<svg.*?</svg>', re.S)
GAP = 1.2  # points by which a bar is drawn shorter, at most
INSET = 0.35  # points by which a hatch's lines keep off the edge of what they fill
MOST_STAGES = 32  # of a rank


class Shape(NamedTuple):
    """A rectangle and its fill: a colour, a pattern's `url(#...)`, or nothing that hides what is behind it."""

    left: float
    top: float
    right: float
    bottom: float
    fill: str
    clip: str


class Label(NamedTuple):
    x: float
    y: float
    says: str


def dressed(page: str) -> str:
    """HTML in which each figure is dressed."""

    def one(found: re.Match) -> str:
        dress(root := ElementTree.fromstring(found[0]))
        return ElementTree.tostring(root, "unicode")

    return FIGURE.sub(one, page)


def dress(root: Element) -> None:
    """Add to a drawing what it tells about time, if it does, and draw its hatches as lines."""
    if re.search(r"Gantt chart|over time", root.get("aria-label", "")) and (told := moments(root)):
        said = Element(f"{SVG}metadata")
        root.insert(0, said)
        said.text = json.dumps(told, ensure_ascii=False, separators=(",", ":"))
    rule(root)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def style_of(element: Element) -> dict[str, str]:
    """Its attributes and its style, which has priority over them."""
    said = (each.partition(":") for each in element.get("style", "").split(";"))
    return {**element.attrib, **{name.strip(): value.strip() for name, _, value in said}}


def rectangles(path: Element) -> list[Shape]:
    """The rectangles of a path, without its lines and arrows."""
    style = style_of(path)
    is_solid = float(style.get("fill-opacity", 1)) == 1
    fill = style.get("fill", "currentColor") if is_solid else "none"
    found = []
    for part in path.get("d", "").split("M")[1:]:
        numbers = [float(x) for x in re.findall(r"-?[\d.]+(?:e-?\d+)?", part)]
        xs, ys = sorted({*numbers[::2]}), sorted({*numbers[1::2]})
        if len(xs) == len(ys) == 2:
            found.append(Shape(xs[0], ys[0], xs[1], ys[1], fill, style.get("clip-path", "")))
    return found


def rule(root: Element) -> None:
    """Draw the fill of rectangles with a pattern of lines as those lines."""
    patterns = {f"url(#{each.get('id')})": each.find(f"{SVG}path") for each in root.iter(f"{SVG}pattern")}
    for parent in [*root.iter()]:
        for path in parent.findall(f"{SVG}path"):
            pattern, shapes = patterns.get(style_of(path).get("fill", "")), rectangles(path)
            lines = lines_of(pattern.get("d", "")) if pattern is not None else {}
            if not lines or not shapes:
                continue
            drawn = Element(pattern.tag, pattern.attrib | {"d": "".join(ruled(lines, shape) for shape in shapes)})
            if shapes[0].clip:
                drawn.set("clip-path", shapes[0].clip)
            parent[[*parent].index(path)] = drawn
    kept = {style_of(each).get("fill") for each in root.iter()}
    for parent in [*root.iter()]:
        for pattern in parent.findall(f"{SVG}pattern"):
            if f"url(#{pattern.get('id')})" not in kept:
                parent.remove(pattern)


@cache
def lines_of(pattern: str) -> dict[int, tuple[float, float]]:
    """By slope (+1 for falling lines), where a pattern's lines y = slope * x + c lie: one c, and the distance to the
    next."""
    found = defaultdict(set)
    for ends in re.findall(r"M *([-\d.]+) ([-\d.]+)\s*L *([-\d.]+) ([-\d.]+)", pattern):
        x1, y1, x2, y2 = map(float, ends)
        slope = round((y2 - y1) / (x2 - x1)) if x1 != x2 else 0
        found[slope].add(y1 - slope * x1)
    return {slope: (min(at), sorted(at)[1] - min(at)) for slope, at in found.items() if len(at) > 1}


def ruled(lines: dict[int, tuple[float, float]], shape: Shape) -> str:
    """Those lines inside a rectangle, as a path of equal steps, which packs well."""
    left, right = shape.left + INSET, shape.right - INSET
    top, bottom = (shape.top + INSET, shape.bottom - INSET) if any(lines) else (shape.top, shape.bottom)
    drawn, x, y = "", 0, 0
    for slope, (first, step) in lines.items():
        low = min(top - slope * at for at in (left, right))
        high = max(bottom - slope * at for at in (left, right))
        for k in range(ceil((low - first) / step), ceil((high - first) / step)):
            c = first + k * step
            ends = sorted((at - c) * slope for at in (top, bottom)) if slope else (left, right)
            start, end = max(left, ends[0]), min(right, ends[1])
            if start >= end:
                continue
            place = [round(10 * at) for at in (start, slope * start + c, end, slope * end + c)]  # in tenths of a point
            moves = (place[0] - x, place[1] - y, place[2] - place[0], place[3] - place[1])
            drawn += "{}{:g} {:g}l{:g} {:g}".format("m" if drawn else "M", *(move / 10 for move in moves))
            x, y = place[2:]
    return drawn


# ---- charts of time --------------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """Time along x: where it is 0, how much of it a point is, and with how many decimals to write it."""

    zero: float
    scale: float
    decimals: int

    def time(self, x: float) -> float:
        return short(round((x - self.zero) * self.scale, self.decimals))


def moments(root: Element) -> dict | None:
    """What a chart of time shows, panel by panel, or None if a drawing has no axis of time."""
    labels = [
        Label(float(text.get("x", 0)), float(text.get("y", 0)), "".join(text.itertext()))
        for text in root.iter(f"{SVG}text")
    ]
    boxes = sorted(map(panel_box, root.findall(f".//{SVG}clipPath[{SVG}rect]")), key=lambda box: box.top)
    if not boxes or any(box.left != boxes[-1].left for box in boxes):
        return None
    below = [label for label in labels if label.y > boxes[-1].bottom]
    unit = next((found for label in below if (found := re.fullmatch(r"time(?: \((.+)\))?", label.says))), None)
    ticks = [label for label in below if label.y < boxes[-1].bottom + 20 and re.fullmatch(r"[\d.]+", label.says)]
    if unit is None or len(ticks) < 2:
        return None
    (first, last), (from_, to) = (ticks[0], ticks[-1]), (float(ticks[0].says), float(ticks[-1].says))
    scale = (to - from_) / (last.x - first.x)
    zero = first.x - from_ / scale
    axis = Axis(zero, scale, 3 - floor(log10((boxes[-1].right - zero) * scale)))
    shapes = [shape for path in root.iter(f"{SVG}path") if path.get("clip-path") for shape in rectangles(path)]
    panels = [panel(box, [shape for shape in shapes if shape.clip == box.clip], labels, axis) for box in boxes]
    ends = [end for each in panels for group in each["groups"] for _, _, end in group["bars"]]
    return {
        "end": max(ends, default=axis.time(boxes[-1].right)),  # an axis may go on
        "unit": f" {unit[1]}" if unit[1] else "",
        "zero": short(axis.zero),
        "scale": short(axis.scale),
        "colours": {name: palette.FILL[kind] for kind, name in palette.NAME.items()},
        "panels": panels,
    }


def panel_box(clip: Element) -> Shape:
    x, y, width, height = (float(clip[0].get(name, 0)) for name in ("x", "y", "width", "height"))
    return Shape(x, y, x + width, y + height, "none", f"url(#{clip.get('id')})")


def panel(box: Shape, shapes: list[Shape], labels: list[Label], axis: Axis) -> dict:
    """One chart of a drawing: its name, the names of its rows, and what they do. Bars of one colour and height form a
    group, with each bar's label, start and end."""
    rows = [each for each in labels if each.x < box.left and box.top < each.y < box.bottom]
    title = next((each for each in labels if abs(each.x - box.left) < 1 and box.top - 12 < each.y < box.top), None)
    bars = [shape for shape in shapes if is_bar(shape)]
    last = max((shape.right for shape in shapes if not is_bar(shape)), default=box.right)  # where the step ends
    starts: dict[int, set[float]] = defaultdict(lambda: {last, box.right})  # by row

    def row_of(shape: Shape) -> int:
        return int(((shape.top + shape.bottom) / 2 - box.top) / (box.bottom - box.top) * len(rows))

    for shape in shapes:
        starts[row_of(shape)].add(shape.left)
    groups: dict[tuple, list] = defaultdict(list)
    for bar in bars:
        row = row_of(bar)
        end = min((x for x in starts[row] if bar.right - 0.1 < x < bar.right + GAP), default=bar.right)
        inside = (each.says for each in labels if bar.left < each.x < bar.right and bar.top < each.y < bar.bottom)
        groups[row, bar.fill, bar.top, bar.bottom].append([next(inside, ""), axis.time(bar.left), axis.time(end)])
    made = [
        {
            "row": row,
            "kind": kinds().get(fill, "something else"),
            "fill": fill,
            "top": short(top),
            "bottom": short(bottom),
            "bars": alike,
        }
        for (row, fill, top, bottom), alike in groups.items()
    ]
    return {
        "name": title.says.partition(":")[0] if title else "",
        "rows": [each.says for each in sorted(rows, key=lambda each: each.y)],
        **{name: short(getattr(box, name)) for name in ("left", "top", "right", "bottom")},
        "groups": made,
        "messages": messages(made, axis.time(box.right)),
    }


def is_bar(shape: Shape) -> bool:
    return shape.fill != "none" and not shape.fill.startswith("url")


def messages(groups: list[dict], end: float) -> dict:
    """The messages between rows. The forwards of a microbatch follow each other, and so do its backwards, so they are
    chains of places among all bars. Also how long a message takes, which is at least long enough to be seen. There is
    no chain where a bar is too narrow for its label, or where one begins before the bar that it would wait for has
    ended."""
    bars = [(group["row"], group["kind"], *bar) for group in groups for bar in group["bars"]]
    chains: dict[tuple, list[int]] = defaultdict(list)
    for i in sorted(range(len(bars)), key=lambda i: bars[i][3]):
        _, kind, label, *_ = bars[i]
        if kind in ("forward", "backward", "input gradient"):
            chains[kind == "forward", label].append(i)
    pairs = ((bars[i], bars[j]) for chain in chains.values() for i, j in pairwise(chain))
    waits = min((after[3] - before[4] for before, after in pairs if before[0] != after[0]), default=0)
    is_unclear = waits < -end / 200 or any(not label for _, label in chains)
    return {"takes": short(max(waits, end / 60)), "chains": [] if is_unclear else [*chains.values()]}


@cache
def kinds() -> dict[str, str]:
    """Colours that bars may have, and the kind of action that each stands for."""
    counts = range(1, MOST_STAGES + 1)
    return {
        shade(fill, step, count): palette.NAME[kind]
        for kind, fill in palette.FILL.items()
        for count in counts
        for step in range(count)
    }


def short(x: float) -> float:
    """A number with as many digits as a drawing's numbers are accurate to."""
    rounded = float(f"{x:.6g}")
    return int(rounded) if rounded.is_integer() else rounded
