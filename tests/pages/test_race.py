"""The race on the first page: what it says against counts by hand, and how it plays, in a browser."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import browser as chromium
from pplab import lab

sys.path.insert(0, str(Path(__file__).parents[2] / "book" / "_ext"))
import pplab_front

LANES = ["naive", "GPipe", "1F1B", "ZB-V, cut 4+5+5+3+5+4+4+2"]


@pytest.fixture(scope="module")
def told() -> dict[str, dict]:
    """By lane, what the script is given."""
    found = {}

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            found.update(json.loads(dict(attributes).get("data-race", "{}")))

    Reader().feed(pplab_front.race_html(LANES, 16, "1F1B"))
    return dict(zip(("naive", "GPipe", "1F1B", "ZB-V"), found["lanes"], strict=True))


def test_gpipe_stops_where_its_fifth_sequence_starts(told):
    case = lab.Case()
    state, each = case.state_gb()[0], case.sequence_gb()[0]
    fit = int((80 - state) / each)
    assert fit == 4 and told["GPipe"]["done"] == []
    assert told["GPipe"]["end"] == pytest.approx(fit * 8 * case.layer_ms / 1e3, abs=1e-4)
    assert told["GPipe"]["held"][0][-1][1] == pytest.approx((state + 5 * each) / 80, abs=1e-3)


def test_every_boundary_between_gpus_is_crossed_twice_by_a_sequence(told):
    assert len(told["1F1B"]["sent"]) == 2 * 16 * 3
    assert len(told["ZB-V"]["sent"]) == 2 * 16 * 6  # the turn of the V stays on its GPU
    assert len(told["1F1B"]["done"]) == len(told["ZB-V"]["done"]) == 16
    assert len(told["naive"]["done"]) == int(told["1F1B"]["end"] / (told["naive"]["end"] / 16))


@pytest.mark.parametrize(("lines", "until", "says"), [(["1F2B"], "1F2B", "1F2B"), (["1F1B"], "GPipe", "one of 1F1B")])
def test_a_race_that_cannot_be_is_refused(lines, until, says):
    with pytest.raises(ValueError, match=says):
        pplab_front.race_html(lines, 16, until)


@pytest.fixture(scope="module")
def visit(book) -> Iterator:
    """Opens the first page, at a time or none, on a screen as described."""
    with chromium.launched_or_skipped() as started, chromium.watched_tabs(started) as opened:

        def visit(at: str = "", width: int = 1280, **options: object):
            tab = opened(width, **options)
            tab.goto((book / "book/index.html").as_uri() + at)
            return tab

        yield visit


TIME = "Number(document.querySelector('.pplab-clock input').value)"
SAYS = "[...document.querySelectorAll('.pplab-lane p > span')].map((e) => e.textContent)"


@pytest.mark.slow
def test_it_stands_at_the_end_for_those_who_want_no_motion(visit):
    tab = visit(width=390, reduced_motion="reduce", has_touch=True)
    tab.wait_for_timeout(300)
    naive, gpipe, one_f_one_b, zb_v = tab.evaluate(SAYS)
    assert naive.endswith("$321") and "full" in gpipe and one_f_one_b.endswith("$99.4") and zb_v.endswith("$80.5")
    assert tab.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.slow
def test_it_plays_by_itself_and_keys_and_the_hand_move_it(visit):
    tab = visit()
    tab.wait_for_function(f"{TIME} > 0.5 && {TIME} < 5")
    tab.evaluate("document.dispatchEvent(new CustomEvent('pplab-play', { detail: {} }))")  # another chart starts
    stood = tab.evaluate(TIME)
    tab.wait_for_timeout(100)
    assert tab.evaluate(TIME) == stood
    box = tab.locator(".pplab-track").last.bounding_box()
    tab.mouse.click(box["x"] + box["width"] / 2, box["y"] + 5)
    middle = tab.evaluate(TIME)
    tab.keyboard.press("ArrowRight")
    assert middle < tab.evaluate(TIME) <= middle + 0.11
    tab.wait_for_function("location.hash.startsWith('#t=3.0')")
    tab.keyboard.press(" ")
    tab.wait_for_function(f"{TIME} > 3.3")


@pytest.mark.slow
def test_an_address_holds_a_moment(visit):
    tab = visit("#t=2.00")
    assert tab.evaluate(TIME) == 2
    assert tab.evaluate(SAYS)[2].endswith("of 16 done")
    assert tab.locator(".pplab-dots circle").count()
