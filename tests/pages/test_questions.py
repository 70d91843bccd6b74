"""The page of questions: every cell runs, every number of an answer is found, and an entry has all its parts.

One process runs the cells, without a browser. A number of an answer stands in its question, in its cell or what that
prints, or in the section behind it; the number in bold in what the cell prints, or without a cell in that section.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "book" / "_ext"))
from pplab_search import ASKED  # noqa: E402

PAGE = ROOT / "book" / "questions.md"
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
CELL = re.compile(r"```\{code-cell\} ipython3\n:tags: \[live\]\n(.*?)\n```\n", re.S)
ORIGIN = re.compile(r"^Asked (?:in|about).*$", re.M)


class Entry(NamedTuple):
    title: str
    answer: str
    cell: str
    origin: str
    words: list[str]


def entries(text: str) -> list[Entry]:
    found = []
    for part in re.split(r"^### ", text, flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        body = body.partition("\n## ")[0]
        cell, origin = CELL.search(body), ORIGIN.search(body)
        words = [word for said in ASKED.findall(body) for word in said.split(", ")]
        answer = re.sub(r"<!--.*?-->", "", ORIGIN.sub("", CELL.sub("", body))).strip()
        found.append(Entry(title, answer, cell[1] if cell else "", origin[0] if origin else "", words))
    return found


ENTRIES = entries(PAGE.read_text())


def numbers(text: str, words: list[str] = WORDS) -> set[float]:
    """All numbers of a text, in digits or as words; not those in names, such as 1F1B, in code, or in addresses."""
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)
    found = {float(each.replace(",", "")) for each in re.findall(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?!\w)", plain)}
    return found | {float(words.index(word)) for word in re.findall(r"[a-z]+", plain.lower()) if word in words}


def named(title: str) -> str:
    """A section's anchor, by its title."""
    return re.sub(r"[^\w -]", "", title.lstrip("# ").lower()).replace(" ", "-")


@cache
def section(place: str) -> str:
    """The text of a page, or of its section, with what a notebook's cells print there."""
    name, _, anchor = place.partition("#")
    path = (PAGE.parent / name).resolve()
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        printed = {id(cell): "".join("".join(o.get("text", "")) for o in cell.get("outputs", ())) for cell in cells}
        text = "\n\n".join("".join(cell["source"]) + "\n" + printed[id(cell)] for cell in cells)
    if not anchor:
        return text
    text = re.sub(r"^```.*?^```$", lambda code: code[0].replace("\n#", "\n "), text, flags=re.M | re.S)
    titles = {named(part.partition("\n")[0]): part for part in re.split(r"^(?=#+ )", text, flags=re.M)}
    assert anchor in titles, f"{place}: no such section"
    return titles[anchor]


@cache
def printed(cell: str) -> str:
    """What a cell prints, alone, and its last expression."""
    tree, space = ast.parse(cell), {"__name__": "__main__"}
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, "a question's cell", "exec"), space)
        if last and (value := eval(compile(ast.Expression(last.value), "its last line", "eval"), space)) is not None:
            print(value)
    return out.getvalue()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title[:40])
def test_an_answer_is_short_and_its_numbers_are_found(entry):
    plain = re.sub(r"`[^`]*`|\d\.\d|\]\([^)]*\)", "x", entry.answer)
    assert 3 <= len(re.findall(r"[.?!](?=\s|\*|$)", plain)) <= 6, "three to five sentences, or six short ones"
    assert len(entry.words) > 1, "say what else people type: <!-- asked: words, more words -->"
    thread = re.search(rf"\(https://github\.com/\S+\).*\b({MONTHS}) 20\d\d", entry.origin)
    assert thread and "Read on: [" in entry.origin, "name the thread, its month, and the section behind the answer"
    behind, said = (
        section(entry.origin.rpartition("](")[2].partition(")")[0]),
        printed(entry.cell) if entry.cell else "",
    )
    bold = [number for bold in re.findall(r"\*\*(.+?)\*\*", entry.answer) for number in numbers(bold, [])]
    assert bold and set(bold) <= numbers(said or behind), (bold, said)
    assert "arguments are required" not in said
    known = numbers(entry.title) | numbers(entry.cell) | numbers(said) | numbers(behind)
    assert (lacking := numbers(entry.answer, []) - known) == set(), (lacking, said)


def test_a_number_that_is_wrong_is_noticed():
    entry = next(entry for entry in ENTRIES if "perfectly balanced" in entry.title)
    wrong = entry._replace(answer=entry.answer.replace("**8**", "**7.5**"))
    test_an_answer_is_short_and_its_numbers_are_found(entry)
    with pytest.raises(AssertionError, match="7.5"):
        test_an_answer_is_short_and_its_numbers_are_found(wrong)


def test_there_are_many_and_no_two_alike():
    titles = [entry.title for entry in ENTRIES]
    assert len(titles) >= 60 and len({*titles}) == len(titles)
    assert sum(bool(entry.cell) for entry in ENTRIES) > 0.75 * len(titles)
    assert all("live" in tags for tags in re.findall(r"code-cell\} ipython3\n:tags: \[(.*?)\]", PAGE.read_text()))
