"""Execute the notebooks in place, with outputs as they are committed: counts 1 to n, no timestamps, no widget state.

python tools/execute_notebooks.py [--clean | --frames] [NOTEBOOK or PAGE ...]

In measured/, next to them, it writes the values that cells in the book's page are given, as tools/page_cells.py
explains. It also records the outputs of the pages that tools/recorded_pages.py lists, which measure nothing.

With --clean nothing is executed. The notebooks lose what an editor left in them, and what the page hides is folded.

With --frames only the cells with an explorer or a level of the game are executed, which measure nothing. Use it after a
change to the page's explorer, so that their frames have it.

Measurements must not be disturbed. So before each notebook the machine must be quiet for two seconds, its GPUs too, and
while a cell runs other processes may take no more than a tenth of all cores' time (seen on Linux only). Otherwise an
error says so, and the command ends with status 1. This notebook and those after it stay as they were.
"""

from __future__ import annotations

import ast
import json
import sys
import time
from copy import deepcopy
from pathlib import Path

import durations
import nbformat
import page_cells
import quiet
import recorded_pages
from kernel_ports import OwnPorts
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
FOLDS = {  # what JupyterLab folds, by the tag with which the page hides it
    "hide-input": "source_hidden",
    "remove-input": "source_hidden",
    "hide-output": "outputs_hidden",
    "answer": "outputs_hidden",
    "remove-output": "outputs_hidden",
}


# JupyterLab shows the first line of a folded output, which would be the answer of the guess above it, or a line of
# HTML. This comes before it there. The page leaves out what is marked so, and so does the comparison of outputs.
FIRST = {
    "answer": "The answer is folded here: open it when you have guessed.",
    "hide-output": "The output is folded here.",
}
FOLDED = {"pplab": "folded"}


def main(names: list[str]) -> int:
    """Execute the named notebooks, or all, until the machine is too busy, and return the exit status."""
    only = {"--clean": clean, "--frames": show_again}.get(names[0] if names else "")
    named = [Path(name) for name in names[bool(only) :]] or [
        *sorted(NOTEBOOKS.glob("*.ipynb")),
        *recorded_pages.pages(),
    ]
    paths, pages = ([path for path in named if (path.suffix == ".md") is is_page] for is_page in (False, True))
    if only:
        for path in paths:
            only(notebook := nbformat.read(path, as_version=4))
            nbformat.write(notebook, path)
        return 0
    OwnPorts.instance()
    took = {}
    for path in paths:
        print(f"{path.name} ...", end=" ", flush=True)
        started = time.monotonic()
        try:
            quiet.check()
            notebook, values = executed(path)
        except quiet.TooBusy as problem:
            print(f"too busy\n== {problem}", flush=True)
            print("== not recorded:", *(path.name for path in paths[len(took) :]))
            return 1
        nbformat.write(notebook, path)
        page_cells.write(path, values)
        took[path.stem] = time.monotonic() - started
        print(f"{took[path.stem]:.0f} s")
    for page in pages:
        nbformat.write(recorded_pages.executed(page), recorded_pages.recording_of(page))
        print(f"{page.name}: recorded")
    print(durations.report(took).splitlines()[-1])
    return 0


def executed(path: Path) -> tuple[nbformat.NotebookNode, dict[str, dict]]:
    """The notebook with new outputs, and the values that it measured for the page, by cell and name.

    Raises quiet.TooBusy, and nbclient's CellExecutionError.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, record_timing=False, resources={"metadata": {"path": path.parent}})
    (wanted, read), values, readings = page_cells.wanted(path), {}, []

    async def keep(cell: nbformat.NotebookNode, cell_index: int, execute_reply: dict) -> None:
        if readings:
            quiet.Reading.now().check_since(readings[-1], f"while cell {cell_index + 1} ran,")
        if cell.id in wanted and (found := await asked(client, wanted[cell.id], read)):
            values[cell.id] = found

    if quiet.can_tell_own():
        client.on_cell_execute = lambda cell, cell_index: readings.append(quiet.Reading.now())
    client.on_cell_executed = keep
    client.execute()
    clean(notebook)
    return notebook, page_cells.needed(path, values) if values else {}


async def asked(client: NotebookClient, names: list[str], read: list[str]) -> dict:
    """The values of these names in the notebook's kernel, as they are now, in the form of book/_live/measured.py."""
    path = f"__import__('sys').path.append({str(page_cells.LIVE)!r})"  # at the end: matplotlib is the real one
    kept = f"({path}, __import__('measured').kept(globals(), {names!r}, {read!r}))[1]"  # leaves no name behind
    reply = await client.kc.execute("", silent=True, user_expressions={"kept": kept}, reply=True, timeout=60)
    found = reply["content"]["user_expressions"]["kept"]
    if found["status"] != "ok":
        raise RuntimeError("\n".join(found["traceback"]))
    return json.loads(ast.literal_eval(found["data"]["text/plain"]))


def clean(notebook: nbformat.NotebookNode) -> None:
    """Keep what a reader needs and nothing that changes from run to run."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        folded = {FOLDS[tag]: True for tag in tags if tag in FOLDS}
        figure = cell.metadata.get("figure")
        kept = {"figure": figure, "jupyter": folded, "tags": tags}
        cell.metadata = {name: value for name, value in kept.items() if value}
        if cell.cell_type == "code":
            made = [each for each in cell.outputs if each.get("metadata") != FOLDED]
            first = [
                nbformat.v4.new_output("display_data", {"text/plain": text}, metadata=FOLDED)
                for tag, text in FIRST.items()
                if tag in tags
            ]
            cell.outputs = first + [each for each in made if each.get("name") != "stderr"]


def show_again(notebook: nbformat.NotebookNode) -> None:
    """Execute the explorers and levels of the game, apart from the other cells."""
    views = [cell for cell in notebook.cells if "explorer" in cell.metadata.get("tags", [])]
    start = nbformat.v4.new_code_cell("%load_ext pplab_course.notebook")
    apart = nbformat.v4.new_notebook(cells=[start, *deepcopy(views)], metadata=deepcopy(notebook.metadata))
    NotebookClient(apart, record_timing=False, resources={"metadata": {"path": NOTEBOOKS}}).execute()
    for view, shown in zip(views, apart.cells[1:], strict=True):
        view.outputs = shown.outputs
    clean(notebook)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
