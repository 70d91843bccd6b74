"""The notebooks in JupyterLab, on a fresh clone: nobody has trusted them, so only what is safe is shown."""

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
    """One that has everything: a chapter with an explorer, a table and citations, and another one's slider. Whether it
    is trusted shows in an output that nobody made."""
    chapter, other = (json.loads(path.read_text()) for path in sorted((ROOT / "notebooks").glob("0[15]_*.ipynb"))[::-1])
    chapter["cells"] += [cell | {"id": "slider"} for cell in other["cells"] if "Slider(" in "".join(cell["source"])]
    next(c for c in chapter["cells"] if c["cell_type"] == "code")["outputs"].insert(0, UNSAFE)
    return chapter


@pytest.fixture(scope="module")
def prices() -> dict:
    """A notebook of every text of the course in which there are prices."""
    chapters = [json.loads(path.read_text()) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    texts = [cell for chapter in chapters for cell in chapter["cells"] if cell["cell_type"] == "markdown"]
    with_prices = [cell for cell in texts if r"\$" in "".join(cell["source"])]
    return chapters[0] | {"cells": [cell | {"id": f"text-{n}"} for n, cell in enumerate(with_prices)]}


@pytest.fixture(scope="module")
def lab(tmp_path_factory, notebook, prices) -> Iterator[str]:
    """The address of a JupyterLab on these notebooks beside the book's pages, with no settings and no signatures."""
    folder, home = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "book", folder / "book", ignore=shutil.ignore_patterns("_static"))
    (folder / "notebooks").mkdir()
    for name, made in {"chapter": notebook, "prices": prices}.items():
        (folder / "notebooks" / f"{name}.ipynb").write_text(json.dumps(made))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {f"JUPYTER_{what}_DIR": str(home / what) for what in ("CONFIG", "DATA", "RUNTIME")}
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", f"--port={port}"]
    options = ["--IdentityProvider.token=", f"--ServerApp.root_dir={folder}", "--LabApp.news_url="]
    with open(home / "log", "w") as log:
        environment = os.environ | places | {"HOME": str(home), "IPYTHONDIR": str(home)}
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
        yield started.new_page(viewport={"width": 1100, "height": 32000})


def opened(page, address: str, cells: list[dict]) -> None:
    """Go to a notebook and wait for all of its cells."""
    page.goto(address)
    page.wait_for_selector("mjx-container, .MathJax", state="attached", timeout=90_000)
    page.wait_for_function(f"document.querySelectorAll('.jp-Notebook .jp-Cell').length >= {len(cells)}", timeout=60_000)


def test_an_untrusted_notebook_reads_well(page, lab, notebook):
    cells = notebook["cells"]
    kinds = [set(o.get("data", {})) for cell in cells for o in cell.get("outputs", [])]
    assert sum("Slider(" in "".join(cell["source"]) for cell in cells) == 1
    opened(page, f"{lab}/lab/tree/notebooks/chapter.ipynb", cells)
    page.wait_for_function("[...document.querySelectorAll('.jp-Notebook img')].every((e) => e.naturalWidth > 200)")

    assert "left" in page.inner_text(".jp-OutputArea-output >> nth=0")
    assert not page.locator("svg.unsafe").count(), "the copy is trusted: the test would see what a fresh clone doesn't"
    assert page.locator(".jp-RenderedImage img").count() == sum("image/png" in kind for kind in kinds)
    assert page.locator(".jp-OutputArea table").count() == sum("text/html" in kind for kind in kinds) - 1  # UNSAFE
    prose = "\n".join(page.locator(".jp-MarkdownOutput").all_inner_texts())
    assert not re.findall(r"\{\w+\}|:::|\$\$|\\tag|<details|Math Processing Error", prose)
    assert not page.locator("mjx-merror").count()
    folded = page.locator(".jp-RenderedMarkdown details")
    assert folded.count() == sum("".join(cell["source"]).count("<details") for cell in cells)
    assert not page.locator(".jp-RenderedMarkdown details[open]").count()
    assert "Exercises" in prose and "exercise." not in prose, "a solution is in sight"
    assert prose.count("_build/html/notebooks/05_messages.html") == 1, "where the game is, isn't said"
    for kind, tag in (("Input", "hide-input|remove-input"), ("Output", "hide-output")):
        tagged = [bool(re.search(tag, " ".join(cell["metadata"].get("tags", ())))) for cell in cells]
        folds = page.locator(".jp-Notebook .jp-Cell").evaluate_all(f"""
            (cells) => cells.map((cell) => !!cell.querySelector(".jp-{kind}Placeholder"))""")
        assert folds == tagged and any(tagged)


def test_prices_are_no_formulas(page, lab, prices):
    """A dollar that delimits a formula is gone; those of prices are all there, also in folded solutions."""
    cells = prices["cells"]
    opened(page, f"{lab}/lab/tree/notebooks/prices.ipynb?reset", cells)
    texts = page.locator(".jp-MarkdownOutput").all_text_contents()
    assert [text.count("$") for text in texts] == ["".join(cell["source"]).count(r"\$") for cell in cells]
    assert sum(map(len, cells)) and page.locator("mjx-container").count() > 20, "formulas are typeset"
