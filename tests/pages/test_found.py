"""The book's search, in Chromium and from files: people's own words lead to the section that answers."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import pytest

import browser as chromium
from pplab.lab.planning import RULES, TITAN_RULES, TORCH_RULES

pytestmark = pytest.mark.slow

LINES = Path(__file__).with_name("searches.txt").read_text().splitlines()
SEARCHES = dict(line.split(" -> ") for line in LINES if " -> " in line)
RIGHT = {
    query: re.compile("|".join(re.escape(place).replace(r"\*", ".*") for place in right.split())).fullmatch
    for query, right in SEARCHES.items()
}
FOUND = (
    """queries => queries.map((query) => pplabSearch(query).map(({ page, anchor }) => page.split("/")[1] + anchor))"""
)


@pytest.fixture(scope="module")
def tab():
    with chromium.launched_or_skipped() as browser, chromium.watched_tabs(browser) as opened:
        yield opened()


def test_the_first_section_answers(tab, book):
    """Of all but a few, whose words an edit elsewhere may have brought into another section; those are among three."""
    tab.goto((book / "search.html").as_uri())
    found = dict(zip(SEARCHES, tab.evaluate(FOUND, list(SEARCHES)), strict=True))

    def missed(first: int) -> dict[str, list[str]]:
        return {query: found[query][:3] for query in SEARCHES if not any(map(RIGHT[query], found[query][:first]))}

    assert len(SEARCHES) > 150 and not missed(3), missed(3)
    assert len(missed(1)) <= 0.05 * len(SEARCHES), missed(1)


@pytest.mark.parametrize(
    ("table", "rules"),
    [("what-megatron-lm-says", RULES), ("what-pytorch-and-torchtitan-say", (*TITAN_RULES, *TORCH_RULES))],
)
def test_an_error_is_found_by_its_words(tab, book, table, rules):
    """Of each rule of a framework's, with numbers in the places where it has some."""
    tab.goto((book / "search.html").as_uri())
    errors = [rule.error.replace("{}", "8") for rule in rules]
    found = tab.evaluate(FOUND, errors)
    here = f"frameworks#{table}"
    at = [any(place.startswith(here) for place in places[:3]) for places in found]
    assert [error for error, there in zip(errors, at, strict=True) if not there] == []


def test_it_leads_to_places_that_exist(tab, book):
    tab.goto((book / "search.html").as_uri())
    pages = tab.evaluate("pplabSections.map(([page, rows]) => [page, rows.map(([anchor]) => anchor.slice(1))])")
    assert len(pages) > 30 and sum(len(anchors) for _, anchors in pages) > 500
    for page, anchors in pages:
        ids = {*re.findall(r'\bid="([^"]+)"', (book / f"{page}.html").read_text()), ""}
        assert ids.issuperset(anchors), (page, set(anchors) - ids)


def test_results_are_quoted_from_files_too(tab, book):
    def search(query: str) -> None:
        tab.goto(f"{(book / 'search.html').as_uri()}?q={quote(query)}")

    search("--virtual-pipeline-model-parallel-size & <b>")
    first = tab.locator("#search-results li").first
    assert first.locator("a").inner_text() == "Ranks, stages of a rank, groups"
    assert "The same thing in your framework" in first.inner_text()
    assert "virtual_pipeline_model_parallel_size" in first.locator("mark").all_inner_texts()
    assert 100 < len(first.locator("p").inner_text()) < 300
    first.locator("a").click()
    assert tab.url.endswith("/book/frameworks.html#ranks-stages-of-a-rank-groups")
    search("xyzzy")
    assert "Nothing in the book" in tab.inner_text("#search-results")
    assert tab.locator("#search-results li").count() == 0
    search("DeepSeek-V9 hangs")
    assert "No section has “DeepSeek-V9”. These have" in tab.inner_text("#search-results [role=status]")
    assert tab.locator("#search-results li").count() > 3
