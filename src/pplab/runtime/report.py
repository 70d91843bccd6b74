"""What a run measured, put together from the ranks' reports."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .listener import StepTrace
from .options import Job
from .readings import Readings

if TYPE_CHECKING:
    from .reference import GradientReport
    from .training import RankReport

_CLOCK_ERROR_MS = 0.1  # what is worth a note


@dataclass(frozen=True)
class Machine:
    """What a run was measured on, and with."""

    device: str
    transport: str
    versions: dict[str, str]
    clock_error_ms: float = 0.0  # how far a rank's times can be off the clock of all, at worst: 0 on one host's CPU


@dataclass(frozen=True, repr=False)
class Run(Readings):
    """A measured run of a schedule: what was run, on what, when everything happened, and what its extras found."""

    job: Job
    machine: Machine
    notes: tuple[str, ...]  # what this machine can't show, and where the data came from
    losses: tuple[float, ...]  # one per measured step
    first_loss: float  # before any update
    traces: tuple[tuple[StepTrace, ...], ...]  # per measured step, one per rank
    gradients: GradientReport | None
    extras: Mapping[str, object]  # what the run's extras found, by their names


def make_run(
    job: Job,
    reports: Sequence[RankReport],
    gradients: GradientReport | None,
    *,
    device: str,
    transport: str,
    notes: Sequence[str],
    several_hosts: bool = False,
) -> Run:
    """Put the ranks' reports together. `transport` is the ranks'; `notes` are on the machine, not on the workload."""
    if job.engine_name == "torch" and transport == "shared":
        transport = "gloo"  # torch's runtime knows nothing of the memory that the ranks share
    clock_error_ms = max(trace.error_ns for report in reports for trace in report.traces) / 1e6
    extras = [(e.name, e.finish(job, [report.extras[i] for report in reports])) for i, e in enumerate(job.extras)]
    return Run(
        job,
        Machine(device, transport, versions(), clock_error_ms),
        (*job.workload.notes, *notes, *_notes(reports, clock_error_ms, several_hosts)),
        tuple(map(sum, zip(*(report.losses for report in reports), strict=True))),
        sum(report.first_loss for report in reports),
        tuple(zip(*(report.traces for report in reports), strict=True)),
        gradients,
        {name: found for name, found in extras if found is not None},
    )


def _notes(reports: Sequence[RankReport], clock_error_ms: float, several_hosts: bool) -> list[str]:
    """What a reader of the results should know of how they came about."""
    notes = []
    if unsplit := sorted(set().union(*(report.unsplit for report in reports))):
        notes.append(f"gradients of weights in {', '.join(unsplit)} are computed with the input's, not put off")
    if again := {stage for report in reports for trace in report.traces for stage, _, _ in trace.again}:
        notes.append(f"forwards run again in the backward: stages {', '.join(map(str, sorted(again)))}")
    if several_hosts:
        tied = "ranks on several hosts: before every step each host's clock is tied to rank 0's"
        notes.append(f"{tied}; a rank's times can be {clock_error_ms:.2f} ms off")
    elif clock_error_ms > _CLOCK_ERROR_MS:
        notes.append(f"a rank's times can be {clock_error_ms:.1f} ms off the clock of all ranks")
    return notes


def versions() -> dict[str, str]:
    """What a measurement was made with."""
    from .. import __version__

    return {"pplab": __version__, "python": platform.python_version(), "torch": torch.__version__}
