"""Coverage and errata: what a row points at says what the row promises. Plain text only."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "book"
MENTIONED, LEFT_OUT = "mentioned: ", "left out: "
LINK = re.compile(r'\[([^]]+)\]\(([^)#\s]+)(?:#([^)\s]+))?(?: "([^"]+)")?\)')


@dataclass(frozen=True)
class Row:
    """A row of coverage.md. `where` holds links, perhaps after "mentioned: ", or says why there are none."""

    what: str
    where: str

    def __str__(self) -> str:
        return self.what


def table_rows(page: str) -> list[list[str]]:
    """The cells of every row of a page's tables, without headings."""
    tables = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)+)", (BOOK / page).read_text(), re.M)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for table in tables for line in table.splitlines()]


ROWS = [Row(*row) for row in table_rows("coverage.md")]


def without_headings(code: str) -> str:
    """Code or output, in which a line that starts with # is no heading."""
    return re.sub("^#", " #", code, flags=re.M)


@cache
def blocks(path: Path) -> list[str]:
    """A page's text, split before its headings. Of a notebook also the code, and the outputs that are text."""
    texts = [path.read_text()]
    if path.suffix == ".ipynb":
        texts = []
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            texts.append(source if cell["cell_type"] == "markdown" else without_headings(source))
            for output in cell.get("outputs", []):
                shown = output.get("text", output.get("data", {}).get("text/plain", ""))
                texts.append(without_headings("".join(shown)))
    text = re.sub("^```.*?^```", lambda fence: without_headings(fence[0]), "\n".join(texts), flags=re.M | re.S)
    return re.split(r"^(?=#+ )", text, flags=re.M)


def level(block: str) -> int:
    return len(block) - len(block.lstrip("#"))


def section(target: str, anchor: str | None) -> str:
    """The text that a link leads to: to the next heading of its level, or what stands before a page's second one."""
    path = (BOOK / target).resolve()
    path = next(p for p in (path, path.with_suffix(".ipynb"), path.with_suffix(".md")) if p.is_file())
    found = blocks(path)
    if anchor is None:
        return "".join(found[:2])
    for i, block in enumerate(found):
        heading = block.lstrip("#").strip().partition("\n")[0].strip()
        if re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") == anchor:
            below = (j for j in range(i + 1, len(found)) if level(found[j]) <= level(block))
            return "".join(found[i : next(below, len(found))])
    raise AssertionError(f"{path.name} has no heading with the anchor #{anchor}")


def plain(text: str) -> str:
    """Lower case, single spaces, and a glossary's or emphasis' marks taken away."""
    text = re.sub(r"\{term\}`([^`<]+?)(?: <[^>]+>)?`", r"\1", text)
    text = re.sub(r"\[([^][]+)\]\(\.\./book/glossary\.md[^)]*\)", r"\1", text)
    return " ".join(text.replace("*", "").lower().split())


def test_plain_text_and_sections():
    assert plain("A {term}`stage <stages>`\n  **is** a {term}`Rank`") == "a stage is a rank"
    assert plain('A [stage](../book/glossary.md "stages") is a [rank](../book/glossary.md)') == "a stage is a rank"
    assert "### More microbatches" in section("../notebooks/01_bubble_math.ipynb", "the-bill")
    with pytest.raises(AssertionError, match="no heading"):
        section("sources.md", "nothing-here")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_is_true(row):
    """Its links lead to sections that contain the words of their tooltips, or it says why there are none."""
    links = LINK.findall(row.where)
    promised = [(target, anchor, words) for _, target, anchor, words in links if words]
    if row.where.startswith(LEFT_OUT):
        assert not promised and len(row.where) > 20, "say why it is left out, without links"
    else:
        assert promised and len(promised) == len(links), 'every link needs words, as in [text](page#anchor "words")'
    for target, anchor, words in promised:
        text = plain(section(target, anchor or None))
        for word in words.split("; "):
            assert plain(word) in text, f"{target}#{anchor} doesn't contain {word!r}"


def test_a_number_is_that_of_its_section():
    """Of a chapter's second-level headings, the one that a link's anchor is, or is below."""
    numbered = [link for row in ROWS for link in LINK.findall(row.where) if re.fullmatch(r"\d+\.\d+", link[0])]
    assert len(numbered) > 100
    for text, target, anchor, _ in numbered:
        path = (BOOK / target).resolve()
        found = blocks(path)
        at = next(i for i, block in enumerate(found) if block and section(target, anchor).startswith(block))
        count = sum(level(block) == 2 for block in found[: at + 1])
        assert text == f"{int(path.name[:2])}.{count}", f"{target}#{anchor} is {count} of its chapter"


def test_what_the_page_says_of_itself():
    mentioned, left_out = (sum(row.where.startswith(state) for row in ROWS) for state in (MENTIONED, LEFT_OUT))
    opening = " ".join((BOOK / "coverage.md").read_text().partition("\n## ")[0].split())
    for said in (
        f"Of {len(ROWS)} rows {len(ROWS) - mentioned - left_out} are *taught*",
        f"{mentioned} are *mentioned*",
        f"{left_out} are *left out*",
    ):
        assert said in opening, f"book/coverage.md has to begin with: {said}"


ERRATA = [cells for cells in table_rows("sources.md") if len(cells) == 4]


@pytest.mark.parametrize("cells", ERRATA, ids=lambda cells: f"{cells[0]}: {cells[1][:60]}")
def test_a_slip_is_asserted_or_its_evidence_linked(cells):
    """Where a row has a tick, the section that it points at asserts something or has exercises."""
    where = cells[3]
    links = [(target, anchor) for _, target, anchor, _ in LINK.findall(where)]
    labels = re.findall(r"\{ref\}`below <([\w-]+)>`", where)
    assert links or labels, "link the section that shows it"
    page = (BOOK / "sources.md").read_text()
    texts = [section(target, anchor or None) for target, anchor in links if not target.startswith("http")]
    texts += [page.partition(f"({label})=\n")[2].partition("\n(errata-")[0] for label in labels]
    if "✓" in where:
        shown = texts and all("assert" in text or "exercise." in text for text in texts)
        assert shown, f"a section that it links asserts nothing: {where}"
    else:
        assert any(target.startswith("http") for target, _ in links) or texts, f"no evidence is linked: {where}"
