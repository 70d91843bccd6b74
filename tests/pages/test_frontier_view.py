"""The frontier on the page: a schedule is chosen by pointing, by keyboard, and without scripts."""

from __future__ import annotations

from itertools import combinations

import pytest

pytest.importorskip("playwright")
pytest.importorskip("matplotlib").use("Agg")

from matplotlib import pyplot as plt  # noqa: E402

import browser as chromium  # noqa: E402
import pplab as pp  # noqa: E402
from pplab import lab, palette  # noqa: E402
from pplab.actions import parts  # noqa: E402
from pplab.builders import known  # noqa: E402
from pplab.lab.forms import MARKS  # noqa: E402
from pplab_course import figures  # noqa: E402
from pplab_course.frontier_chart import frontier_chart  # noqa: E402
from pplab_course.frontier_view import FrontierView, FrontierViews  # noqa: E402

CHOSEN = ".pplab-choice input:checked + label + .pplab-chosen"


HEAD = (
    '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    "<title>A frontier</title><body>"
)


@pytest.fixture(scope="module")
def views():
    recorded = lab.frontiers()
    return {"equal": FrontierView(recorded["equal-8"], most=5.6), "case": FrontierView(recorded["case-16"])}


@pytest.fixture(scope="module")
def place(views, tmp_path_factory):
    file = tmp_path_factory.mktemp("frontier") / "page.html"
    file.write_text(f"{HEAD}{views['equal']._repr_mimebundle_()[0][figures.PAGE]}")
    return file.as_uri()


@pytest.fixture(scope="module")
def both(views, tmp_path_factory):
    file = tmp_path_factory.mktemp("frontiers") / "page.html"
    data, _ = FrontierViews(views)._repr_mimebundle_()
    assert data["image/png"] == views["equal"]._repr_mimebundle_()[0]["image/png"]
    file.write_text(f"{HEAD}{data[figures.PAGE]}")
    return file.as_uri()


@pytest.fixture(scope="module")
def browser():
    with chromium.launched_or_skipped() as started:
        yield started


