"""The glossary where its terms are used: definitions beside links, in Chromium and from files, and the way back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import browser as chromium

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
LINK = re.compile(r'\[([^][]+)\]\(\.\./book/glossary\.md(?: "([^"]+)")?\)')
RANK = 'article a[href$="#term-rank"] >> nth=0'
CHAPTER = "notebooks/01_bubble_math.html"


@pytest.fixture(scope="module")
def opened():
    with chromium.launched_or_skipped() as browser, chromium.watched_tabs(browser) as opened:
        yield opened


def test_a_definition_comes_and_goes(opened, book):
    tab = opened()
    tab.goto((book / CHAPTER).as_uri())
    link, box = tab.locator(RANK), tab.locator("#pplab-term")
    link.hover()
    box.wait_for(state="visible")
    said = "A process of the pipeline. There are P of them, numbered from 0. Usually a rank has a GPU to itself."
    assert box.inner_text() == f"{said} In the glossary"
    assert link.get_attribute("aria-describedby") == "pplab-term"
    box.hover()  # it stays under the pointer
    tab.wait_for_timeout(300)
    assert box.is_visible()
    tab.mouse.move(1, 1)
    box.wait_for(state="hidden")
    link.focus()
    assert box.is_visible()
    tab.keyboard.press("Escape")
    assert box.is_hidden() and link.get_attribute("aria-describedby") is None
    link.click()
    assert tab.url.endswith("/book/glossary.html#term-rank")


def test_a_finger_taps_twice(opened, book):
    tab = opened(390, has_touch=True)
    tab.goto((book / CHAPTER).as_uri())
    link, box = tab.locator(RANK), tab.locator("#pplab-term")
    link.tap()
    assert box.is_visible() and tab.url.endswith(CHAPTER)
    sides = box.bounding_box()
    assert 0 <= sides["x"] and sides["x"] + sides["width"] <= 390
    tab.locator("article h1").last.tap()
    assert box.is_hidden()
    link.tap()
    link.tap()
    tab.wait_for_url("**/book/glossary.html#term-rank")
    tab.go_back()
    link.tap()
    box.locator("a").tap()
    tab.wait_for_url("**/book/glossary.html#term-rank")


def test_every_linked_term_has_its_definition(book):
    for path in book.glob("*/*.html"):
        page = path.read_text()
        linked = set(re.findall(r'class="reference internal" href="[^"]*#(term-[^"]+)"', page))
        found = re.search(r'<script type="application/json" id="pplab-terms">(.*?)</script>', page)
        definitions = json.loads(found[1]) if found else {}
        assert definitions.keys() == linked, path
        assert all(20 < len(text) < 700 and "\\" not in text for text in definitions.values()), path


def test_the_glossary_says_where_terms_are_used(book):
    glossary = (book / "book/glossary.html").read_text()
    entries = dict(
        re.findall(r'<dt id="term-[^"]+">(.+?)<a class="headerlink.*?</dt>(.*?)(?=<dt|</dl>)', glossary, re.S)
    )
    said = {term.lower(): set(re.findall(r"notebooks/(\w+)\.html", text)) for term, text in entries.items()}
    used: dict[str, set[str]] = {}
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text())["cells"]:
            for words, term in LINK.findall("".join(cell["source"]) if cell["cell_type"] == "markdown" else ""):
                used.setdefault(" ".join((term or words).lower().split()), set()).add(path.stem)
    assert len(used) > 40
    for term, chapters in used.items():
        assert chapters <= said[term], (term, chapters, said[term])
