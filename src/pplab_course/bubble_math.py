"""Checkers of the chapter on bubble math."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from numbers import Integral

from pplab.actions import Action, B, F
from pplab.builders import build
from pplab.deps import needs
from pplab.lab import Case, Entry
from pplab.lab.planning import floor_makespan
from pplab.schedule import Schedule
from pplab.simulator import simulate
from pplab.text import parse
from pplab.timeline import Timeline, idle_intervals

from .answers import actions_of, in_whole_backwards, is_file, rows_of, schedule_of, whole
from .verdict import (
    Verdict,
    Wrong,
    checker,
    joined,
    numbers,
    one_or_several,
    right,
    told,
    values_of,
    wrong,
)

BROKEN_CHART = """0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3
1F0,1F1,1F2,1F3,1B0,1B1,1B3
2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3
"""

COUNTED_RANKS, COUNTED_MICROBATCHES = 8, 32
# A count that forgets that a backward needs the backward of the stage after it. Every action takes
# 1.
COUNTED = "\n".join(
    f"rank {rank}: forwards {rank} to {rank + COUNTED_MICROBATCHES}, backwards "
    f"{rank + COUNTED_MICROBATCHES} to {rank + 2 * COUNTED_MICROBATCHES}"
    for rank in range(COUNTED_RANKS)
)

DEADLINE_H, SEQUENCES = 6, 64
CHEAPEST = (5, 5, 5, 5, 5, 5, 2)  # of all cuts that are in time
NEAR = 1.005  # times the cheapest: as good


def slow_middle(*answer: object) -> Verdict:
    """Count GPipe on 3 ranks with 2 microbatches, F=1 and B=2, but 2 and 4 on rank 1: the makespan,
    and how many cells are idle.
    """
    turn = "rank 1's forwards should end at 5, and rank 2's first backward at 8. Go on from there"
    makespan = dict.fromkeys(range(61), turn) | {
        12: "that would be three equal ranks",
        15: "that is 1 + 12 + 2, as if rank 1 never waited. Its first backward has to wait for "
        "rank 2's",
        17: "look at rank 1 after its forwards. Its first backward has to wait for rank 2's",
        24: "that would be three ranks as slow as rank 1",
    }
    count = (
        "count all three ranks. Subtract the busy cells from 3 rows of 18, and remember that rank "
        "1 is half as fast"
    )
    idle = dict.fromkeys(range(61), count) | {
        24: "those are the busy cells",
        54: "those are all cells",
        12: "that is rank 0's; the question is about all three",
        6: "that is rank 1's; the question is about all three",
    }
    why = "rank 1 starts after 1 unit, works for 12 and waits for 3, and then rank 0 needs 2 more"
    return numbers(
        joined(answer), (18, 30), why, ("makespan", "idle cells"), traps=(makespan, idle)
    )


def tokens_per_second(*answer: object) -> Verdict:
    """Compute, for P=8, M=64, 10 and 20 ms, and 4 sequences of 2,048 tokens each, the step in s,
    the efficiency, and the tokens per second.
    """
    step = 71 * 0.030
    names = ("step", "efficiency", "tokens per second")
    traps = (
        {
            1000 * step: "that is in ms; the question asks for s",
            64 * 0.030: "that leaves out the bubble",
        },
        {7 / 71: "that is the bubble fraction; efficiency is the rest"},
        {64 * 2048 / step: "a microbatch has 4 sequences"},
    )
    expected = (step, 64 / 71, 64 * 4 * 2048 / step)
    return numbers(
        joined(answer), expected, "71 turns of 30 ms, 64 of them work", names, traps=traps
    )


@in_whole_backwards(stage_per_rank=True)
@one_or_several
@checker()
def chart_at_the_floor(answer: object) -> Verdict:
    """Write rows for 3 ranks and 3 microbatches that end at the floor. Only rank 0 may run all its
    forwards first.
    """
    schedule = schedule_of(
        answer, (3, 3, 3), "the chart must have 3 ranks with a stage each and 3 microbatches"
    )
    if list(schedule.placement) != [0, 1, 2]:
        return wrong("stage 0 belongs on rank 0, stage 1 on rank 1, stage 2 on rank 2")
    timeline, floor = simulate(schedule), floor_makespan(3, 3, 1, 2)
    if timeline.makespan > floor:
        return wrong(
            f"it is legal and takes {timeline.makespan}, the floor is {floor}; "
            f"{_needless_wait(timeline, floor)}"
        )
    for rank in (1, 2):
        if all(action.kind == F for action in schedule.rows[rank][:3]):
            return wrong(
                f"it is at the floor, but rank {rank} runs all its forwards before its first "
                "backward"
            )
    return right(f"legal, and no order can end before {floor}")


def _needless_wait(timeline: Timeline, floor: float) -> str:
    """The longest wait of the lowest rank that ends later than at the floor, where F = 1 and B = 2.

    Rank r can't start before r, so waiting until then is unavoidable.
    """
    ends = {
        rank: max(span.end for span in timeline.spans if span.rank == rank) for rank in range(3)
    }
    late = max(rank for rank in ends if ends[rank] > floor - 2 * rank)
    waits = [
        idle for idle in idle_intervals(timeline) if idle.rank == late and idle.start < ends[late]
    ]
    return str(max(waits, key=lambda idle: idle.end - max(idle.start, late)))


@in_whole_backwards(stage_per_rank=True)
@one_or_several
@checker()
def repair(answer: object) -> Verdict:
    """Give BROKEN_CHART a new line for rank 1, which runs in 18 units. The answer is the line, or
    all three as text or rows.
    """
    given = [actions_of(line) for line in BROKEN_CHART.splitlines()]
    with told("", TypeError):
        rows = [] if is_file(answer) else rows_of(answer)
    alone = len(rows) == 1 or all(len(row) == 1 for row in rows)  # a line, or its actions
    rows = [whole(row, 1 if alone else rank) for rank, row in enumerate(rows)]
    if (row := [action for each in rows for action in each]) and all(
        action.startswith("1") for action in row
    ):
        answer = rows = [given[0], row, given[2]]
    if len(rows) == 3:
        for rank in (0, 2):
            if rows[rank] != given[rank]:
                return wrong(f"the line of rank {rank} is right: leave it as it is")
        for m in range(4):
            for action in (f"1F{m}", f"1B{m}"):
                if action not in rows[1]:
                    return wrong(
                        f"{action} is missing: rank 1 has to run every microbatch forward and "
                        "backward"
                    )
    try:
        schedule = schedule_of(
            answer, (3, 3, 4), "the repaired chart must keep 3 ranks, 3 stages and 4 microbatches"
        )
    except Wrong as error:
        raise Wrong(str(error).partition("; on rank")[0]) from None  # what comes then is the repair
    makespan = simulate(schedule).makespan
    if makespan > floor_makespan(3, 4, 1, 2):
        return wrong(f"it runs, in {makespan}, but with a different line for rank 1 it takes 18")
    return right("legal, and no order can be faster than 18")


@cache
def _counted_schedule() -> Schedule:
    return build("GPipe", num_ranks=COUNTED_RANKS, num_microbatches=COUNTED_MICROBATCHES)


def _counted_action(text: object) -> Action:
    """An action of the colleague's schedule. Raises `Wrong` for anything else."""
    if not isinstance(text, (str, Action)):
        raise Wrong(f'expected an action, such as "0F0", got {text!r}')
    action = parse(*whole([text]))
    if not any(action in row for row in _counted_schedule().rows):
        raise Wrong(f"{action} isn't an action of this schedule")
    return action


