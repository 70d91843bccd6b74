"""Tables of the measurements that are kept in `results/`. Plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from . import gpu_results as gpu
from .json_form import reading
from .recordings import FORM, NONE, Recording, Results, find_folder, load, problems, said, write
from .recordings import table_of as _table

__all__ = ["FORM", "NONE", "Recording", "Results", "find_folder", "load", "problems", "said", "write"]


class Tables(tuple):
    """Tables one below the other; a sentence where there is none."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self)) if self else str(Results((), ()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self or (Results((), ()),))


def tables(folder: Path | str | None = None) -> Tables:
    """All tables of the recordings in a folder that have something in them."""
    return Tables(filter(None, (make(folder) for make in ALL)))


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


# All tables, in the order of the page: one that isn't here isn't shown.
ALL: tuple[Callable[[Path | str | None], Results], ...] = (
    gpu.machines,
    gpu.gradients,
    gpu.assumptions,
    gpu.nccl,
    sharing,
    gpu.links,
    gpu.batch,
    runs,
    gpu.simulated,
    gpu.where,
    paced,
    versus,
    profile,
    gpu.clocks,
    gpu.tests,
    not_run,
)
