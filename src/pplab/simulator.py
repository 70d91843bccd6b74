"""When everything happens: run a schedule's rows against the clock.

One loop, `run`, tells when every action starts and ends, whether a schedule can run at all, and
where it gets stuck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, pairwise

from .actions import COMPUTE
from .costs import Costs
from .errors import expect
from .footprint import Memory
from .schedule import Graph, Schedule
from .timeline import Timeline

Send = Callable[[int, float], float]


def run(
    graph: Graph, durations: Sequence[float], lags: Sequence[float], send: Send | None = None
) -> tuple[list, list]:
    """When every item starts, and when it ends: None if it never does.

    Items are numbered along rank 0's row, then rank 1's, and so on. A rank runs its row until an
    item waits for a message that hasn't been sent, and goes on once it has. An item takes
    `durations[i]`, its message `lags[i]`; where links are narrow, `send` says when it arrives. A
    message has its maker's slot, and is read M slots further on.
    """
    bounds, slots, second, M = (
        graph.columns.bounds,
        graph.slots,
        graph.second,
        graph.columns.num_microbatches,
    )
    starts, ends = [None] * bounds[-1], [None] * bounds[-1]
    hops = 2 * graph.columns.num_stages * M  # of all slots, those whose messages somebody waits for
    arrived = [0] * M + [None] * hops + [0] * (hops + 2 * M)  # of every slot: when its message has
    waiting = [None] * len(arrived)  # of every slot: the rank that waits for its message
    ready = list(range(len(bounds) - 1))

    def work(rank: int) -> Iterator[None]:
        now = 0
        for i in range(bounds[rank], bounds[rank + 1]):
            slot, backward = slots[i], second and second.get(i)
            if arrived[slot - M] is None:
                waiting[slot - M] = rank
                yield  # the rank stays here until the sender puts it back into `ready`
            if arrived[slot - M] > now:  # the rank is free and has to wait
                now = arrived[slot - M]
            if backward:  # of an overlap, which waits for two messages and sends two
                other = slots[backward]
                if arrived[other - M] is None:
                    waiting[other - M] = rank
                    yield
                now = max(now, arrived[other - M])
            starts[i] = now
            ends[i] = now = now + durations[i]
            arrived[slot] = send(i, now) if send else now + lags[i]
            if waiting[slot] is not None:
                ready.append(waiting[slot])
            if backward:
                arrived[other] = send(backward, now) if send else now + lags[backward]
                if waiting[other] is not None:
                    ready.append(waiting[other])

    rows = [work(rank) for rank in ready]
    while ready:
        next(rows[ready.pop()], None)
    return starts, ends


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Predict the timeline of `schedule` under `costs` (all ones when left out).

    An action starts when its rank is free and what it waits for has arrived; sending costs the
    sender nothing. Linear in the number of actions. Raises ScheduleError for a schedule that can't
    run, ValueError for costs that don't fit.

    >>> from pplab import build
    >>> simulate(build("1F1B", num_ranks=4, num_microbatches=8)).makespan
    33
    """
    check_form(schedule)
    costs = Costs() if costs is None else costs
    expect(Costs, costs=costs)
    costs.check(schedule.num_stages, schedule.num_ranks, schedule.num_microbatches)
    if not schedule.graph.whole:
        validate(schedule)
    lags, send = [0] * len(schedule.graph.slots), None
    if costs.latency or costs.links or costs.has_queues:
        from .links import lags_of, queueing

        lags = lags_of(schedule.graph, costs)
        send = queueing(schedule.graph, costs, lags) if costs.has_queues else None
    starts, ends = run(schedule.graph, durations_of(schedule, costs), lags, send)
    if any(ends[end - 1] is None for end in schedule.columns.bounds[1:]):
        validate(schedule)
    return Timeline(schedule, starts, ends, unit=costs.unit)


def validate(
    schedule: Schedule,
    *,
    max_in_flight: int | None = None,
    memory: Memory | None = None,
    limit: float | Sequence[float] | None = None,
) -> None:
    """Raise ScheduleError unless every rank can run its row to the end: every action is there once,
    in an order that never waits in a circle, within a memory limit. Linear in the number of
    actions.

    The error is of the first fault, with the rank, the action, the cause and what to change.
    `max_in_flight`: the most forwards whose activations one rank may hold at once (see
    `Schedule.peak_in_flight`). `limit`: the most that one rank may hold, or one value per rank, in
    the unit of `memory`.
    """
    check_form(schedule)
    if not schedule.graph.whole or stuck_at(schedule):
        from .faults import explain

        explain(schedule)
    if max_in_flight is not None or limit is not None:
        from .faults import check_limits

        check_limits(schedule, max_in_flight, memory, limit)


def check_form(schedule: Schedule) -> None:
    """Raise ScheduleError unless every rank runs something, and every stage is where a stage may
    be.
    """
    expect(Schedule, schedule=schedule)
    if schedule.copies > 1 or not all(schedule.rows):
        from .faults import check_placement

        check_placement(schedule)


def stuck_at(schedule: Schedule) -> dict[int, int]:
    """Of every rank that can't finish its row: the id of the item at which it is stuck. For a
    `whole` graph.
    """
    bounds = schedule.columns.bounds
    starts, _ = run(schedule.graph, [0] * bounds[-1], [0] * len(schedule.graph.slots))
    rows = enumerate(pairwise(bounds))
    return {
        rank: starts.index(None, *row) for rank, row in rows if None in starts[slice(*row)][-1:]
    }


def durations_of(schedule: Schedule, costs: Costs) -> list[float]:
    """How long every id takes."""
    if costs.by_microbatch:
        return [*map(costs.of_item, chain(*schedule.rows))]
    columns, of_overlap = schedule.columns, cache(costs.of_overlap)
    kinds, stages = columns.kinds, columns.stages
    table = {
        kind: [costs.of(kind, stage) for stage in range(columns.num_stages)] for kind in COMPUTE
    }
    durations = [table[kind][stage] for kind, stage in zip(kinds, stages, strict=True)]
    for second, i in enumerate(columns.overlaps, columns.bounds[-1]):
        durations[i] = of_overlap(stages[i], stages[second], kinds[i], kinds[second])
    return durations[: columns.bounds[-1]]
