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
NAMES = ("01_bubble_math", "05_interleaved")  # with a slider, and with an explorer, a table and citations
UNSAFE = {
    "data": {"text/html": '<p>left <svg class="unsafe"></svg></p>'},
    "metadata": {},
    "output_type": "display_data",
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[str]:
    """The address of a JupyterLab on copies of the notebooks, with no settings and no signatures."""
    folder, home = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "book", folder / "book", ignore=shutil.ignore_patterns("_static"))
    (folder / "notebooks").mkdir()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        notebook = json.loads(path.read_text())
        next(c for c in notebook["cells"] if c["cell_type"] == "code")["outputs"].insert(0, UNSAFE)
        (folder / "notebooks" / path.name).write_text(json.dumps(notebook))
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


@pytest.fixture(scope="module")
def window() -> Iterator:
    """What isn't in sight isn't drawn. Its tabs share what they have loaded: JupyterLab is large."""
    with chromium.launched_or_skipped() as started:
        yield started.new_context(viewport={"width": 1100, "height": 32000})


@pytest.mark.parametrize("name", NAMES)
def test_an_untrusted_notebook_reads_well(window, lab, name):
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    kinds = [set(o.get("data", {})) for cell in cells for o in cell.get("outputs", [])]
    page = window.new_page()
    page.goto(f"{lab}/lab/workspaces/{name}/tree/notebooks/{name}.ipynb")
    page.wait_for_selector("mjx-container, .MathJax", timeout=90_000)
    page.wait_for_function(f"document.querySelectorAll('.jp-Notebook .jp-Cell').length >= {len(cells)}", timeout=60_000)
    page.wait_for_function("[...document.querySelectorAll('.jp-Notebook img')].every((e) => e.naturalWidth > 200)")

    assert "left" in page.inner_text(".jp-OutputArea-output >> nth=0")
    assert not page.locator("svg.unsafe").count(), "the copy is trusted: the test would see what a fresh clone doesn't"
    assert page.locator(".jp-RenderedImage img").count() == sum("image/png" in kind for kind in kinds)
    assert page.locator(".jp-OutputArea table").count() == sum("text/html" in kind for kind in kinds)
    prose = "\n".join(page.locator(".jp-MarkdownOutput").all_inner_texts())
    assert not re.findall(r"\{\w+\}|:::|\$\$|\\tag|<details|Math Processing Error", prose)
    assert not page.locator("mjx-merror").count()
    folded = page.locator(".jp-RenderedMarkdown details")
    assert folded.count() == sum("".join(cell["source"]).count("<details") for cell in cells)
    assert not page.locator(".jp-RenderedMarkdown details[open]").count()
    assert "Exercises" in prose and "exercise." not in prose, "a solution is in sight"
    page.close()
