"""Cells in the built pages, opened as files in a browser without a network: what their reader has of them."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import live_cells as live
import pytest
from playwright.sync_api import Page

import browser as chromium

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "book" / "_live"))
from kernel import ABSENT  # noqa: E402

NEEDS = json.loads(live.NEEDS.read_text())
SERVER = "http://bare.test/"  # answered by the test
AN_HOUR = "while True: pass"

# What the tests of the checkers import beside the package, for their tables of wrong answers in the page's Python.
STAND_INS = """
import sys, types
__file__ = "/app/tests/course/table.py"
from types import SimpleNamespace

class Anything:
    def __getattr__(self, name): return self
    def __call__(self, *given, **named):  # as a decorator it leaves the function
        return given[0] if len(given) == 1 and callable(given[0]) and not named else self

pytest, conftest, checkers = map(types.ModuleType, ("pytest", "conftest", "checkers"))
pytest.param = lambda *values, **_: SimpleNamespace(values=values)
pytest.mark = pytest.fixture = pytest.raises = Anything()
conftest.assert_explained = None
sys.modules |= {"pytest": pytest, "conftest": conftest, "checkers": checkers}
"""
TRY_ALL = """
refused, elsewhere = 0, 0
for check, answer, says in (getattr(row, "values", row) for row in WRONG):
    try:
        verdict = check(answer)
    except ImportError:  # this checker needs torch
        elsewhere += 1
        continue
    assert verdict.right is False and says in verdict.says or "torch" in verdict.says, (check, answer, verdict)
    refused += verdict.right is False
print(refused, elsewhere)
"""


@pytest.fixture(scope="module")
def tabs() -> Iterator[Callable[..., Page]]:
    with chromium.launched_or_skipped() as browser, chromium.watched_tabs(browser, SERVER) as opened:
        yield opened


@pytest.fixture(scope="module")
def tab(tabs) -> Page:
    return tabs()


# Chapters whose searches and pools take as long in a page as all others do. nbval executes their cells, too.
SELDOM = ("03", "07", "10", "12")
OFTEN = [pytest.param(each, marks=[pytest.mark.long] * each.startswith(SELDOM)) for each in live.CHAPTERS]


@pytest.mark.parametrize("chapter", OFTEN)
def test_cells_say_what_is_recorded_and_solutions_are_accepted(tab, book, chapter):
    def needs(cell: dict) -> str | None:
        return NEEDS.get(chapter, {}).get(cell["id"])

    live.open_chapter(tab, book, chapter)
    for cell, solution in live.on_page(chapter):
        name = (chapter, cell["id"])
        made, kept = live.run(tab, cell, solution), live.recorded(cell)
        if needs(cell):
            assert made.error or "✓" not in made.text, (name, "runs: record needs.json anew")
            continue
        if solution is not None:
            assert made.text.startswith("✓"), (name, made)
            continue
        assert not made.error and made.charts == kept.charts, (name, made)
        if "nbval-ignore-output" not in cell["metadata"].get("tags", ()):
            assert made.text.strip() == kept.text.strip(), (name, made, kept)
    if chapter == live.CHAPTERS[0]:
        assert tab.locator(".live-mine .pplab-offer").count()  # its charts of time can be played
    judged = [
        (" ".join(solution.split()), cell) for cell, solution in live.on_page(chapter) if solution and not needs(cell)
    ]
    solution, cell = min(judged, key=lambda each: len(each[0]))
    live.answer(tab, cell, solution)
    tab.locator(f"#cell-{cell['id']}").get_by_text("✓ right").wait_for()
    live.read_again(tab, book, chapter, cell)


def test_a_cell_of_a_page_in_markdown_runs(tab, book):
    """tests/pages/test_questions.py runs all of them without a browser."""
    tab.goto((book / "book" / "questions.html").as_uri())
    tab.wait_for_function("globalThis.pplabLive && pplabLive.cells().length > 60")
    cell = tab.evaluate(
        "pplabLive.cells().find((each) => each.printed.includes('num_ranks=8, num_microbatches=32')).id"
    )
    made = live.run(tab, {"id": cell})
    assert made.text == "(8, 7, 6, 5, 4, 3, 2, 1)\n", made


@pytest.mark.long  # test_cells_say_what_is_recorded_and_solutions_are_accepted types one of each chapter
@pytest.mark.parametrize("chapter", live.CHAPTERS)
def test_every_solution_is_typed_and_read_again(tabs, book, chapter):
    tab = tabs()
    for cell, solution in live.on_page(chapter):
        if solution and cell["id"] not in NEEDS.get(chapter, {}):
            live.open_chapter(tab, book, chapter)
            live.answer(tab, cell, solution.strip())
            tab.locator(f"#cell-{cell['id']}").get_by_text("✓ right").wait_for()
            live.read_again(tab, book, chapter, cell)


def test_every_printable_key_arrives(tabs, book):
    """Among the book's other scripts: the search took the slash of a division once."""
    tab, chapter = tabs(), live.CHAPTERS[0]
    live.open_chapter(tab, book, chapter)
    cell = next(cell for cell, solution in live.on_page(chapter) if solution)
    place = tab.locator(f"#cell-{cell['id']}")
    place.get_by_role("button", name="Answer").click()
    box, lost = place.get_by_role("textbox"), []
    for key in map(chr, range(33, 127)):
        box.press("Control+a")
        tab.keyboard.type(key)
        if not live.written(tab, cell).startswith(key):
            lost.append(key)
    box.press("Control+a")
    tab.keyboard.type("x = 7/2 + 9//4 - 'a b'")
    assert not lost and live.written(tab, cell) == "x = 7/2 + 9//4 - 'a b'", (lost, live.written(tab, cell))


