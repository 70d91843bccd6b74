"""Run a schedule's rows against the clock.

A single loop, `run`, finds when every action starts and ends, whether a schedule can run at all,
and where it gets stuck.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain

from .actions import COMPUTE
from .costs import Costs
from .errors import expect
from .schedule import Schedule
from .timeline import Timeline


def run(
    rows: Sequence[Sequence[int]],
    needs: Sequence[int | None],
    durations: Sequence[float],
    lags: Sequence[float],
) -> tuple[list, list]:
    """When every item starts, and when it ends: both None if it never runs, as in a waiting circle.

    Items are numbers, and those of a row take turns. Item i starts once the one before it has ended
    and what it needs has arrived: that is `lags[i]` after the end of item `needs[i]`, if it needs
    one. It takes `durations[i]`. A rank is a row of actions. So is whatever else does one thing
    after the other: a narrow link is a row of messages, each of which needs the action that sends
    it, and is needed by the one that receives it. Where something waits for two items, an item that
    needs the second, and takes no time, stands before it in its row.
    """
    starts, ends = [None] * len(needs), [None] * len(needs)
    waiting = {}  # of an item that hasn't run: the workers that stand still until it has
    ready = []  # workers that can go on, in any order, since each has a clock of its own

    def work(row: Sequence[int]) -> Iterator[int]:
        now = 0
        for i in row:
            need = needs[i]
            if need is not None:
                if ends[need] is None:
                    yield need  # stand still here until it has run
                arrival = ends[need] + lags[i]
                if arrival > now:  # the row is free and has to wait
                    now = arrival
            starts[i] = now
            ends[i] = now = now + durations[i]
            if i in waiting:
                ready.extend(waiting.pop(i))

    ready.extend(work(row) for row in rows)
    while ready:
        worker = ready.pop()
        need = next(worker, None)  # it works until it needs what hasn't run, or to its row's end
        if need is not None:
            waiting.setdefault(need, []).append(worker)
    return starts, ends


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Predict the timeline of `schedule` under `costs` (all ones when left out).

    An action starts when its rank is free and what it waits for has arrived. Sending costs the
    sender no time. Linear in the number of actions. Raises ScheduleError for a schedule that can't
    run, and ValueError for costs that don't fit it.

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
    durations, count = durations_of(schedule, costs), schedule.columns.bounds[-1]
    rows, needs, lags = *schedule.graph.turns, [0] * len(durations)
    if costs.latency or costs.links or costs.has_queues:
        from .links import with_links

        rows, needs, durations, lags = with_links(schedule.graph, costs, durations)
    starts, ends = run(rows, needs, durations, lags)
    if any(ends[row[-1]] is None for row in rows):
        validate(schedule)
    return Timeline(schedule, starts[:count], ends[:count], unit=costs.unit)


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError unless every rank can run its row to the end. So every action is there
    once, in an order in which ranks never wait for each other in a circle. Linear in the number of
    actions.

    The error describes the first fault, with its rank, its action, its cause and what to change.
    """
    check_form(schedule)
    if not schedule.graph.whole or stuck_at(schedule):
        from .faults import explain

        explain(schedule)


def check_form(schedule: Schedule) -> None:
    """Raise ScheduleError unless every rank runs something and every stage is where it may be."""
    expect(Schedule, schedule=schedule)
    if schedule.copies > 1 or not all(schedule.rows):
        from .faults import check_placement

        check_placement(schedule)


def stuck_at(schedule: Schedule) -> dict[int, int]:
    """For every rank that can't finish its row, the entry at which it is stuck, since what that
    entry needs hasn't run. The graph has to be `whole`.
    """
    rows, needs = schedule.graph.turns
    no_time = [0] * len(needs)
    starts, _ = run(rows, needs, no_time, no_time)
    stuck = {}
    for rank, row in enumerate(rows):
        if starts[row[-1]] is None:
            stuck[rank] = i = next(i for i in row if starts[i] is None)
            need = needs[i]
            fault = f"simulator.run has a fault: rank {rank} stops at {schedule.graph.action(i)}"
            assert need is not None and starts[need] is None, f"{fault}, and nothing is missing"
    return stuck


def durations_of(schedule: Schedule, costs: Costs) -> list[float]:
    """How long every entry takes. The second half of an overlap takes no time, since the first half
    takes the time of both.
    """
    columns, of_overlap = schedule.columns, cache(costs.of_overlap)
    kinds, stages = columns.kinds, columns.stages
    if costs.by_microbatch:
        return list(map(costs.of_item, chain(*schedule.rows))) + [0] * len(columns.overlaps)
    table = {
        kind: [costs.of(kind, stage) for stage in range(columns.num_stages)] for kind in COMPUTE
    }
    durations = [table[kind][stage] for kind, stage in zip(kinds, stages, strict=True)]
    for i, second in schedule.graph.second_half.items():
        durations[i] = of_overlap(stages[i], stages[second], kinds[i], kinds[second])
        durations[second] = 0
    return durations
