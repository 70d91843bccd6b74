"""What a run measured, and what can be read off it."""

from __future__ import annotations

import statistics
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from ..actions import B, F, I, Overlap, W, parts
from ..costs import Costs
from ..schedule import Schedule, plural
from ..timeline import Span, Timeline
from .listener import StepTrace
from .options import Job

if TYPE_CHECKING:
    from .reference import GradientReport


@dataclass(frozen=True)
class Machine:
    """What a run was measured on, and with."""

    device: str
    transport: str
    versions: dict[str, str]
    clock_error_ms: float = (
        0.0  # how far a rank's times can be off the clock of all, at worst: 0 on one host's CPU
    )


@dataclass(frozen=True, repr=False)
class Run:
    """A measured run of a schedule: what was run, on what, when everything happened, and what its
    extras found.
    """

    job: Job
    machine: Machine
    notes: tuple[str, ...]  # what this machine can't show, and where the data came from
    losses: tuple[float, ...]  # one per measured step
    first_loss: float  # before any update
    traces: tuple[tuple[StepTrace, ...], ...]  # per measured step, one per rank
    gradients: GradientReport | Any  # None unless they were asked for
    extras: Mapping[str, Any]  # what the run's extras found, by their names

    @property
    def schedule(self) -> Schedule:
        """What was run."""
        return self.job.schedule

    @cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        """One per measured step, in ms from the first rank's start."""
        return tuple(_timeline(self.schedule, traces, self.job.how) for traces in self.traces)

    @cached_property
    def step_times_ms(self) -> tuple[float, ...]:
        """Of every measured step, from the first rank's start to the last rank's end, optimizer and
        all.
        """
        return tuple(
            (max(t.end for t in traces) - min(t.start for t in traces)) / 1e6
            for traces in self.traces
        )

    @property
    def timeline(self) -> Timeline:
        """The timeline of the median step."""
        return self.timelines[self.step_times_ms.index(self.step_time_ms)]

    @property
    def step_time_ms(self) -> float:
        """The median step's time."""
        return statistics.median_high(self.step_times_ms)

    @property
    def held(self) -> Any:
        """What ranks and stages held, in bytes, where `lab.Meter()` has counted it; ValueError
        where it hasn't.
        """
        if "held" not in self.extras:
            raise ValueError(
                "this run didn't count what it held: pool.train(schedule, workload, lab.Meter()) does"
            )
        return self.extras["held"]

    @property
    def predicted_peak_bytes(self) -> tuple[int, ...]:
        """Per rank, what the schedule's order says is held at once, from the bytes of one
        microbatch in each stage.
        """
        return self.schedule.peak_held(self.held.memory)

    @cached_property
    def recompute_ms(self) -> tuple[float, ...]:
        """Per stage, the median time of running a forward again; () where no stage does."""
        took: dict[int, list[float]] = defaultdict(list)
        for stage, start, end in (
            each for traces in self.traces for trace in traces for each in trace.again
        ):
            took[stage].append((end - start) / 1e6)
        stages = range(self.schedule.num_stages if took else 0)
        return tuple(statistics.median(took[stage]) if stage in took else 0 for stage in stages)

    @property
    def costs(self) -> Costs:
        """The median durations of this run's actions, per stage, in ms, and of overlaps by the
        stages of their halves.

        Where no backward is split, a full one counts as input gradient; where a stage has none, as
        the sum of its halves. What never runs alone counts as its overlaps do. Running a forward
        again is `recompute`, part of none.
        """
        times, at_most = defaultdict(list), defaultdict(list)
        for _, item, start, end in (span for timeline in self.timelines for span in timeline.spans):
            names = sorted(f"{half.stage}{half.kind}" for half in parts(item))
            times[tuple(names) if isinstance(item, Overlap) else (item.stage, item.kind)].append(
                end - start
            )
            for half in parts(item):
                at_most[half.stage, half.kind].append(end - start)
        median = {key: statistics.median(found) for key, found in (at_most | times).items()}
        stages = range(self.schedule.num_stages)
        again = self.recompute_ms or (0,) * len(stages)
        for s, kind in median.keys() & {*product(stages, (B, I))}:
            median[s, kind] = max(0, median[s, kind] - again[s])
        inputs = [median.get((s, I), median.get((s, B))) for s in stages]
        weights = [median.get((s, W), 0) for s in stages]
        backwards = (
            [median.get((s, B), inputs[s] + weights[s]) for s in stages] if any(weights) else None
        )
        pairs = {key: lasted for key, lasted in median.items() if isinstance(key[0], str)}
        more = {"recompute": again if any(again) else 0, "overlap": pairs or "sum", "unit": "ms"}
        return Costs([median[s, F] for s in stages], inputs, weights, backward=backwards, **more)

    def __str__(self) -> str:
        schedule, crosses = self.schedule, self.machine.transport.replace("shared", "shared memory")
        ranks, microbatches = (
            plural(schedule.num_ranks, "rank"),
            plural(schedule.num_microbatches, "microbatch"),
        )
        by = " by torch" * (self.job.engine_name == "torch")
        dtype = self.job.options.autocast
        mixed = f", mixed precision in {dtype}".replace("torch.", "") if dtype else ""
        lines = [
            f"{schedule.name}{by}, {self.job.how}: {ranks} on {self.machine.device} ({crosses}), {microbatches}{mixed}",
            self.job.workload.name,
            f"loss             {' '.join(f'{loss:.4f}' for loss in self.losses)}",
            f"step time        {self.step_time_ms:.1f} ms (median of {len(self.step_times_ms)})",
            f"bubble fraction  {self.timeline.bubble_fraction:.3f}",
        ]
        for extra in self.job.extras:
            if extra.name in self.extras:
                lines += extra.lines(self.extras[extra.name])
        if self.gradients:
            lines.append(f"gradients        {self.gradients}")
        for note in self.notes:
            lines += textwrap.wrap(note, 80, initial_indent="note: ", subsequent_indent="      ")
        return "\n".join(lines)

    __repr__ = __str__


def _timeline(schedule: Schedule, traces: Sequence[StepTrace], how: str) -> Timeline:
    """One step of all ranks, in milliseconds from the first rank's start."""
    zero = min(trace.start for trace in traces)
    starts, ends = (
        [(span[at] - zero) / 1e6 for trace in traces for span in trace.actions] for at in (1, 2)
    )
    others = ((rank, *other) for rank, trace in enumerate(traces) for other in trace.others)
    spans = tuple(
        Span(rank, what, (start - zero) / 1e6, (end - zero) / 1e6)
        for rank, what, start, end in others
    )
    return Timeline(schedule, starts, ends, "ms", how, spans)
