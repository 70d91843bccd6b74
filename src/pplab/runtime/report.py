"""What a run measured, put together from the ranks' reports."""

from __future__ import annotations

import platform
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch

from ..actions import B, F, I, Kind, Overlap, W
from ..costs import Costs
from ..footprint import Memory
from ..lab.profiles import Profile
from ..schedule import Schedule, plural
from ..timeline import Span, Timeline
from .job import Job, RankReport, WholeReport
from .trace import StepTrace

_CLOCK_ERROR_MS = 0.1  # what is worth a note
_TRANSPORTS = {"shared": "shared memory"}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class GradientReport:
    """Gradients of a run against those of one process, which ran the whole batch through the whole model."""

    difference: float  # the largest |run - one process| over all elements of all parameters
    scale: float  # the largest |one process|
    tolerance: float  # on difference / scale, for the dtype
    worst: str  # the parameter that differs most
    parameters: dict[str, float] = field(repr=False)  # name -> largest difference
    loss_difference: float

    @property
    def relative(self) -> float:
        """difference / scale."""
        return self.difference / self.scale if self.scale else self.difference

    @property
    def equal(self) -> bool:
        """Whether every parameter's gradient is that of one process, to the tolerance."""
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "NOT equal"
        count = plural(len(self.parameters), "parameter")
        return f"{verdict} to one process ({count}, largest difference {self.difference:.1e})"


def compare_gradients(
    run: Mapping[str, np.ndarray],
    one_process: Mapping[str, np.ndarray],
    loss_difference: float,
    dtype: torch.dtype = torch.float32,
) -> GradientReport:
    """Compare per parameter; ValueError when the two don't have the same parameters."""
    if run.keys() != one_process.keys():
        missing, extra = sorted(one_process.keys() - run.keys()), sorted(run.keys() - one_process.keys())
        raise ValueError(
            "the stages don't have the parameters of the whole model: "
            f"without a gradient {missing[:5] or 'none'}, unknown {extra[:5] or 'none'}"
        )
    differences = {name: float(np.abs(run[name] - one_process[name]).max()) for name in sorted(run)}
    worst = max(differences, key=differences.__getitem__)
    scale = max(float(np.abs(g).max()) for g in one_process.values())
    return GradientReport(differences[worst], scale, TOLERANCE[dtype], worst, differences, loss_difference)


@dataclass(frozen=True)
class Reference:
    """One process with the whole model."""

    loss: float
    gradients: dict[str, np.ndarray] = field(repr=False)
    step_times_ms: tuple[float, ...]

    @property
    def step_time_ms(self) -> float:
        """The median step."""
        return statistics.median(self.step_times_ms)


