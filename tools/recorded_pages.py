"""Record pages with cells that need more than `make book` has, such as torch, in the same way as notebooks.

book/_recorded/NAME.ipynb has the cells of book/NAME.md and their outputs. `make book` shows these as long as the page
has the same cells, and executes the page if they have changed. `make notebooks` records all of these pages again. To
record a page for the first time, name it:

python tools/execute_notebooks.py book/NAME.md
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from jupyter_cache import get_cache
from myst_nb.core.read import read_myst_markdown_notebook
from nbclient import NotebookClient

BOOK = Path(__file__).parents[1] / "book"
RECORDED = BOOK / "_recorded"


def pages() -> list[Path]:
    """The pages that are recorded."""
    return [BOOK / f"{path.stem}.md" for path in sorted(RECORDED.glob("*.ipynb"))]


def recording_of(page: Path) -> Path:
    return RECORDED / f"{page.stem}.ipynb"


def cells_of(page: Path) -> nbformat.NotebookNode:
    """A page's cells as a notebook, which was not executed."""
    notebook = read_myst_markdown_notebook(page.read_text("utf-8"))
    notebook.nbformat_minor = 4  # without the cells' ids, which are made up each time
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in notebook.cells:
        del cell["id"]
    return notebook


def executed(page: Path) -> nbformat.NotebookNode:
    """A page's cells with their outputs, without a network, as `make book` executes the other pages."""
    notebook, place = cells_of(page), {"metadata": {"path": page.parent}}
    client = NotebookClient(notebook, timeout=300, record_timing=False, coalesce_streams=True, resources=place)
    client.execute(env={**os.environ, "HF_HUB_OFFLINE": "1"})
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}  # without Python's version
    for cell in notebook.cells:
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def hand_to(cache: Path) -> None:
    """Put the recordings into Sphinx's cache of executed pages, which finds them by their cells and their tags."""
    for page in pages():
        get_cache(str(cache)).cache_notebook_file(str(recording_of(page)), str(page), overwrite=True)
