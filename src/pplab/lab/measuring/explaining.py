"""What traces of a training run say: where a step's time went, and what another order, cut or number of microbatches
would make of it.

Everything is predicted from one step, the median one: `calibrate` takes its means, and a simulation puts them together
again. Each prediction has an error, a share of the step, the larger of two:

    the replay's    how far a simulation of the schedule that ran is from the step that was measured
    the steps'      half of how far predictions from other steps lie apart, each against that step's own replay
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from ...actions import B, I, Kind, parts
from ...builders import Builder, known
from ...costs import Costs
from ...errors import shown
from ...plot import compare, end_of
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Timeline
from ..forms import STATIC, Table, explore, figure_html
from .attribution import Where, _machines, where

Machines = Sequence[Costs]  # what `where` replays a step on, the last with all that was measured


@dataclass(frozen=True)
class WhatIf:
    """A step that nobody ran, as the costs of one that ran predict it."""

    what: str
    timeline: Timeline
    change: float  # of the time per microbatch, against the replay: -0.1 is a tenth less
    error: float  # of `timeline`'s makespan, as a share of it


@dataclass(frozen=True, repr=False)
class Explained:
    """What `explain` found. `print` shows it, `to_html` makes a page of it."""

    where: Where  # the median step's parts
    slowest: Timeline
    costs: Costs
    replay: Timeline  # the schedule that ran, under `costs`
    what_ifs: tuple[WhatIf, ...]
    notes: tuple[str, ...]

    @property
    def error(self) -> float:
        """How far the replay is from the step: -0.1 where it takes a tenth less than was measured."""
        return self.replay.makespan / self.where.timeline.makespan - 1

    @property
    def table(self) -> Table:
        """The replay and what differs from it, a row each. Errors are shares of the row's step."""
        unit = self.replay.unit
        rows = Table()
        rows.columns = "what if", f"step{unit and f' ({unit})'}", "per microbatch", "error", "most in flight"
        for row in (WhatIf("nothing (replay)", self.replay, 0, abs(self.error)), *self.what_ifs):
            step, peaks = row.timeline, row.timeline.peak_in_flight
            rows.append((row.what, f"{step.makespan:.1f}", f"{row.change:+.1%}", f"± {row.error:.1%}", f"{max(peaks)}"))
        return rows

    @property
    def told(self) -> str:
        """Which step this is about."""
        step, slowest = self.where.step_time, end_of(self.slowest)
        return f"the median step, {step:.1f} {self.replay.unit}; the slowest, {slowest:.1f} {self.replay.unit}"

    def to_dict(self) -> dict:
        """The figures as plain JSON values."""
        return {
            "where": self.where.to_dict(),
            "slowest": end_of(self.slowest),
            "replay": {"makespan": self.replay.makespan, "error": self.error},
            "what_ifs": [
                {"what": row.what, "makespan": row.timeline.makespan, "change": row.change, "error": row.error}
                for row in self.what_ifs
            ],
            "notes": self.notes,
        }

    def to_html(self, path: str | Path) -> None:
        """Write one page that needs nothing else: tables, charts, and the step in the explorer beside its replay.

        OSError for a path that can't be written; ModuleNotFoundError, which says what to install, without matplotlib.
        """
        from ..forms import waterfall

        pair = [self.replay, self.where.timeline]
        filled = {
            "title": html.escape(f"Where a step of {self.replay.schedule.name} went"),
            "told": html.escape(self.told),
            "where": html.escape(str(self.where)),
            "waterfall": figure_html(waterfall(self.where).figure),
            "compare": figure_html(compare(pair)[0].figure),
            "table": self.table._repr_html_(),
            "notes": "".join(f"<li>{html.escape(note)}</li>" for note in self.notes),
            "explorer": explore(pair)._repr_html_(),
        }
        page = (STATIC.parent / "explained.html").read_text("utf-8")
        Path(path).write_text(re.sub(r"/\*(\w+)\*/", lambda place: filled[place[1]], page), "utf-8")

    def __str__(self) -> str:
        return "\n".join((self.told, str(self.where), "", str(self.table), "", *self.notes))

    __repr__ = __str__


