"""The frontier on the page: a schedule is chosen by pointing, by keyboard, and without scripts."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright")
pytest.importorskip("matplotlib").use("Agg")

import browser as chromium  # noqa: E402
from pplab import lab  # noqa: E402
from pplab.course import figures  # noqa: E402
from pplab.course.frontier_view import FrontierView  # noqa: E402

CHOSEN = ".pplab-choice input:checked + label + .pplab-chosen"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    data, _ = FrontierView(lab.frontiers()["equal-8"], most=5.6)._repr_mimebundle_()
    file = tmp_path_factory.mktemp("frontier") / "page.html"
    head = '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    file.write_text(f"{head}<title>A frontier</title><body>{data[figures.PAGE]}")
    return file.as_uri()


@pytest.fixture(scope="module")
def browser():
    with chromium.launched_or_skipped() as started:
        yield started


@pytest.mark.parametrize("width", [390, 1280])
def test_a_schedule_is_pointed_at_or_chosen(browser, place, width):
    view = FrontierView(lab.frontiers()["equal-8"], most=5.6)
    said = [each.said(view.frontier) for each in view.shown]
    with chromium.watched_tabs(browser) as new_tab:
        tab = new_tab(width)
        tab.goto(place)
        assert tab.inner_text(CHOSEN).startswith(said[0])
        number = next(i for i, each in enumerate(view.shown) if each.names == "V-Half")
        tab.hover(f'.pplab-point[data-point="{number}"] use', force=True)
        assert tab.inner_text(CHOSEN).startswith(said[number])
        assert tab.get_attribute(".pplab-point.pplab-on", "data-point") == str(number)
        tab.focus(".pplab-choice input:checked")
        tab.keyboard.press("ArrowRight")
        assert tab.inner_text(CHOSEN).startswith(said[number + 1])
        assert tab.locator(CHOSEN).count() == 1 and tab.locator(f"{CHOSEN} svg").is_visible()
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_it_is_chosen_without_scripts(browser, place):
    with chromium.watched_tabs(browser) as new_tab:
        tab = new_tab(java_script_enabled=False)
        tab.goto(place)
        before = tab.inner_text(CHOSEN)
        tab.click(".pplab-choice label >> nth=3")
        assert tab.inner_text(CHOSEN) != before
