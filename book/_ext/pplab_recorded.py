"""Make what pages say about GPUs from what is recorded. Write one of these names in double braces on a page:

measured_on_gpus    which GPUs were measured, and when; or that none was
executed_on         where the notebooks' own outputs come from
healthy_run         what the first look of `make gpu` prints where all is well: on a GPU if that is recorded
"""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import fill

from pplab.lab import results
from pplab.lab.forms import reading

ROOT = Path(__file__).parents[2]
PLAYED = ROOT / "book" / "_ext" / "healthy_run.txt"


def sentences(recorded: Path, notebooks: Path) -> dict[str, str]:
    """The text for each name, made from the recordings in one folder and the notebooks in a second one."""
    return {
        "measured_on_gpus": results.said(recorded),
        "executed_on": "a machine with GPUs" if any(map(_on_gpus, notebooks.glob("*.ipynb"))) else "two CPU cores",
        "healthy_run": _healthy_run(recorded),
    }


def _on_gpus(notebook: Path) -> bool:
    """Whether a cell of a notebook shows that ranks ran on GPUs."""
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [json.dumps(cell["outputs"]) for cell in cells if cell["cell_type"] == "code"]
    return any("ranks on cuda:" in output for output in outputs)


def first_look(folder: Path) -> tuple[str, list[str]] | None:
    """What the part `smoke` printed where it was recorded last, with the device and the date, or None where it
    wasn't."""
    found = [each for each in results.load(folder) if each.data["kind"] == "cuda" and each.rows("smoke")]
    if not found:
        return None
    last = max(found, key=lambda recording: recording.data["date"])
    with reading(str(last.path), "what `make gpu` records in its part smoke"):
        return last.title("smoke"), [row["says"] for row in last.rows("smoke")]


def _healthy_run(recorded: Path) -> str:
    found = first_look(recorded)
    lines = found[1] if found else PLAYED.read_text().splitlines()
    words = f"{found[0]}, printed" if found else "No GPU has been recorded. One that the tests play on the CPU prints"
    fitting = "\n".join(fill(line, 72, subsequent_indent="    ") for line in lines)
    return f"{words}:\n\n```text\n{fitting}\n```"


def substitute(app, config) -> None:
    """Put the texts into the pages."""
    config.myst_substitutions = {**config.myst_substitutions, **sentences(ROOT / "results", ROOT / "notebooks")}


def setup(app) -> dict:
    app.connect("config-inited", substitute)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