@pytest.mark.parametrize("width", [390, 1280])
def test_a_schedule_is_pointed_at_or_chosen(browser, views, place, width):
    view = views["equal"]
    said = [each.said(view.frontier) for each in view.shown]
    with chromium.watched_tabs(browser) as new_tab:
        tab = new_tab(width)
        tab.goto(place)
        assert tab.inner_text(CHOSEN).startswith(said[0])
        for name, part in (("V-Half", "use"), ("V-Min", "path")):  # its mark, and the row with its name
            number = next(i for i, each in enumerate(view.shown) if each.name == name)
            tab.hover(f'.pplab-point[data-point="{number}"] {part}', force=True)
            assert tab.inner_text(CHOSEN).startswith(said[number])
            marked = tab.locator(".pplab-point.pplab-on")
            assert {marked.nth(i).get_attribute("data-point") for i in range(marked.count())} == {str(number)}
        tab.focus(".pplab-choice input:checked")
        tab.keyboard.press("ArrowRight")
        assert tab.inner_text(CHOSEN).startswith(said[number + 1])
        assert tab.locator(CHOSEN).count() == 1 and tab.locator(".pplab-small").is_visible()
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_chosen_schedule_is_drawn(browser, views, both):
    """The bars of every chart lie where the simulated actions do, in their colours, and its name says the makespan."""
    bars = "svg => [...svg.querySelectorAll('rect')].map(e => ['x', 'y', 'fill'].map(name => e.getAttribute(name)))"
    with chromium.watched_tabs(browser) as new_tab:
        tab = new_tab()
        tab.goto(both)
        for place, view in enumerate(views.values()):
            chart = tab.locator(".pplab-small").nth(place)
            until = max(each.timeline.makespan for each in view.shown)
            for each in view.shown:
                if each.number != view.shown[0].number:  # the first one's chart is there from the start
                    chart.evaluate(
                        "(svg, name) => [...svg.parentElement.querySelectorAll('label')]"
                        ".find(label => label.textContent === name).click()",
                        each.name,
                    )
                spans = [(span, part) for span in each.timeline.spans for part in parts(span.action)]
                drawn = chart.evaluate(bars)
                assert [int(float(y) // 22) for _, y, _ in drawn] == [span.rank for span, _ in spans]
                starts = [(float(x) - 50) / 590 * until for x, _, _ in drawn]
                assert starts == pytest.approx([span.start for span, _ in spans], abs=2e-4 * until)
                for (_, _, fill), (span, part) in zip(drawn, spans, strict=True):
                    is_first = part.stage == min(each.timeline.schedule.stages_of(span.rank))
                    assert (fill == palette.FILL[part.kind]) == is_first
                said = chart.get_attribute("aria-label")
                assert said.startswith(f"Gantt chart of {each.name}, which takes ")
                assert float(said.split()[-1]) == pytest.approx(each.timeline.makespan, rel=1e-4)


def test_the_first_is_drawn_where_a_script_puts_it(browser, views):
    """As the page does with what a cell shows that a reader runs there."""
    page = views["equal"]._repr_mimebundle_()[0][figures.PAGE]
    with chromium.watched_tabs(browser) as new_tab:
        tab = new_tab()
        tab.evaluate("page => (document.body.innerHTML = page)", page)
        tab.wait_for_selector(".pplab-small rect")


def test_it_is_chosen_without_scripts(browser, place):
    with chromium.watched_tabs(browser) as new_tab:
        tab = new_tab(java_script_enabled=False)
        tab.goto(place)
        before = tab.inner_text(CHOSEN)
        tab.click(".pplab-choice label >> nth=3")
        assert tab.inner_text(CHOSEN) != before


def test_a_click_opens_the_rows(browser, views, place):
    """What the address says of rows and times takes, simulated, the time that the chart has."""
    frontier = lab.frontiers()["equal-8"]
    with chromium.watched_tabs(browser) as new_tab:
        tab = new_tab()
        tab.goto(place)
        tab.route("**/explorer.html*", lambda route: route.fulfill(body="<title>The explorer</title>"))
        number = next(i for i, each in enumerate(views["equal"].shown) if each.name == "DualPipeV")
        tab.click(f'.pplab-point[data-point="{number}"] use', force=True)
        tab.wait_for_url("**/explorer.html*")
        said = dict(each.partition("=")[::2] for each in tab.url.partition("#")[2].split("&"))
    rows = [row.replace("-", ";").replace(")", ")OVERLAP_F_B").split(".") for row in said["rows"].split("~")]
    costs = pp.Costs(*(float(said[name]) for name in ("forward", "backward-input", "backward-weight")))
    (point,) = [each for each in frontier.published if each.name == "DualPipeV"]
    assert rows == [row.split() for row in point.rows]
    assert pp.simulate(pp.Schedule(rows), costs).makespan == point.time


def test_names_and_lines_keep_out_of_each_others_way():
    """No two names touch, none lies in the plot, and every schedule there is has a mark of its own."""
    without = {each.name for each in known()} - set(MARKS)
    assert not without, f"give {without} a mark and a colour in pplab/lab/forms/palette.py"
    assert len(set(MARKS.values())) == len(MARKS)
    for setting, most in (("equal-8", 5.6), ("3-4-2-8", 5.6), ("profile-8", 5.6), ("case-16", 104)):
        frontier = lab.frontiers()[setting]
        ax = frontier_chart(frontier, most=most)
        ax.figure.canvas.draw()
        boxes = {text.get_text(): text.get_window_extent() for text in ax.texts if text.get_text() in MARKS}
        assert len(boxes) >= 7
        for one, other in combinations(boxes.values(), 2):
            assert not one.overlaps(other)
        for name, box in boxes.items():
            assert ax.transData.inverted().transform((box.x0, box.y0))[0] > most, name
            others = [each.get_window_extent() for each in ax.texts if each.get_text() != name]
            assert not any(box.overlaps(each) for each in others), name
        plt.close(ax.figure)


@pytest.mark.parametrize("width", [390, 1280])
def test_times_are_chosen(browser, views, both, width):
    """One setting's chart is seen at a time, its own orders are chosen below it, and other viewers have the first."""
    with chromium.watched_tabs(browser) as new_tab:
        tab = new_tab(width)
        tab.goto(both)
        charts = tab.locator(".pplab-frontier")
        assert [charts.nth(i).is_visible() for i in (0, 1)] == [True, False]
        tab.focus(".pplab-choice > input:checked")
        tab.keyboard.press("ArrowRight")
        assert [charts.nth(i).is_visible() for i in (0, 1)] == [False, True]
        said = [each.said(views["case"].frontier) for each in views["case"].shown]
        charts.nth(1).locator('.pplab-point[data-point="2"] use').first.dispatch_event("pointerover")
        chosen = charts.nth(1).locator("input:checked + label + .pplab-chosen")
        assert chosen.inner_text().startswith(said[2])
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        first = charts.nth(0).locator("input:checked")
        assert first.count() == 1 and first.get_attribute("id").endswith("-0")


def test_a_switch_needs_a_setting():
    with pytest.raises(ValueError, match="at least one"):
        FrontierViews({})
