"""Measurements that are kept in `results/`: what they must hold, and tables of them. Plain Python.

`make gpu` writes one file per kind of device. A file says what was measured, with which versions, when and by which
command, and what was not run and why.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .balance_sheet import Table
from .json_form import reading
from .safe_text import printable_in

FORM = 1  # changes when a reader of older files would misread newer ones
LONG = 24  # rows: a longer table is folded on the page
NONE = "No run on GPUs has been recorded yet: `make gpu`, on a machine with GPUs, records one."

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


class Results(Table):
    """A table of measurements, or where there are none, a sentence that says so."""

    def __init__(self, columns: Iterable[str], rows: Iterable[Iterable[str]], caption: str = ""):
        super().__init__(tuple(row) for row in rows)
        self.columns, self.caption = tuple(columns), caption

    def __str__(self) -> str:
        return f"{self.caption}\n{super().__str__()}".strip() if self else NONE

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self:
            return f"<p>{NONE.replace('`', '<code>', 1).replace('`', '</code>', 1)}</p>"
        said = html.escape(self.caption)
        if len(self) <= LONG:
            return f"<p>{said}</p>{super()._repr_html_()}"
        return f"<details><summary>{said} ({len(self)} rows)</summary>{super()._repr_html_()}</details>"


class Tables(tuple):
    """Tables one below the other; a sentence where there is none."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self)) if self else str(Results((), ()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self or (Results((), ()),))


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
    found = _lacks("the recording", data, _FIELDS)
    if found:
        return found
    if data["form"] != FORM:
        return [f"its form is {data['form']}, and this pplab reads form {FORM}"]
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


def tables(folder: Path | str | None = None) -> Tables:
    """All tables of the recordings in a folder that have something in them."""
    from . import gpu_results as gpu  # which are made of what stands here
    from .stage_results import TABLES

    of_runs = runs, *gpu.OF_RUNS, paced, versus, profile
    every = *gpu.OF_MACHINES, sharing, *TABLES, *of_runs, *gpu.OF_CHECKS, not_run
    return Tables(filter(None, (make(folder) for make in every)))


def runs(folder: Path | str | None = None) -> Results:
    """Every recorded training run: device, date, how the ranks shared the devices, step time, equality, memory."""
    return _table(
        folder,
        "runs",
        {
            "ranks": lambda row: str(row["num_ranks"]),
            "sharing": lambda row: row["sharing"],
            "workload": lambda row: row["workload"],
            "dtype": lambda row: row["dtype"],
            "schedule": lambda row: row["schedule"],
            "step ms": lambda row: f"{row['step_time_ms']:.1f}",
            "gradients": lambda row: "equal" if row["gradients"]["equal"] else "NOT equal",
            "held (predicted)": lambda row: f"{_mega(row['peak_bytes'])} ({_mega(row['predicted_peak_bytes'])})",
            "allocator (expected)": _allocator,
        },
        "Training runs. Memory is the fullest rank's, in MB. The allocator's peak has weights, gradients and the "
        "optimizer in it: expected are four times the weights (AdamW) and what is held. Step times are the schedule's "
        "only where every rank has a GPU.",
    )


def sharing(folder: Path | str | None = None) -> Results:
    """How far ranks that compute at once slow each other down: 1 where each has a device or a part of one to itself."""
    return _table(
        folder,
        "slow_down",
        {
            "ranks": lambda row: str(row["num_ranks"]),
            "sharing": lambda row: row["sharing"],
            "one alone, ms": lambda row: f"{row['alone_ms']:.2f}",
            "all at once take": lambda row: f"{row['ratio']:.2f} times that",
            "notes": lambda row: "; ".join(row["notes"]),
        },
        "How far the ranks of a shared GPU slow each other down: the time of one matrix product of a rank, alone and "
        "while all ranks compute theirs.",
    )


def paced(folder: Path | str | None = None) -> Results:
    """Paced runs on a shared device: the schedule's makespan, measured and simulated."""
    return _table(
        folder,
        "paced",
        {
            "ranks": lambda row: str(row["num_ranks"]),
            "schedule": lambda row: row["schedule"],
            "an action, ms": lambda row: f"{row['pace_ms']:.1f}",
            "measured, ms": lambda row: f"{row['makespan_ms']:.1f}",
            "simulated, ms": lambda row: f"{row['predicted_makespan_ms']:.1f}",
            "ratio": lambda row: f"{row['makespan_ms'] / row['predicted_makespan_ms']:.3f}",
        },
        "Paced runs. Every action is stretched to one duration: order and waits are the schedule's, times say nothing "
        "of speed.",
    )


