"""What a run measured, put together from the ranks' reports."""

from __future__ import annotations

import platform
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product

import torch

from ..actions import B, F, I, Kind, Overlap, W
from ..costs import Costs
from ..schedule import Schedule, plural
from ..timeline import Span, Timeline
from .clock import StepTrace
from .meter import Held, readable_bytes, together
from .options import Job
from .reference import GradientReport
from .training import RankReport

_CLOCK_ERROR_MS = 0.1  # what is worth a note
_TRANSPORTS = {"shared": "shared memory"}


@dataclass(frozen=True)
class Machine:
    """What a run was measured on, and with."""

    device: str
    transport: str
    versions: dict[str, str]
    clock_error_ms: float = 0.0  # how far a rank's times can be off the clock of all, at worst: 0 on one host's CPU


@dataclass(frozen=True, repr=False)
class Run:
    """A measured run of a schedule: what was run, on what, when everything happened, and what was held."""

    job: Job
    machine: Machine
    how: str  # "measured" or "paced"
    notes: tuple[str, ...]  # what this machine can't show, and where the data came from
    losses: tuple[float, ...]  # one per measured step
    first_loss: float  # before any update
    traces: tuple[tuple[StepTrace, ...], ...]  # per measured step, one per rank
    held: Held
    gradients: GradientReport | None
    extras: Mapping[str, object]  # what the run's extras found, by their names

    @property
    def schedule(self) -> Schedule:
        """What was run."""
        return self.job.schedule

    @cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        """One per measured step, in ms from the first rank's start."""
        return tuple(_timeline(self.schedule, traces, self.how) for traces in self.traces)

    @cached_property
    def step_times_ms(self) -> tuple[float, ...]:
        """Of every measured step, from the first rank's start to the last rank's end, optimizer and all."""
        return tuple((max(t.end for t in traces) - min(t.start for t in traces)) / 1e6 for traces in self.traces)

    @property
    def timeline(self) -> Timeline:
        """The timeline of the median step."""
        return self.timelines[self._median]

    @property
    def step_time_ms(self) -> float:
        """The median step's time."""
        return self.step_times_ms[self._median]

    @property
    def _median(self) -> int:
        order = sorted(range(len(self.step_times_ms)), key=self.step_times_ms.__getitem__)
        return order[len(order) // 2]

    @property
    def precision(self) -> str:
        """The dtype of mixed precision, or float32."""
        return str(self.job.options.autocast or torch.float32).removeprefix("torch.")

    @property
    def predicted_peak_bytes(self) -> tuple[int, ...]:
        """Per rank, what the schedule's order says is held at once, from the bytes of one microbatch in each stage."""
        return self.schedule.peak_held(self.held.memory)

    @property
    def costs(self) -> Costs:
        """The median durations of this run's actions, per stage, in ms; of overlaps, the median of all.

        Where no backward is split, a full backward counts as input gradient. Where a stage has none alone, it is the
        sum of its halves. Running a forward again is `recompute`, not part of the gradients' times.
        """
        times: dict[tuple[int, Kind] | type, list[float]] = defaultdict(list)
        for _, item, start, end in (span for timeline in self.timelines for span in timeline.spans):
            key = Overlap if isinstance(item, Overlap) else (item.stage, item.kind)
            times[key].append(end - start)
        median = {key: statistics.median(found) for key, found in times.items()}
        stages = range(self.schedule.num_stages)
        again = self.held.recompute_ms or (0,) * len(stages)
        for s, kind in product(stages, (B, I)):
            if (s, kind) in median:
                median[s, kind] = max(0, median[s, kind] - again[s])
        inputs = [median.get((s, I), median.get((s, B))) for s in stages]
        weights = [median.get((s, W), 0) for s in stages]
        halves = [i + w for i, w in zip(inputs, weights, strict=True)]
        return Costs(
            [median[s, F] for s in stages],
            inputs,
            weights,
            backward=[median.get((s, B), halves[s]) for s in stages] if any(weights) else None,
            recompute=again if any(again) else 0,
            overlap=median.get(Overlap, "sum"),
            unit="ms",
        )

    def to_dict(self) -> dict:
        """Everything needed to redraw the run, as plain JSON values."""
        gradients = self.gradients and {
            "equal": self.gradients.equal,
            "difference": self.gradients.difference,
            "relative": self.gradients.relative,
            "tolerance": self.gradients.tolerance,
            "worst": self.gradients.worst,
            "loss_difference": self.gradients.loss_difference,
        }
        return {
            "schedule": self.schedule.name,
            "num_ranks": self.schedule.num_ranks,
            "num_stages": self.schedule.num_stages,
            "num_microbatches": self.schedule.num_microbatches,
            "workload": self.job.workload.name,
            **asdict(self.machine),
            "how": self.how,
            "engine": self.job.engine_name,
            "precision": self.precision,
            "reduction": self.job.options.reduction,
            "notes": self.notes,
            "first_loss": self.first_loss,
            "losses": self.losses,
            "first_step": self.job.first_step,
            "step_times_ms": self.step_times_ms,
            "step_time_ms": self.step_time_ms,
            **asdict(self.held),
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "gradients": gradients,
            **{name: _plain(found) for name, found in self.extras.items()},
            "timelines": [timeline.to_dict() for timeline in self.timelines],
        }

    def __str__(self) -> str:
        schedule, held, machine = self.schedule, self.held, self.machine
        ranks, microbatches = plural(schedule.num_ranks, "rank"), plural(schedule.num_microbatches, "microbatch")
        by, mixed = " by torch" * (self.job.engine_name == "torch"), f", mixed precision in {self.precision}"
        lines = [
            f"{schedule.name}{by}, {self.how}: {ranks} on {machine.device} "
            f"({_TRANSPORTS.get(machine.transport, machine.transport)}), {microbatches}"
            + mixed
            * (self.precision != "float32"),
            self.job.workload.name,
            f"loss             {' '.join(f'{loss:.4f}' for loss in self.losses)}",
            f"step time        {self.step_time_ms:.1f} ms (median of {len(self.step_times_ms)})",
            f"bubble fraction  {self.timeline.bubble_fraction:.3f}",
            f"peak held        {', '.join(map(readable_bytes, held.peak_bytes))}",
        ]
        if any(held.peak_in_flight):
            lines.insert(-1, f"peak in flight   {', '.join(map(str, held.peak_in_flight))} forwards")
        if held.allocated_bytes:
            both = zip(held.allocated_bytes, held.resident_bytes, strict=True)
            shown = ", ".join(f"{readable_bytes(peak)} ({readable_bytes(before)} before)" for peak, before in both)
            lines.append(f"allocator peak   {shown}")
        if norms := self.extras.get("gradient_norms"):
            lines.append(f"gradient norm    {' '.join(f'{norm:.4f}' for norm in norms)}")
        if self.gradients:
            lines.append(f"gradients        {self.gradients}")
        for note in self.notes:
            lines += textwrap.wrap(note, 80, initial_indent="note: ", subsequent_indent="      ")
        return "\n".join(lines)

    __repr__ = __str__


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
    held = together(job.schedule, reports)
    extras = [(e.name, e.finish(job, [report.extras[i] for report in reports])) for i, e in enumerate(job.extras)]
    return Run(
        job,
        Machine(device, transport, versions(), clock_error_ms),
        "measured" if job.options.pace is None else "paced",
        (*job.workload.notes, *notes, *_notes(reports, held, clock_error_ms, several_hosts)),
        tuple(map(sum, zip(*(report.losses for report in reports), strict=True))),
        sum(report.first_loss for report in reports),
        tuple(zip(*(report.traces for report in reports), strict=True)),
        held,
        gradients,
        {name: found for name, found in extras if found is not None},
    )


def _notes(reports: Sequence[RankReport], held: Held, clock_error_ms: float, several_hosts: bool) -> list[str]:
    """What a reader of the results should know of how they came about."""
    notes = []
    if unsplit := sorted(set().union(*(report.unsplit for report in reports))):
        notes.append(f"gradients of weights in {', '.join(unsplit)} are computed with the input's, not put off")
    if any(held.recompute_ms):
        again = ", ".join(str(stage) for stage, took in enumerate(held.recompute_ms) if took)
        notes.append(f"forwards run again in the backward: stages {again}")
    if several_hosts:
        tied = "ranks on several hosts: before every step each host's clock is tied to rank 0's"
        notes.append(f"{tied}; a rank's times can be {clock_error_ms:.2f} ms off")
    elif clock_error_ms > _CLOCK_ERROR_MS:
        notes.append(f"a rank's times can be {clock_error_ms:.1f} ms off the clock of all ranks")
    return notes


def _plain(found: object) -> object:
    return found.to_dict() if hasattr(found, "to_dict") else found


def versions() -> dict[str, str]:
    """What a measurement was made with."""
    from .. import __version__

    return {"pplab": __version__, "python": platform.python_version(), "torch": torch.__version__}


def _timeline(schedule: Schedule, traces: Sequence[StepTrace], how: str) -> Timeline:
    """One step of all ranks, in milliseconds from the first rank's start."""
    zero = min(trace.start for trace in traces)
    starts, ends = [], []
    for trace in traces:
        for _, start, end in trace.actions:
            starts.append((start - zero) / 1e6)
            ends.append((end - zero) / 1e6)
    others = tuple(
        Span(rank, what, (start - zero) / 1e6, (end - zero) / 1e6)
        for rank, trace in enumerate(traces)
        for what, start, end in trace.others
    )
    return Timeline(schedule, starts, ends, "ms", how, others)
