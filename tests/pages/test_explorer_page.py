"""The explorer and the game as a reader has them: in a browser, without a network, on pages that Sphinx made."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

import browser as chromium
import pplab as pp
from pplab import lab, palette, plot

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

CONF = f"""
import sys
sys.path.insert(0, {str(ROOT / "book" / "_ext")!r})
extensions = ["myst_parser", "pplab_book"]
html_static_path = [{str(ROOT / "book" / "_static")!r}]
html_theme = "basic"
exclude_patterns = []
"""
PAGES = {
    "index.md": """# Embeds

```{explorer}
```

```{explorer}
:schedule: GPipe
:microbatches: 1
:forward: 8
:backward-input: 8
:backward-weight: 8
:per: batch
:until: 96
:controls: microbatches
```

{explore}`A state <schedule=ZB-H1&latency=0.5>`

```{toctree}
book/explorer
book/play
levels
stamp
plain
```
""",
    "book/explorer.md": "# Explorer\n\n```{explorer}\n:page:\n```\n",
    "book/play.md": "# Play\n\n```{play}\n```\n\n```{stamp}\n```\n",
    "levels.md": "# Two\n\n```{play}\n:level: eighteen\n```\n\n```{play}\n:level: memory-line\n```\n",
    "stamp.md": "# One\n\n```{stamp}\n:level: one-microbatch\n```\n",
    "plain.md": "# Nothing here\n",
}


def sphinx(folder: Path, pages: dict[str, str]) -> subprocess.CompletedProcess:
    """Build `pages` with the book's extension, warnings as errors."""
    for name, text in {**pages, "conf.py": CONF}.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-n", "--keep-going", str(folder), str(folder / "html")]
    return subprocess.run(command, text=True, capture_output=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    made = sphinx(folder, PAGES)
    assert made.returncode == 0, made.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium.launched_or_skipped() as started:
        yield started


@pytest.fixture
def visit(site, browser) -> Iterator:
    """Open a page of the site, offline. No page may log an error, or ask for anything but its files."""
    with chromium.watched_tabs(browser) as new_tab:

        def opened(page: str, *, settled: str = ".pplab-explorer", **options):
            tab = new_tab(**options)
            tab.goto(f"{site.as_uri()}/{page}")
            if settled:
                tab.wait_for_selector(f"{settled}[data-ready]")
            return tab

        yield opened


def settle(tab) -> None:
    """Wait until what was asked for is drawn."""
    tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    tab.wait_for_selector(".pplab-explorer[data-ready]")


def figures(tab, prefix: str = "") -> tuple:
    """The figures that the first explorer of the page publishes."""
    root = tab.locator(".pplab-explorer").first
    names = ("makespan", "bubble-fraction", "bubble-ratio", "span-bubble-fraction")
    numbers = [float(root.get_attribute(f"data-{prefix}{name}")) for name in names]
    return (*numbers, root.get_attribute(f"data-{prefix}peak-in-flight"))


def expected(name: str, *, P: int = 4, M: int = 8, V: int | None = None, **costs: object) -> tuple:
    """The same figures by the package, for durations of a rank's share of the model."""
    made = pp.Costs(**costs)
    builder = pp.builders.find(name)
    its_costs = {"costs": made.finer(2 if builder.placement == "V" else 1)} if "costs" in builder.options else {}
    options = {"stages_per_rank": V} if V else its_costs
    schedule = pp.build(name, num_ranks=P, num_microbatches=M, **options)
    t = pp.simulate(schedule, made.finer(schedule.num_stages // schedule.num_ranks))
    peaks = ",".join(map(str, t.peak_in_flight))
    return (t.makespan, t.bubble_fraction, t.bubble_ratio, t.span_bubble_fraction, peaks)


@pytest.mark.parametrize(
    "state, same",
    [
        ({}, expected("1F1B")),
        ({"schedule": "naive", "ranks": 6, "microbatches": 1}, expected("naive", P=6, M=1)),
        (
            {"schedule": "GPipe", "microbatches": 32, "forward": 8, "per": "batch"},
            expected("GPipe", M=32, forward=0.25, backward_input=1 / 32, backward_weight=1 / 32),
        ),
        ({"schedule": "eager-1F1B", "latency": 0.7}, expected("eager-1F1B", latency=0.7)),
        (
            {
                "microbatches": 16,
                "forward": 8,
                "backward-input": 8,
                "backward-weight": 8,
                "overhead": 0.5,
                "per": "batch",
            },
            expected("1F1B", M=16, forward=0.5, backward_input=0.5, backward_weight=0.5, overhead=0.5),
        ),
        (
            {"schedule": "interleaved", "overhead": "1,0,0.5,0,1,0,0.5,0"},
            expected("Interleaved1F1B", V=2, overhead=[1, 0, 0.5, 0] * 2),
        ),
        ({"schedule": "ZB-1P", "ranks": 8, "microbatches": 16}, expected("ZB-1P", P=8, M=16)),
        ({"schedule": "interleaved", "stages-per-rank": 4}, expected("Interleaved1F1B", V=4)),
        (
            {"schedule": "ZBVZeroBubble", "forward": 3, "backward-input": 4, "backward-weight": 2, "ranks": 8},
            expected("ZBVZeroBubble", P=8, forward=3, backward_input=4, backward_weight=2),
        ),
        (
            {"schedule": "V-Half", "forward": 6, "backward-input": 1, "backward-weight": 2, "microbatches": 4},
            expected("V-Half", M=4, forward=6, backward_input=1, backward_weight=2),
        ),
        ({"schedule": "DualPipe", "overlap": "max"}, expected("DualPipe", overlap="max")),
        ({"schedule": "DualPipe", "pair": 2.5}, expected("DualPipe", overlap=2.5)),
    ],
)
def test_figures_are_the_packages(visit, state, same):
    tab = visit(f"book/explorer.html#{urlencode(state)}")
    found = figures(tab)
    assert found[:4] == pytest.approx(same[:4], abs=1e-9) and found[4] == same[4]
    assert f"{same[0]:.6g}" in tab.inner_text(".pplab-figures tbody tr:first-child")


def test_per_stage_durations_are_not_divided(visit):
    tab = visit("book/explorer.html#schedule=Interleaved1F1B&per=stage")
    schedule = pp.build("Interleaved1F1B", num_ranks=4, num_microbatches=8, stages_per_rank=2)
    assert figures(tab)[0] == pp.simulate(schedule).makespan == 57


def test_a_slider_changes_chart_and_figures(visit):
    tab = visit("book/explorer.html")
    before = tab.get_attribute(".pplab-gantt", "aria-label")
    tab.focus("input[type=range][name=microbatches]")
    for _ in range(4):
        tab.keyboard.press("ArrowRight")
    settle(tab)
    assert figures(tab) == expected("1F1B", M=12)
    assert tab.input_value("input[type=number][name=microbatches]") == "12"
    assert "12 microbatches" in tab.get_attribute(".pplab-gantt", "aria-label") != before
    tab.click("button[type=reset]")
    settle(tab)
    assert figures(tab) == expected("1F1B")


def test_an_action_says_what_it_waits_for(visit):
    tab = visit("book/explorer.html#latency=1")
    tab.focus(".pplab-scroll")
    tab.keyboard.press("Home")
    assert tab.inner_text(".pplab-says").startswith(
        "0F0, the forward of microbatch 0 on stage 0, runs on rank 0 from 0 to 1."
    )
    tab.keyboard.press("ArrowDown")  # rank 1 has nothing at that time
    says = tab.inner_text(".pplab-says")
    assert says == (
        "Rank 1 is idle from 0 to 2: it waits for 0F0, which runs on rank 0 until 1 and whose result arrives at 2."
    )
    tab.keyboard.press("ArrowRight")
    says = tab.inner_text(".pplab-says")
    assert (
        "It needs the result of 0F0, which arrives from rank 0 at 2." in says
        and "2F0 on rank 2" in says
        and "1F1 on this rank" in says
    )
    assert tab.locator(".pplab-from").count() == 1 and tab.locator(".pplab-selected").count() == 1
    tab.keyboard.press("Escape")
    assert tab.locator(".pplab-marks path").count() == 0


def test_every_action_and_idle_interval_is_reached_by_keys_and_pointer(visit):
    tab = visit("book/explorer.html#schedule=ZB-H1&ranks=2&microbatches=3")
    t = pp.simulate(pp.build("ZB-H1", num_ranks=2, num_microbatches=3))
    tab.focus(".pplab-scroll")
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Home")
    met = []
    for _ in range(30):
        met.append(tab.inner_text(".pplab-says").split(",")[0].split(":")[0])
        tab.keyboard.press("ArrowRight")
    actions = [str(span.action) for span in t.spans_of(1)]
    idle = [f"Rank 1 is idle from {i.start:g} to {i.end:g}" for i in pp.idle_intervals(t) if i.rank == 1]
    assert sorted(set(met)) == sorted(actions + idle)
    tab.keyboard.press("Escape")
    place = tab.locator(".pplab-gantt").bounding_box()
    width = place["width"] - 15  # the right margin, and the last unit's line
    tab.mouse.move(place["x"] + width * 0.5 / t.makespan, place["y"] + 40)
    assert tab.inner_text(".pplab-says").startswith("0F0,")


def test_the_address_holds_the_state(visit):
    tab = visit("book/explorer.html")
    tab.select_option("select[name=schedule]", "DualPipeV")
    tab.select_option("select[name=compare]", "GPipe")
    tab.fill("input[type=number][name=microbatches]", "10")
    tab.fill("input[name=backward-weight]", "0.5")
    tab.get_by_label("overhead per action").fill("0.25")
    tab.check("input[name=path]")
    settle(tab)
    address = urlsplit(tab.url)
    said = {"schedule": "DualPipeV", "compare": "GPipe", "microbatches": "10", "backward-weight": "0.5"}
    said |= {"overhead": "0.25", "path": "true"}
    assert parse_qs(address.fragment) == {name: [value] for name, value in said.items()}
    other = visit(f"book/explorer.html#{address.fragment}")
    assert figures(other) == figures(tab) == expected("DualPipeV", M=10, backward_weight=0.5, overhead=0.25)
    assert figures(other, "compare-") == expected("GPipe", M=10, backward_weight=0.5, overhead=0.25)
    assert other.is_checked("input[name=path]")
    other.evaluate("() => { location.hash = 'schedule=naive&ranks=3' }")
    other.wait_for_function("document.querySelector('.pplab-explorer').dataset.peakInFlight === '1,1,1'")
    assert figures(other) == expected("naive", P=3)


def test_an_embed_keeps_to_itself_and_links_to_the_explorer(visit):
    tab = visit("index.html")
    first, second = tab.locator(".pplab-explorer").all()
    assert (first.get_attribute("data-makespan"), second.get_attribute("data-makespan")) == ("33", "96")
    second.locator("input[type=number][name=microbatches]").fill("8")
    settle(tab)
    assert (first.get_attribute("data-makespan"), second.get_attribute("data-makespan")) == ("33", "33")
    assert "#" not in tab.url
    second.locator(".pplab-open").click()
    tab.wait_for_selector(".pplab-explorer[data-page][data-ready]")
    assert tab.input_value("select[name=schedule]") == "GPipe" and figures(tab)[0] == 33
    tab.go_back()
    tab.click("text=A state")
    tab.wait_for_selector(".pplab-explorer[data-page][data-ready]")
    assert figures(tab) == expected("ZB-H1", latency=0.5)


@pytest.mark.parametrize(
    "setting, value, sizes",
    [
        ("ranks", "0", {"num_ranks": 0}),
        ("ranks", "3", {"num_ranks": 3}),
        ("microbatches", "2", {"num_microbatches": 2}),
    ],
)
def test_what_cannot_be_built_says_why_and_keeps_the_chart(visit, setting, value, sizes):
    tab = visit("book/explorer.html#schedule=DualPipe&ranks=4&microbatches=8")
    before = figures(tab)
    tab.fill(f"input[type=number][name={setting}]", value)
    settle(tab)
    with pytest.raises(ValueError) as error:
        pp.build("DualPipe", **{"num_ranks": 4, "num_microbatches": 8, **sizes})
    assert tab.inner_text(".pplab-error") == str(error.value)
    assert tab.locator(".pplab-gantt").count() == 1 and figures(tab) == before
    assert tab.locator(".pplab-scroll").evaluate("e => getComputedStyle(e).opacity") == "0.3"
    tab.click("button[type=reset]")
    settle(tab)
    assert tab.inner_text(".pplab-error") == "" and figures(tab) == expected("1F1B")


@pytest.mark.parametrize(
    "state, says",
    [
        ("schedule=mine", "unknown schedule 'mine'"),
        ("latency=-1", "latency must be"),
        ("overhead=1,2", "overhead has 2 values for 4 stages: give one per stage, or a single number"),
        ("forward=0&backward-input=0&backward-weight=0", "all take 0 time"),
        ("ranks=64&microbatches=5000", "draws at most"),
    ],
)
def test_an_address_that_says_nonsense_is_answered(visit, state, says):
    tab = visit(f"book/explorer.html#{state}")
    assert says in tab.inner_text(".pplab-error")
    tab.click("button[type=reset]")
    settle(tab)
    assert figures(tab) == expected("1F1B")


def test_an_emptied_box_of_rows_shows_the_schedule_that_was_chosen(visit):
    tab = visit("book/explorer.html#schedule=GPipe&ranks=2&microbatches=3")
    tab.select_option("select[name=schedule]", "own")
    box = tab.locator("textarea[name=rows]")
    box.fill("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0")
    settle(tab)
    assert "deadlock" in tab.inner_text(".pplab-error") and "your rows" in tab.text_content(".pplab-ranks")
    box.press("Control+A")
    box.press("Delete")
    settle(tab)
    rows = lab.to_csv(pp.build("GPipe", num_ranks=2, num_microbatches=3))
    assert tab.inner_text(".pplab-error") == "" and figures(tab) == expected("GPipe", P=2, M=3)
    assert box.input_value() == "" and box.get_attribute("placeholder").split() == rows.split()
    assert tab.text_content(".pplab-title").startswith("GPipe") and tab.url.endswith(
        "schedule=own&ranks=2&microbatches=3"
    )
    box.type("0F0,0B0")
    settle(tab)
    assert tab.text_content(".pplab-title").startswith("your rows") and figures(tab)[0] == 3
    tab.click("button[type=reset]")
    settle(tab)
    assert figures(tab) == expected("1F1B")


def test_the_critical_path_and_the_rows_as_text(visit):
    tab = visit("book/explorer.html#path=true&latency=1")
    t = pp.simulate(pp.build("1F1B", num_ranks=4, num_microbatches=8), pp.Costs(latency=1))
    assert tab.get_attribute(".pplab-path", "d").count("M") == len(pp.critical_path(t))
    tab.click("summary:text('The rows as text')")
    tab.wait_for_selector(".pplab-rows")
    assert tab.inner_text(".pplab-rows tbody tr:nth-child(2) .pplab-row").split() == [
        str(a) for a in t.schedule.rows[1]
    ]
    path = " ".join(str(span.action) for span in pp.critical_path(t))
    assert f"Critical path: {path}" in tab.inner_text(".pplab-text")
    tab.focus(".pplab-scroll")
    tab.keyboard.press("Home")
    assert tab.inner_text(".pplab-says").endswith(" It is on the critical path.")
    tab.uncheck("input[name=path]")
    settle(tab)
    tab.focus(".pplab-scroll")
    tab.keyboard.press("Home")
    assert not tab.inner_text(".pplab-says").endswith("critical path.")


def test_colours_are_the_packages(visit):
    tab = visit("book/explorer.html")
    assert tab.evaluate("pplabChart.FILL") == {kind.name: fill for kind, fill in palette.FILL.items()}
    assert tab.evaluate("pplabChart.NAME") == {kind.name: name for kind, name in palette.NAME.items()}
    assert tab.evaluate("pplabChart.OTHER") == palette.OTHER
    assert tab.evaluate("pplabChart.IDLE_OPACITY") == list(plot.IDLE_OPACITY)
    shades = [plot.shade(fill, k, n) for fill in palette.FILL.values() for n in range(1, 9) for k in range(n)]
    js = "Object.values(pplabChart.FILL).flatMap((f) => [1,2,3,4,5,6,7,8].flatMap((n) => Array.from({length: n}, (_, k) => pplabChart.shade(f, k, n))))"  # fmt: skip # noqa: E501
    assert tab.evaluate(js) == shades
    assert tab.evaluate(f"({js}).map(pplabChart.ink)") == [plot.ink(shade) for shade in shades]


def test_what_the_directive_leaves_out_is_what_the_view_assumes(visit):
    sys.path.insert(0, str(ROOT / "book" / "_ext"))
    try:
        from pplab_explorer import SETTINGS
    finally:
        sys.path.pop(0)
    tab = visit("book/explorer.html")
    for name in SETTINGS.keys() - {"time"}:  # which the playhead has
        _, default = SETTINGS[name]
        control = tab.locator(f".pplab-live [name={name}]").last
        found = control.is_checked() if isinstance(default, bool) else control.input_value()
        assert str(found) == str(default), name


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_wide_charts_scroll_in_their_own_box(visit, width, theme):
    tab = visit(
        "book/explorer.html#schedule=ZB-H2&compare=Interleaved1F1B&ranks=8&microbatches=64&zoom=4",
        width=width,
        color_scheme=theme,
    )
    assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert tab.evaluate("(e => e.scrollWidth > e.clientWidth)(document.querySelector('.pplab-scroll'))")
    tab.focus(".pplab-scroll")
    tab.keyboard.press("Home")
    tab.keyboard.press("End")
    assert tab.evaluate("document.querySelector('.pplab-scroll').scrollLeft") > 100
    tab.click("[data-zoom=whole]")
    assert tab.evaluate("(e => e.scrollWidth - e.clientWidth)(document.querySelector('.pplab-scroll'))") == 0
    sliders = tab.locator(".pplab-live input[type=range]:visible").all()
    assert sliders and all(width > 700 or slider.bounding_box()["height"] >= 44 for slider in sliders)


def test_a_wide_window_shows_controls_and_charts_at_once(visit):
    tab = visit("book/explorer.html#schedule=1F1B&compare=GPipe")
    root, scroll = tab.locator(".pplab-explorer").bounding_box(), tab.locator(".pplab-scroll").bounding_box()
    assert scroll["x"] - root["x"] > 200 and scroll["y"] - root["y"] < 120
    assert tab.locator("form .pplab-check:visible").last.bounding_box()["y"] < scroll["y"] + scroll["height"]


def test_back_undoes_a_control(visit):
    tab = visit("book/explorer.html")
    tab.select_option("select[name=schedule]", "GPipe")
    slider = tab.locator("input[type=range][name=microbatches]").bounding_box()
    tab.mouse.move(slider["x"] + 20, slider["y"] + slider["height"] / 2)
    tab.mouse.down()
    for x in range(30, 90, 10):  # one step of the history, however many of the slider
        tab.mouse.move(slider["x"] + x, slider["y"] + slider["height"] / 2)
    tab.mouse.up()
    settle(tab)
    moved = figures(tab)
    for go, name in ((tab.go_back, "GPipe"), (tab.go_back, "1F1B"), (tab.go_forward, "GPipe")):
        go()
        settle(tab)
        assert tab.input_value("select[name=schedule]") == name and figures(tab) == expected(name)
    tab.go_forward()
    settle(tab)
    assert figures(tab) == moved != expected("GPipe")


def test_1f1b_slides_into_gpipe(visit):
    tab = visit("book/explorer.html#schedule=1F1B&compare=GPipe")
    slider = tab.locator("input[type=range][name=more-in-flight]")
    slider.fill("2")
    settle(tab)
    more = pp.build("1F1B", num_ranks=4, num_microbatches=8, in_flight=(6, 5, 4, 3))
    assert figures(tab)[0] == 33 and figures(tab)[4] == ",".join(map(str, more.peak_in_flight))
    slider.press("End")
    settle(tab)
    assert figures(tab) == figures(tab, "compare-") == expected("GPipe")


def under_way(t: pp.Timeline, time: float, latency: float) -> int:
    """How many messages are between two ranks, counted action by action."""
    ends = {(s.action.kind.name, s.action.stage, s.action.microbatch): s.end for s in t.spans}
    neighbours = ((kind, stage + (1 if kind == "F" else -1), m, end) for (kind, stage, m), end in ends.items())
    return sum((kind, stage, m) in ends and end <= time < end + latency for kind, stage, m, end in neighbours)


def test_the_playhead_shows_a_moment(visit):
    """What ranks hold and which messages are under way, as the package's timeline says; the address keeps the time."""
    t = pp.simulate(pp.build("1F1B", num_ranks=4, num_microbatches=8), pp.Costs(latency=1))
    shown = visit("book/explorer.html#latency=1&time=13.5")
    assert under_way(t, 13.5, 1) == 1
    for time in (13.5, 14.0, 15.0):
        held = [[n for at, n in zip(*curve, strict=True) if at <= time][-1] for curve in lab.held_over_time(t)]
        assert shown.locator(".pplab-peak").all_text_contents() == [f"holds {n}" for n in held]
        assert shown.locator(".pplab-now circle").count() == under_way(t, time, 1)
        assert shown.inner_text(".pplab-clock output") == f"{time:g}"
        shown.press(".pplab-clock input", "ArrowRight")  # to where something starts or ends
    shown.wait_for_function("location.hash.includes('time=16')")
    shown.press(".pplab-clock input", "End")
    assert shown.locator(".pplab-now *").count() == 0
    assert shown.locator(".pplab-peak").first.text_content() == "peak 4"


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_one_playhead_of_the_page_plays(visit, motion):
    tab = visit("index.html", reduced_motion=motion)
    first, second = tab.locator(".pplab-clock").all()
    tab.focus(".pplab-scroll")
    tab.keyboard.press(" ")
    tab.wait_for_function("document.querySelector('.pplab-clock input').value > 2")
    second.locator("button").click()
    assert [each.locator("button").get_attribute("aria-label") for each in (first, second)] == ["play", "pause"]
    tab.evaluate("document.dispatchEvent(new CustomEvent('pplab-play', { detail: { source: 'another' } }))")
    assert second.locator("button").get_attribute("aria-label") == "play"


@pytest.mark.parametrize("name", ["1F1B", "eager-1F1B"])
def test_tickets_ride_as_in_the_picture(visit, name):
    from matplotlib import pyplot

    from pplab_course import pictures

    t = pp.simulate(pp.build(name, num_ranks=4, num_microbatches=16), pp.Costs(latency=1))
    tab = visit(f"book/explorer.html#schedule={name}&microbatches=16&latency=1&tickets=true")
    for time in (0.5, 23.5, 40.25, 70):
        tab.evaluate("(time) => { location.hash = location.hash.replace(/&time=.*|$/, `&time=${time}`) }", time)
        settle(tab)
        label = pictures.tickets(t, time, 1).get_label()
        pyplot.close("all")
        said = tab.get_attribute(".pplab-tickets svg", "aria-label")
        assert re.findall(r"\d+", said.split(":", 1)[1]) == re.findall(r"\d+", label.split(":", 1)[1])
    tab.select_option("select[name=schedule]", "ZB-H1")
    settle(tab)
    assert tab.inner_text(".pplab-tickets").startswith("Tickets are drawn of schedules with one stage per rank")


def test_controls_have_names(visit):
    tab = visit("book/explorer.html")
    for control in tab.locator(".pplab-live :is(input, select)").all():
        name = control.evaluate("e => e.ariaLabel || [...e.labels].map((l) => l.textContent).join()")
        assert name, control.get_attribute("name")


def test_paper_and_readers_without_scripts_have_a_picture(visit):
    tab = visit("book/explorer.html")
    static, live = tab.locator(".pplab-static"), tab.locator(".pplab-live")
    assert live.is_visible() and not static.is_visible()
    tab.emulate_media(media="print")
    assert static.is_visible() and not live.is_visible()
    plain = visit("book/explorer.html", settled="", java_script_enabled=False)
    svg = plain.locator(".pplab-static svg")
    assert svg.is_visible() and "makespan 33" in svg.get_attribute("aria-label")


def test_pages_without_a_view_load_no_script_of_it(site):
    names = ("plain", "index", "levels", "stamp", "book/explorer", "book/play")
    pages = {f"{name}.html": (site / f"{name}.html").read_text() for name in names}
    loaded = {name: re.findall(r"(?:explorer|play)/(\w+)\.js", page) for name, page in pages.items()}
    assert loaded["plain.html"] == []
    assert (
        loaded["index.html"]
        == loaded["book/explorer.html"]
        == [*("core", "rows", "chart", "clock", "tickets", "settings", "explorer")]
    )
    assert loaded["levels.html"] == ["core", "play", "chart", "game", "play_view"]
    assert loaded["stamp.html"] == ["core", "stamp", "chart", "game", "stamp_view"]
    assert loaded["book/play.html"] == [*loaded["levels.html"], *loaded["stamp.html"][1::3]]


def test_wrong_options_fail_the_build_and_are_named(tmp_path):
    wrong = {
        ":ranks: 3\n:schedule: DualPipe": "an even number of ranks",
        ":schedule: 2F2B": "2F2B",
        ":latency: soon": "latency",
        ":per: microbatch": "per",
        ":colour: red": "colour",
        ":controls: ranks colour": "no control is named 'colour'",
    }
    page = "# Wrong\n\n" + "".join(f"```{{explorer}}\n{options}\n```\n\n" for options in wrong)
    page += "{explore}`a state <schedule=1F1B&rank=2>`\n\n```{play}\n:level: less-memory\n```\n"
    wrong["level"] = "no level is named 'less-memory': choose from first-steps, eighteen"
    made = sphinx(tmp_path, {"index.md": page})
    assert made.returncode != 0
    for says in (*wrong.values(), "no setting is named 'rank'"):
        assert says in made.stderr, (says, made.stderr)


def test_slices_are_parts_of_microbatches(visit):
    """The same work as the others': of each microbatch, every slice takes its share, and counts as its share held."""
    tab = visit("book/explorer.html#schedule=Seq1F1B&compare=1F1B&stages-per-rank=1&slices=4")
    sliced = pp.build("Seq1F1B", num_ranks=4, num_microbatches=32, slices=4)
    t = pp.simulate(sliced, pp.Costs(0.25, 0.25, 0.25))
    assert figures(tab)[0] == t.makespan == 26.25 and figures(tab, "compare-")[0] == 33
    assert figures(tab)[4] == ",".join(map(str, sliced.peak_in_flight))
    shown = tab.inner_text(".pplab-figures")
    assert "1.75, 1.5, 1.25, 1" in shown and "4, 3, 2, 1" in shown
    tab.fill("input[type=number][name=slices]", "2")
    settle(tab)
    assert figures(tab)[0] == 28.5 and "slices" not in tab.url
    tab.click("summary:has-text('More settings')")
    tab.fill("input[name=attention]", "0.5")
    settle(tab)
    causal = lab.Slices.even(2, 0.5).simulate(pp.build("Seq1F1B", num_ranks=4, num_microbatches=16, slices=2))
    assert figures(tab)[0] == pytest.approx(causal.makespan) and causal.makespan > 28.5
    tab.select_option("select[name=schedule]", "GPipe")
    settle(tab)
    assert not tab.is_visible("[data-control=slices]") and not tab.is_visible("input[name=attention]")


def test_a_change_is_drawn_soon(visit, capsys):
    """Within a few frames, of which the page measures the length between the changes: a busy machine stretches both."""
    frame = "() => new Promise((done) => requestAnimationFrame((a) => requestAnimationFrame((b) => done(b - a))))"
    for state in ("schedule=1F1B", "schedule=ZB-H1&compare=DualPipeV"):
        tab = visit(f"book/explorer.html#{state}&ranks=8&microbatches=31")
        tab.focus("input[type=range][name=microbatches]")
        took, frames = [], []
        for key in ("ArrowRight", "ArrowLeft") * 5:
            frames.append(tab.evaluate(frame))
            tab.keyboard.press(key)
            settle(tab)
            took.append(float(tab.get_attribute(".pplab-explorer", "data-update-ms")))
        middle, frame_ms = median(took), median(frames)
        with capsys.disabled():
            print(f"\n{state}, P=8, M=32: a change takes {middle:.1f} ms, the slowest {max(took):.1f}", end="")
            print(f"; a frame {frame_ms:.1f}")
        assert len(took) == 10 and 0 < min(took)
        assert middle <= 4 * frame_ms  # one or two on an idle machine


def placed(tab, *actions: str) -> None:
    for action in actions:
        tab.click(f"[data-text='{action}']")


def played(tab, t: pp.Timeline) -> None:
    """Press the actions of a timeline in the order of their starts: those that haven't run by themselves."""
    for span in sorted(t.spans, key=lambda span: (span.start, span.rank)):
        button = tab.locator(f"[data-text='{span.action}']:not(.pplab-not)")
        if button.count():
            button.click()


def test_play_refuses_with_the_reason_and_scores(visit):
    tab = visit("book/play.html#level=memory-line", settled=".pplab-play")
    root, says = tab.locator(".pplab-play"), tab.locator(".pplab-play .pplab-says")
    placed(tab, "1F0")
    assert says.inner_text() == "1F0 waits for the output of 0F0 on rank 0: place that first."
    placed(tab, "0F0", "0F1", "0F2", "0F3")
    assert says.inner_text().startswith("Rank 0 has no memory left: it holds 0F0, 0F1 and 0F2.")
    assert root.get_attribute("data-placed") == "5" and "1F1B" not in root.locator(".pplab-figures").inner_text()
    assert "peak 3/3" in root.locator(".pplab-ranks").text_content() and root.locator(".pplab-cap").count() == 1
    tab.click("[data-do=undo]")
    assert root.get_attribute("data-placed") == "4" and tab.locator("[data-text='0F2']").count() == 1
    tab.click("[data-do=hint]")
    tab.keyboard.press("Enter")  # the hinted action has the focus
    assert tab.evaluate("document.activeElement.dataset.text") == "0F3", "the focus stays in its place"
    reference = pp.simulate(pp.build("1F1B", num_ranks=3, num_microbatches=5), pp.Costs(backward=2))
    played(tab, reference)
    assert float(root.get_attribute("data-makespan")) == reference.makespan
    assert root.get_attribute("data-found") == "true" and "You built 1F1B. Your order takes 21" in says.inner_text()
    assert tab.evaluate("document.activeElement.dataset.do") == "next level"
    assert says.inner_text().endswith("You took 1 hint in this try.") and "28.6\N{NO-BREAK SPACE}%" in root.inner_text()
    tab.check(".pplab-reference")
    assert root.locator(".pplab-title").count() == 2
    with tab.expect_download() as download:
        tab.click(".pplab-csv")
    mine = lab.read_csv(Path(download.value.path()).read_text())
    lab.check_memory(mine, 3)
    assert pp.simulate(mine, pp.Costs(backward=2)).makespan == reference.makespan
    tab.click("[data-do='next level']")
    assert root.get_attribute("data-shows") == "latency" and "level=latency" in tab.url
    assert "Memory for three ✓" in tab.inner_text("option[value=memory-line]")


def test_play_says_what_ran_by_itself_and_undo_takes_it_back(visit):
    tab = visit("book/play.html#level=memory-line", settled=".pplab-play")
    says, count = tab.locator(".pplab-play .pplab-says"), tab.locator(".pplab-play")
    placed(tab, "0F0")
    alone = "1F0 and 2F0 followed by themselves, without an alternative."
    assert says.inner_text() == f"0F0 runs on rank 0 from 0 to 1. {alone}"
    placed(tab, "2B0", "1B0")  # rank 0 may wait for its backward, or run on
    assert says.inner_text() == "1B0 runs on rank 1 from 5 to 7." and count.get_attribute("data-placed") == "5"
    tab.click("[data-do=undo]")
    assert says.inner_text() == "1B0 is taken back."
    tab.click("[data-do=undo]")
    tab.click("[data-do=undo]")
    assert says.inner_text() == "0F0 is taken back, and so is what followed by itself: 1F0 and 2F0."
    assert count.get_attribute("data-placed") == "0" and tab.locator("[data-do=undo]").is_disabled()


def test_play_keeps_the_answer_from_an_order_that_misses_it(visit):
    tab = visit("book/play.html#level=memory-line", settled=".pplab-play")
    naive = pp.simulate(pp.build("naive", num_ranks=3, num_microbatches=5), pp.Costs(backward=2))
    played(tab, naive)
    root = tab.locator(".pplab-play")
    assert root.get_attribute("data-complete") == "true" and root.get_attribute("data-solved") == "false"
    assert "Once 1B0 ran on rank 1 from 5 to 7, 21 was out of reach" in tab.inner_text(".pplab-says")
    assert "1F1B" not in root.inner_text() and "asked for" in tab.inner_text(".pplab-figures")
    assert not tab.is_visible(".pplab-reference")


def test_play_by_hints_alone_is_not_ticked(visit):
    tab = visit("book/play.html#level=first-steps", settled=".pplab-play")
    while not tab.locator("[data-do=hint]").is_disabled():
        tab.click("[data-do=hint]")
        tab.keyboard.press("Enter")
    root = tab.locator(".pplab-play")
    assert root.get_attribute("data-solved") == "true" and root.get_attribute("data-found") == "false"
    assert "You took 1 hint, for more than half of your choices" in tab.inner_text(".pplab-says")
    assert "✓" not in tab.inner_text("option[value=first-steps]")


def test_play_goes_on_where_it_was_left(visit):
    tab = visit("book/play.html#level=eighteen", settled=".pplab-play")
    placed(tab, "0F0")
    tab.reload()
    tab.wait_for_selector(".pplab-play[data-placed='3']")
    tab.click("[data-do='start again']")
    assert tab.get_attribute(".pplab-play", "data-placed") == "0"
    assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_an_address_of_no_level_and_progress_of_the_first_edition(visit):
    tab = visit("book/play.html#level=less-memory", settled=".pplab-play")
    assert tab.inner_text(".pplab-says") == "There is no level less-memory: this is the first one."
    kept = {
        "less-memory": {"moves": [[0, "0F0"]], "isSolved": True},
        "latency": {"moves": [[0, "0F0"]], "isSolved": True},
    }
    tab.evaluate("kept => localStorage.setItem('pplab-play', JSON.stringify(kept))", kept)
    tab.evaluate("() => { location.hash = 'level=first-steps' }")
    tab.reload()
    tab.wait_for_selector(".pplab-play[data-shows=first-steps]")
    assert "✓" not in tab.inner_text("option[value=memory-line]") and "✓" in tab.inner_text("option[value=latency]")
    tab.select_option(".pplab-play select", "latency")
    assert tab.get_attribute(".pplab-play", "data-placed") == "1"


@pytest.mark.parametrize("options", [{}, {"width": 390, "has_touch": True, "color_scheme": "dark"}])
def test_levels_in_a_chapter_keep_to_themselves(visit, options):
    tab = visit("levels.html", settled=".pplab-play:last-of-type", **options)
    first, second = tab.locator(".pplab-play").all()
    assert [each.get_attribute("data-shows") for each in (first, second)] == ["eighteen", "memory-line"]
    assert tab.locator(".pplab-play select").count() == 0 and "Finish before 18." in first.inner_text()
    assert tab.locator(".pplab-cap").count() == 1, "the one with a memory"
    action = first.locator("[data-text='0F0']")
    if options:
        action.tap()
    else:
        action.focus()
        tab.keyboard.press("ArrowRight")
        tab.keyboard.press("ArrowLeft")
        tab.keyboard.press("Enter")
    second.locator("[data-text='0F0']").click()
    second.locator("[data-text='0F1']").click()
    assert [each.get_attribute("data-placed") for each in (first, second)] == ["3", "4"] and "#" not in tab.url
    assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    tab.reload()
    tab.wait_for_selector(".pplab-play:last-of-type[data-placed='4']")
    assert first.get_attribute("data-placed") == "3"
    second.locator(".pplab-open").click()
    tab.wait_for_selector(".pplab-play[data-shows=memory-line][data-placed='4']")
    assert tab.locator(".pplab-play select").count() == 1


def test_a_level_on_paper_and_without_scripts_is_its_question(visit):
    plain = visit("levels.html", settled="", java_script_enabled=False)
    asked = plain.locator(".pplab-static").all_inner_texts()
    assert "Finish before 18." in asked[0] and "Finish by 21." in asked[1] and "1F1B" not in "".join(asked)
    assert "Memory for three. 3 ranks, 5 microbatches. The batch" in asked[1]


@pytest.mark.parametrize("options", [{}, {"width": 390, "has_touch": True, "color_scheme": "dark"}])
def test_a_block_is_stamped(visit, options):
    """The first level, by keys or by touch: what meets is named, and what is reached is the package's."""
    tab = visit("stamp.html", settled=".pplab-stamp", **options)
    root, says, made = (tab.locator(name) for name in (".pplab-stamp", ".pplab-says", ".pplab-made"))
    assert says.inner_text().startswith("On rank 0, 0F (at 0) and 5I (at 6) meet in unit 0 of the interval of 6: ")
    assert not made.is_visible() and tab.locator("td.pplab-meets").count() == 6
    if options:
        tab.locator("[data-key='5I']").tap()
        for _ in range(2):
            tab.locator("[data-do=later]").tap()
    else:
        tab.focus("[data-key='0F']")
        for key in ("ArrowRight", "ArrowRight", "+", "+", "+", "-"):
            tab.keyboard.press(key)
        assert tab.evaluate("document.activeElement.dataset.key") == "5I"
    block = lab.v_min_block(3)
    assert root.get_attribute("data-solved") == "true" and root.get_attribute("data-start") == "8"
    assert float(root.get_attribute("data-makespan")) == block.reorder(8).makespan
    assert root.get_attribute("data-peak") == ",".join(map(str, block.peak))
    assert made.is_visible() and tab.locator("td.pplab-meets").count() == 0
    rows = tab.locator(".pplab-figures tbody tr").all_inner_texts()[: block.num_ranks]
    assert all(f"= {most}\t{held}\t" in row for row, most, held in zip(rows, block.bound, block.peak, strict=True))
    for view, timeline in (
        ("stamped", block.stamp(8)),
        ("squeezed", block.squeeze(8)),
        ("reordered", block.reorder(8)),
    ):
        tab.select_option(".pplab-view", view)
        assert made.locator(".pplab-title").text_content() == f"makespan {timeline.makespan:g}"
    tab.fill(".pplab-interval", "5")
    assert "rank 0 has 6 of work on a microbatch, and the interval is 5" in says.inner_text().replace("Rank", "rank")
    tab.fill(".pplab-interval", "-1")
    assert says.inner_text() == "An interval is a whole number of units from 1 to 99, not -1."
    tab.fill(".pplab-interval", "6")
    tab.reload()
    tab.wait_for_selector(".pplab-stamp[data-solved=true]")
    assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    tab.locator(".pplab-open").click()
    tab.wait_for_selector(".pplab-stamp[data-shows=one-microbatch][data-solved=true]")
    assert "✓" in tab.inner_text(".pplab-stamp option[value=one-microbatch]")
    tab.click(".pplab-stamp [data-do='next level']")
    assert tab.get_attribute(".pplab-stamp", "data-shows") == "stamp-a-v"


def test_a_block_that_starts_too_early_or_was_stored_broken(visit):
    tab = visit("stamp.html", settled=".pplab-stamp")
    tab.uncheck(".pplab-along")
    tab.click("[data-key='2F']")
    tab.click("[data-do=later]")
    early = "2F starts at 3. 3F starts at 3, and what 2F makes arrives at 4: start it at 4 or later."
    assert tab.inner_text(".pplab-says") == early
    tab.click("[data-do='start again']")
    assert tab.get_attribute(".pplab-stamp", "data-start") == "0" and tab.locator("[data-do=earlier]").is_disabled()
    for kept in ({"one-microbatch": {"starts": {"0F": "x"}}}, {"one-microbatch": 1}, []):
        tab.evaluate("kept => localStorage.setItem('pplab-stamp', JSON.stringify(kept))", kept)
        tab.reload()
        tab.wait_for_selector(".pplab-stamp[data-shows=one-microbatch][data-solved=false]")
