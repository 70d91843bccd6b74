"""Pages whose outputs are recorded show what their cells give, and the others are made without torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

import nbformat
import pytest
import recorded_pages

from conftest import WITHOUT_TORCH

PAGES = recorded_pages.pages()
ANEW = "book/{0} no longer gives what is recorded: python tools/execute_notebooks.py book/{0}"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def recorded(page) -> list[dict]:
    return nbformat.read(recorded_pages.recording_of(page), as_version=4).cells


def of(cells: Iterable[dict], *names: str) -> list[list]:
    return [[cell[name] for name in names] for cell in cells]


@each_page
def test_a_recording_has_the_cells_of_its_page(page):
    now, then = (of(cells, "source", "metadata") for cells in (recorded_pages.cells_of(page).cells, recorded(page)))
    assert then == now, ANEW.format(page.name)


@pytest.mark.slow
@each_page
def test_a_recording_shows_what_the_cells_give(page, monkeypatch):
    """But for what is measured, which such a cell's tag says; and on another processor, as notebooks are compared."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    now, then = recorded_pages.executed(page).cells, recorded(page)
    same = [i for i, cell in enumerate(now) if "nbval-ignore-output" not in cell.metadata.get("tags", ())]
    assert of((then[i] for i in same), "outputs") == of((now[i] for i in same), "outputs"), ANEW.format(page.name)
    assert [len(cell.outputs) for cell in then] == [len(cell.outputs) for cell in now]


@pytest.mark.slow
def test_the_book_was_made_without_torch(book):
    """As in the environment that book/requirements.txt makes; and what hides it hides it."""
    environment = {"PYTHONPATH": str(WITHOUT_TORCH)}
    code = "import matplotlib, jupyter_book\ntry:\n    import torch\nexcept ModuleNotFoundError:\n    print('hidden')"
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout
        == "hidden\n"
    )
    page = (book / "book" / "own_family.html").read_text()
    assert "equal to one process (56 parameters" in page and "layers on each rank:" in page