def test_what_a_browser_does_not_keep_is_told(tabs, book):
    tab, chapter = tabs(), live.CHAPTERS[0]
    full = "Storage.prototype.setItem = (key) => { if (key.startsWith('pplab:')) throw new Error('full'); }"
    tab.add_init_script(full)
    live.open_chapter(tab, book, chapter)
    cell = next(cell for cell, solution in live.on_page(chapter) if solution)
    place = tab.locator(f"#cell-{cell['id']}")
    place.get_by_role("button", name="Answer").click()
    place.get_by_role("textbox").press_sequentially("18")
    tab.locator(".live-tally").get_by_text("no room to keep what you write").wait_for()
    tab.evaluate(f"dispatchEvent(new StorageEvent('storage', {{ key: 'pplab:{chapter}:any' }}))")
    tab.locator(".live-tally").get_by_text("in a second tab, too").wait_for()


def test_most_cells_run_and_most_exercises_are_judged():
    cells = [(chapter, cell["id"], solution) for chapter in live.CHAPTERS for cell, solution in live.on_page(chapter)]
    assert {what for found in NEEDS.values() for what in found.values()} <= ABSENT  # words for a reader
    elsewhere = [solution for chapter, name, solution in cells if name in NEEDS.get(chapter, {})]
    asked = [solution for *_, solution in cells if solution]
    assert elsewhere.count(None) <= 0.2 * len(cells), (elsewhere.count(None), len(cells))
    assert len(elsewhere) - elsewhere.count(None) <= 0.3 * len(asked)


