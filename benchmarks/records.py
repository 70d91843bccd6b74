"""Recordings in `results/`: how commands that need no GPU write them, and which rows other recordings lack."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pplab.lab import results


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
    """Write the recording of a command that needs no GPU. It has a date if it is about that day's machine."""
    about = {
        "form": results.FORM,
        "device": device,
        "kind": "cpu",
        "date": date,
        "command": command,
        "versions": versions,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(about | {"box": box or {}, "parts": parts, "not_run": []}, indent=1) + "\n")


def not_run(recording: results.Recording) -> list[tuple[str, str]]:
    """What was left out, and why."""
    return [(each["what"], each["why"]) for each in recording.data["not_run"]]


def failed(recording: results.Recording) -> list[tuple[str, str]]:
    """The parts that failed, and the text of each one's first failure."""
    parts = [part for part in recording.data["parts"] if part["state"] == "failed"]
    return [(f"{part['name']}: failed", part["error"].strip().splitlines()[0]) for part in parts]
