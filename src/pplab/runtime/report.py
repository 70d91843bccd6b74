"""What a run measured, and what you can derive from it."""

from __future__ import annotations

import statistics
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import Any

from ..actions import B, F, I, Overlap, W, parts
from ..costs import Costs
from ..footprint import Memory
from ..schedule import Schedule, plural
from ..timeline import Span, Timeline
from .listener import StepTrace
from .options import Job
from .reference import GradientReport


@dataclass(frozen=True)
class Machine:
    """What a run was measured on, and with."""

    device: str
    transport: str
    versions: dict[str, str]
    clock_error_ms: float = 0.0  # at worst, off the clock of all; 0 on one host's CPU


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
        """The time of every measured step, from the first rank's start to the last rank's end, with
        the optimizer's step.
        """
        return tuple(
            (max(trace.end for trace in traces) - min(trace.start for trace in traces)) / 1e6
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
        """What ranks and stages held, in bytes, if an extra such as `lab.Meter()` has counted it
        and gives their `memory`. Raises ValueError otherwise.
        """
        for found in self.extras.values():
            if isinstance(getattr(found, "memory", None), Memory):
                return found
        raise ValueError(
            "this run didn't count what it held: pool.train(schedule, workload, lab.Meter()) does"
        )

    @property
    def predicted_peak_bytes(self) -> tuple[float, ...]:
        """Per rank, what is held at once by the order of the schedule, given the bytes of one
        microbatch in each stage.
        """
        return self.schedule.peak_held(self.held.memory)

    @cached_property
    def recompute_ms(self) -> tuple[float, ...]:
        """Per stage, the median time of running a forward a second time, as with `lab.Recompute()`.
        It is () if no stage does so.
        """
        took = defaultdict(list)
        for trace in chain(*self.traces):
            for stage, start, end in trace.again:
                took[stage].append((end - start) / 1e6)
        stages = range(self.schedule.num_stages) if took else ()
        return tuple(statistics.median(took[s] or [0]) for s in stages)

    @property
    def costs(self) -> Costs:
        """The median durations of this run's actions, per stage, in ms, and of overlaps by the
        stages of their halves.

        Where no backward is split, a full one counts as input gradient. Where a stage has no full
        backward, it is the sum of its halves. An action that never runs alone takes as long as the
        overlaps that it is in. The time to run a forward a second time is in `recompute` alone.
        """
        alone, paired, pairs = defaultdict(list), defaultdict(list), defaultdict(list)
        for _, item, start, end in (span for timeline in self.timelines for span in timeline.spans):
            if isinstance(item, Overlap):
                names = sorted(f"{half.stage}{half.kind}" for half in item)
                pairs[tuple(names)].append(end - start)
            for half in parts(item):
                found = alone if half is item else paired
                found[half.kind, half.stage].append(end - start)
        lasted = {key: statistics.median(times) for key, times in (paired | alone).items()}
        stages, again = range(self.schedule.num_stages), self.recompute_ms
        for kind, s in product((B, I), stages if again else ()):
            if (kind, s) in lasted:
                lasted[kind, s] = max(0, lasted[kind, s] - again[s])
        inputs = [lasted.get((I, s), lasted.get((B, s), 0)) for s in stages]
        weights = [lasted.get((W, s), 0) for s in stages]
        backwards = None
        if any(weights):
            backwards = [lasted.get((B, s), inputs[s] + weights[s]) for s in stages]
        return Costs(
            [lasted[F, s] for s in stages],
            inputs,
            weights,
            backward=backwards,
            recompute=again or 0,
            overlap={pair: statistics.median(times) for pair, times in pairs.items()} or "sum",
            unit="ms",
        )

    def __str__(self) -> str:
        schedule, job, machine = self.schedule, self.job, self.machine
        by = "" if job.engine_name == "pplab" else f" by {job.engine_name}"
        ranks = plural(schedule.num_ranks, "rank")
        microbatches = plural(schedule.num_microbatches, "microbatch")
        crosses = machine.transport.replace("shared", "shared memory")
        dtype = job.options.autocast
        mixed = f", mixed precision in {dtype}".replace("torch.", "") if dtype else ""
        lines = [
            f"{schedule.name}{by}, {job.how}: {ranks} on {machine.device} ({crosses}), "
            f"{microbatches}{mixed}",
            job.workload.name,
            f"loss             {' '.join(f'{loss:.4f}' for loss in self.losses)}",
            f"step time        {self.step_time_ms:.1f} ms (median of {len(self.step_times_ms)})",
            f"bubble fraction  {self.timeline.bubble_fraction:.3f}",
        ]
        for extra in job.extras:
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

    def ms(moment: int) -> float:
        return (moment - zero) / 1e6

    items = [item for trace in traces for item in trace.actions]
    others = tuple(
        Span(rank, what, ms(start), ms(end))
        for rank, trace in enumerate(traces)
        for what, start, end in trace.others
    )
    starts, ends = [ms(start) for _, start, _ in items], [ms(end) for *_, end in items]
    return Timeline(schedule, starts, ends, "ms", how, others)