@dataclass(frozen=True, repr=False)
class Run:
    """A measured run of a schedule."""

    schedule: Schedule
    workload: str
    device: str
    transport: str
    how: str  # "measured" or "paced"
    notes: tuple[str, ...]  # what this machine can't show, and where the data came from
    losses: tuple[float, ...]  # one per measured step
    first_loss: float  # before any update
    timelines: tuple[Timeline, ...] = field(repr=False)  # one per measured step, in ms from its start
    step_times_ms: tuple[float, ...]  # from the first rank's start to the last rank's end, optimizer and all
    peak_in_flight: tuple[int, ...]  # per rank, counted while running
    peak_bytes: tuple[int, ...]  # per rank: kept by forwards for backwards at the worst moment
    bytes_of: tuple[int, ...]  # per stage: kept by one forward
    kept_of: tuple[int, ...]  # per stage: what of it is kept after an input gradient, with what is kept for the weights
    extra_of: tuple[int, ...]  # per stage: how far an input gradient rises above what was held at its start
    gradients: GradientReport | None
    versions: dict[str, str]
    engine: str = "pplab"  # or "torch"
    profile: Profile | None = field(default=None, repr=False)  # of the ranks' traces, where they were recorded
    # Per rank, the CUDA allocator's peak in the measured steps (weights, gradients, optimizer and all), and what of it
    # was there before them (the weights); None on the CPU.
    allocated_bytes: tuple[int, ...] | None = None
    resident_bytes: tuple[int, ...] | None = None
    recomputed_of: tuple[int, ...] = ()  # per stage: what comes on top when a forward is run again; none: no stage does
    recompute_ms: tuple[float, ...] = ()  # per stage: the median time of that
    gradient_norms: tuple[float, ...] = ()  # of a run that clips: over all parameters, per step, before clipping
    first_step: int = 0  # how many steps a checkpoint had done when this run went on from it
    precision: str = "float32"  # or the dtype of mixed precision
    reduction: str = "end"  # when gradients kept on several ranks were added up
    message_bytes: tuple[int, ...] = ()  # per stage: what it gives a stage on another rank; none by torch's runtime
    clock_error_ms: float = 0.0  # how far a rank's times can be off the clock of all, at worst: 0 on one host's CPU

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
    def memory(self) -> Memory:
        """What this run's stages hold for a microbatch, in bytes, without parameters."""
        again = self.recomputed_of or 0
        return Memory(self.bytes_of, self.kept_of, again, while_input_gradient=self.extra_of, unit="bytes")

    @property
    def predicted_peak_bytes(self) -> tuple[int, ...]:
        """Per rank, what the schedule's order says is held at once, from the bytes of one microbatch in each stage."""
        return self.schedule.peak_held(self.memory)

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
        again = self.recompute_ms or (0,) * len(stages)
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
            "workload": self.workload,
            "device": self.device,
            "transport": self.transport,
            "how": self.how,
            "engine": self.engine,
            "precision": self.precision,
            "reduction": self.reduction,
            "notes": self.notes,
            "first_loss": self.first_loss,
            "losses": self.losses,
            "gradient_norms": self.gradient_norms,
            "first_step": self.first_step,
            "step_times_ms": self.step_times_ms,
            "step_time_ms": self.step_time_ms,
            "peak_in_flight": self.peak_in_flight,
            "peak_bytes": self.peak_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "allocated_bytes": self.allocated_bytes,
            "resident_bytes": self.resident_bytes,
            "bytes_of": self.bytes_of,
            "kept_of": self.kept_of,
            "extra_of": self.extra_of,
            "recomputed_of": self.recomputed_of,
            "recompute_ms": self.recompute_ms,
            "gradients": gradients,
            "versions": self.versions,
            "profile": self.profile and self.profile.to_dict(),
            "message_bytes": self.message_bytes,
            "clock_error_ms": self.clock_error_ms,
            "timelines": [timeline.to_dict() for timeline in self.timelines],
        }

    def __str__(self) -> str:
        ranks, microbatches = (
            plural(self.schedule.num_ranks, "rank"),
            plural(self.schedule.num_microbatches, "microbatch"),
        )
        lines = [
            f"{self.schedule.name}{' by torch' * (self.engine == 'torch')}, {self.how}: {ranks} on {self.device} "
            f"({_TRANSPORTS.get(self.transport, self.transport)}), {microbatches}"
            + f", mixed precision in {self.precision}"
            * (self.precision != "float32"),
            self.workload,
            f"loss             {' '.join(f'{loss:.4f}' for loss in self.losses)}",
            f"step time        {self.step_time_ms:.1f} ms (median of {len(self.step_times_ms)})",
            f"bubble fraction  {self.timeline.bubble_fraction:.3f}",
            f"peak held        {', '.join(map(readable_bytes, self.peak_bytes))}",
        ]
        if self.engine == "pplab":
            lines.insert(-1, f"peak in flight   {', '.join(map(str, self.peak_in_flight))} forwards")
        if self.allocated_bytes:
            both = zip(self.allocated_bytes, self.resident_bytes, strict=True)
            shown = ", ".join(f"{readable_bytes(peak)} ({readable_bytes(before)} before)" for peak, before in both)
            lines.append(f"allocator peak   {shown}")
        if self.gradient_norms:
            lines.append(f"gradient norm    {' '.join(f'{norm:.4f}' for norm in self.gradient_norms)}")
        if self.gradients:
            lines.append(f"gradients        {self.gradients}")
        for note in self.notes:
            lines += textwrap.wrap(note, 80, initial_indent="note: ", subsequent_indent="      ")
        return "\n".join(lines)

    __repr__ = __str__


