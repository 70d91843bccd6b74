"""When everything happens: run a schedule's rows against the clock.

A rank runs its row in order. An action starts when the rank is free and what it waits for has arrived: the end of the
action it depends on, plus the latency when that ran on another rank. Sending costs the sender nothing.
"""

from __future__ import annotations

from .costs import Costs
from .schedule import Schedule
from .timeline import Timeline
from .validate import deadlock, run_without_time, validate


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Predict the timeline of `schedule` under `costs` (all ones when left out).

    One pass over the actions, linear in their number. Raises ScheduleError for a schedule that can't run, ValueError
    for costs that don't fit it.

    >>> from pplab import build
    >>> simulate(build("1F1B", num_ranks=4, num_microbatches=8)).makespan
    33
    """
    costs = costs or Costs()
    costs.check(schedule.num_stages)
    graph = schedule.graph
    if not graph.complete:
        validate(schedule)
    durations, lags = _durations(schedule, costs), _lags(schedule, costs)
    starts, ends = _run(schedule.columns.bounds, graph.dep, durations, lags)
    if any(ends[end - 1] is None for end in schedule.columns.bounds[1:]):
        raise deadlock(schedule, run_without_time(schedule))
    for gate in schedule.columns.gates:  # it has done its part: let it stand where its pair starts
        starts[gate] = ends[gate] = starts[gate + 1]
    return Timeline(schedule, starts, ends, unit=costs.unit)


def _run(bounds: tuple[int, ...], dep: list[int], durations: list[float], lags: list[float]):
    """Start and end of every id; the ends that are never reached stay None.

    A work list of ranks: each runs until it needs an id that isn't done, parks there, and is put back when that id
    ends. Two ranks can park at one id (an overlap's), hence the chain.
    """
    num_ranks = len(bounds) - 1
    position, clock = list(bounds[:-1]), [0] * num_ranks
    starts: list[float] = [0] * len(dep)
    ends: list[float | None] = [None] * len(dep)
    parked, next_parked = [-1] * len(dep), [-1] * num_ranks
    ready = list(range(num_ranks))
    while ready:
        rank = ready.pop()
        now, i, stop = clock[rank], position[rank], bounds[rank + 1]
        while i < stop:
            d = dep[i]
            if d >= 0:
                arrival = ends[d]
                if arrival is None:
                    next_parked[rank], parked[d] = parked[d], rank
                    break
                arrival += lags[i]
                if arrival > now:
                    now = arrival
            starts[i] = now
            now += durations[i]
            ends[i] = now
            other = parked[i]
            while other >= 0:
                ready.append(other)
                other = next_parked[other]
            i += 1
        clock[rank], position[rank] = now, i
    return starts, ends


def _durations(schedule: Schedule, costs: Costs) -> list[float]:
    """How long every id takes. Of an overlap, the gate takes none and the pair takes it all."""
    columns = schedule.columns
    table = {kind: [costs.of(kind, stage) for stage in range(columns.num_stages)] for kind in set(columns.kinds)}
    durations = [table[kind][stage] for kind, stage in zip(columns.kinds, columns.stages, strict=True)]
    for gate in columns.gates:
        durations[gate], durations[gate + 1] = 0, durations[gate] + durations[gate + 1]
    return durations


def _lags(schedule: Schedule, costs: Costs) -> list[float]:
    """How long what each id waits for takes to arrive."""
    dep = schedule.graph.dep
    if not costs.latency:
        return [0] * len(dep)
    ranks = schedule.columns.ranks()
    return [costs.latency if d >= 0 and ranks[d] != rank else 0 for d, rank in zip(dep, ranks, strict=True)]
