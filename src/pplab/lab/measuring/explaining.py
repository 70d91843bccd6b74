"""What traces of a training run say: where a step's time went, and what another schedule, cut or number of microbatches
would make of it.

All is predicted from one step, the median one: `calibrate` takes its means, and a simulation puts them together again.
Torch's Schedule1F1B and ScheduleGPipe wait for what they send. So a step of theirs is replayed both ways, and what else
is predicted of the two is sent in the way that comes nearer to the step.

The error of a prediction is a sum, in shares of the step:

    of the replay    how far the nearer replay is from what was measured
    of the steps     how far they are from the median one, on average
    of the sending   for another order or another way to send: how far the two replays lie apart
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean
from typing import Any

from ...actions import B, I
from ...builders import Builder, known
from ...costs import Costs
from ...errors import shown
from ...plot import end_of
from ...schedule import Schedule, plural
from ...simulator import simulate
from ...timeline import Timeline
from ..forms import Table, timeline_to_dict
from ..streams import SENDS, simulate_sends
from .attribution import Where, _machines, where


@dataclass(frozen=True)
class WhatIf:
    """A step as it would be under the costs of one that ran."""

    what: str
    timeline: Timeline
    change: float  # of the time per microbatch against the replay: -0.1 is a tenth less
    error: float  # of the makespan, as a share of it


@dataclass(frozen=True, repr=False)
class Explained:
    """What `explain` found: `print` shows it."""

    where: Where  # the median step's parts
    costs: Costs  # which the median step had
    what_ifs: tuple[WhatIf, ...]  # the first changes nothing: it is the replay
    notes: tuple[str, ...]

    @property
    def replay(self) -> Timeline:
        """What ran, simulated under `costs`."""
        return self.what_ifs[0].timeline

    @property
    def table(self) -> Table:
        """A row for each of `what_ifs`."""
        rows = Table()
        rows.columns = "what if", f"step {self.replay.unit}", "per microbatch", "error", "most in flight"
        for row in self.what_ifs:
            step, change = row.timeline, f"{row.change:+.1%}"
            rows.append((row.what, f"{step.makespan:.1f}", change, f"±{row.error:.1%}", f"{max(step.peak_in_flight)}"))
        return rows

    def to_dict(self) -> dict:
        """All of it as plain JSON values."""
        rows = [vars(row) | {"timeline": timeline_to_dict(row.timeline)} for row in self.what_ifs]
        return {"where": self.where.to_dict(), "what_ifs": rows, "notes": self.notes}

    def __str__(self) -> str:
        return "\n".join(map(str, (self.where, "", self.table, "", *self.notes)))

    __repr__ = __str__


def explain(traced: Any) -> Explained:
    """Say where the time of the median step went, and predict what differs from it: stages that take equally long,
    messages that take no time, twice and half as many microbatches of the same size, and every registered schedule of
    the same stages whose actions' durations the step tells.

    `traced` is what `lab.read_traces` gives, or a Run: it has `timelines`, one per whole step, and `notes`. ValueError
    where it has no step.
    """
    if not (steps := sorted(getattr(traced, "timelines", ()), key=end_of)):
        raise ValueError(f"explain takes what lab.read_traces gives, with a whole step in it, got {shown(traced)}")
    step = steps[(len(steps) - 1) // 2]
    own, (mean, *_, costs) = step.schedule, _machines(step)
    even = replace(mean, links=costs.links, message=costs.message, overhead=costs.overhead)
    both = {sends: _simulated(own, costs, sends).makespan for sends in SENDS[:2]}
    nearest = min(both, key=lambda sends: abs(both[sends] - step.makespan))
    of_replay = abs(both[nearest] / step.makespan - 1)
    of_steps = fmean(abs(each.makespan / step.makespan - 1) for each in steps)
    of_sending = max(both.values()) / min(both.values()) - 1

    def what_if(what: str, schedule: Schedule = own, costs: Costs = costs, sends: str = nearest) -> WhatIf:
        timeline = _simulated(schedule, costs, sends)
        shares = timeline.makespan / schedule.num_microbatches, both[nearest] / own.num_microbatches
        error = of_replay + of_steps + of_sending * (schedule != own or sends != nearest)
        return WhatIf(what, timeline, shares[0] / shares[1] - 1, error)

    what_ifs = [
        what_if("nothing (replay)"),
        what_if("nobody waits for sends", sends=SENDS[0]),
        what_if("stages equally long", costs=even),
        what_if("messages at once", costs=replace(costs, links={})),
        *(what_if(*named) for named in _schedules(own, costs)),
    ]
    if nearest == SENDS[0]:
        del what_ifs[1]
    told = f"{plural(len(steps), 'whole step')}: the median one takes {end_of(step):.1f} {step.unit}, "
    told += f"the slowest {end_of(steps[-1]):.1f}"
    return Explained(where(step), costs, tuple(what_ifs), (told, *traced.notes, *_unknown(steps, costs)))


def _simulated(schedule: Schedule, costs: Costs, sends: str) -> Timeline:
    try:
        return simulate_sends(schedule, costs, sends)
    except ValueError:
        return simulate(schedule, costs)  # rows of which no class waits for its sends


def _schedules(own: Schedule, costs: Costs) -> Iterator[tuple[str, Schedule]]:
    """What ran with other numbers of microbatches, if it is a registered schedule; then all others of its stages."""
    M, V = own.num_microbatches, own.num_stages // own.num_ranks
    without = {"slices", "stages_per_rank"} if V == 1 else {"slices"}  # of sequences, which would be other microbatches

    def built(builder: Builder, num_microbatches: int) -> Schedule | None:
        options = {"costs": costs, "stages_per_rank": V}
        taken = {name: options[name] for name in builder.options if name in options}
        try:
            return builder(own.num_ranks, num_microbatches, **taken)
        except ValueError:
            return None  # it takes other ranks or microbatches

    found = [(each, built(each, M)) for each in known() if without.isdisjoint(each.options)]
    ran = [builder for builder, schedule in found if schedule == own]
    for count in (2 * M, M // 2):
        if ran and (schedule := built(ran[0], count)):
            yield f"{ran[0].name}, {count} microbatches", schedule
    told = {*own.columns.kinds, B}  # which lasts as long as its halves
    seen: list[Schedule | None] = [own, None]
    for _, schedule in found:
        if schedule not in seen and schedule.placement == own.placement and told.issuperset(schedule.columns.kinds):
            seen.append(schedule)
            yield schedule.name, schedule


def _unknown(steps: Sequence[Timeline], costs: Costs) -> Iterator[str]:
    """What the steps don't tell."""
    own = steps[0].schedule
    yield "believe differences that are larger than the error"
    if len(steps) == 1:
        yield "one step alone doesn't tell how far steps differ, so no error has that"
    yield "microbatches stay as large as they are, and memory isn't checked"
    yield "other stages per rank, cuts and sizes of microbatches need a run of their own"
    if all(link.bandwidth == inf for link in costs.links.values()):
        yield "no link's bandwidth is known: all of a message's time counts as latency"
    if own.num_stages > own.num_ranks:
        yield "a receive that is posted early can hold messages up: no error knows of that"
    if I not in own.columns.kinds:
        yield "no backward is split, so schedules that split it aren't predicted"
    if not own.graph.second_half:
        yield "pairs count as one action after the other, since none ran at once"
