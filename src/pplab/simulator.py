"""When everything happens: run a schedule's rows against the clock.

A rank runs its row in order. An action starts when the rank is free and what it waits for has arrived: the end of the
action it depends on, plus, when that ran on another rank, the time on the way. Sending costs the sender nothing.
"""

from __future__ import annotations

from collections import defaultdict
from math import inf

from . import engine
from .actions import COMPUTE
from .costs import Costs
from .deps import Columns, made_by
from .schedule import Schedule
from .timeline import Timeline
from .validity import validate


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Predict the timeline of `schedule` under `costs` (all ones when left out).

    One pass over the actions, linear in their number. Raises ScheduleError for a schedule that can't run, ValueError
    for costs that don't fit it.

    >>> from pplab import build
    >>> simulate(build("1F1B", num_ranks=4, num_microbatches=8)).makespan
    33
    """
    costs = costs or Costs()
    costs.check(schedule.num_stages, schedule.num_ranks)
    if not schedule.graph.whole:
        validate(schedule)
    durations, lags = durations_of(schedule.columns, costs), lags_of(schedule, costs)
    if costs.has_queues:
        starts, ends = engine.run_with_queues(schedule, durations, lags, *_queued(schedule, costs))
    else:
        starts, ends = engine.run(schedule, durations, lags)
    if any(ends[end - 1] is None for end in schedule.columns.bounds[1:]):
        validate(schedule)
    for gate in schedule.columns.gates:  # it has done its part: let it stand where its pair starts
        starts[gate] = ends[gate] = starts[gate + 1]
    return Timeline(schedule, starts, ends, unit=costs.unit)


def durations_of(columns: Columns, costs: Costs) -> list[float]:
    """How long every id takes. Of an overlap, the gate takes none and the pair takes it all."""
    stages = range(columns.num_stages)
    table = {kind: [costs.of(kind, stage) for stage in stages] for kind in COMPUTE}
    durations = [table[kind][stage] for kind, stage in zip(columns.kinds, columns.stages, strict=True)]
    for gate in columns.gates:
        durations[gate], durations[gate + 1] = 0, costs.of_overlap(columns.stages[gate], columns.stages[gate + 1])
    return durations


def lags_of(schedule: Schedule, costs: Costs) -> list[float]:
    """How long what each id waits for takes to arrive, queues aside."""
    columns = schedule.columns
    if not costs.has_latency and not costs.has_queues:
        return [0] * len(columns.kinds)
    dep, ranks = schedule.graph.dep, columns.ranks()
    latency = [[costs.latency] * schedule.num_ranks for _ in schedule.rows]  # from, to
    for (source, target), link in costs.links.items():
        latency[source][target] = link.latency
    for rank, row in enumerate(latency):
        row[rank] = 0
    lags = [latency[ranks[d]][rank] if d >= 0 else 0 for d, rank in zip(dep, ranks, strict=True)]
    return lags


def messages(schedule: Schedule) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Of every id, which message it waits for, or -1; and which messages leave at its end, with the rank they go to.

    A message is named by the id that made it, and what the forward half of an overlap makes by the gate's: it leaves
    first when the pair ends. What stays on a rank is a message to itself.
    """
    columns, ranks = schedule.columns, schedule.columns.ranks()
    dep = made_by(columns, schedule.graph)
    sends: list[list[tuple[int, int]]] = [[] for _ in dep]
    for i, (d, maker) in enumerate(zip(schedule.graph.dep, dep, strict=True)):
        if d >= 0:
            sends[d].append((maker, ranks[i]))
    for gate in columns.gates:
        sends[gate + 1].sort()
    return dep, sends


def _queued(schedule: Schedule, costs: Costs) -> tuple[list[int], list[list[engine.Send]]]:
    """`messages` with the links that they pass."""
    columns, ranks = schedule.columns, schedule.columns.ranks()
    dep, leaving = messages(schedule)
    free: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0])

    def send(message: int, target: int) -> engine.Send:
        rank = ranks[message]
        if rank == target or (link := costs.link(rank, target)).bandwidth == inf:
            return engine.Send(message, [0], 0)
        occupancy = costs.occupancy(columns.kinds[message], columns.stages[message], link.bandwidth)
        return engine.Send(message, free[rank, target], occupancy)

    return dep, [[send(*each) for each in of_id] for of_id in leaving]
