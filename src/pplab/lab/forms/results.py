"""Measurements that are kept in `results/`. Plain Python.

`make gpu` writes one file per kind of device. It lists what was measured, with which versions, when
and by which command, and what was not run and why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .json_form import reading
from .safe_text import printable_in

FORM = 1  # changes when a reader of older files would misread newer ones


@dataclass(frozen=True)
class Recording:
    """One file of measurements."""

    path: Path
    data: Mapping

    def title(self, part: str = "") -> str:
        """The devices, and the day on which that part was measured."""
        count = len(self.data["box"].get("devices", ())) if self.data["kind"] == "cuda" else 1
        dates = [
            each.get("date", self.data["date"])
            for each in self.data["parts"]
            if each["name"] == part
        ]
        devices = f"{count} x {self.data['device']}" if count > 1 else self.data["device"]
        return f"{devices}, {(dates or [self.data['date']])[0][:10]}"

    def rows(self, part: str) -> list[dict]:
        """The rows that a part measured, or none if it was not run."""
        return [
            row for found in self.data["parts"] if found["name"] == part for row in found["rows"]
        ]


def find_folder() -> Path | None:
    """The nearest folder `results` with recordings, from here upward, or that of the package's own
    repository.
    """
    here = Path.cwd()
    for place in (here, *here.parents, Path(__file__).parents[4]):
        folder = place / "results"
        if (place / "pyproject.toml").is_file() and any(folder.glob("*.json")):
            return folder
    return None


def load(folder: Path | str | None = None) -> tuple[Recording, ...]:
    """All recordings in a folder, by device, by default from the repository's `results`.

    Raises ValueError for a file that isn't of this form, which names what is wrong with it.
    """
    found = find_folder() if folder is None else Path(folder)
    recordings = []
    for path in sorted(found.glob("*.json")) if found else ():
        with reading(str(path), "JSON: record it again with `make gpu`, or remove it"):
            data = printable_in(json.loads(path.read_text()), keep="\n")
        form = data.get("form") if isinstance(data, dict) else None
        if form != FORM:
            says = f"its form is {form}, and this pplab reads form {FORM}"
            raise ValueError(f"{path} is not a recording: {says}: record it again with `make gpu`")
        recordings.append(Recording(path, data))
    return tuple(recordings)


def said(folder: Path | str | None = None) -> str:
    """A sentence that names the GPUs that were measured, and when, or that there were none.

    Pages and chapters take it from here, so that they agree with the recordings.
    """
    on_gpus = [each for each in load(folder) if each.data["kind"] == "cuda"]
    found = [each.title() for each in on_gpus if any(part["rows"] for part in each.data["parts"])]
    return (
        f"Measured on GPUs so far: {'; '.join(found)}."
        if found
        else "Nothing has been measured on a GPU so far."
    )
