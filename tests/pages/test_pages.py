"""The built pages in a browser without a network: on screens, on a phone, in the dark, on paper."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from test_play import PRESSES

import browser as chromium

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "book" / "_ext"))
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PAPER = {"width": 680, "height": 1000}  # the text's width on A4
SERVER = "http://book.test/"  # answered by the test
CHAPTER = "notebooks/04_1f1b.html"

# What a page's own script can't see from outside is asked in the page. Each returns a list of what is wrong.
MATHS = """async () => {
  if (!window.MathJax) return document.querySelector(".math") ? ["no MathJax"] : [];
  await MathJax.startup.promise;
  const wrong = [...document.querySelectorAll("mjx-merror, [data-mjx-error]")].map((e) => "error: " + e.textContent);
  for (const e of document.querySelectorAll(".math"))
    if (!e.querySelector("mjx-container")) wrong.push("not rendered: " + e.textContent);
  const texts = document.createTreeWalker(document.querySelector("article") ?? document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const inside = texts.currentNode.parentElement.closest("pre, code, script, style");
    const raw = /\\$\\$|\\\\[([]|\\\\(frac|text|cdot)/.exec(texts.currentNode.data);
    if (raw && !inside) wrong.push("raw: " + texts.currentNode.data.trim());
  }
  return wrong;
}"""
UNDESCRIBED = """() => [...document.querySelectorAll("img, svg")].filter((e) => {
  if (e.closest("[aria-hidden=true], [role=presentation]") || e.getBoundingClientRect().width === 0) return false;
  if (e.tagName === "IMG") return !e.alt;
  return !e.parentElement.closest("svg") && !e.getAttribute("aria-label") && !e.getAttribute("aria-labelledby")
    && !e.querySelector(":scope > title");
}).map((e) => e.outerHTML.slice(0, 200))"""
TOO_WIDE = """() => {
  const room = document.documentElement.clientWidth;
  if (Math.max(document.documentElement.scrollWidth, document.body.scrollWidth) <= room) return [];
  const scrolls = (e) => e && (getComputedStyle(e).overflowX !== "visible" || scrolls(e.parentElement));
  const out = [...document.querySelectorAll("main *")].filter(
    (e) => e.getBoundingClientRect().right > room + 1 && !scrolls(e.parentElement));
  return ["page", ...out.slice(-3).map((e) => e.outerHTML.slice(0, 200))];
}"""
CLIPPED = """() => {
  const scrolls = (e) => e && (["auto", "scroll"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const room = (document.querySelector("article") ?? document.body).getBoundingClientRect().right;
  return [...document.querySelectorAll("article mjx-container:not([display])")].filter(
    (e) => e.getBoundingClientRect().right > room + 1 && !scrolls(e.parentElement),
  ).map((e) => "clipped: " + e.querySelector("mjx-assistive-mml").textContent);
}"""
CUT = """() => [...document.querySelectorAll("pre, .pplab-figure, .pplab-table, table")].filter(
  (e) => e.checkVisibility() && e.getBoundingClientRect().height > 0 && e.scrollWidth > e.clientWidth + 1,
).map((e) => "cut: " + e.outerHTML.slice(0, 200))"""
PALE = """() => {
  const numbers = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const over = (top, below) => {
    const alpha = top[3] ?? 1;
    return [0, 1, 2].map((i) => top[i] * alpha + below[i] * (1 - alpha));
  };
  const grounds = new Map([[null, [255, 255, 255]]]);
  const ground = (e) => {
    if (!grounds.has(e)) {
      const own = numbers(getComputedStyle(e).backgroundColor);
      grounds.set(e, (own[3] ?? 1) === 1 ? own : over(own, ground(e.parentElement)));
    }
    return grounds.get(e);
  };
  const luminance = (rgb) => rgb.map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const pale = new Map();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement, style = getComputedStyle(e);
    if (!texts.currentNode.data.trim() || e.closest("script, style, noscript, svg, option, [disabled]")) continue;
    if (!e.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const below = ground(e), size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
    const [light, dark] = [luminance(over(numbers(style.color), below)), luminance(below)].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05), large = size >= 24 || (bold && size >= 18.66);
    if (ratio < (large ? 3 : 4.5))
      pale.set(`${style.color} on ${below}`, `${ratio.toFixed(2)}: ${style.color} on rgb(${below}), `
        + `<${e.tagName.toLowerCase()} class="${e.className}">${texts.currentNode.data.trim().slice(0, 40)}`);
  }
  return [...pale.values()];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium.launched_or_skipped() as started:
        yield started


class Visit:
    """A tab that remembers what went wrong in it: requests that leave, files that aren't there, errors of scripts."""

    def __init__(self, browser, book: Path, screen: dict = DESK, theme: str = "light", **more: object):
        self.book = book
        options = {"viewport": screen, "color_scheme": theme, "offline": True, "accept_downloads": True}
        self.context = browser.new_context(**options, **more)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        here = ("file:", "data:", "blob:", SERVER)
        self.page.on("request", lambda r: self._check(r.url.startswith(here), f"left: {r.url}"))
        self.page.on("requestfailed", lambda request: self._check(False, f"not there: {request.url}"))
        self.page.on("pageerror", lambda error: self._check(False, f"error: {error}"))
        self.page.on("console", lambda m: self._check(m.type not in ("error", "warning"), f"console: {m.text}"))

    def _check(self, fine: bool, what: str) -> None:
        if not fine:
            self.wrong.append(what)

    def open(self, name: str):
        self.page.goto((self.book / name).as_uri(), wait_until="load")
        self.page.add_style_tag(content="* { transition: none !important }")  # no colours halfway to others
        return self.page

    def serve(self, name: str):
        """The page as from a web server."""
        self.context.route(f"{SERVER}**", lambda route: route.fulfill(path=self._file(route.request.url)))
        self.page.goto(SERVER + name, wait_until="load")
        return self.page

    def _file(self, address: str) -> Path:
        return self.book / urlsplit(address).path.lstrip("/")

    def ask(self, script: str, name: str) -> None:
        self.wrong += [f"{name}: {found}" for found in self.page.evaluate(script)]

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


def names(book: Path) -> list[str]:
    """All pages but the first file, which only leads on to the first page."""
    found = sorted(str(path.relative_to(book)) for path in book.rglob("*.html"))
    return [name for name in found if not name.startswith("_static") and name != "index.html"]


def check_on_paper(visit: Visit, name: str) -> None:
    """The page that is open is no wider than the paper when it's printed, its folded blocks unfolded."""
    visit.page.evaluate("() => { for (const e of document.querySelectorAll('details')) e.open = true }")
    visit.page.set_viewport_size(PAPER)
    visit.page.emulate_media(media="print")
    visit.ask(TOO_WIDE, f"{name} on paper")
    visit.ask(CUT, f"{name} on paper")


def check_on_screen(visit: Visit, name: str) -> None:
    """The page that is open, on whatever screen it is."""
    for script in (UNDESCRIBED, TOO_WIDE, CLIPPED):
        visit.ask(script, name)


def test_every_page(browser, book):
    """Each is loaded once, which takes longer than all checks of it: its formulas are set anew each time."""
    started = time.perf_counter()
    with Visit(browser, book) as visit:
        for name in names(book):
            page = visit.open(name)
            visit.ask(MATHS, name)
            check_on_screen(visit, name)
            visit.ask(PALE, f"{name} (light)")
            page.emulate_media(color_scheme="dark")
            page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
            visit.ask(PALE, f"{name} (dark)")
            page.set_viewport_size(PHONE)
            check_on_screen(visit, f"{name} on a phone")
            check_on_paper(visit, name)
            page.goto("about:blank")  # to lay this page out for the screen again would take longer than all checks
            page.emulate_media(media="screen", color_scheme="light")
            page.set_viewport_size(DESK)
        assert not visit.wrong, "\n".join(visit.wrong)
    print(f"{len(names(book))} pages: {time.perf_counter() - started:.0f} s")


@pytest.mark.parametrize("name", [CHAPTER, "book/explorer.html"])
def test_a_page_that_is_opened_on_a_phone_in_the_dark(browser, book, name):
    """Scripts and formulas take the screen as it is when the page is loaded."""
    with Visit(browser, book, PHONE, "dark") as visit:
        visit.open(name)
        for script in (MATHS, PALE):
            visit.ask(script, name)
        check_on_screen(visit, name)
        assert not visit.wrong, "\n".join(visit.wrong)


SHIFTS = """window.shifted = 0;
new PerformanceObserver((list) => list.getEntries().forEach(({ value }) => (window.shifted += value)))
  .observe({ type: "layout-shift", buffered: true });"""


TABLET = pytest.param({"width": 768, "height": 1024}, marks=pytest.mark.long)


@pytest.mark.parametrize("screen", [DESK, TABLET, PHONE], ids=["desk", "tablet", "phone"])
@pytest.mark.parametrize("name", [CHAPTER, "notebooks/10_how_good.html", "book/explorer.html"])
def test_nothing_jumps_while_a_page_is_loaded(browser, book, name, screen):
    """What scripts fold, fill and dress has its room from the start: over 0.1 browsers call it a poor page."""
    with Visit(browser, book, screen) as visit:
        visit.page.add_init_script(SHIFTS)
        page = visit.open(name)
        page.wait_for_timeout(500)
        assert page.evaluate("window.shifted") < 0.1
        page.evaluate(
            "() => document.querySelector('article h1').insertAdjacentHTML('afterend', '<p style=height:400px>')"
        )
        page.wait_for_function("window.shifted > 0.1")  # it would have been seen


def test_every_level_of_the_game_under_a_thumb(browser, book):
    """On a phone, by taps: chart and buttons are on one screen, and nothing moves while one plays."""
    from pplab_course.levels import LEVELS

    places = """(game) => [".pplab-scroll", ".pplab-tray button", "[data-do]"]
      .flatMap((name) => [...game.querySelectorAll(name)]).map((e) => e.getBoundingClientRect())
      .map(({ left, top, right, bottom }) => [left, top, right, bottom])"""
    to_chart = "e => scrollTo({ top: e.getBoundingClientRect().top + scrollY - 60, behavior: 'instant' })"
    with Visit(browser, book, PHONE, has_touch=True) as visit:
        page = visit.open("book/play.html")
        game = page.locator(".pplab-play[data-ready]")
        for level in LEVELS:
            game.locator("select").select_option(level.id)
            game.locator(".pplab-scroll").evaluate(to_chart)
            before, presses = game.evaluate(places), 0
            header = page.locator(".bd-header-article").bounding_box()
            assert header["y"] + header["height"] <= before[0][1] and max(b for *_, b in before) <= PHONE["height"]
            timeline = level.simulated(level.reference, level.stages_per_rank)
            for span in sorted(timeline.spans, key=lambda span: (span.start, span.rank)):
                button = game.locator(f"[data-text='{span.action}']:not(.pplab-not)")
                if not button.count():
                    continue  # it ran by itself
                box = button.bounding_box()
                assert min(box["width"], box["height"]) >= 44
                page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
                presses += 1
                refused = game.locator("button.pplab-not").last  # its reason is a long text, at times
                if refused.is_visible():
                    refused.tap()
                if game.get_attribute("data-complete") == "false":
                    assert game.evaluate(places) == before, (level.id, str(span.action))
            assert game.get_attribute("data-found") == "true" and presses == PRESSES[level.id]
        assert not visit.wrong, visit.wrong


def test_what_lies_over_a_page_keeps_off_the_game(browser, book):
    """The button to the top of a page comes when one scrolls up. The name of a level isn't cut off."""
    with Visit(browser, book, PHONE, has_touch=True) as visit:
        page, top = visit.open(CHAPTER), visit.page.locator("#pst-back-to-top")
        up = "(e, y) => { e.scrollIntoView({ behavior: 'instant' }); scrollBy({ top: y, behavior: 'instant' }) }"
        for place, is_there in (("#what-it-costs", True), (".pplab-play", False)):
            page.locator(place).evaluate(up, 200)
            page.wait_for_timeout(300)
            page.locator(place).evaluate(up, 0)
            page.wait_for_timeout(300)
            assert top.is_visible() == is_there, place
        page = visit.open("book/play.html")
        choice = page.locator(".pplab-play select")
        longest = choice.evaluate("""(e) => {
          const pen = document.createElement("canvas").getContext("2d");
          pen.font = getComputedStyle(e).font;
          return Math.max(...[...e.options].map((option) => pen.measureText(option.text).width));
        }""")
        assert longest + 20 < choice.bounding_box()["width"] <= PHONE["width"]


@pytest.mark.parametrize("screen, says", [(DESK, "Ctrl+Enter runs it"), (PHONE, "")], ids=["desk", "phone"])
def test_keys_are_told_where_there_are_keys(browser, book, screen, says):
    with Visit(browser, book, screen, has_touch=screen is PHONE) as visit:
        page = visit.open(CHAPTER)
        cell = page.locator("div.cell.live:has(.live-edit)").first
        cell.locator(".live-edit").click()
        cell.locator(".cm-content").wait_for()
        assert cell.locator(".live-note").inner_text().partition(",")[0] == says
        assert not visit.wrong, visit.wrong


@pytest.mark.parametrize(
    "name, formula", [("08_zero_bubble.html", "#equation-zb-h1"), ("12_layout.html", "#equation-boundary-volume")]
)
def test_a_formula_with_a_number_fits_a_phone(browser, book, name, formula):
    with Visit(browser, book, PHONE) as visit:
        page = visit.open(f"notebooks/{name}")
        page.evaluate("MathJax.startup.promise")
        assert page.locator(f"{formula} mjx-container").evaluate("e => e.scrollWidth <= e.clientWidth")
        assert page.locator(f"{formula} .eqno").is_visible() and not visit.wrong, visit.wrong


def test_the_checks_find_what_is_wrong(browser, book):
    """A check that finds nothing on a broken page would find nothing anywhere."""
    with Visit(browser, book, PHONE) as visit:
        page = visit.open("book/glossary.html")
        page.evaluate("""() => {
          const add = (html) => document.querySelector("article").insertAdjacentHTML("beforeend", html);
          add('<p>so $$x$$</p><img src="../_static/logo.svg"><svg width="9" height="9"></svg>');
          add('<p style="color: #999; background: #fff">pale</p><div style="width: 600px">wide</div>');
          const wide = document.querySelector("article mjx-container").cloneNode(true);
          wide.style.cssText = "display: inline-block; width: 600px";
          document.querySelector("article p").append(wide);
          add('<span class="math">x</span><pre style="width: 80px; overflow: auto">too long for its box</pre>');
        }""")
        for script, found in ((MATHS, 2), (UNDESCRIBED, 2), (PALE, 1), (CLIPPED, 1)):
            assert len(page.evaluate(script)) == found, script
        assert any("600px" in what for what in page.evaluate(TOO_WIDE))
        assert any("too long for its box" in what for what in page.evaluate(CUT))
        page.evaluate(
            "() => { setTimeout(() => { throw new Error('thrown') }); fetch('https://example.org').catch(() => 0) }"
        )
        page.wait_for_timeout(200)
        assert any("thrown" in what for what in visit.wrong) and any("left: https" in what for what in visit.wrong)


def test_search_without_a_server(browser, book):
    with Visit(browser, book) as visit:
        page = visit.open("book/index.html")
        page.click("button.search-button-field")
        page.fill("dialog input[type=search], .search-button__search-container input", "warm-up")
        page.keyboard.press("Enter")
        page.click("#search-results ul.search > li:has-text('1F1B') > a")
        page.wait_for_selector("article h1")
        assert page.url.partition("#")[0].endswith(".html") and "search.html" not in page.url
        assert not visit.wrong, visit.wrong


def test_theme_toggle(browser, book):
    with Visit(browser, book) as visit:
        page = visit.open(CHAPTER)
        ground = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(ground)
        seen = set()
        for _ in range(3):
            page.click("article-header-buttons .theme-switch-button, .bd-header-article .theme-switch-button")
            seen.add((page.evaluate("document.documentElement.dataset.mode"), page.evaluate(ground) == light))
        assert seen == {("light", True), ("dark", False), ("auto", True)}
        while page.evaluate("document.documentElement.dataset.mode") != "dark":
            page.click(".bd-header-article .theme-switch-button")
        visit.open("book/glossary.html")  # is remembered
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert not visit.wrong, visit.wrong


def test_sidebar_opens_on_a_phone(browser, book):
    with Visit(browser, book, PHONE) as visit:
        page = visit.open("book/index.html")
        link = page.locator(".bd-sidebar-primary a[href*='03_gpipe'], dialog a[href*='03_gpipe']")
        assert not link.filter(visible=True).count()
        page.locator("button.primary-toggle").filter(visible=True).first.click()
        link.filter(visible=True).first.click()
        page.wait_for_url("**/03_gpipe.html")
        assert not visit.wrong, visit.wrong


def test_notebooks_download(browser, book):
    """Every notebook is in the book as it is here; opened as a file it shows, from a server it is saved."""
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks
    for notebook in notebooks:
        page = (book / f"notebooks/{notebook.stem}.html").read_text()
        (target,) = re.findall(r'<a href="([^"]+)"[^>]*\sclass="[^"]*btn-download-source-button', page)
        assert (book / "notebooks" / target).resolve().read_bytes() == notebook.read_bytes(), target
    with Visit(browser, book) as visit:
        page = visit.serve(f"notebooks/{notebook.name.replace('ipynb', 'html')}")
        page.click(".dropdown-download-buttons > button")
        with page.expect_download() as download:
            page.click("a.btn-download-source-button")
        assert download.value.suggested_filename == notebook.name
        assert not visit.wrong, visit.wrong


def test_paper(browser, book):
    """Printed from the dark: light, the text alone, nothing cut; folded blocks only where the reader opened them."""
    dark = "document.documentElement.dataset.theme === 'dark'"
    with Visit(browser, book, PAPER, "dark") as visit:
        for name in (CHAPTER, "book/sources.html"):
            page = visit.open(name)
            page.evaluate("MathJax.startup.promise")
            page.evaluate("() => document.querySelector('section > details, .cell > details').open = true")
            assert page.evaluate(dark)
            page.emulate_media(media="print", color_scheme="dark")
            page.wait_for_function(f"!({dark})")
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
            visit.ask(PALE, name)
            visit.ask(TOO_WIDE, name)
            visit.ask(CUT, name)
            visit.wrong += page.evaluate("""() => {
              const shown = (e) => e.checkVisibility() && e.getBoundingClientRect().height > 0;
              const wrong = [];
              for (const e of document.querySelectorAll(".bd-sidebar, .bd-header-article, .bd-footer, .copybtn"))
                if (shown(e)) wrong.push("shown: " + e.className);
              for (const e of document.querySelectorAll("section > details, .cell > details"))
                if (shown(e) !== !e.closest("details:not([open])")) wrong.push("folded: " + e.textContent.slice(0, 40));
              return wrong;
            }""")
            page.emulate_media(media="screen", color_scheme="dark")
            page.wait_for_function(dark)
        pdf = visit.open(CHAPTER).pdf(format="A4", print_background=True, prefer_css_page_size=True)
        assert 5 < len(re.findall(rb"/Type /Page\b", pdf)) < 40
        assert len(pdf) < 5e6, f"{len(pdf) / 1e6:.1f} MB"
        page = visit.open("book/cheat_sheet.html")
        page.emulate_media(media="null")
        sheet = page.pdf(print_background=True, prefer_css_page_size=True)
        assert len(re.findall(rb"/Type /Page\b", sheet)) == 1, "the cheat sheet is more than a page"
        assert page.evaluate(dark)
        assert not visit.wrong, "\n".join(visit.wrong)
