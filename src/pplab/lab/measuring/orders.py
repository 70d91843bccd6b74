"""Predict what a step would take in other orders of the same actions, from steps that ran.

Every prediction is made several times. Each time the actions take what they took in one of the
steps, drawn separately for each microbatch. Torch's Schedule1F1B and ScheduleGPipe wait for what
they send, which makes ranks start late. So each order is predicted without such waits, with them,
and with them instead of all lateness, unless the steps that ran rule one of the three out. If no
rank waited for a link's messages, the link is taken to be as fast as its other direction, and then
as slow as it may be. The error of a prediction is a sum, in shares of the step:

    of the replay  how far the steps that ran, predicted in the same way, are from what was measured
    of the steps   twice the standard error of the predictions
    of the machine half of what lies between the ways to send and the bounds of the links
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from statistics import fmean, stdev

from ...actions import Action, B, F, I, W
from ...builders import Builder, known
from ...costs import Costs
from ...plot import end_of
from ...schedule import Schedule
from ...timeline import Timeline
from ..forms import Table
from ..searches import built
from ..streams import SENDS, simulator_of
from .attribution import calibrate
from .deliveries import observe

# predictions of a step, fewer where all of them would have more actions than that
_DRAWS, _WORK = 8, 10_000
_Way = tuple[str, bool]  # who waits, and whether ranks are late besides
_WAYS: tuple[_Way, ...] = (SENDS[0], True), (SENDS[1], True), (SENDS[1], False)
# for each way to send: of all draws, with links as fast as may be, and of all with slow ones
_Makespans = dict[_Way, list[tuple[float, ...]]]
# of a step: ways to send whose replays are so close to what was measured aren't ruled out
_NEAR = 0.01


@dataclass(frozen=True)
class WhatIf:
    """A step in a different order, or with more or fewer microbatches."""

    what: str
    change: float  # of the time per microbatch: -0.1 is a tenth less
    error: float  # of `change`
    in_flight: float  # at most, on any rank


def table_of(rows: Sequence[WhatIf]) -> Table:
    """A row for each of them."""
    table = Table()
    table.columns = "order", "per microbatch", "error", "most in flight"
    for row in rows:
        table.append((row.what, f"{row.change:+.1%}", f"±{row.error:.1%}", f"{row.in_flight:g}"))
    return table


def predict_orders(steps: Sequence[Timeline]) -> list[WhatIf]:
    """Predict every registered schedule of the same stages for which the steps tell the durations
    of actions, and also twice and half as many microbatches of the same size. The first row changes
    nothing, so its error is that of the replay.
    """
    steps, own = sorted(steps, key=end_of), steps[0].schedule
    draws = max(1, min(_DRAWS, _WORK // len(steps[0].spans)))
    costs_of = cache(lambda number: calibrate(steps[number]))

    @cache
    def machines(num_microbatches: int) -> list[list[Costs]]:
        """What actions take in every draw."""
        numbers = [draw % len(steps) for draw in range(draws)]
        return [
            _machine(steps[number], costs_of(number), num_microbatches, Random(draw))
            for draw, number in enumerate(numbers)
        ]

    # What ran is predicted first: that tells which ways to send are possible.
    replays = _predict(own, _WAYS, machines)
    ways, of_replay = _not_ruled_out(replays, steps)

    def what_if(what: str, schedule: Schedule, sends: str = "") -> WhatIf:
        """Compare every prediction with the replay of the same draw."""
        predicted = _predict(schedule, ways, machines, sends)
        changes = _changes(predicted, schedule, replays, own)
        means = [fmean(found) for found in changes]
        of_steps = max(_noise(found, len(steps)) for found in changes)
        of_machine = (max(means) - min(means)) / 2
        error = of_replay + of_steps + of_machine
        return WhatIf(what, (max(means) + min(means)) / 2, error, max(schedule.peak_in_flight))

    rows = [WhatIf("as it ran (replay)", 0.0, of_replay, max(steps[0].peak_in_flight))]
    if SENDS[0] not in dict(ways):
        rows.append(what_if("nobody waits for sends", own, SENDS[0]))
    return rows + [what_if(*named) for named in _schedules(own, costs_of(len(steps) // 2))]


def _not_ruled_out(replays: _Makespans, steps: Sequence[Timeline]) -> tuple[list[_Way], float]:
    """The ways to send whose replays are near what was measured, and how far off the nearest is."""
    took = fmean(step.makespan for step in steps)
    off = {way: abs(fmean((*fast, *slow)) / took - 1) for way, (fast, slow) in replays.items()}
    nearest = min(off, key=off.__getitem__)
    noise = _noise([time / took for time in replays[nearest][0]], len(steps))
    return [way for way in _WAYS if off[way] <= off[nearest] + noise + _NEAR], off[nearest]


def _changes(
    predicted: _Makespans, schedule: Schedule, replays: _Makespans, own: Schedule
) -> list[list[float]]:
    """For each way to send and bound of the links, how much every draw's time per microbatch
    differs from its replay's.
    """
    M, own_M = schedule.num_microbatches, own.num_microbatches
    changes = []
    for way, bounds in predicted.items():
        for times, replayed in zip(bounds, replays[way], strict=True):
            pairs = zip(times, replayed, strict=True)
            changes.append([time / M / (before / own_M) - 1 for time, before in pairs])
    return changes


def _noise(found: Sequence[float], count: int) -> float:
    """Twice the standard error of the mean, if several steps were drawn from."""
    return 2 * stdev(found) / min(len(found), count) ** 0.5 if len(found) > 1 else 0.0


def _machine(step: Timeline, costs: Costs, num_microbatches: int, random: Random) -> list[Costs]:
    """What a step's actions took, drawn separately for each microbatch, with links as fast as may
    be and then as slow. `costs` are the step's, as `calibrate` gives them.
    """
    lasted = defaultdict(list)
    for span in step.spans:
        if isinstance(span.action, Action):
            lasted[span.action.kind, span.action.stage].append(span.end - span.start)

    def drawn(name: str, kind: str) -> list[list[float]]:
        found = []
        for stage, usual in enumerate(getattr(costs, name)):
            took = lasted.get((kind, stage), [1.0])
            mean = fmean(took) or 1.0
            found.append([usual * random.choice(took) / mean for _ in range(num_microbatches)])
        return found

    kinds, names = step.schedule.columns.kinds, {"forward": F, "backward_input": B}
    if I in kinds:
        names |= {"backward_input": I, "backward_weight": W, "backward": B if B in kinds else I}
    costs = replace(costs, **{name: drawn(name, kind) for name, kind in names.items()})
    messages = observe(step)[0]
    told = {
        pair: costs.links[pair].latency
        for pair, found in messages.items()
        if any(message.waited for message in found)
    }
    fast = {
        (source, target): replace(link, latency=min(link.latency, told.get((target, source), 0.0)))
        for (source, target), link in costs.links.items()
        if (source, target) not in told
    }
    return [replace(costs, links={**costs.links, **fast}) if fast else costs, costs]


def _predict(
    schedule: Schedule,
    ways: Sequence[_Way],
    machines: Callable[[int], list[list[Costs]]],
    sends: str = "",
) -> _Makespans:
    """For each way to send, the makespans on every machine. Rows for which no class waits for its
    sends use those where no rank waits. `sends`, if given, replaces who waits.
    """
    made: _Makespans = {}
    found = {}
    for way in ways:
        waits, late = sends or way[0], way[1]
        try:
            simulated = simulator_of(schedule, waits)
        except ValueError:
            waits = SENDS[0]
            simulated = simulator_of(schedule, waits)
        if (waits, late) not in made:
            drawn = machines(schedule.num_microbatches)
            pairs = [_at_both_bounds(simulated, machine, late) for machine in drawn]
            made[waits, late] = [*zip(*pairs, strict=True)]
        found[way] = made[waits, late]
    return found


def _at_both_bounds(
    simulated: Callable[[Costs | None], Timeline], machine: Sequence[Costs], late: bool
) -> tuple[float, float]:
    fast, slow = machine if late else [replace(costs, overhead=0) for costs in machine]
    most = simulated(slow).makespan
    return most if fast == slow else simulated(fast).makespan, most


def _schedules(own: Schedule, costs: Costs) -> Iterator[tuple[str, Schedule]]:
    """What ran, with other numbers of microbatches, if it is a registered schedule, then all other
    schedules of its stages.
    """
    P, M, V = own.num_ranks, own.num_microbatches, own.num_stages // own.num_ranks
    # of sequences, which would be other microbatches
    without = {"slices", "stages_per_rank"} if V == 1 else {"slices"}
    told = {*own.columns.kinds, B}  # which lasts as long as its halves

    def by(builder: Builder, count: int) -> Schedule | None:
        return next(built([builder], P, count, {"costs": costs, "stages_per_rank": V}), None)

    seen: list[Schedule] = [own]
    found = []
    for builder in known():
        # a search for a large one takes long, and its kinds are the same
        small = next(built([builder], 2, 4, {}), None)
        if without.isdisjoint(builder.options) and (
            small is None or told.issuperset(small.columns.kinds)
        ):
            if schedule := by(builder, M):
                found.append((builder, schedule))
    for builder, schedule in found:
        for count in (2 * M, M // 2) if schedule == own and M * P < _WORK / 4 else ():
            if other := by(builder, count):
                yield f"{builder.name}, {count} microbatches", other
    for _, schedule in found:
        if (
            schedule not in seen
            and schedule.placement == own.placement
            and told.issuperset(schedule.columns.kinds)
        ):
            seen.append(schedule)
            yield schedule.name, schedule
