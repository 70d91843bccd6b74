"""The page's matplotlib beside the real one: the same charts, drawn by both, from the chapters' own cells."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "book" / "_live"
ABSENT = "numpy PIL torch transformers datasets ortools IPython"
CELLS = """
01_bubble_math:code-02 01_bubble_math:overview-6 01_bubble_math:code-03 01_bubble_math:code-09 01_bubble_math:code-18
01_bubble_math:code-40 02_naive:naive-03 02_naive:naive-10 02_naive:naive-35 03_gpipe:code-24 04_1f1b:a1f6cffc
06_fsdp:64b97c9c 07_interleaved:code-07 08_zero_bubble:a0c35f07 08_zero_bubble:ba7dd6a8 09_dualpipev:overlap-02
09_dualpipev:overlap-10 09_dualpipev:overlap-36 10_how_good:how-good-007 10_how_good:how-good-009
10_how_good:how-good-025 12_layout:4d3f88c5 14_profile:code-06 14_profile:gpu-05 own:own
""".split()
SVG, LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
NEAR = 0.02  # of the figure's size


@cache
def drawn(own: bool) -> dict[str, list[str]]:
    path = [str(STAND_IN)] * own + [str(ROOT / "src")]
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(path), "MPLBACKEND": "svg"}
    command = [sys.executable, str(ROOT / "tests" / "charts.py"), ABSENT if own else "torch", *CELLS]
    found = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout)


class Word(NamedTuple):
    text: str
    left: float
    baseline: float


class Chart(NamedTuple):
    """What an SVG shows: its size, its words, how many shapes there are by kind and colour, its rectangles."""

    size: tuple[float, float]
    words: list[Word]
    shapes: Counter
    rectangles: list[tuple]


def read(svg: str) -> Chart:
    root = ET.fromstring(svg[svg.index("<svg") : svg.rindex("</svg>") + 6])
    named = {element.get("id"): element for element in root.iter() if element.get("id")}
    words, shapes, rectangles = [], Counter(), []
    width, height = map(float, root.get("viewBox").split()[2:])

    def walk(element: ET.Element, x: float, y: float) -> None:
        tag = element.tag.removeprefix(SVG)
        if tag in ("defs", "clipPath", "pattern"):
            return
        if moved := re.match(r"translate\(([-\d.]+)[ ,]([-\d.]+)\)", element.get("transform", "")):
            x, y = x + float(moved[1]), y + float(moved[2])
        if tag == "text":
            words.append(word(element, x, y))
        if tag in ("path", "use"):
            path = element if tag == "path" else named[(element.get("href") or element.get(LINK))[1:]]
            at = x + float(element.get("x", 0)), y + float(element.get("y", 0))
            heights = [high for _, high in points(path.get("d"))]
            is_mark = max(heights) - min(heights) < 30  # nobody sees one that lies off the page
            if tag == "path" or not is_mark or 0 <= at[1] <= height:
                look(path.get("d"), style_of(path) | style_of(element), *at)
        for each in element:
            walk(each, x, y)

    def look(d: str, style: dict[str, str], x: float, y: float) -> None:
        outlines = [outline for outline in re.split("(?=M)", d) if len(points(outline)) > 1]  # one draws nothing
        fill, opacity = style.get("fill", "currentColor"), style.get("opacity", "1")
        if fill.startswith("url"):
            hatching = named[fill[5:-1]].find(f"{SVG}path").get("d")
            is_dotted = "z" in hatching
            ends = (
                frozenset((round(x), round(y)) for x, y in points(hatching)) if not is_dotted else hatching.count("M")
            )
            shapes["hatching", ends] += len(outlines)
        elif fill != "none" and "z" in d.lower() and (fill, style.get("fill-opacity")) != ("currentColor", "0"):
            shapes["filled", fill, f"{float(style.get('fill-opacity', opacity)):.2f}"] += len(outlines)
            rectangles.extend((fill, *box(outline, x, y)) for outline in outlines if is_rectangle(outline))
        if style.get("stroke", "none") != "none" and style.get("stroke-width") != "0":
            is_dashed = style.get("stroke-dasharray", "none") != "none"
            shapes["line", style["stroke"], is_dashed, f"{float(style.get('stroke-opacity', opacity)):.2f}"] += len(
                outlines
            )

    walk(root, 0, 0)
    return Chart((width, height), words, shapes, rectangles)


def style_of(element: ET.Element) -> dict[str, str]:
    pairs = (each.split(":", 1) for each in element.get("style", "").split(";") if ":" in each)
    style = {name.strip(): value.strip() for name, value in pairs}
    return style | {name: value for name, value in element.attrib.items() if "fill" in name or "stroke" in name}


def word(element: ET.Element, x: float, y: float) -> Word:
    """A line of text where it begins; some stand upright."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    style, text = element.get("style", ""), re.sub(r"\s+", " ", "".join(element.itertext())).strip()
    x, y = x + float(element.get("x") or 0), y + float(element.get("y") or 0)
    anchor = re.search("text-anchor: (start|middle|end)", style)
    size = float(re.search(r"([\d.]+)px", style)[1]) if "px" in style else 10
    bold = "bold" if re.search("bold|weight: 700", style) else "normal"
    font = FontProperties(family="monospace" if "Mono" in style.split(",")[0] else "sans-serif", weight=bold, size=size)
    wide = text_to_path.get_text_width_height_descent(text.replace("$", r"\$"), font, False)[0]
    share = {"start": 0, "middle": 0.5, "end": 1}[anchor[1] if anchor else "start"]
    upright = "rotate(-90" in element.get("transform", "")
    text = text.replace("\N{MINUS SIGN}", "-")
    if "tspan" in ET.tostring(element, "unicode"):
        text = text.replace(" ", "")
    return Word(text, x, y + share * wide) if upright else Word(text, x - share * wide, y)


