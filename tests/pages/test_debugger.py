"""A reader's file in the built pages: written in its cell, judged, stepped through, and handed on by its address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import live_cells as live
import pytest
from playwright.sync_api import FrameLocator, Page

import browser as chromium

pytestmark = pytest.mark.slow

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
HANG = "f7d94519-debug"


@pytest.fixture(scope="module")
def tabs() -> Iterator[Callable[..., Page]]:
    with chromium.launched_or_skipped() as browser, chromium.watched_tabs(browser) as opened:
        yield opened


@pytest.fixture(scope="module")
def hung(tabs, book) -> tuple[Page, FrameLocator]:
    """Chapter 4's hang in the debugger, on its page."""
    tab = tabs()
    live.open_chapter(tab, book, "04_1f1b")
    return tab, debugged(tab, HANG)


def debugged(tab: Page, cell: str) -> FrameLocator:
    """Run a cell that shows the debugger."""
    tab.evaluate("id => pplabLive.run(id)", cell)
    tab.locator(f"#cell-{cell} iframe").last.scroll_into_view_if_needed()
    frame = tab.frame_locator(f"#cell-{cell} iframe").last
    frame.locator(".stands li").first.wait_for(timeout=120_000)
    return frame


def test_a_hang_is_told_and_stepped_through_with_keys(hung):
    tab, frame = hung
    verdict = frame.locator(".verdict").inner_text()
    assert verdict.startswith("✗ Every rank in the circle sends, and none of them receives"), verdict
    assert "rank 0 waits until rank 1 receives its message 2" in verdict and "this is a deadlock" in verdict
    assert "waits for its send to rank 1" in frame.locator(".stands").inner_text()
    body = frame.locator("body")
    frame.get_by_label("to the end").click()
    body.press("Home")
    assert "hasn't begun" in frame.locator(".stands").inner_text()
    for _ in range(12):
        body.press("Shift+ArrowRight")
        if "has run a forward" in frame.locator(".stands").inner_text():
            break
    assert "has run a forward" in frame.locator(".stands").inner_text()
    before = frame.locator(".bar span").first.inner_text()
    body.press("ArrowRight")
    body.press("ArrowLeft")
    assert frame.locator(".bar span").first.inner_text() == before
    assert frame.locator(".code .mark").count() >= 2
    body.press("End")


def test_a_guess_is_judged(hung):
    _, frame = hung
    frame.get_by_label("guess who goes on").check()
    frame.get_by_label("to the start").click()
    for _ in range(40):
        frame.get_by_label("on to the next message").click()
        if frame.locator(".guess").is_visible():
            break
    assert "which one goes on next?" in frame.locator(".guess").inner_text()
    frame.locator(".guess button").first.click()
    assert "1 guesses are right" in frame.locator(".guess").inner_text()
    frame.get_by_label("guess who goes on").uncheck()


def test_where_sends_do_not_wait_the_same_file_ends(hung):
    _, frame = hung
    frame.get_by_label("sends wait").uncheck()
    assert frame.locator(".verdict").inner_text() == "✓ gradients as in one process"
    frame.get_by_label("sends wait").check()
    assert "deadlock" in frame.locator(".verdict").inner_text()


def test_its_address_runs_it_again_when_its_reader_says_so(hung, tabs):
    tab, frame = hung
    link = frame.get_by_role("link", name="a link to this run").evaluate("link => link.href")
    assert link.startswith(tab.url) and "#shared=" in link and len(link) < 4000
    other = tabs()
    other.goto(link)
    own = f"{HANG}-lent-lent"
    other.locator(f"#cell-{own}").get_by_text("Run shows what the shared file does").wait_for()
    assert "dist.send(tensor, to)" in other.locator(f"#cell-{HANG}-lent").inner_text()
    assert not other.evaluate("!!pplabLive.python.worker")
    assert "Every rank in the circle sends" in debugged(other, own).locator(".verdict").inner_text()
    other.goto(link[:-9] + "A")
    other.reload()
    other.get_by_text("The address of a shared run is damaged").wait_for()


def test_a_file_is_written_in_its_cell_judged_and_kept(tabs, book):
    tab = tabs()
    live.open_chapter(tab, book, "02_naive")
    cell = {"id": "naive-21"}
    made = live.run(tab, cell)
    assert "… not answered: write send and receive and step in my_pipe.py" in made.text, made
    place, text = tab.locator("#cell-naive-17"), (NOTEBOOKS / "pipe_naive.py").read_text()
    place.get_by_role("button", name="Edit").press("Enter")
    tab.wait_for_function("String(getSelection()) === '...'")  # the first of what is the reader's, in sight
    place.get_by_role("textbox").fill(f"%%writefile my_pipe.py\n{text}")
    made = live.run(tab, cell)
    assert "✓ right: gradients as in one process" in made.text, made
    tab.locator("#cell-naive-21").get_by_text("run 2 of 3: 3 ranks, M = 1").wait_for()
    assert "rank 1" in debugged(tab, "naive-21-debug").locator(".stands").inner_text()
    tab.reload()
    live.open_chapter(tab, book, "02_naive")
    assert "dist.recv(tensor, source)" in tab.locator("#cell-naive-17").inner_text()


def test_a_loop_that_never_ends_leaves_a_debugger_with_its_last_lines(tabs, book):
    tab = tabs()
    live.open_chapter(tab, book, "02_naive")
    place, text = tab.locator("#cell-naive-17"), (NOTEBOOKS / "pipe_naive.py").read_text()
    place.get_by_role("button", name="Edit").click()
    loops = text.replace("    y.backward(", "    while x.grad is None:\n        receive(rank + 1, x)\n    y.backward(")
    place.get_by_role("textbox").fill(f"%%writefile my_pipe.py\n{loops}")
    frame = debugged(tab, "naive-21-debug")
    verdict = frame.locator(".verdict").inner_text()
    assert "in the loop of line 51: does it never end?" in verdict and "Of the 100,001 lines that have run" in verdict
    assert "has failed in line" in frame.locator(".stands").inner_text() and frame.locator("svg rect").count() > 2


def test_on_a_phone_nothing_is_wider_than_the_screen(tabs, book):
    tab = tabs(390, has_touch=True)
    live.open_chapter(tab, book, "04_1f1b")
    frame = debugged(tab, HANG)
    frame.get_by_label("back to the message before").tap()
    wide = frame.locator("html").evaluate("page => [page.scrollWidth, page.clientWidth]")
    assert wide[0] <= wide[1] and tab.evaluate("document.documentElement.scrollWidth") <= 390