def test_wrong_answers_are_refused_in_the_same_words(tab, book):
    live.open_chapter(tab, book, live.CHAPTERS[0])
    setup = next(cell for cell, _ in live.on_page(live.CHAPTERS[0]))
    helpers = (ROOT / "tests/course/checkers.py").read_text()
    refused = elsewhere = 0
    for path in sorted((ROOT / "tests/course").glob("test_exercises_*.py")):
        table = path.read_text().partition("\ntest_a_wrong_answer_is_explained")[0]
        text = f"{STAND_INS}\nexec({helpers!r}, vars(checkers))\n{table}\n{TRY_ALL}"
        made = live.run(tab, setup, text.replace("from __future__ import annotations", ""))
        if made.absent:  # the file itself needs torch
            continue
        assert not made.error, (path.name, made)
        first, second = map(int, made.text.split())
        refused, elsewhere = refused + first, elsewhere + second
    assert refused > 5 * elsewhere and refused > 300, (refused, elsewhere)


ROUGH = {  # a text, and what the page says then, in the cell or beside it
    "print(1 / 0)": "ZeroDivisionError: division by zero",
    "def f(:": "SyntaxError",
    "f = lambda: f()\nf()": "RecursionError",
    "while True: print('x' * 1000)": "200,000 characters",
    "while True: display(1)": "more than 500 outputs",
    "display('x' * 10**8)": "200,000 characters in one of them",
    "class R:\n    def _repr_mimebundle_(self, **_): return 7\nR()": "has to return a dict of texts, got 7",
    "input('name? ')": "NoInput: the page has no keyboard input",
    "import sys\nsys.exit(3)": "SystemExit: 3",
    "import os\nos._exit(1)": "Python itself has ended",
    "x = [b'x' * 10**8 for _ in range(100)]": "MemoryError",
    "import pandas": "No module named 'pandas'",
    "import torch\ntorch.zeros(3)": "needs torch, which the page can't have",
    "import multiprocessing as m\nm.Process()": "needs multiprocessing",
    "import threading\nthreading.Thread(target=print).start()": "needs threads",
    "import matplotlib.pyplot as plt\nplt.subplots()[1].contourf([[1, 2], [3, 4]])": "contourf",
}


def test_rough_handling_ends_well(tab, book):
    live.open_chapter(tab, book, live.CHAPTERS[0])
    cell = next(cell for cell, _ in live.on_page(live.CHAPTERS[0]))
    for text, says in ROUGH.items():
        made = live.run(tab, cell, text)
        assert says in made.error + made.note, (text, made)
        again = live.run(tab, cell, "print(6 * 7)")
        assert again.text == "42\n" and not again.error, (text, again)
    none = "class R:\n    def _repr_mimebundle_(self, **_): return None\n    def __repr__(self): return 'me'\nR()"
    assert live.run(tab, cell, none).text == "me\n"  # as in IPython


CHOOSE = """
from pplab import lab
box = lab.machine_of("h100", 8, between=50e9)
print(lab.choose(lab.Transformer(80, 8192, 4096, heads=64, vocabulary=128256), box, 64, 256, tp=(4, 8)).gpus)
"""


def test_long_work_tells_how_far_it_has_come(tab, book):
    live.open_chapter(tab, book, live.CHAPTERS[0])
    first = next(cell["id"] for cell, _ in live.on_page(live.CHAPTERS[0]))
    node = tab.locator(f"#cell-{first}")
    tab.evaluate("([id, text]) => { pplabLive.cells().find((c) => c.id === id).text = text; }", [first, CHOOSE])
    node.get_by_role("button", name="Run").click()
    node.get_by_text(re.compile(r"^running, \d+ s, planning layout \d+ of \d+ …$")).wait_for()
    node.get_by_text("made here in").wait_for(timeout=120_000)
    assert node.get_by_text("64", exact=True).count() == 1 and not node.get_by_text("planning").count()
    tab.evaluate("id => { pplabLive.cells().find((c) => c.id === id).text = undefined; }", first)