def points(outline: str) -> list[tuple[float, float]]:
    numbers = [float(each) for each in re.findall(r"[-\d.]+", outline)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def is_rectangle(outline: str) -> bool:
    return not set("aCcQq") & set(outline) and len(set(points(outline))) == 4


def box(outline: str, x: float, y: float) -> tuple[float, float, float, float]:
    xs, ys = zip(*points(outline), strict=True)
    return x + min(xs), y + min(ys), x + max(xs), y + max(ys)


def paired(mine: list, theirs: list) -> list[tuple]:
    """Each of mine with what is nearest to it of what is called the same."""
    left, found = list(theirs), []
    for one in mine:
        same = [each for each in left if each[0] == one[0]]
        nearest = min(same, key=lambda each: sum(abs(a - b) for a, b in zip(one[1:], each[1:], strict=True)))
        left.remove(nearest)
        found.append((one, nearest))
    return found


@pytest.mark.parametrize("cell", CELLS)
def test_a_chart_is_what_matplotlib_draws(cell: str) -> None:
    ours, real = (drawn(own)[cell] for own in (True, False))
    assert len(ours) == len(real) > 0
    for mine, theirs in zip(map(read, ours), map(read, real), strict=True):
        width, height = theirs.size
        assert mine.size == pytest.approx(theirs.size, rel=NEAR)
        assert mine.shapes == theirs.shapes
        for a, b in zip(mine[1::2], theirs[1::2], strict=True):  # words and rectangles
            assert Counter(each[0] for each in a) == Counter(each[0] for each in b)
            for one, other in paired(a, b):
                assert one[1::2] == pytest.approx(other[1::2], abs=NEAR * width), (one, other)
                assert one[2::2] == pytest.approx(other[2::2], abs=NEAR * height), (one, other)


@pytest.mark.parametrize(
    "call, lacks",
    [
        ("ax.contourf([[1, 2], [3, 4]])", "contourf"),
        ("ax.plot([1, 2], drawstyle='steps')", "drawstyle= for plot"),
        ("ax.plot([1, 2], marker='3')", "marker '3'"),
        ("ax.bar([1], [2], yerr=1)", "yerr= for bar"),
        ("ax.set_xlim(0, 1, emit=False)", "emit= for set_xlim"),
        ("ax.set(xlim=(0, 1), zlim=3)", "set_zlim"),
        ("ax.legend(shadow=True)", "shadow= for Legend"),
        ("plt.imshow([[1]])", "plt.imshow"),
        ("plt.subplots(subplot_kw={})", "subplot_kw= for subplots"),
        ("ax.figure.colorbar(None)", "colorbar"),
        ("ax.set_xlabel('$x^2$')", "formulas between dollars"),
        ("ax.text(0, 0, 'a', color='chartreuse')", "colour 'chartreuse'"),
    ],
)
def test_what_the_page_lacks_is_said(call: str, lacks: str) -> None:
    before, after = "import io, matplotlib.pyplot as plt; ax = plt.figure().gca()", "ax.figure.savefig(io.StringIO())"
    program = "\n".join((before, call, after))
    settings = os.environ | {"PYTHONPATH": str(STAND_IN)}
    found = subprocess.run([sys.executable, "-c", program], env=settings, capture_output=True, text=True, timeout=60)
    last = found.stderr.strip().splitlines()[-1]
    assert re.fullmatch(rf".*: the page's charts have no {re.escape(lacks)}.*: open the notebook for this one", last), (
        last
    )
