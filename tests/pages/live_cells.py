"""What comes of each cell of the chapters in their built pages: run as a reader would, in a browser without a network.

`python tests/pages/live_cells.py BOOK` writes book/_live/needs.json anew: cells, by chapter, that need what the page
can't have.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]
NEEDS = ROOT / "book" / "_live" / "needs.json"
PAGE = "application/vnd.pplab.page+html"
CHAPTERS = tuple(path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb")))
SOLUTION = re.compile(r"<summary>Solution</summary>.*?```python\n(.*?)```", re.S)

# Run a text as a cell of the page's, and what it needs before it, as the page does.
RUN = """async ([id, text]) => {
  const cell = pplabLive.cells().find((each) => each.id === id);
  const events = [], show = cell.show.bind(cell), own = cell.text;
  cell.show = (event) => { events.push(event); show(event); };
  if (text !== null) cell.text = text;
  const began = performance.now();
  await pplabLive.run(id);
  cell.text = own;
  delete cell.show;
  return { events, note: cell.note.textContent, ms: performance.now() - began };
}"""


@dataclass
class Outcome:
    """What came of a cell."""

    text: str = ""  # what it printed, and texts of what it showed
    charts: int = 0
    error: str = ""  # last line
    note: str = ""  # what the page says beside it
    ms: float = 0.0
    absent: str = ""  # what it needs that the page can't have


def outcome(told: dict) -> Outcome:
    """What a page's events come to."""
    made = Outcome(note=told["note"], ms=told["ms"])
    for kind, *what in told["events"]:
        if kind == "stream" and what[0] == "stdout":
            made.text += what[1]
        elif kind == "display":
            made.charts += PAGE in what[0]
            made.text += what[0].get("text/plain", "") + "\n"
        elif kind == "error":
            made.error, made.absent = what[1].splitlines()[-1], what[3]
    return made


def recorded(cell: dict) -> Outcome:
    """What the notebook has kept of a cell."""
    made = Outcome()
    for output in cell["outputs"]:
        if output.get("metadata", {}) == {"pplab": "folded"}:
            continue
        if output["output_type"] == "stream":
            made.text += "".join(output["text"]) * (output["name"] == "stdout")
        else:
            made.charts += PAGE in output["data"]
            made.text += "".join(output["data"].get("text/plain", "")) + "\n"
    return made


def on_page(chapter: str) -> Iterator[tuple[dict, str | None]]:
    """A chapter's code cells that its page shows, in order, each with the solution where it asks for an answer."""
    solution = None
    for cell in json.loads((ROOT / "notebooks" / f"{chapter}.ipynb").read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            solution = (SOLUTION.findall(text) or [solution])[-1]
        elif not {"explorer", "remove-cell"} & set(cell["metadata"].get("tags", ())):
            asks = re.match(r"exercise\.\w+\([^)]*\.\.\.", text)
            yield cell, solution if asks else None
            solution = None if asks else solution


def open_chapter(tab: Page, book: Path, chapter: str) -> None:
    """Open a chapter's page as a file."""
    tab.goto((book / "notebooks" / f"{chapter}.html").as_uri())
    tab.wait_for_function("globalThis.pplabLive && pplabLive.cells().length")


def run(tab: Page, cell: dict, text: str | None = None) -> Outcome:
    """Run a cell, or another text in its place."""
    return outcome(tab.evaluate(RUN, [cell["id"], text]))


def answer(tab: Page, cell: dict, text: str) -> None:
    """Answer an exercise as a hand does: open its editor, type key by key, check."""
    place = tab.locator(f"#cell-{cell['id']}")
    place.get_by_role("button", name="Answer").press("Enter")  # a pointer may miss what moves on a busy machine
    place.get_by_role("textbox").press("Control+a")
    for number, line in enumerate(text.splitlines()):
        if number:
            tab.keyboard.press("Enter")
            tab.keyboard.press("Shift+Home")  # the editor's own indentation
        tab.keyboard.type(line)
    assert written(tab, cell).strip() == text.strip(), written(tab, cell)
    check = place.get_by_role("button", name="Check")
    check.press("Enter")
    check.wait_for()  # while it runs, it stops it


def written(tab: Page, cell: dict) -> str:
    """What a cell's editor has."""
    lines = tab.locator(f"#cell-{cell['id']} .cm-line").all_inner_texts()
    return "\n".join(line.rstrip("\n") for line in lines)


def read_again(tab: Page, book: Path, chapter: str, cell: dict) -> None:
    """Open the page anew: the answer is there with its verdict, and counts."""
    open_chapter(tab, book, chapter)
    tab.locator(f"#cell-{cell['id']}").get_by_text("✓ right").wait_for()
    assert "not answered" not in tab.locator(f"#cell-{cell['id']}").inner_text()
    assert not tab.locator(".live-tally").inner_text().startswith("0 of")
    tab.evaluate("localStorage.clear()")


def needs(tab: Page, book: Path) -> dict[str, dict[str, str]]:
    """What cells and exercises' solutions need, by chapter and cell: the absent thing that they used, or that of a cell
    above which they need."""
    found: dict[str, dict[str, str]] = {}
    for chapter in CHAPTERS:
        open_chapter(tab, book, chapter)
        last = ""
        for cell, solution in on_page(chapter):
            made = run(tab, cell, solution)
            last = made.absent or last
            if made.error or (solution and not made.text.startswith("✓")):
                found.setdefault(chapter, {})[cell["id"]] = made.absent or last
                print(chapter, cell["id"], made.absent, made.error or made.text, flush=True)
    return found


def main() -> None:
    import browser as chromium

    with chromium.launched_or_skipped() as browser:
        found = needs(browser.new_page(), Path(sys.argv[1]).resolve())
    NEEDS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main()