def explain(traced: Any) -> Explained:
    """Say where the time of the median step went, and predict what differs from it: stages that take equally long,
    messages that take no time, twice and half as many microbatches of the same size, and every registered schedule of
    the same stages that needs no duration which the step doesn't tell.

    `traced` is what `lab.read_traces` gives, or a run: it has `timelines`, one per whole step, and `notes`. ValueError
    where it has no step.
    """
    steps = sorted(getattr(traced, "timelines", ()), key=end_of)
    if not steps:
        raise ValueError(f"explain takes what lab.read_traces gives, with one whole step at least, got {shown(traced)}")
    machines = [_machines(step) for step in steps]
    median = (len(steps) - 1) // 2
    step, costs = steps[median], machines[median][-1]
    own, replay = step.schedule, simulate(step.schedule, costs)
    replays = [simulate(own, each[-1]).makespan for each in machines]
    of_replay = abs(replay.makespan / step.makespan - 1)

    def what_if(what: str, schedule: Schedule, pick: Callable[[Machines], Costs]) -> WhatIf:
        ratios = [simulate(schedule, pick(each)).makespan / one for each, one in zip(machines, replays, strict=True)]
        of_steps = (max(ratios) - min(ratios)) / 2 / ratios[median]
        change = ratios[median] * own.num_microbatches / schedule.num_microbatches - 1
        return WhatIf(what, simulate(schedule, pick(machines[median])), change, max(of_replay, of_steps))

    found = [what_if("stages equally long", own, _even), what_if("messages take no time", own, _at_once)]
    found += (what_if(name, schedule, _measured) for name, schedule in _schedules(own, costs))
    notes = (*traced.notes, *_unknown(steps, costs))
    return Explained(where(step), steps[-1], costs, replay, tuple(found), notes)


def _measured(machines: Machines) -> Costs:
    return machines[-1]


def _even(machines: Machines) -> Costs:
    costs = machines[-1]
    return replace(machines[0], links=costs.links, message=costs.message, overhead=costs.overhead)


def _at_once(machines: Machines) -> Costs:
    return replace(machines[-1], links={})


def _schedules(own: Schedule, costs: Costs) -> Iterator[tuple[str, Schedule]]:
    """What ran with other numbers of microbatches, where its rows are a registered schedule's; then other schedules."""

    def built(builder: Builder, num_microbatches: int) -> Schedule | None:
        options: dict[str, Any] = {"costs": costs} if "costs" in builder.options else {}
        if "stages_per_rank" in builder.options:
            options["stages_per_rank"] = each
        try:
            return builder(own.num_ranks, num_microbatches, **options)
        except ValueError:
            return None  # it takes other ranks or microbatches

    M, each, told = own.num_microbatches, own.num_stages // own.num_ranks, _items(own)
    if (I,) in told:
        told.add((B,))  # as long as both halves
    beside = {"slices", "stages_per_rank"} if each == 1 else {"slices"}  # of sequences, which nobody has measured
    found = [(builder, built(builder, M)) for builder in known() if beside.isdisjoint(builder.options)]
    for builder in [builder for builder, schedule in found if schedule == own][:1]:
        for count in (2 * M, M // 2):
            if schedule := built(builder, count):
                yield f"{count} microbatches, each as now", schedule
    seen = [own]
    for _, schedule in found:
        if schedule and schedule not in seen and schedule.placement == own.placement and _items(schedule) <= told:
            seen.append(schedule)
            yield schedule.name, schedule


def _items(schedule: Schedule) -> set[tuple[Kind, ...]]:
    """Of what kinds a row's items are: (F,) is a forward, (B, F) a pair."""
    return {tuple(sorted(action.kind for action in parts(item))) for row in schedule.rows for item in row}


def _unknown(steps: Sequence[Timeline], costs: Costs) -> Iterator[str]:
    """What these steps don't tell."""
    if len(steps) == 1:
        yield "This is the only whole step, so errors don't say how far steps differ."
    if all(link.bandwidth == inf for link in costs.links.values()):
        yield "No link's bandwidth is known: a message's whole time counts as latency, also where others would queue."
    if (I,) not in _items(steps[0].schedule):
        yield "No backward is split in two, so schedules that split it aren't predicted."
    yield "Other stages per rank, a measured cut and microbatches of another size need a run of their own."
    yield "Nobody has checked whether what is most in flight fits. Believe differences that are larger than the error."
