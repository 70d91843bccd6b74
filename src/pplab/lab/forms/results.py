"""Measurements that are kept in `results/`, and what they must hold. Plain Python.

`make gpu` writes one file per kind of device. A file says what was measured, with which versions, when and by which
command, and what was not run and why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .json_form import reading
from .safe_text import printable_in

FORM = 1  # changes when a reader of older files would misread newer ones

STATES = ("done", "failed", "not run")
_FIELDS = {
    "form": int,
    "device": str,
    "kind": str,  # "cuda", or "cpu": by `make bench`, or by a trial of `make gpu`
    "date": str,  # ISO, with the zone
    "command": str,
    "versions": dict,
    "box": dict,
    "parts": list,
    "not_run": list,
}


@dataclass(frozen=True)
class Recording:
    """One file of measurements."""

    path: Path
    data: Mapping

    def title(self, part: str = "") -> str:
        """The devices, and the day on which that part was measured."""
        count = len(self.data["box"].get("devices", ())) if self.data["kind"] == "cuda" else 1
        dates = [each.get("date", self.data["date"]) for each in self.data["parts"] if each["name"] == part]
        devices = f"{count} x {self.data['device']}" if count > 1 else self.data["device"]
        return f"{devices}, {(dates or [self.data['date']])[0][:10]}"

    def rows(self, part: str) -> list[dict]:
        """What a part measured; nothing where it was not run."""
        return [row for found in self.data["parts"] if found["name"] == part for row in found["rows"]]

    @property
    def has_rows(self) -> bool:
        """Whether anything was measured."""
        return any(part["rows"] for part in self.data["parts"])

    @property
    def not_run(self) -> list[tuple[str, str]]:
        """What was left out, and why."""
        return [(each["what"], each["why"]) for each in self.data["not_run"]]

    @property
    def failed(self) -> list[tuple[str, str]]:
        """The parts that failed, and how each one's first failure reads."""
        failed = [part for part in self.data["parts"] if part["state"] == "failed"]
        return [(f"{part['name']}: failed", part["error"].strip().splitlines()[0]) for part in failed]


def find_folder() -> Path | None:
    """The nearest folder `results` with recordings, from here upward, or that of the package's own repository."""
    here = Path.cwd()
    for place in (here, *here.parents, Path(__file__).parents[4]):
        folder = place / "results"
        if (place / "pyproject.toml").is_file() and any(folder.glob("*.json")):
            return folder
    return None


def load(folder: Path | str | None = None) -> tuple[Recording, ...]:
    """All recordings in a folder, by device; of the repository's `results` when none is named.

    A file that isn't of this form is refused with ValueError, which says what is wrong with it.
    """
    found = find_folder() if folder is None else Path(folder)
    recordings = []
    for path in sorted(found.glob("*.json")) if found else ():
        with reading(str(path), "JSON: record it again with `make gpu`, or remove it"):
            data = printable_in(json.loads(path.read_text()), keep="\n")
        if wrong := problems(data):
            raise ValueError(f"{path} is not a recording: {'; '.join(wrong[:5])}: record it again with `make gpu`")
        recordings.append(Recording(path, data))
    return tuple(recordings)


def said(folder: Path | str | None = None) -> str:
    """Which GPUs were measured, and when, in a sentence; where none was, a sentence that says so.

    Pages and chapters have it from here, so that they say what is recorded.
    """
    found = [each.title() for each in load(folder) if each.data["kind"] == "cuda" and each.has_rows]
    return f"Measured on GPUs so far: {'; '.join(found)}." if found else "Nothing has been measured on a GPU so far."


def write(
    path: Path,
    parts: Sequence[Mapping],
    *,
    device: str,
    command: str,
    versions: Mapping[str, str],
    box: Mapping[str, object] | None = None,
    date: str = "",
) -> None:
    """Write the recording of a command that needs no GPU. It has a date where what it says is of that day's machine."""
    about = {"form": FORM, "device": device, "kind": "cpu", "date": date, "command": command, "versions": versions}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(about | {"box": box or {}, "parts": parts, "not_run": []}, indent=1) + "\n")


def problems(data: object) -> list[str]:
    """What keeps a value from being a recording, in words; nothing when it is one."""
    if not isinstance(data, dict):
        return [f"expected an object, got {type(data).__name__}"]
    found = lacks("the recording", data, _FIELDS)
    if found:
        return found
    if data["form"] != FORM:
        return [f"its form is {data['form']}, and this pplab reads form {FORM}"]
    for each in data["not_run"]:
        found += lacks("an entry of not_run", each, {"what": str, "why": str})
    for part in data["parts"]:
        found += lacks("a part", part, {"name": str, "state": str, "seconds": (int, float), "rows": list})
        if not found and part["state"] not in STATES:
            found.append(f"part {part['name']} has the state {part['state']!r}, not one of {', '.join(STATES)}")
        if not found and part["state"] == "failed" and not part.get("error"):
            found.append(f"part {part['name']} failed without an error")
        for row in () if found else part["rows"]:
            found += lacks(f"a row of {part['name']}", row, {})
    return found


def lacks(what: str, data: object, fields: Mapping[str, type | tuple]) -> list[str]:
    """Which fields an object hasn't, or of another type, in words."""
    if not isinstance(data, dict):
        return [f"{what} is {type(data).__name__}, not an object"]
    return [
        f"{what} has {'no ' + name if name not in data else f'{name} of type {type(data[name]).__name__}'}"
        for name, kind in fields.items()
        if not isinstance(data.get(name), kind) or isinstance(data.get(name), bool)
    ]
