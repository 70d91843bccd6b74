"""The frontier on the page: a schedule is chosen by pointing, by keyboard, and without scripts."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright")
pytest.importorskip("matplotlib").use("Agg")

import browser as chromium  # noqa: E402
from pplab import lab  # noqa: E402
from pplab_course import figures  # noqa: E402
from pplab_course.frontier_view import FrontierView, FrontierViews  # noqa: E402

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


@pytest.mark.parametrize("width", [390, 1280])
def test_times_are_chosen(browser, tmp_path, width):
    """One setting's chart is seen at a time, its own orders are chosen below it, and other viewers have the first."""
    both = {"equal": FrontierView(lab.frontiers()["equal-8"]), "case": FrontierView(lab.frontiers()["case-16"])}
    data, _ = FrontierViews(both)._repr_mimebundle_()
    assert data["image/png"] == both["equal"]._repr_mimebundle_()[0]["image/png"]
    file = tmp_path / "page.html"
    head = '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    file.write_text(f"{head}<title>Frontiers</title><body>{data[figures.PAGE]}")
    with chromium.watched_tabs(browser) as new_tab:
        tab = new_tab(width)
        tab.goto(file.as_uri())
        charts = tab.locator(".pplab-frontier")
        assert [charts.nth(i).is_visible() for i in (0, 1)] == [True, False]
        tab.focus(".pplab-choice > input:checked")
        tab.keyboard.press("ArrowRight")
        assert [charts.nth(i).is_visible() for i in (0, 1)] == [False, True]
        said = [each.said(both["case"].frontier) for each in both["case"].shown]
        charts.nth(1).locator("label").nth(2).click()
        chosen = charts.nth(1).locator("input:checked + label + .pplab-chosen")
        assert chosen.inner_text().startswith(said[2])
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        first = charts.nth(0).locator("input:checked")
        assert first.count() == 1 and first.get_attribute("id").endswith("-0")


def test_a_switch_needs_a_setting():
    with pytest.raises(ValueError, match="at least one"):
        FrontierViews({})
