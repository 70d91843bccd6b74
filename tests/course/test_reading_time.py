"""How long chapters take: their heads, the first page's paths and the README say what one rule counts.

A minute of reading is 200 words of prose, ten lines of visible code or three charts. Exercises, tables and comments
aren't counted, nor are code and formulas that are shown apart. On top come a minute for each folded answer, five for a
game, two for an explorer, and one and a half for a formula.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NOT_READ = re.compile(
    r"""```.*?```|\$\$.*?\$\$|^\|.*?$|<!--.*?-->|<details class="answer">.*?</summary>|</details>""", re.S | re.M
)
AS_A_WORD = re.compile(r"\$[^$]*\$|`[^`]*`|\]\([^)]*\)")


@cache
def minutes(path: Path) -> float:
    words = lines = charts = 0
    exercises = False
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text, heading, asked = text.partition("## Exercises")
            exercises = bool(heading) or exercises and not re.search(r"^## ", text, re.M)
            if heading or not exercises:
                words += len(AS_A_WORD.sub(" x ", NOT_READ.sub(" ", text)).split())
        elif not exercises:
            hidden = any(tag.startswith(("hide", "remove")) for tag in cell["metadata"].get("tags", []))
            hidden |= text.startswith("%%writefile")  # the course's file, which the text explains line by line
            lines += 0 if hidden else sum(bool(line.strip()) for line in text.splitlines())
            charts += sum("image/png" in output.get("data", {}) for output in cell["outputs"])
    return words / 200 + lines / 10 + charts / 3


def head(path: Path) -> str:
    return "".join(json.loads(path.read_text())["cells"][0]["source"])


def said(path: Path) -> int:
    return int(re.search(r"\*Reading time: (\d+) minutes", head(path))[1])


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapters_head_says_how_long_it_takes(path):
    assert abs(said(path) - minutes(path)) <= 2, f"say *Reading time: {minutes(path):.0f} minutes* in its first cell"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapters_head_tells_reading_and_doing_apart(path):
    cells = json.loads(path.read_text())["cells"]
    prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    prose = prose.partition("## Exercises")[0]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    answers, formulas = prose.count('<details class="answer">'), prose.count("$$") / 2
    games, explorers = (len(re.findall(rf"^{name}\(", code, re.M)) for name in ("play", "explore"))
    takes = answers + 5 * games + 2 * explorers + 1.5 * formulas
    what = "guess and play" if answers and games else "guess and think" if answers else "think"
    found = re.search(rf"minutes, some (\d+) more to {what}, ", head(path))
    assert found and abs(int(found[1]) - takes) <= 5, f"say some {max(5, 5 * round(takes / 5))} more to {what}"


def test_the_course_is_read_in_seven_hours():
    total = sum(map(minutes, CHAPTERS))
    assert total <= 430, f"{total:.0f} minutes: let what is new take the place of something, or give it a page"
    assert 25 < total / len(CHAPTERS) < 35, "the first page says that a chapter takes about half an hour"
    assert len(CHAPTERS) == 14, f"{len(CHAPTERS)} chapters: say so here, and what the course takes now"


def test_the_first_page_adds_up():
    page = (ROOT / "book/index.md").read_text()
    doors = re.findall(r"^- \*\*I\b.*: (\[\d+\].*)\. \*(\d+) minutes\*$", page, re.M)
    assert len(doors) == 3 and f"All of it takes {sum(map(said, CHAPTERS))} minutes." in " ".join(page.split())
    for chapters, shown in doors:
        total = sum(said(CHAPTERS[int(n) - 1]) for n in re.findall(r"\[(\d+)\]", chapters))
        assert total == int(shown), f"book/index.md: {chapters} take {total} minutes, and the page says {shown}"


def title_and_question(path: Path) -> tuple[str, str]:
    title, question = re.match(r"# (.+)\n\n\*\*([^*]+)\*\*", head(path)).groups()
    return title, " ".join(question.split())


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_the_first_page_lists_it_and_what_a_reader_can_do_then(path):
    title, question = title_and_question(path)
    row = f"| [{int(path.stem[:2])}. {title}](../notebooks/{path.stem}) | {question} | "
    _, found, after = (ROOT / "book/index.md").read_text().partition(row)
    assert found, f"book/index.md lacks this row, of the chapter's own words: {row}"
    assert re.match(r"[a-z]+ .* \|\n", after), f"{path.name}: the first page doesn't say what a reader can do after it"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_the_readme_lists_it(path):
    title, question = title_and_question(path)
    row = f"| {int(path.stem[:2])} | [{title}](notebooks/{path.name}) | {question} |"
    assert row in (ROOT / "README.md").read_text(), f"README.md lacks this row, of the chapter's own words: {row}"