@in_whole_backwards(stage_per_rank=True)
@one_or_several
@checker()
def too_early(answer: object) -> Verdict:
    """Name an action that COUNTED starts before what it needs has ended, and the action that it
    should wait for.
    """
    pair = [
        _counted_action(each)
        for each in (actions_of(answer) if isinstance(answer, Sequence) else [answer])
    ]
    if len(pair) != 2:
        return wrong(
            "name two actions: one that starts too early, and the one it should wait for; got "
            f"{len(pair)}"
        )
    action, needed = pair
    start, end = _counted_start(action), _counted_start(needed) + 1
    if not _needs(action, needed):
        if _needs(needed, action) and start + 1 > _counted_start(needed):
            return wrong(
                f"{action} starts at {start}, and it doesn't need {needed}: is it the other way "
                "round?"
            )
        return wrong(
            f"{action} starts at {start}, and it doesn't need {needed} directly: which of the "
            "three rules says so?"
        )
    if end <= start:
        return wrong(
            f"{action} needs {needed} and starts at {start}, when {needed} has ended: here the "
            "count is right"
        )
    ends = f"{needed}, whose gradient it needs, ends at {end}"
    return right(f"{action} starts at {start}, and {ends}: the third rule was forgotten")


def _needs(action: Action, needed: Action) -> bool:
    """Whether an action can't start before the other one has ended."""
    return any(
        needed == Action(n.stage, k, n.microbatch)
        for n in needs(action, COUNTED_RANKS)
        for k in n.kinds
    )


def _counted_start(action: Action) -> int:
    return action.stage + action.microbatch + COUNTED_MICROBATCHES * (action.kind == B)


@one_or_several
@checker()
def six_hours(answer: object) -> Verdict:
    """Give the layers of each rank, so that the case with 64 sequences in a step takes at most six
    hours and as few dollars as possible.
    """
    cut = _whole_layers(answer)
    found, cheapest = _entry(cut), _entry(CHEAPEST)
    for rank, state in enumerate(Case(num_ranks=len(cut)).state_gb(cut)):
        if state > found.case.room_gb:
            return wrong(f"rank {rank} can't even hold its state: {state:.1f} of 80 GB")
    times = found.case.stage_ms(cut)
    slowest = max(range(len(cut)), key=times.__getitem__)
    machines = f"{len(cut)} machine{'s' * (len(cut) > 1)}"
    said = f"{machines}, {found.hours:.2f} hours, ${found.dollars:.1f}"
    pace = (
        f"rank {slowest} is the slowest: its forward takes {times[slowest]:.0f} ms, the fastest "
        f"one's {min(times):.0f}"
    )
    if found.hours > DEADLINE_H:
        return wrong(f"too late: {said}; {pace}")
    if found.dollars > NEAR * cheapest.dollars:
        more = f"{100 * (found.dollars / cheapest.dollars - 1):.1f} % more than the cheapest"
        return wrong(f"in time: {said}, which is {more}; {pace}")
    return right(f"{said}; no cut is in time for less")


def _entry(cut: Sequence[int]) -> Entry:
    case = replace(Case(), num_ranks=len(cut))
    return case.row("GPipe", num_microbatches=SEQUENCES, cut=cut)


def _whole_layers(answer: object) -> tuple[int, ...]:
    """A cut of the case's model. Raises `Wrong`, which tells why, for anything else."""
    layers, cut = Case().model.num_layers, values_of(answer)
    if not isinstance(answer, Sequence):
        raise Wrong(f"expected the layers of each rank, such as [8, 8, 8, 8], got {answer!r}")
    for each in cut:
        if not isinstance(each, Integral) or isinstance(each, bool) or each < 1:
            raise Wrong(f"expected whole layers, one at least on each rank, got {each!r}")
    if sum(cut) != layers:
        raise Wrong(f"these are {sum(cut)} layers, and the model has {layers}")
    return tuple(map(int, cut))
