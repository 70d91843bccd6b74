"""Recordings in `results/`, as `make gpu`, `make bench` and the other commands write them, and what they must hold.

A row of a part must have what its table shows, or it is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pplab.lab import results

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
_NUMBER = (int, float)
_ROW_FIELDS = {  # of a part's rows; those of other parts may have any
    "runs": {
        **dict.fromkeys(("schedule", "workload", "dtype"), str),
        "sharing": str,  # "a GPU each", "turns", "mps", or "cores" on the CPU
        **{"num_ranks": int, "num_microbatches": int, "step_time_ms": _NUMBER, "gradients": dict},
        **dict.fromkeys(("peak_bytes", "predicted_peak_bytes", "notes"), list),
    },
    "stages": {
        **dict.fromkeys(("width", "tokens", "layers", "rounds"), int),
        **dict.fromkeys(("ms", "flops", "tflops", "ratios"), dict),
        **{"dtype": str, "pace": str},  # what sets it: "GPU", "launches", or "core"
    },
    "copies": {
        **{"memory": str, "ways": str, "bytes": int},
        **dict.fromkeys(("alone_gb_per_s", "beside_gb_per_s", "compute_ms", "beside_ms", "slower"), _NUMBER),
    },
    "offload": {"schedule": str, **dict.fromkeys(("plain_ms", "measured_ms", "predicted_ms", "error"), _NUMBER)},
    "predicted": {"measured": str, "num_ranks": int, "sharing": str, "schedules": list},
    "cores": {"schedule": str, "num_ranks": int, "makespan_ms": _NUMBER, "free": dict},
}


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


def load(folder: Path | str | None = None) -> tuple[results.Recording, ...]:
    """`results.load`, which also refuses what lacks something that is shown."""
    found = results.load(folder)
    for recording in found:
        if wrong := problems(recording.data):
            says = "; ".join(wrong[:5])
            raise ValueError(f"{recording.path} is not a recording: {says}: record it again with `make gpu`")
    return found


def not_run(recording: results.Recording) -> list[tuple[str, str]]:
    """What was left out, and why."""
    return [(each["what"], each["why"]) for each in recording.data["not_run"]]


def failed(recording: results.Recording) -> list[tuple[str, str]]:
    """The parts that failed, and how each one's first failure reads."""
    parts = [part for part in recording.data["parts"] if part["state"] == "failed"]
    return [(f"{part['name']}: failed", part["error"].strip().splitlines()[0]) for part in parts]


def problems(data: object) -> list[str]:
    """What keeps a value from being a recording, in words; nothing when it is one."""
    if not isinstance(data, dict):
        return [f"expected an object, got {type(data).__name__}"]
    found = _lacks("the recording", data, _FIELDS)
    if found:
        return found
    if data["form"] != results.FORM:
        return [f"its form is {data['form']}, and this pplab reads form {results.FORM}"]
    for each in data["not_run"]:
        found += _lacks("an entry of not_run", each, {"what": str, "why": str})
    for part in data["parts"]:
        found += _lacks("a part", part, {"name": str, "state": str, "seconds": (int, float), "rows": list})
        if not found and part["state"] not in STATES:
            found.append(f"part {part['name']} has the state {part['state']!r}, not one of {', '.join(STATES)}")
        if not found and part["state"] == "failed" and not part.get("error"):
            found.append(f"part {part['name']} failed without an error")
        for row in () if found else part["rows"]:
            what = "a run" if part["name"] == "runs" else f"a row of {part['name']}"
            found += _lacks(what, row, _ROW_FIELDS.get(part["name"], {}))
    return found


def _lacks(what: str, data: object, fields: Mapping[str, type | tuple]) -> list[str]:
    if not isinstance(data, dict):
        return [f"{what} is {type(data).__name__}, not an object"]
    return [
        f"{what} has {'no ' + name if name not in data else f'{name} of type {type(data[name]).__name__}'}"
        for name, kind in fields.items()
        if not isinstance(data.get(name), kind) or isinstance(data.get(name), bool)
    ]