def report_gradients(
    reports: Sequence[RankReport], whole: WholeReport, dtype: torch.dtype | None = None
) -> GradientReport:
    """Compare what all ranks collected with one process. Of copies of a parameter, the one that differs most counts."""
    merged: dict[str, np.ndarray] = {}
    for name, gradient in (item for report in reports for item in report.gradients.items()):
        one = whole.gradients.get(name)
        if name not in merged or (one is not None and _apart(gradient, one) > _apart(merged[name], one)):
            merged[name] = gradient
    first_loss = sum(report.first_loss for report in reports)
    return compare_gradients(merged, whole.gradients, abs(first_loss - whole.loss), dtype or torch.float32)


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


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
    schedule, workload, how = job.schedule, job.workload, "measured" if job.pace_s is None else "paced"
    notes = (*workload.notes, *notes)
    if job.engine == "torch" and transport == "shared":
        transport = "gloo"  # torch's runtime knows nothing of the memory that the ranks share
    steps = list(zip(*(report.traces for report in reports), strict=True))
    changes = {key: change for report in reports for key, change in report.bytes_of.items()}
    stages = range(schedule.num_stages)
    bytes_of = [changes.get((stage, F), (0, 0))[0] for stage in stages]
    if unsplit := sorted(set().union(*(report.unsplit for report in reports))):
        notes = (*notes, f"gradients of weights in {', '.join(unsplit)} are computed with the input's, not put off")
    of_input = [changes.get((stage, I), (0, 0)) for stage in stages]
    allocated = [report.allocated for report in reports]
    sent = {stage: size for report in reports for stage, size in report.message_bytes.items()}
    recomputed = {stage: size for report in reports for stage, size in report.recomputed_bytes.items()}
    again: dict[int, list[float]] = defaultdict(list)
    for stage, start, end in (each for traces in steps for trace in traces for each in trace.again):
        again[stage].append((end - start) / 1e6)
    if again:
        notes = (*notes, f"forwards run again in the backward: stages {', '.join(map(str, sorted(again)))}")
    clock_error_ms = max(trace.error_ns for traces in steps for trace in traces) / 1e6
    if several_hosts:
        tied = "ranks on several hosts: before every step each host's clock is tied to rank 0's"
        notes = (*notes, f"{tied}; a rank's times can be {clock_error_ms:.2f} ms off")
    elif clock_error_ms > _CLOCK_ERROR_MS:
        notes = (*notes, f"a rank's times can be {clock_error_ms:.1f} ms off the clock of all ranks")
    return Run(
        schedule,
        workload.name,
        device,
        transport,
        how,
        tuple(notes),
        tuple(map(sum, zip(*(report.losses for report in reports), strict=True))),
        sum(report.first_loss for report in reports),
        tuple(_timeline(schedule, traces, how) for traces in steps),
        tuple((max(t.end for t in traces) - min(t.start for t in traces)) / 1e6 for traces in steps),
        tuple(report.peak_in_flight for report in reports),
        tuple(report.peak_bytes for report in reports),
        tuple(bytes_of),
        tuple(held + change for held, (change, _) in zip(bytes_of, of_input, strict=True)),
        tuple(max(0, rise - recomputed.get(stage, 0)) for stage, (_, rise) in enumerate(of_input)),
        gradients,
        versions(),
        job.engine,
        profile=_profile(schedule, reports, job.engine),
        allocated_bytes=tuple(peak for _, peak in allocated) if all(allocated) else None,
        resident_bytes=tuple(before for before, _ in allocated) if all(allocated) else None,
        recomputed_of=tuple(recomputed.get(stage, 0) for stage in stages) if again else (),
        recompute_ms=tuple(statistics.median(again[s]) if s in again else 0 for s in stages) if again else (),
        gradient_norms=reports[0].gradient_norms,
        first_step=job.first_step,
        precision=str(job.autocast or torch.float32).removeprefix("torch."),
        reduction=job.reduction,
        message_bytes=tuple(sent.get(stage, 0) for stage in stages) if sent else (),
        clock_error_ms=clock_error_ms,
    )


def _profile(schedule: Schedule, reports: Sequence[RankReport], engine: str) -> Profile | None:
    found = tuple(report.profile for report in reports if report.profile is not None)
    return Profile(f"{schedule.name}{' by torch' * (engine == 'torch')}", found) if found else None


def readable_bytes(count: float) -> str:
    """`34.8 MB`, `512 B`: powers of ten, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


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
