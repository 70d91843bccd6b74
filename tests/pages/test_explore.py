"""The file that `lab.explore` writes, as a reader has it: in a browser without a network, or in a notebook's frame."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import browser as chromium
import pplab as pp
from pplab import Costs, Span, Timeline, lab
from pplab.builders import known
from pplab.builders.registry import ALL

pytestmark = pytest.mark.slow

SCHEDULE = pp.build("1F1B", num_ranks=4, num_microbatches=8)
STUCK = pp.Schedule([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], name="mine")
DEADLOCK = "deadlock: rank 0 waits at 0B0 for 1B0; rank 1 waits at 1F1 for 0F1; on rank 1, run 1B0 before 1F1"


def measured() -> Timeline:
    t = pp.simulate(SCHEDULE, Costs([3.25, 4, 3.5, 5], 4.75))
    ends = [1.5 * x for x in t.ends]
    step = Span(0, "optimizer", max(ends), max(ends) + 4)
    return Timeline(SCHEDULE, [1.5 * x for x in t.starts], ends, "ms", "measured", (step,))


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium.launched_or_skipped() as started:
        yield started


@pytest.fixture
def visit(browser, tmp_path) -> Iterator:
    """Open what `lab.explore` makes of something. It may log no error, and ask for nothing but its file."""
    with chromium.watched_tabs(browser) as new_tab:

        def opened(thing: object, *, html: str | None = None, costs: Costs | None = None, **options: object):
            page = lab.explore(thing, tmp_path / "explorer.html", costs=costs)
            assert page.path.read_text() == page.page
            if html:
                page.path.write_text(html)
            tab = new_tab(**options)
            tab.goto(page.path.as_uri())
            if not html:
                tab.wait_for_selector(".pplab-explorer[data-ready]")
            return tab

        yield opened


def settle(tab) -> None:
    tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def makespan(tab, prefix: str = "") -> float:
    return float(tab.get_attribute(".pplab-explorer", f"data-{prefix}makespan"))


def says(tab, *keys: str) -> str:
    tab.focus(".pplab-scroll")
    for key in keys:
        tab.keyboard.press(key)
    return tab.inner_text(".pplab-says")


def test_a_schedule_is_simulated_and_can_be_changed(visit):
    costs = Costs([1, 3, 1, 2], latency=0.5)
    tab = visit(SCHEDULE, costs=costs)
    assert makespan(tab) == pp.simulate(SCHEDULE, costs).makespan
    assert tab.input_value("input[name=forward]") == "1,3,1,2"
    tab.fill("input[name=forward]", "2, 2,2 1")
    settle(tab)
    assert makespan(tab) == pp.simulate(SCHEDULE, Costs([2, 2, 2, 1], latency=0.5)).makespan
    tab.fill("input[name=forward]", "2,2")
    settle(tab)
    said = "forward has 2 values for 4 stages: give one per stage, or a single number"
    assert tab.inner_text(".pplab-error") == said
    tab.fill("input[name=forward]", "1")
    tab.select_option("select[name=compare]", "GPipe")
    tab.fill("textarea[name=rows]", lab.to_csv(pp.build("GPipe", num_ranks=4, num_microbatches=8)))
    settle(tab)
    assert makespan(tab) == makespan(tab, "compare-") != pp.simulate(SCHEDULE, Costs(latency=0.5)).makespan
    tab.reload()  # the address has it all
    tab.wait_for_selector(".pplab-explorer[data-ready]")
    assert makespan(tab) == makespan(tab, "compare-") and "your rows" in tab.text_content(".pplab-ranks")
    tab.click("button[type=reset]")
    settle(tab)
    assert makespan(tab) == pp.simulate(SCHEDULE, costs).makespan and "1F1B" in tab.text_content(".pplab-ranks")


def test_a_link_needs_no_page(monkeypatch, tmp_path):
    monkeypatch.setattr("pplab.lab.forms.explorer.STATIC", tmp_path)  # without the explorer's files
    made = lab.explore(SCHEDULE)
    assert made.link("https://book.test").startswith("https://book.test#schedule=own")
    with pytest.raises(FileNotFoundError):
        made.page  # noqa: B018


def test_measured_and_predicted_on_one_axis(visit):
    ran = measured()
    tab = visit([ran, SCHEDULE], costs=Costs(4))
    assert (makespan(tab), makespan(tab, "compare-")) == (ran.makespan, pp.simulate(SCHEDULE, Costs(4)).makespan)
    assert f"1F1B, measured: makespan {ran.makespan:.5g} ms" in tab.text_content(".pplab-ranks")
    assert "optimizer" in tab.inner_text(".pplab-legend") and not tab.is_visible("textarea")
    assert "runs on rank 0 from 0 to 4.875: it takes 4.875 ms." in says(tab, "Home")
    assert "which ends on rank 0 at 4.875" in says(tab, "ArrowDown", "Home", "ArrowRight")
    assert says(tab, "ArrowUp", "End").endswith(": optimizer.")
    tab.fill("input[name=forward]", "1")
    settle(tab)
    assert (makespan(tab), makespan(tab, "compare-")) == (ran.makespan, pp.simulate(SCHEDULE).makespan)
    tab.click(".pplab-text > summary")
    first = tab.inner_text(".pplab-took tbody tr:nth-child(2)").split("\t")
    assert first == ["0F", *["4.875 ms"] * 3]


def test_a_run_by_itself_has_no_times_to_set(visit):
    tab = visit([measured()], width=390)
    assert not tab.is_visible("input[name=latency]")
    assert tab.text_content(".pplab-axis").endswith("time (ms)")


def test_rows_that_cannot_run_show_where_they_are_stuck(visit):
    tab = visit(STUCK)
    assert tab.inner_text(".pplab-error") == DEADLOCK
    assert [text.text_content() for text in tab.locator(".pplab-stuck text").all()] == ["0B0?", "1F1?"]
    assert says(tab, "Home", "ArrowRight") == (
        "Rank 0 is stuck from 1 on: it waits at 0B0 for 1B/I0, which never runs."
    )
    assert "none: it is stuck" in tab.inner_text(".pplab-figures tbody tr:first-child")
    tab.fill("textarea", "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1")
    settle(tab)
    assert tab.inner_text(".pplab-error") == "" and tab.locator(".pplab-stuck").count() == 0
    assert (
        makespan(tab) == pp.simulate(pp.Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])).makespan
    )


DROP = """([name, text]) => {
  const data = new DataTransfer();
  if (name) data.items.add(new File([text], name));
  else data.setData("text", text);
  document.querySelector(".pplab-scroll").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""  # fmt: skip # noqa: E501


def test_files_and_texts_that_are_opened(visit, tmp_path):
    tab = visit(STUCK)
    (tmp_path / "gpipe.csv").write_text(lab.to_csv(pp.build("GPipe", num_ranks=2, num_microbatches=3)))
    (tmp_path / "run.json").write_text(json.dumps({"timelines": [lab.timeline_to_dict(measured())] * 2}))
    tab.set_input_files("input[type=file]", tmp_path / "gpipe.csv")
    tab.wait_for_selector(".pplab-explorer:not([data-stuck])")
    assert makespan(tab) == 12 and "gpipe" in tab.text_content(".pplab-title")
    assert tab.input_value("textarea").startswith("0F0,0F1,0F2,")
    tab.set_input_files("input[type=file]", [tmp_path / "run.json", tmp_path / "gpipe.csv"])
    tab.wait_for_selector(".pplab-explorer[data-compare-makespan]")
    assert tab.locator(".pplab-title").count() == 3 and makespan(tab) == measured().makespan
    tab.evaluate(DROP, ["", str(SCHEDULE)])
    tab.wait_for_function("document.querySelectorAll('.pplab-title').length === 1")
    assert makespan(tab) == pp.simulate(SCHEDULE).makespan
    for name, text, why in [
        (
            "poem.txt",
            "To be, or not to be",
            "poem.txt: CSV row 1 (rank 0), column 1: 'To be' is not an action: expected",
        ),
        ("", "0F0,0B0\n1X0", "CSV row 2 (rank 1), column 1: '1X0' is not an action"),
        ("a.json", "{3", "a.json: this begins like JSON and isn't any"),
        ("b.json", "[3]", "b.json: the file holds something other than timelines; expected what lab.timeline_to_dict"),
        (
            "many.csv",
            ",".join(f"0F{m},0B{m}" for m in range(11_000)),
            "these rows have 22000 actions, and the page draws",
        ),
    ]:
        tab.evaluate(DROP, [name, text])
        tab.wait_for_function("why => document.querySelector('.pplab-error').textContent.startsWith(why)", arg=why)
    assert tab.locator(".pplab-gantt").count() == 1


def test_zoom_by_buttons_keys_wheel_and_fingers(visit):
    big = pp.build("ZB-H1", num_ranks=8, num_microbatches=64)
    tab = visit(big, width=390, has_touch=True)
    assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    shown = "document.querySelectorAll('.pplab-numbers text').length"
    wide = "document.querySelector('.pplab-gantt').getBoundingClientRect().width"
    zoom = "Number(document.querySelector('input[name=zoom]').value)"
    before, few = tab.evaluate(wide), tab.evaluate(shown)
    for _ in range(7):
        tab.click("[data-zoom=in]")
    assert tab.evaluate(zoom) == pytest.approx(1.5**7, abs=0.01) and tab.evaluate(wide) > 7 * before
    assert tab.evaluate(shown) == 8 * 64 * 3 > few  # every action can be read
    says(tab, "Home", *["ArrowRight"] * 8)
    at = "document.querySelector('.pplab-selected').getBoundingClientRect().left"
    place, said = tab.evaluate(at), tab.inner_text(".pplab-says")
    for key, factor in (("+", 1.5**8), ("-", 1.5**7)):
        tab.keyboard.press(key)
        assert tab.evaluate(zoom) == pytest.approx(factor, abs=0.05)
        assert abs(tab.evaluate(at) - place) < 3 and tab.inner_text(".pplab-says") == said
    box = tab.locator(".pplab-scroll").bounding_box()
    tab.mouse.move(box["x"] + 200, box["y"] + 60)
    left = tab.evaluate("document.querySelector('.pplab-scroll').scrollLeft")
    tab.mouse.wheel(0, 100)  # scrolls the page
    tab.keyboard.down("Control")
    tab.mouse.wheel(0, -300)
    tab.keyboard.up("Control")
    tab.wait_for_function(f"{zoom} > 1.5 ** 8")
    assert tab.evaluate("document.querySelector('.pplab-scroll').scrollLeft") > left
    fingers = """(apart) => {
      const scroll = document.querySelector(".pplab-scroll");
      const send = (type, pointerId, clientX) => scroll.dispatchEvent(new PointerEvent(type, { pointerType: "touch", pointerId, clientX, clientY: 300 }));
      [[8, 150], [9, 250]].forEach(([id, x]) => send("pointerdown", id, x));
      send("pointermove", 9, 150 + apart);
      [8, 9].forEach((id) => send("pointerup", id, 0));
    }"""  # fmt: skip # noqa: E501
    now = tab.evaluate(zoom)
    tab.evaluate(fingers, 50)
    assert tab.evaluate(zoom) == pytest.approx(now / 2, rel=0.01)
    tab.wait_for_function("location.hash.includes('zoom=')")
    tab.fill("input[name=zoom]", "1000")
    settle(tab)
    assert tab.evaluate(wide) < 33 * before
    tab.click("[data-zoom=whole]")
    assert tab.evaluate(wide) == before and tab.evaluate(zoom) == 1


@pytest.mark.parametrize("where", ["jupyter", "sandbox"])
def test_in_a_notebook(visit, where):
    frame = lab.explore(SCHEDULE)._repr_html_()
    if where == "sandbox":
        frame = frame.replace("<iframe", '<iframe sandbox="allow-scripts"')
    tab = visit(SCHEDULE, html=f'<body data-jp-theme-light="false">{frame}</body>')
    frame = tab.frame_locator("iframe")
    root = frame.locator(".pplab-explorer[data-ready]")
    frame.locator("textarea").fill("0F0,0B0")
    frame.locator(".pplab-explorer[data-makespan='3']").wait_for()
    frame.locator("select[name=compare]").select_option("GPipe")
    frame.locator(".pplab-explorer[data-compare-makespan='33']").wait_for()
    assert root.get_attribute("data-error") is None
    assert tab.get_by_text("or the notebook is trusted").count() == (where == "sandbox")
    if where == "jupyter":
        assert frame.locator("html").get_attribute("data-theme") == "dark"
        tab.wait_for_function(
            "(f => f.contentDocument.documentElement.scrollHeight <= f.clientHeight)(document.querySelector('iframe'))"
        )


HOSTILE = {  # names of strangers: each breaks out of another place, if nobody escapes it there
    "script": "</script><script>top.ran = 1</script>",
    "comment": "<!--<script>",
    "element": """x"><img src="" onerror="top.ran = 1"><b title='""",
    "template": "/*given*/ /*scripts*/ /*state*/",
    "frame": "&lt;script&gt;top.ran = 1&lt;/script&gt;",
    "property": "constructor",
    "surrogate": "\ud800 \u2028 \x1b[31m",
}


@pytest.fixture(params=HOSTILE)
def hostile(request) -> Iterator[str]:
    """A name, by which a schedule is registered, too: it is in every page that is made from then on."""
    before, name = known(), HOSTILE[request.param]

    @pp.builders.register(name, rules=name, source=name, placement=name, aliases=(f"{name}2",))
    def rows(num_ranks: int, num_microbatches: int) -> list[list[str]]:
        return [[f"{r}{kind}{m}" for kind in "FB" for m in range(num_microbatches)] for r in range(num_ranks)]

    yield name
    ALL[:] = before


def called(name: str) -> list:
    """A schedule, and a timeline in which every text that it can have is this one."""
    t = measured()
    step = Span(0, f"step {name}", t.makespan, t.makespan + 4)
    timeline = Timeline(pp.Schedule(SCHEDULE.rows, name), t.starts, t.ends, name, name, (step,))
    return [timeline, pp.Schedule(SCHEDULE.rows, name)]


def look_everywhere(place) -> None:
    """All that an explorer says is drawn, and shows its names as they are."""
    place.locator(".pplab-explorer[data-ready]").wait_for()
    place.locator(".pplab-scroll").press("Home")
    for summary in place.locator("details > summary").all():
        summary.click()
    place.locator(".pplab-took, .pplab-rows").first.wait_for()
    assert place.locator(".pplab-explorer").get_attribute("data-error") is None


def seen(name: str) -> str:
    """A text as a page has it."""
    return name.replace("\ud800", "?")


def test_whatever_things_are_called_nothing_runs_and_pages_draw(visit, hostile):
    tab = visit(called(hostile))
    tab.set_default_timeout(5000)
    look_everywhere(tab)
    assert seen(hostile) in tab.text_content(".pplab-title >> nth=0")
    assert tab.locator("caption").first.text_content() == seen(hostile)
    assert tab.text_content(".pplab-legend").endswith(f"step {seen(hostile)}")
    assert tab.evaluate("window.ran") is None and tab.locator("img, b, h1").count() == 0


def test_whatever_things_are_called_notebooks_draw_them(visit, hostile):
    tab = visit(SCHEDULE, html=f"<body>{lab.explore(called(hostile))._repr_html_()}</body>")
    tab.set_default_timeout(5000)
    look_everywhere(frame := tab.frame_locator("iframe"))
    assert seen(hostile) in frame.locator(".pplab-title").first.text_content()
    assert tab.evaluate("window.ran") is None


def test_the_books_explorer_knows_strange_schedules_and_takes_strange_files(visit, hostile):
    sys.path.append(str(Path(__file__).parents[2] / "book" / "_ext"))
    from pplab_schedules import script

    page = lab.explore(SCHEDULE).page
    page = re.sub(r"^var pplabSchedules = .*$", lambda _: script(), page, count=1, flags=re.M)  # with its rows
    tab = visit(SCHEDULE, html=page)
    tab.set_default_timeout(5000)
    tab.wait_for_selector(".pplab-explorer[data-ready]")
    last = tab.locator("select[name=schedule] option").count() - 2  # behind it are the reader's rows
    tab.select_option("select[name=schedule]", index=last)
    settle(tab)
    assert tab.text_content(".pplab-title").startswith(seen(hostile)) and makespan(tab) > 0
    look_everywhere(tab)
    record = {"schedule": hostile, "rows": [["0F0", "0B0"]], "unit": hostile, "how": ""}
    spans = {"spans": [[0, "0F0", 0, 1], [0, "0B0", 1, 3]], "others": [[0, f"a{hostile}", 3, 4]]}
    for file in (record, record | spans, [record | {"unit": [hostile]}]):
        tab.evaluate(DROP, ["", json.dumps(file)])
        tab.wait_for_function("document.querySelector('.pplab-ranks').textContent.includes('makespan 3')")
    tab.evaluate(DROP, [f"{seen(hostile)}.csv", "0F0,0F1,0B0,0B1"])
    tab.wait_for_function("document.querySelector('.pplab-ranks').textContent.includes('makespan 6')")
    tab.evaluate(DROP, [f"{seen(hostile)}.csv", seen(hostile)])
    tab.wait_for_function(
        "name => document.querySelector('.pplab-error').textContent.startsWith(name)", arg=seen(hostile)
    )
    assert tab.evaluate("window.ran") is None and tab.locator("img").count() == 0


NAMELESS = """() => [...document.querySelectorAll(".pplab-live :is(input, select, textarea, button)")].filter(
  (e) => !e.ariaLabel && !e.textContent.trim() && ![...e.labels].map((label) => label.textContent).join(""),
).map((e) => e.outerHTML)"""


@pytest.mark.parametrize("width, theme", [(390, "dark"), (1280, "light")])
def test_fits_the_screen_and_can_be_read(visit, width, theme):
    from test_pages import PALE, TOO_WIDE, UNDESCRIBED

    for thing in (STUCK, [measured(), SCHEDULE]):
        tab = visit(thing, width=width, color_scheme=theme)
        tab.evaluate("() => document.querySelectorAll('details').forEach((e) => (e.open = true))")
        settle(tab)
        assert [tab.evaluate(script) for script in (PALE, TOO_WIDE, UNDESCRIBED)] == [[], [], []]
        assert tab.evaluate("document.querySelector('.pplab-scroll').getBoundingClientRect().top") < 900
        assert tab.evaluate(NAMELESS) == []


def test_the_first_screen_of_a_phone_has_the_chart(visit):
    tab = visit(SCHEDULE, width=390)
    assert tab.locator(".pplab-gantt").bounding_box()["y"] < 500
    tab.select_option("select[name=schedule]", "GPipe")
    settle(tab)
    assert tab.locator(".pplab-gantt").bounding_box()["y"] < 500 and not tab.is_visible("input[name=latency]")
