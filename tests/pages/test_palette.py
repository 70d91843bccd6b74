"""Colours that a reader must tell apart stay apart, however the reader sees colours."""

from itertools import combinations

import numpy as np
import pytest

from pplab import palette, plot
from pplab.actions import B, F, I, W
from pplab.lab.palette import CATEGORIES, MESSAGE, PART

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


KINDS = {kind.value: fill for kind, fill in palette.FILL.items()}
DRAWINGS = {
    "actions": {**KINDS, "idle": palette.IDLE, "other": palette.OTHER},
    "messages": {**KINDS, "idle": palette.IDLE, **MESSAGE},
    "categories": {fill: fill for fill in CATEGORIES},
    "parts": {fill: fill for fill in PART.values()},
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


def test_actions_in_greyscale():
    lightness = sorted(seen(fill, "normal")[0] for fill in (*palette.FILL.values(), palette.IDLE))
    assert np.diff(lightness).min() >= 5
    assert sorted(palette.FILL, key=lambda kind: seen(palette.FILL[kind], "normal")[0]) == [F, I, B, W]


def test_that_this_test_refuses_red_and_green():
    pair = {"red": "#c4502e", "green": "#74742f"}
    assert nearest(pair, "normal")[0] > 2 * APART > APART > nearest(pair, "deuteranomaly")[0]
