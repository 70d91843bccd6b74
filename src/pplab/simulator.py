"""When everything happens: run a schedule's rows against the clock.

One loop, `run`, tells whether a schedule can run at all, when its actions start and end, and where it gets stuck.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from math import inf

from .actions import COMPUTE
from .costs import Costs
from .errors import positive_int
from .footprint import Memory
from .schedule import NOBODY, Columns, Graph, Schedule
from .timeline import Timeline

Times = list[float | None]
Send = Callable[[int, int, int, int, float], float]


def run(
    graph: Graph, durations: Sequence[float], latency: Sequence[Sequence[float]], send: Send | None = None
) -> tuple[Times, Times, list[int]]:
    """When every item starts and ends, None where it never comes to it, and at which id each rank has stopped.

    Every rank runs its row until an item waits for a message that isn't there yet. Who sends it wakes the rank up.
    An item takes `durations[id]`, a message `latency[source][target]`, and on narrow links first what `send` says.
    """
    bounds, ranks, users, several = graph.columns.bounds, graph.columns.ranks, graph.users, graph.several
    starts, ends = [None] * len(users), [None] * len(users)
    missing, arrived = graph.waits.copy(), [0] * len(users)  # of every id: messages to come, and when the last one came
    clock, at = [0] * (len(bounds) - 1), list(bounds[:-1])  # of every rank: its time, and the id at which it stands
    awake = list(range(len(clock)))
    while awake:
        rank = awake.pop()
        now, lag = clock[rank], latency[rank]
        for i in range(at[rank], bounds[rank + 1]):
            if missing[i]:
                at[rank] = i
                break
            if arrived[i] > now:
                now = arrived[i]
            starts[i] = now
            ends[i] = now = now + durations[i]
            user = users[i]
            if user >= 0 and send is None:  # nearly always: one message, and its receiver waits for no other
                target = ranks[user]
                arrived[user], missing[user] = now + lag[target], 0
                if at[target] == user:
                    awake.append(target)
            elif user != NOBODY:
                for half, other in enumerate(several.get(i, (user,))):  # an overlap sends two and waits for two
                    target = ranks[other]
                    left = now if send is None else send(rank, target, i, half, now)
                    arrived[other] = max(arrived[other], left + lag[target])
                    missing[other] -= 1
                    if at[target] == other:
                        awake.append(target)
        else:
            at[rank] = bounds[rank + 1]
        clock[rank] = now
    return starts, ends, at


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Predict the timeline of `schedule` under `costs` (all ones when left out).

    Linear in the number of actions. Sending costs the sender nothing. Raises ScheduleError for a schedule that can't
    run, ValueError for costs that don't fit it.

    >>> from pplab import build
    >>> simulate(build("1F1B", num_ranks=4, num_microbatches=8)).makespan
    33
    """
    costs = costs or Costs()
    costs.check(schedule.num_stages, schedule.num_ranks)
    if not schedule.graph.whole:
        validate(schedule)
    latency = latencies_of(schedule.num_ranks, costs)
    send = queueing(schedule.columns, costs) if costs.has_queues else None
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
    never waits in a circle, within a memory limit.

    The error is of the first fault, with the rank, the action, the cause and what to change. `max_in_flight`: the most
    forwards whose activations one rank may hold at once (see `Schedule.peak_in_flight`). `limit`: the most that one
    rank may hold, or one value per rank, in the unit of `memory`. Linear in the number of actions.
    """
    if schedule.copies > 1 or not all(schedule.rows):
        from .faults import check_placement

        check_placement(schedule)
    if not schedule.graph.whole or stuck_at(schedule):
        from .faults import explain

        explain(schedule)
    if max_in_flight is not None:
        _limit(schedule, Memory(), positive_int("max_in_flight", max_in_flight), "forwards' activations")
    if limit is not None:
        _limit(schedule, memory or Memory(), limit, memory.unit if memory else "forwards' activations")


def stuck_at(schedule: Schedule) -> dict[int, int]:
    """Of every rank that can't finish its row: the id of the item at which it is stuck. For a `whole` graph."""
    bounds, P = schedule.columns.bounds, schedule.num_ranks
    *_, at = run(schedule.graph, [0] * bounds[-1], [[0] * P] * P)
    return {rank: i for rank, i in enumerate(at) if i < bounds[rank + 1]}


def _limit(schedule: Schedule, memory: Memory, limit: float | Sequence[float], unit: str) -> None:
    limits = list(limit) if isinstance(limit, Sequence) else [limit] * schedule.num_ranks
    if len(limits) != schedule.num_ranks:
        raise ValueError(
            f"limit has {len(limits)} values for {schedule.num_ranks} ranks: give one per rank, or a number"
        )
    for rank, (peak, most) in enumerate(zip(schedule.peak_held(memory), limits, strict=True)):
        if peak > most:
            from .faults import over_limit

            raise over_limit(schedule, rank, memory, most, unit)


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


def queueing(columns: Columns, costs: Costs) -> Send:
    """What tells `run` when a message has passed its link: those of one link pass one after the other.

    A link's messages leave in the order of its source's row, so that no other clock decides.
    """
    backwards = {i: backward for backward, i in enumerate(columns.overlaps, columns.bounds[-1])}
    free: dict[tuple[int, int], float] = defaultdict(int)  # when a link is free again

    def send(source: int, target: int, i: int, half: int, now: float) -> float:
        if source == target or (link := costs.link(source, target)).bandwidth == inf:
            return now
        entry = backwards[i] if half else i
        takes = costs.occupancy(columns.kinds[entry], columns.stages[entry], link.bandwidth)
        free[source, target] = passed = max(now, free[source, target]) + takes
        return passed

    return send