def test_stop_ends_a_loop_and_the_page_goes_on(tab, book):
    live.open_chapter(tab, book, live.CHAPTERS[0])
    cells = [cell["id"] for cell, _ in live.on_page(live.CHAPTERS[0])]
    first = tab.locator(f"#cell-{cells[0]}")
    tab.evaluate(f"id => {{ const c = pplabLive.cells().find((c) => c.id === id); c.text = {AN_HOUR!r}; }}", cells[0])
    first.get_by_role("button", name="Run").click()
    first.get_by_text("running, ").wait_for()
    first.get_by_role("button", name="Stop").click()
    first.get_by_text("Stopped.").wait_for()
    tab.evaluate("id => { pplabLive.cells().find((c) => c.id === id).text = undefined; }", cells[0])
    made = live.run(tab, {"id": "code-07"})  # and runs what it needs from above again
    assert "rank 0 is idle" in made.text and not made.error


def test_nothing_is_loaded_before_it_is_asked_for(tabs, book):
    tab, asked = tabs(), []
    tab.on("request", lambda request: asked.append(urlsplit(request.url).path.rpartition("/")[2]))
    live.open_chapter(tab, book, live.CHAPTERS[0])
    tab.wait_for_load_state("networkidle")
    assert not [name for name in asked if name.startswith(("python-", "editor", live.CHAPTERS[0] + "-"))]
    tab.get_by_role("button", name="Run").first.click()
    tab.get_by_text(" s", exact=False).first.wait_for()
    tab.wait_for_function("pplabLive.python.worker")
    assert any(name.startswith("python-0") for name in asked) and "editor.js" not in asked


def test_edits_and_answers_are_kept_and_undone(tabs, book):
    tab, chapter = tabs(), live.CHAPTERS[0]
    live.open_chapter(tab, book, chapter)
    cell, solution = next((cell, solution) for cell, solution in live.on_page(chapter) if solution)
    place = tab.locator(f"#cell-{cell['id']}")
    place.get_by_role("button", name="Answer").click()
    editor = place.get_by_role("textbox")
    editor.fill(solution.strip())
    editor.press("Control+Enter")
    place.get_by_text("✓ right").wait_for()
    assert "1 of" in tab.locator(".live-tally").inner_text()
    editor.press("Escape")
    assert tab.evaluate("document.activeElement.textContent") == "Check"
    tab.reload()
    live.open_chapter(tab, book, chapter)
    assert place.locator("pre").first.inner_text().strip() == solution.strip()
    assert "1 of" in tab.locator(".live-tally").inner_text()
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Download them").click()
    notebook = json.loads(Path(download.value.path()).read_text())
    assert solution.strip() in [each["source"].strip() for each in notebook["cells"]]
    place.get_by_role("button", name="As printed").click()
    assert place.locator("pre").first.inner_text().strip() == "".join(cell["source"])
    assert "0 of" in tab.locator(".live-tally").inner_text()


