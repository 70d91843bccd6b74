"""What the rows of `make gpu` and `make bench` must hold: what their tables show."""

from __future__ import annotations

from pathlib import Path

from pplab.lab import results

_NUMBER = (int, float)
_FIELDS = {  # of a part's rows; those of other parts may have any
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


def problems(data: object) -> list[str]:
    """What keeps a value from being a recording whose rows can be shown, in words; nothing when it is one."""
    return results.problems(data) or [
        problem
        for part in data["parts"]
        for row in part["rows"]
        for problem in results.lacks(
            "a run" if part["name"] == "runs" else f"a row of {part['name']}", row, _FIELDS.get(part["name"], {})
        )
    ]


def load(folder: Path | str | None = None) -> tuple[results.Recording, ...]:
    """`results.load`, which also refuses rows that lack what the tables show."""
    found = results.load(folder)
    for recording in found:
        if wrong := problems(recording.data):
            raise ValueError(f"{recording.path}: {'; '.join(wrong[:5])}: record it again with `make gpu`")
    return found
