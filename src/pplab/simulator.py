"""When everything happens: run a schedule's rows against the clock.

One loop, `run`, tells when every action starts and ends, whether a schedule can run at all, and where it gets stuck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from .actions import COMPUTE
from .costs import Costs
from .errors import positive_int
from .footprint import Memory
from .schedule import NOBODY, Columns, Graph, Schedule
from .timeline import Timeline

Send = Callable[[int, int, int, bool, float], float]


def run(
    graph: Graph, durations: Sequence[float], latency: Sequence[Sequence[float]], send: Send | None = None
) -> tuple[list[float | None], list[float | None], list[int]]:
    """Of every item, when it starts and ends, None if it never does; of every rank, the item at which it has stopped.

    Items are numbered along rank 0's row, then rank 1's, and so on. A rank runs its row until an item waits for a
    message that hasn't been sent, and goes on once it has. An item takes `durations[i]`, a message to another rank
    `latency[source][target]`; where links are narrow, `send` says when it arrives.
    """
    bounds, ranks, users, second = graph.columns.bounds, graph.columns.ranks, graph.users, graph.second.copy()
    starts, ends = [None] * bounds[-1], [None] * bounds[-1]
    missing, arrived = graph.waits.copy(), [0] * bounds[-1]  # of every item: messages to come, when the last one came
    clock, at = [0] * (len(bounds) - 1), list(bounds[:-1])  # of every rank: how far its time and its row have come
    ready = list(range(len(clock)))
    while ready:
        rank = ready.pop()
        now, lag = clock[rank], latency[rank]
        for i in range(at[rank], bounds[rank + 1]):
            if missing[i]:  # the rank stays here until the sender puts it back into `ready`
                at[rank] = i
                break
            if arrived[i] > now:  # the rank is free and has to wait
                now = arrived[i]
            starts[i] = now
            ends[i] = now = now + durations[i]
            user = users[i]
            while user != NOBODY:
                target = ranks[user]
                arrival = now + lag[target] if send is None else send(rank, target, i, i in second, now)
                if arrival > arrived[user]:
                    arrived[user] = arrival
                missing[user] -= 1
                if at[target] == user:
                    ready.append(target)
                user = second.pop(i) if i in second else NOBODY  # an overlap's backward sends as well
        else:
            at[rank] = bounds[rank + 1]
        clock[rank] = now
    return starts, ends, at


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Predict the timeline of `schedule` under `costs` (all ones when left out).

    An action starts when its rank is free and what it waits for has arrived; sending costs the sender nothing. Linear
    in the number of actions. Raises ScheduleError for a schedule that can't run, ValueError for costs that don't fit.

    >>> from pplab import build
    >>> simulate(build("1F1B", num_ranks=4, num_microbatches=8)).makespan
    33
    """
    costs = costs or Costs()
    costs.check(schedule.num_stages, schedule.num_ranks)
    if not schedule.graph.whole:
        validate(schedule)
    latency, send = latencies_of(schedule.num_ranks, costs), None
    if costs.has_queues:
        from .links import queueing

        send = queueing(schedule.columns, costs, latency)
    starts, ends, at = run(schedule.graph, durations_of(schedule.columns, costs), latency, send)
    if at != [*schedule.columns.bounds[1:]]:
        validate(schedule)
    return Timeline(schedule, starts, ends, unit=costs.unit)


def validate(
    schedule: Schedule,
    *,
    max_in_flight: int | None = None,
    memory: Memory | None = None,
    limit: float | Sequence[float] | None = None,
) -> None:
    """Raise ScheduleError unless every rank can run its row to the end: every action is there once, in an order that
    never waits in a circle, within a memory limit. Linear in the number of actions.

    The error is of the first fault, with the rank, the action, the cause and what to change. `max_in_flight`: the most
    forwards whose activations one rank may hold at once (see `Schedule.peak_in_flight`). `limit`: the most that one
    rank may hold, or one value per rank, in the unit of `memory`.
    """
    if schedule.copies > 1 or not all(schedule.rows):
        from .faults import check_placement

        check_placement(schedule)
    if not schedule.graph.whole or stuck_at(schedule):
        from .faults import explain

        explain(schedule)
    if max_in_flight is not None or limit is not None:
        from .faults import check_memory

        if max_in_flight is not None:
            check_memory(schedule, Memory(), positive_int("max_in_flight", max_in_flight), "forwards' activations")
        if limit is not None:
            check_memory(schedule, memory or Memory(), limit, memory.unit if memory else "forwards' activations")


def stuck_at(schedule: Schedule) -> dict[int, int]:
    """Of every rank that can't finish its row: the id of the item at which it is stuck. For a `whole` graph."""
    bounds, P = schedule.columns.bounds, schedule.num_ranks
    *_, at = run(schedule.graph, [0] * bounds[-1], [[0] * P] * P)
    return {rank: i for rank, i in enumerate(at) if i < bounds[rank + 1]}


def durations_of(columns: Columns, costs: Costs) -> list[float]:
    """How long every id takes."""
    stages = range(columns.num_stages)
    table = {kind: [costs.of(kind, stage) for stage in stages] for kind in COMPUTE}
    durations = [table[kind][stage] for kind, stage in zip(columns.kinds, columns.stages, strict=True)]
    of_overlap = cache(costs.of_overlap)
    for backward, i in enumerate(columns.overlaps, columns.bounds[-1]):
        durations[i] = of_overlap(columns.stages[i], columns.stages[backward])
    return durations[: columns.bounds[-1]]


def latencies_of(num_ranks: int, costs: Costs) -> list[list[float]]:
    """How long a message is on its way from rank to rank, `latency[source][target]`, queues aside."""
    latency = [[costs.latency] * num_ranks for _ in range(num_ranks)]
    for (source, target), link in costs.links.items():
        latency[source][target] = link.latency
    for rank in range(num_ranks):
        latency[rank][rank] = 0
    return latency
