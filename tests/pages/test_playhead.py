"""The playhead on charts of time: what it tells beside timelines and counts by hand, and how it moves, in a browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import browser as chromium
import pplab as pp
from pplab.lab.forms.figures import figure_html

sys.path.insert(0, str(Path(__file__).parents[2] / "book" / "_ext"))
import pplab_drawings
import pplab_light

ROOT = Path(__file__).parents[2]
SCRIPTS = (ROOT / "src/pplab/static/explorer/clock.js", ROOT / "book/_static/playhead.js")
LATENCY = 1
CHARTS = {  # and how often a boundary between ranks is crossed in a step, by hand
    "1F1B": 2 * 8 * 3,
    "Interleaved1F1B": 2 * 8 * 7,
    "ZBVZeroBubble": 2 * 8 * 6,  # the turn of the V stays on its rank
    "DualPipe": 2 * 8 * 3,
}
OWN = """import kernel
import pplab as pp
kernel.prepare()
timeline = pp.simulate(pp.build("ZBVZeroBubble", num_ranks=4, num_microbatches=8))
print(kernel.bundle_of(timeline)[kernel.PAGE])"""
NAME = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
PUT = "([place, time]) => { const s = document.querySelectorAll('.pplab-offer input')[place]; s.value = time;"
PUT += "s.dispatchEvent(new Event('input'));"
TOLD = PUT + "return [...document.querySelectorAll('.pplab-told')[place].children].map((e) => e.textContent) }"
DOTS = PUT + "return document.querySelectorAll('.pplab-moment')[place].querySelectorAll('circle').length }"
LATER = """const output = document.createElement("div");
output.innerHTML = document.querySelector(".pplab-figure").outerHTML;
document.body.append(output);
output.dispatchEvent(new Event("pplab-output", { bubbles: true }));"""
MEASURED = """(d) => {
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", d);
  const long = path.getTotalLength();
  return [long, ...[0, 1, 2].flatMap((at) => { const { x, y } = path.getPointAtLength(at * long / 3); return [x, y] })];
}"""
TIME = "Number(document.querySelector('.pplab-offer input').value)"


def timeline(name: str, latency: float = 0) -> pp.Timeline:
    return pp.simulate(pp.build(name, num_ranks=4, num_microbatches=8), pp.Costs(latency=latency))


def page(charts: str) -> str:
    scripts = "".join(f"<script>{path.read_text('utf-8')}</script>" for path in SCRIPTS)
    return f'<!DOCTYPE html><meta charset="utf-8"><title>charts</title><body>{charts}{scripts}'


def drawn_by_the_page() -> str:
    """A chart as the page's own Python draws it, with the matplotlib that stands in there."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("book/_live", "src", "book/_ext"))
    command = [sys.executable, "-c", OWN]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, text=True, capture_output=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def visit(tmp_path_factory) -> Iterator:
    """Opens a page with the charts: the first as the book has it, the last as the page's own Python draws it."""
    plt = pytest.importorskip("matplotlib.pyplot")
    axes = [pp.gantt(timeline(name)) for name in CHARTS] + [
        pp.compare([timeline("1F1B", LATENCY), timeline("GPipe", LATENCY)])[0]
    ]
    first, *rest = [figure_html(ax.figure) for ax in axes]
    plt.close("all")
    book = pplab_light.DRAWING.sub(lambda found: pplab_light.drawing(found[0], "d1"), first)
    file = tmp_path_factory.mktemp("playhead") / "page.html"
    folded, *rest = map(pplab_drawings.dressed, rest)
    charts = f'<div id="fig-1-1">{book}</div><details><div id="fig-1-2">{folded}</div></details>'
    file.write_text(page(charts + "".join(f"<div>{each}</div>" for each in [*rest, drawn_by_the_page()])), "utf-8")
    with chromium.launched_or_skipped() as started, chromium.watched_tabs(started) as opened:

        def visit(at: str = "", **options: object):
            tab = opened(**options)
            tab.goto(file.as_uri() + at)
            return tab

        yield visit


def test_paths_of_fewer_numbers_are_the_same_shapes(visit):
    """As Chromium measures them."""
    plt = pytest.importorskip("matplotlib.pyplot")
    paths = re.findall(r'\bd="\s*(M[^"]*)"', figure_html(pp.gantt(timeline("ZBVZeroBubble")).figure))
    plt.close("all")
    fewer = [pplab_light.straight(path) for path in paths]
    assert sum(map(len, fewer)) < 0.8 * sum(map(len, paths))
    was, now = visit().evaluate(f"(all) => all.map((paths) => paths.map({MEASURED}))", [paths, fewer])
    assert was == now and len({tuple(each) for each in was}) > 100


def lines(d: str) -> list[tuple[float, float, float, float]]:
    """The lines of a path: where each begins, and how far it goes."""
    found, x, y = [], 0.0, 0.0
    for command, *numbers in re.findall(r"([MmLl])\s*(-?[\d.]+)[\s]*(-?[\d.]+)", d):
        to_x, to_y = (float(n) + at * command.islower() for n, at in zip(numbers, (x, y), strict=True))
        if command in "Ll":
            found.append((x, y, to_x - x, to_y - y))
        x, y = to_x, to_y
    return found


