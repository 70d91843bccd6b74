"""The notebooks in JupyterLab: on a fresh clone, where nobody has trusted them, and only what is safe is shown, and
trusted."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import browser as chromium

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
UNSAFE = {
    "data": {"text/html": '<p>left <svg class="unsafe"></svg></p>'},
    "metadata": {},
    "output_type": "display_data",
}


@pytest.fixture(scope="module")
def notebook() -> dict:
    """One that has everything: a chapter with an explorer, a table and citations, and from the others the slider, a
    hidden output, and all texts with prices. Whether it is trusted shows in an output that nobody made."""
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"), key=lambda path: not path.name.startswith("05_"))
    chapter, *others = (json.loads(path.read_text()) for path in paths)
    for number, cell in enumerate(cell for other in others for cell in other["cells"]):
        code, source, tags = cell["cell_type"] == "code", "".join(cell["source"]), cell["metadata"].get("tags", ())
        if "Slider(" in source or "hide-output" in tags if code else r"\$" in source:
            chapter["cells"].append(cell | {"id": f"other-{number}"})
    next(c for c in chapter["cells"] if c["cell_type"] == "code")["outputs"].insert(0, UNSAFE)
    return chapter


@pytest.fixture(scope="module")
def lab(tmp_path_factory, notebook) -> Iterator[str]:
    """The address of a JupyterLab on that notebook beside the book's pages, with no settings and no signatures."""
    folder, home = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "book", folder / "book", ignore=shutil.ignore_patterns("_static"))
    (folder / "notebooks").mkdir()
    for title in ("chapter", "trusted"):  # in each, too: who trusts a text trusts its copies
        own = notebook | {"metadata": notebook["metadata"] | {"title": title}}
        (folder / "notebooks" / f"{title}.ipynb").write_text(json.dumps(own))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {f"JUPYTER_{what}_DIR": str(home / what) for what in ("CONFIG", "DATA", "RUNTIME")}
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", f"--port={port}"]
    options = ["--IdentityProvider.token=", f"--ServerApp.root_dir={folder}", "--LabApp.news_url="]
    with open(home / "log", "w") as log:
        environment = os.environ | places | {"HOME": str(home), "IPYTHONDIR": str(home)}
        trust = [sys.executable, "-m", "jupyter", "trust", folder / "notebooks" / "trusted.ipynb"]
        subprocess.run(trust, env=environment, stdout=log, stderr=log, check=True)
        server = subprocess.Popen([*command, *options], env=environment, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/api", timeout=5)
                break
            except OSError:
                assert server.poll() is None, (home / "log").read_text()
                time.sleep(0.25)
        yield address
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture
def page() -> Iterator:
    """A high one: what isn't in sight isn't drawn."""
    with chromium.launched_or_skipped() as started:
        yield started.new_page(viewport={"width": 1100, "height": 40000})


def test_an_untrusted_notebook_reads_well(page, lab, notebook):
    cells = notebook["cells"]
    shown = [cell for cell in cells if "answer" not in cell["metadata"].get("tags", ())]
    made = [o.get("data", {}) for cell in shown for o in cell.get("outputs", [])]
    tables = ["<table" in "".join(data.get("text/html", "")) for data in made]
    assert sum("Slider(" in "".join(cell["source"]) for cell in cells) == 1
    page.goto(f"{lab}/lab/tree/notebooks/chapter.ipynb")
    page.wait_for_selector("mjx-container:visible, .MathJax:visible", timeout=90_000)  # the first is in a fold
    page.wait_for_function(f"document.querySelectorAll('.jp-Notebook .jp-Cell').length >= {len(cells)}", timeout=60_000)
    page.wait_for_function("[...document.querySelectorAll('.jp-Notebook img')].every((e) => e.naturalWidth > 200)")

    assert "left" in page.inner_text(".jp-OutputArea-output >> nth=0")
    assert not page.locator("svg.unsafe").count(), "the copy is trusted: the test would see what a fresh clone doesn't"
    assert page.locator(".jp-RenderedImage img").count() == sum("image/png" in data for data in made)
    assert page.locator(".jp-OutputArea table").count() == sum(tables)
    prose = "\n".join(page.locator(".jp-MarkdownOutput").all_inner_texts())
    assert not re.findall(r"\{\w+\}|:::|\$\$|\\tag|<details|Math Processing Error", prose)
    assert not page.locator("mjx-merror").count()
    folded = page.locator(".jp-RenderedMarkdown details")
    assert folded.count() == sum("".join(cell["source"]).count("<details") for cell in cells)
    assert not page.locator(".jp-RenderedMarkdown details[open]").count()
    assert "Exercises" in prose and not re.search(r"exercise\.\w", prose), "a solution is in sight"
    assert not page.locator("iframe").count()
    assert (
        page.get_by_text("The explorer shows here once").count()
        == page.get_by_text("Above is its picture").count()
        == 2
    )
    assert page.get_by_text("The game shows here once").inner_text().endswith("Finish by 25."), (
        "no level, or not its question"
    )

    # A dollar that begins or ends a formula is gone; those of prices are all there, also in folded solutions.
    texts = page.locator(".jp-MarkdownCell .jp-MarkdownOutput").all_text_contents()
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert [text.count("$") for text in texts] == [source.count(r"\$") for source in sources]
    assert sum(text.count("$") for text in texts) > 50
    for kind, tag in (("Input", "hide-input|remove-input"), ("Output", "hide-output|answer")):
        hidden = [bool(re.search(tag, " ".join(cell["metadata"].get("tags", ())))) for cell in cells]
        has_fold = f"(cells) => cells.map((cell) => !!cell.querySelector('.jp-{kind}Placeholder'))"
        assert page.locator(".jp-Notebook .jp-Cell").evaluate_all(has_fold) == hidden and any(hidden)
    shown = page.locator(".jp-OutputPlaceholder").all_inner_texts()
    assert all("folded here" in text for text in shown), "a folded output's first line gives it away, or is HTML"


def test_a_trusted_notebook_has_the_explorer_and_the_game(page, lab):
    page.goto(f"{lab}/lab/workspaces/trusted/tree/notebooks/trusted.ipynb")
    page.wait_for_selector("svg.unsafe", state="attached", timeout=90_000)
    explorer = page.frame_locator("iframe[title='Schedule explorer'] >> nth=0")
    explorer.locator(".pplab-explorer[data-ready]").wait_for(timeout=60_000)
    assert explorer.locator(".pplab-explorer").get_attribute("data-makespan") == "85"
    explorer.locator("input[type=number][name=latency]").fill("0")
    explorer.locator(".pplab-explorer[data-makespan='57']").wait_for()
    game = page.frame_locator("iframe[title='Schedule game']")
    game.locator("button[data-text='0F0']").click()
    game.locator(".pplab-play:not([data-placed='0'])").wait_for()
    pictures = ".jp-OutputArea:has(iframe) img"  # each goes when its explorer is there
    page.wait_for_function(f"[...document.querySelectorAll('{pictures}')].every((e) => e.style.display === 'none')")
    assert not page.get_by_text("shows here once").count()
