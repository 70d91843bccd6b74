"""Execute the notebooks in place, with outputs as they are committed: counts 1 to n, no timestamps, no widget state.

python tools/execute_notebooks.py [NOTEBOOK ...]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import durations
import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def main(names: list[str]) -> None:
    """Execute the named notebooks, or all."""
    paths = [Path(name) for name in names] or sorted(NOTEBOOKS.glob("*.ipynb"))
    took = {}
    for path in paths:
        print(f"{path.name} ...", end=" ", flush=True)
        started = time.monotonic()
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(
            notebook, timeout=300, record_timing=False, resources={"metadata": {"path": path.parent}}
        )
        client.execute()
        clean(notebook)
        nbformat.write(notebook, path)
        took[path.stem] = time.monotonic() - started
        print(f"{took[path.stem]:.0f} s")
    print(durations.report(took).splitlines()[-1])


def clean(notebook: nbformat.NotebookNode) -> None:
    """Keep what a reader needs and nothing that changes from run to run."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {key: value for key, value in cell.metadata.items() if key in ("tags", "mystnb")}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


if __name__ == "__main__":
    main(sys.argv[1:])