def test_a_readers_own_cell_and_what_a_change_above_does(tabs, book):
    """Chapter 1's code-05 makes `simulated`, which the next one and code-07 use."""
    tab, chapter = tabs(), live.CHAPTERS[0]
    live.open_chapter(tab, book, chapter)
    maker, user = (tab.locator(f"#cell-{name}") for name in ("code-05", "code-07"))
    live.run(tab, {"id": "code-07"})
    live.run(tab, {"id": "code-05"})
    printed = maker.locator("pre").first.inner_text()
    maker.get_by_role("button", name="Edit").click()
    box = maker.get_by_role("textbox")
    box.fill(f"{printed}\nsimulated = simulated")
    maker.get_by_text("changed since it ran").wait_for()
    box.press("Control+Enter")
    user.get_by_text("a cell above has changed since it ran").wait_for()
    assert "live-old" in user.get_attribute("class") and "live-old" not in maker.get_attribute("class")
    box.fill("print(6 * 7)")
    maker.get_by_role("button", name="Close").click()
    tab.evaluate("pplabLive.halt()")
    user.get_by_role("button", name="Run").click()
    user.get_by_role("button", name="print it again").click()
    user.get_by_text("made here in").wait_for()
    assert maker.locator("pre").first.inner_text().strip() == printed.strip()
    user.get_by_role("button", name="New cell").click()
    mine = tab.locator("#cell-code-07-mine")
    mine.get_by_role("textbox").fill("print(simulated(1).makespan)")
    mine.get_by_role("textbox").press("Control+Enter")
    mine.get_by_text("made here in").wait_for()
    assert mine.locator(".cell_output").inner_text().strip() == "12"
    tab.reload()
    live.open_chapter(tab, book, chapter)
    mine.get_by_role("button", name="Run").click()
    mine.get_by_text("made here in").wait_for()
    mine.get_by_role("button", name="Remove").click()
    assert not mine.count() and "mine" not in tab.evaluate("Object.keys(localStorage).join()")


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("delete globalThis.WebAssembly", "no WebAssembly"),
        ("delete globalThis.Worker", "no Worker"),
    ],
)
def test_a_browser_that_lacks_something_is_told(tabs, book, before, says):
    tab = tabs()
    tab.add_init_script(before)
    live.open_chapter(tab, book, live.CHAPTERS[0])
    tab.get_by_role("button", name="Run").first.click()
    tab.get_by_text(says).first.wait_for()
    assert tab.get_by_role("heading", level=1).is_visible()


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("", "rank 0 is idle"),
        ("worker-src 'none'", "forbids what Python needs"),
        ("worker-src blob:; script-src 'self' 'unsafe-inline' blob:", "forbids what Python needs"),
    ],
)
def test_from_a_server_whatever_its_content_policy(tab, book, policy, says):
    def served(route) -> None:
        path = book / urlsplit(route.request.url).path[1:]
        route.fulfill(path=path, headers={"content-security-policy": policy} if path.suffix == ".html" else None)

    context = tab.context.browser.new_context(offline=True)
    context.route(f"{SERVER}**", served)
    page = context.new_page()
    page.goto(f"{SERVER}notebooks/{live.CHAPTERS[0]}.html")
    place = page.locator("#cell-code-07")
    place.get_by_role("button", name="Run").click()
    place.get_by_text(says).first.wait_for()
    context.close()


BARE = """<script src="pyodide.js"></script><script>
const began = performance.now();
loadPyodide().then((python) => { python.runPython("1 + 1"); globalThis.took = performance.now() - began; });
</script>"""


ONE_STEP = """
from pplab_course.simulated.replay import Replay
text = open("pipe_1f1b.py").read().replace("range(3)", "range(1)")
assert len(Replay(text, 4, M=8).messages) == 96
"""


@pytest.mark.timed
def test_the_first_result_comes_soon_after_a_bare_python_would(tabs, book):
    """And a step of a reader's 1F1B, on four simulated ranks with eight microbatches."""
    with zipfile.ZipFile(ROOT / "book" / "_live" / "pinned.zip") as archive:
        files = {name.replace("stdlib", "python_stdlib"): archive.read(name) for name in archive.namelist()}
    bare, tab = tabs(), tabs()
    bare.route(f"{SERVER}**", lambda route: route.fulfill(**answer(files, route.request.url)))
    bare.goto(SERVER)
    bare.wait_for_function("globalThis.took")
    live.open_chapter(tab, book, live.CHAPTERS[0])
    took = bare.evaluate("took")
    ratios = [live.run(tab, {"id": "code-07"}, text).ms / took for text in (None, ONE_STEP)]
    bare.close()
    tab.close()
    assert max(ratios) <= 2.5, ratios


def answer(files: dict[str, bytes], address: str) -> dict[str, object]:
    """What a server of Pyodide's files, and of a page that starts it, says."""
    if not (name := urlsplit(address).path[1:]):
        return {"body": BARE, "content_type": "text/html"}
    kinds = {
        ".js": "text/javascript",
        ".wasm": "application/wasm",
        ".json": "application/json",
        ".zip": "application/zip",
    }
    return {"body": files[name], "content_type": kinds[Path(name).suffix]}