def versus(folder: Path | str | None = None) -> Results:
    """pplab's runtime against PyTorch's, in turn on the same stages."""
    return _table(
        folder,
        "versus",
        {
            "ranks": lambda row: str(row["num_ranks"]),
            "workload": lambda row: row["workload"],
            "schedule": lambda row: row["schedule"],
            "pplab ms": lambda row: f"{row['pplab_ms']:.1f}",
            "torch ms": lambda row: f"{row['torch_ms']:.1f}",
            "ratio": lambda row: f"{row['ratio']:.2f}",
            "of rounds": lambda row: f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}",
        },
        "pplab's runtime against PyTorch's on the same stages. Below 1, pplab is faster.",
    )


def profile(folder: Path | str | None = None) -> Results:
    """Naive, GPipe and 1F1B on three ranks, DistilBERT, by pplab and by PyTorch: the profile of one of the sources."""
    return _table(
        folder,
        "profile",
        {
            "sharing": lambda row: row["sharing"],
            "workload": lambda row: row["workload"],
            "schedule": lambda row: row["schedule"],
            "runtime": lambda row: row["engine"],
            "step ms": lambda row: f"{row['profile']['step_ms']:.1f}",
            "compute": lambda row: _mean_share(row, "utilisation"),
            "communication": lambda row: _mean_share(row, "communication_share"),
            "overlapped": lambda row: _mean_share(row, "overlap_share"),
            "peak MB": lambda row: _mega([rank["peak_bytes"] or 0 for rank in row["profile"]["ranks"]]),
        },
        "Three ranks, eight microbatches, DistilBERT: means over the ranks of their torch.profiler traces, which slow "
        "every operation; the peak is the fullest rank's. Communication, as a share of it and compute, contains "
        "waiting.",
    )


def not_run(folder: Path | str | None = None) -> Results:
    """What the recorded runs left out, and why."""
    rows: list[tuple[str, ...]] = []
    for recording in load(folder):
        with reading(str(recording.path), "what `make gpu` records of parts that failed or were not run"):
            rows += [(recording.title(), *each) for each in (*recording.failed, *recording.not_run)]
    return Results(("device, date", "not run", "because"), rows, "What failed in the recorded runs or was left out.")


def _table(folder: Path | str | None, part: str, columns: Mapping[str, Callable[[Mapping], str]], says: str) -> Results:
    """What the recordings of a folder measured in one part: by heading, what to show of a row."""
    rows: list[tuple[str, ...]] = []
    for recording in load(folder):
        with reading(str(recording.path), f"what `make gpu` records in its part {part}"):
            rows += [(recording.title(part), *(show(row) for show in columns.values())) for row in recording.rows(part)]
    return Results(("device, date", *columns), rows, says)


def _lacks(what: str, data: object, fields: Mapping[str, type | tuple]) -> list[str]:
    if not isinstance(data, dict):
        return [f"{what} is {type(data).__name__}, not an object"]
    return [
        f"{what} has {'no ' + name if name not in data else f'{name} of type {type(data[name]).__name__}'}"
        for name, kind in fields.items()
        if not isinstance(data.get(name), kind) or isinstance(data.get(name), bool)
    ]


def _mean_share(row: Mapping, figure: str) -> str:
    """A share, as the mean over the ranks."""
    ranks = row["profile"]["ranks"]
    return f"{sum(rank[figure] for rank in ranks) / len(ranks):.1%}"


def _allocator(row: Mapping) -> str:
    """The allocator's peak of the fullest rank, and what that rank is expected to need."""
    if not row.get("allocated_bytes"):
        return "-"
    expected = [4 * w + held for w, held in zip(row["resident_bytes"], row["predicted_peak_bytes"], strict=True)]
    fullest = max(range(len(expected)), key=row["allocated_bytes"].__getitem__)
    return f"{row['allocated_bytes'][fullest] / 1e6:.1f} ({expected[fullest] / 1e6:.1f})"


def _mega(counts: Iterable[float] | None) -> str:
    """The largest of some byte counts in MB."""
    return f"{max(counts) / 1e6:.1f}" if counts else "-"