@pytest.mark.parametrize("phase", ["fill", "inner", "drain"])
def test_a_hatch_is_the_lines_that_its_pattern_has_there(phase):
    """Each drawn line lies on one of the pattern's, and together they are as long as the area holds of them."""
    plt = pytest.importorskip("matplotlib.pyplot")
    ax = plt.figure(figsize=(5, 5)).add_axes((0, 0, 1, 1))
    ax.set_axis_off()
    ax.add_patch(plt.Rectangle((0.13, 0.21), 0.4, 0.6, **pp.plot.idle_styles(phase)[1]))
    page = figure_html(ax.figure)
    plt.close("all")
    tile = re.search(r'<pattern.*?<path d="([^"]*)"', page, re.S)[1]
    ruled = pplab_drawings.dressed(page)
    assert "pattern" not in ruled
    x, y, across, down = lines(tile)[0]
    slope = down / across
    first, second, *_ = sorted(y - slope * x for x, y, *_ in lines(tile))
    drawn = lines(max(re.findall(r'<path d="([^"]*)"', ruled), key=len))
    for x, y, across, down in drawn:
        assert down == pytest.approx(slope * across, abs=0.11)
        nth = (y - slope * x - first) / (second - first)
        assert nth == pytest.approx(round(nth), abs=0.04)
    inside = sum(across for _, _, across, _ in drawn) * (second - first)
    assert inside == pytest.approx(0.4 * 0.6 * (5 * 72) ** 2, rel=0.04)


@pytest.fixture(scope="module")
def tab(visit):
    tab = visit()
    tab.evaluate("document.querySelectorAll('svg').forEach((e) => e.dispatchEvent(new PointerEvent('pointerenter')))")
    return tab


def expected(shown: pp.Timeline, time: float) -> list[str]:
    """What ranks do then, and hold: forwards that have begun, without those whose backward, or last part, has ended."""
    said = []
    for rank in range(shown.schedule.num_ranks):
        own = [span for span in shown.spans if span.rank == rank]
        begun = [part.kind.value for span in own if span.start <= time for part in pp.actions.parts(span.action)]
        ended = [part.kind.value for span in own if span.end <= time for part in pp.actions.parts(span.action)]
        held = begun.count("F") - ended.count("B") - ended.count("W")
        now = [part for span in own if span.start <= time < span.end for part in pp.actions.parts(span.action)]
        does = " and ".join(f"{NAME[part.kind.value]} {part.microbatch}" for part in now) or "idle"
        said.append(f"rank {rank}: {does}, holds {held}")
    return said


@pytest.mark.slow
@pytest.mark.parametrize(("place", "name"), [*enumerate(CHARTS), (len(CHARTS) + 1, "ZBVZeroBubble")])
def test_every_rank_and_message_is_told(tab, place, name):
    shown = timeline(name)
    for time in (0.1, 3.3, 9.6, 14.2, 20.9):
        assert tab.evaluate(TOLD, [place, time]) == expected(shown, time), time
    samples = 60  # each message flies for a sixtieth of the whole time, and is seen once
    times = [(k + 0.5) * shown.makespan / samples for k in range(samples)]
    assert sum(tab.evaluate(DOTS, [place, time]) for time in times) == CHARTS[name]


@pytest.mark.slow
def test_panels_are_told_by_name_and_messages_take_their_time(tab):
    place, shown = len(CHARTS), [timeline("1F1B", LATENCY), timeline("GPipe", LATENCY)]
    told = tab.evaluate(TOLD, [place, 7.4])
    assert told == ["1F1B, simulated", *expected(shown[0], 7.4), "GPipe, simulated", *expected(shown[1], 7.4)]
    times = [k + 0.5 for k in range(int(shown[0].makespan))]  # a message flies for one unit
    assert sum(tab.evaluate(DOTS, [place, time]) for time in times) == 2 * CHARTS["1F1B"]


@pytest.mark.slow
def test_keys_and_the_hand_move_it_and_the_address_holds_it(visit):
    tab = visit(reduced_motion="reduce")
    assert tab.locator(".pplab-offer").count() == len(CHARTS) + 2 and not tab.locator(".pplab-offer input").count()
    chart = tab.locator("svg").first
    box, size = chart.bounding_box(), 541.2  # the drawing's own width, where time 0 lies at 42.61 and 33 at 534
    at = box["x"] + (42.61 + (534 - 42.61) * 10.5 / 33) * box["width"] / size
    tab.mouse.click(at, box["y"] + 40)
    assert tab.evaluate(TIME) == pytest.approx(10.5, abs=0.1)
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate(TIME) == pytest.approx(11, abs=0.01)
    assert tab.locator(".pplab-told span").all_inner_texts() == expected(timeline("1F1B"), 11.01)
    tab.wait_for_function("location.hash.startsWith('#fig-1-1:t=11')")
    other = visit(tab.evaluate("location.hash"))
    assert other.evaluate(TIME) == pytest.approx(11, abs=0.01) and other.locator(".pplab-future").count() == 1
    tab.keyboard.press(" ")
    tab.wait_for_function(f"{TIME} > 12")
    jump = tab.evaluate(TIME) / (33 / 24)  # without motion, time goes in jumps
    assert jump == pytest.approx(round(jump), abs=1e-3)
    tab.locator(".pplab-offer button").last.click()
    stood = tab.evaluate(TIME)
    tab.wait_for_function("Number([...document.querySelectorAll('.pplab-offer input')].at(-1).value) > 1")
    assert tab.evaluate(TIME) == stood  # one plays at a time


@pytest.mark.slow
def test_a_finger_taps_and_charts_that_come_later_have_one(visit):
    tab = visit(has_touch=True)
    tab.locator("svg").nth(2).tap(position={"x": 300, "y": 40})
    assert tab.locator(".pplab-told:visible").count() == 1
    tab.evaluate(LATER)
    assert tab.locator(".pplab-offer").count() == len(CHARTS) + 3


@pytest.mark.slow
def test_an_address_unfolds_what_it_names(visit):
    tab = visit("#fig-1-2:t=5")
    assert tab.locator("details[open] .pplab-future").is_visible()
    assert tab.locator(".pplab-told:visible span").all_inner_texts() == expected(timeline("Interleaved1F1B"), 5)
