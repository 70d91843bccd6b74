"""Colours that a reader must tell apart stay apart, however the reader sees colours."""

from itertools import combinations

import numpy as np
import pytest

from pplab import palette, plot
from pplab.actions import B, F, I, W
from pplab.lab.forms.palette import CATEGORIES, COLOURS, PART
from pplab.lab.measuring import IDLE_PARTS

cspace_convert = pytest.importorskip("colorspacious").cspace_convert

SIGHT = ("normal", "protanomaly", "deuteranomaly", "tritanomaly")  # severity 100: protanopia and so on
APART = 10  # in CAM02-UCS, where about 1 is the least difference that is seen


def seen(colour: str, sight: str) -> np.ndarray:
    """Where a colour lies in CAM02-UCS for somebody with that sight (Machado et al. 2009)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    if sight != "normal":
        space = {"name": "sRGB1+CVD", "cvd_type": sight, "severity": 100}
        channels = np.clip(cspace_convert(channels, space, "sRGB1"), 0, 1)
    return cspace_convert(channels, "sRGB1", "CAM02-UCS")


def nearest(colours: dict[str, str], sight: str) -> tuple[float, str, str]:
    """The two of these colours that are hardest to tell apart, and how far apart they are."""
    places = {name: seen(colour, sight) for name, colour in colours.items()}
    return min((float(np.linalg.norm(places[a] - places[b])), a, b) for a, b in combinations(places, 2))


PAGES = {"light": ("#ffffff", "#222832"), "dark": ("#14181e", "#ced6dd")}  # ground and text of the book's page
KINDS = {kind.value: fill for kind, fill in palette.FILL.items()}
DRAWINGS = {
    "actions": {**KINDS, "other": palette.OTHER},
    "categories": {fill: fill for fill in CATEGORIES},
    "parts": {fill: fill for part, fill in PART.items() if part != "work"},
    "work and what isn't": {part: PART[part] for part in ("work", *IDLE_PARTS[1:])},  # the bubble is hatched
}


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("drawing", DRAWINGS)
def test_colours_of_a_drawing(drawing, sight):
    distance, *which = nearest(DRAWINGS[drawing], sight)
    assert distance >= APART, which


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_shades_of_stages(steps, sight):
    shades = {kind: [plot.shade(fill, step, steps) for step in range(steps)] for kind, fill in palette.FILL.items()}
    for one, other in combinations(shades, 2):
        for a in shades[one]:
            for b in shades[other]:
                assert np.linalg.norm(seen(a, sight) - seen(b, sight)) >= APART, (one, other)


@pytest.mark.parametrize("sight", SIGHT)
def test_work_is_told_from_idle_where_nothing_is_hatched(sight):
    """In small charts idle time is the page itself, and a line: work stands out, a rank's later stage a little less."""
    for fill in palette.FILL.values():
        for page, _ in PAGES.values():
            shades = [plot.shade(fill, step, 2) for step in range(2)]
            first, later = (np.linalg.norm(seen(each, sight) - seen(page, sight)) for each in shades)
            assert first >= 15 and later >= APART, (fill, page)


def test_schedules_that_are_compared_have_colours_of_their_own():
    """Which ones: chapters 4, 8 and 10 draw a line for each."""
    for names in ("GPipe 1F1B", "1F1B ZB-H1 ZB-H2", "ZB-H1 ZBVZeroBubble V-Half V-Min",
                  "1F1B Interleaved1F1B InterleavedZeroBubble ZB-H1 ZBVZeroBubble"):  # fmt: skip
        assert len({COLOURS[name] for name in names.split()}) == len(names.split()), names


def test_actions_in_greyscale():
    lightness = sorted(seen(fill, "normal")[0] for fill in palette.FILL.values())
    assert np.diff(lightness).min() >= 5
    assert sorted(palette.FILL, key=lambda kind: seen(palette.FILL[kind], "normal")[0]) == [F, I, B, W]


def bubble(page: str, text: str) -> tuple[str, str, str]:
    """What idle time looks like on a page: its ground, the lines on that, and both from afar."""
    ground, lines = plot.IDLE_OPACITY
    below = over(text, page, ground)
    return below, over(text, below, lines), over(text, below, lines / 4)  # a quarter of the area are lines


def over(colour: str, below: str, opacity: float) -> str:
    channels = ([int(each[i : i + 2], 16) for i in (1, 3, 5)] for each in (colour, below))
    return "#" + "".join(f"{round(opacity * a + (1 - opacity) * b):02x}" for a, b in zip(*channels, strict=True))


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", PAGES)
def test_the_bubble_stands_out(theme, sight):
    """From the page and from every action; and its lines are no fainter than an action is."""
    page, text = PAGES[theme]
    ground, lines, afar = bubble(page, text)
    actions = {**KINDS, "other": palette.OTHER}
    for others in ({"page": page, "bubble": ground}, {**actions, "page": page, "bubble": afar}):
        distance, *which = nearest(others, sight)
        assert distance >= APART, which
    apart = {name: nearest({name: fill, "page": page}, sight)[0] for name, fill in {**actions, "bubble": lines}.items()}
    assert min(apart, key=apart.get) != "bubble" and apart["bubble"] >= 5 * APART, apart


@pytest.mark.parametrize("theme", PAGES)
def test_the_bubble_in_greyscale(theme):
    """Where an action has the same grey, the lines tell."""
    page, text = PAGES[theme]
    paper, ground, lines = (seen(colour, "normal")[0] for colour in (page, *bubble(page, text)[:2]))
    assert abs(paper - ground) >= APART and abs(ground - lines) >= 3 * APART


def test_that_this_test_refuses_red_and_green():
    pair = {"red": "#c4502e", "green": "#74742f"}
    assert nearest(pair, "normal")[0] > 2 * APART > APART > nearest(pair, "deuteranomaly")[0]
