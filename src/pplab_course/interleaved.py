"""Checkers of the chapter on interleaved 1F1B: stages in a loop, and sequences in slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, sqrt

from pplab.actions import Action
from pplab.builders import build
from pplab.costs import Costs
from pplab.lab import Case, Entry, Slices, check_slices, sliced_row
from pplab.schedule import Schedule
from pplab.simulator import simulate
from pplab.timeline import Timeline

from .answers import builder, in_whole_backwards, schedule_of, shape_of, told_bill
from .verdict import (
    Verdict,
    Wrong,
    checker,
    checker_of_each,
    matched,
    number,
    numbers,
    one_or_several,
    right,
    told,
    values_of,
    wrong,
)

# exercise 8: sequences twice as long
LONG = replace(Case(), model=replace(Case().model, sequence=16384))
BEST_KNOWN = {
    "slices": 8,
    "stages_per_rank": 2,
    "warmup_per_rank": 4,
    "cut": (2, 4, 5, 6, 6, 5, 3, 1),
}
OVERHEAD_MS, NEAR = 1.0, 1.0  # what every action takes beside its work; dollars
BROKEN = [  # exercise 6: one sequence in three slices, on two ranks
    "0F0 0F1 0F2 0B0 0B1 0B2",
    "1F0 1F1 1F2 1B0 1B1 1B2",
]
CAUSES = {"A": "overhead", "B": "uneven", "C": "messages", "D": "as hoped"}
WHY = {
    "A": "its actions take as much longer as there are more of them, and idle time is what it "
    "should be",
    "B": "later slices take longer than earlier ones, and ranks wait for them",
    "C": "slices are short, and each waits as long for its message as a whole sequence did",
    "D": "idle time fell to a fourth, and nothing got longer",
}


@in_whole_backwards(stage_per_rank=False)
def even_groups_builder(answer: object) -> Verdict:
    """Write `rows(num_ranks, num_microbatches)`: interleaved 1F1B, V=2, at the floor for every M
    from P on.

    No rank may hold more stages than with groups of nearly equal size.
    """

    def judge(timeline: Timeline, P: int, M: int) -> str | None:
        floor = (2 * M + P - 1) * 3
        if timeline.makespan > floor:
            return (
                f"it takes {timeline.makespan:g} (F = 1 and B = 2 of a stage); {floor} is possible"
            )
        enough = ceil(M / (M // P)) + 2 * (P - 1) + 1
        if (peak := max(timeline.peak_in_flight)) > enough:
            return f"one rank holds {peak} stages' activations; {enough} are enough"
        return None

    sizes = ((4, 8), (4, 9), (2, 5), (3, 7), (4, 13), (3, 5), (6, 20), (1, 3))
    why = "at the floor at eight sizes, and no group larger than need be"
    return builder(answer, judge, why, sizes, misfit=_not_looped)


def crossover(answer: object) -> Verdict:
    """Find the latency from which eager 1F1B is faster than interleaved 1F1B with two stages per
    rank, with P=4, M=8.
    """
    traps = {
        9 / 16: "a message costs interleaving 14 c only up to c = 0.5; beyond, each further unit "
        "costs more",
        2.25 / 16: "that is where two stages per rank overtake four",
        1.375: "that is where 1F1B overtakes; eager 1F1B does so much earlier",
    }
    why = "beyond c = 0.5 it is 35.5 + 18 (c - 0.5) against 33 + 6 c: they meet at 13/24"
    return number(answer, 13 / 24, why, traps=traps)


@in_whole_backwards(stage_per_rank=False)
@one_or_several
@checker()
def beat_24(answer: object) -> Verdict:
    """Find an order faster than 24, with at most 6 stages held on any rank, for P=3, M=4, V=2, F =
    B = 1 of a stage.
    """
    schedule = schedule_of(answer)
    if (fault := _not_looped(schedule, 3, 4)) is not None:
        return wrong(fault)
    timeline = simulate(schedule, Costs(1, 0.5, 0.5))
    if max(timeline.peak_in_flight) > 6:
        return wrong(
            f"it takes {timeline.makespan:g} and holds {timeline.peak_in_flight}: at most 6 on any "
            "rank"
        )
    if timeline.makespan >= 24:
        return wrong(
            f"it holds {timeline.peak_in_flight} and takes {timeline.makespan:g}; less than 24 is "
            "possible"
        )
    return right(f"it takes {timeline.makespan:g} and holds {timeline.peak_in_flight}")


@one_or_several
def gathers(answer: object) -> Verdict:
    """Count rank 1's gathers in a step of interleaved 1F1B with P=4, V=2, M=8 and M=16, if there is
    room for one stage's weights.
    """
    if values_of(answer) == (18, 46):
        return wrong(
            "those are the changes of stage; the first stage's weights have to be gathered, too"
        )
    rows = (build("Interleaved1F1B", num_ranks=4, num_microbatches=M).rows[1] for M in (8, 16))
    expected = [_changes(row) + 1 for row in rows]
    return numbers(
        answer, expected, "breadth first gathers three times, whatever M is", ("M = 8", "M = 16")
    )


def _changes(row: Sequence[Action]) -> int:
    """How often an action of the row belongs to a different stage than the one before it."""
    return sum(a.stage != b.stage for a, b in zip(row, row[1:], strict=False))


def _not_looped(schedule: Schedule, num_ranks: int, num_microbatches: int) -> str | None:
    """What is wrong with the sizes or the placement of a schedule with two stages per rank in a
    loop.
    """
    wanted = num_ranks, 2 * num_ranks, num_microbatches
    if shape_of(schedule) != wanted:
        has, sizes = shape_of(schedule), "{} ranks, {} stages and {} microbatches"
        return f"wanted are {sizes.format(*wanted)}; yours: {sizes.format(*has)}"
    if schedule.placement != (loop := (*range(num_ranks), *range(num_ranks))):
        return f"stages 0, 1, ... must lie on ranks {', '.join(map(str, loop))}"
    return None


def golden_cut(answer: object) -> Verdict:
    """Find the share of the sequence after which half of the work is done, if half of a forward is
    attention.
    """
    traps = {
        0.5: "that is half of the tokens; later tokens take longer",
        sqrt(0.5): "that is where all of the work is attention",
        (3 - sqrt(5)) / 2: "that is the second slice's share",
    }
    return number(
        answer,
        (sqrt(5) - 1) / 2,
        "(1 - a) x + a x² = 1/2 at a = 1/2: the golden ratio",
        traps=traps,
    )


@one_or_several
@checker()
def repair_slices(answer: object) -> Verdict:
    """Order one sequence in three slices on two ranks so that gradients of keys and values arrive
    in time.
    """
    schedule = schedule_of(answer, (2, 2, 3), "2 ranks, 2 stages and 3 slices")
    with told("", ValueError):
        check_slices(schedule, 3)
    took = Slices.even(3).simulate(schedule).makespan
    best = (
        Slices.even(3)
        .simulate(build("Seq1F1B", num_ranks=2, num_microbatches=3, slices=3))
        .makespan
    )
    if took > best + 1e-9:
        raise Wrong(f"it trains, and takes {took:g}; {best:g} is possible")
    return right(
        f"{took:g}, and every slice's backward comes after the backwards of those that read its "
        "keys"
    )


@checker_of_each("ABCD")
def teams(answer: dict) -> Verdict:
    """Find why four slices did or didn't help."""
    says = "slices trade a shorter bubble for more and shorter actions"
    return matched(answer, CAUSES, sorted(CAUSES.values()), WHY.get, says)


@checker(
    "a dict of what lab.sliced_row takes, with slices", lambda answer: isinstance(answer, Mapping)
)
def long_sequences(answer: Mapping[str, object]) -> Verdict:
    """Give the arguments of `lab.sliced_row` with the smallest bill for eight sequences of 16,384
    tokens a step.
    """
    if "slices" not in answer:
        raise Wrong(
            "how many slices? Expected the key slices among "
            f"{', '.join(map(str, answer)) or 'none'}"
        )
    with told("", ValueError, TypeError):
        row = _row(answer)
    return told_bill(row, _row(BEST_KNOWN).dollars, NEAR)


def _row(asked: Mapping[str, object]) -> Entry:
    if fixed := {"num_microbatches", "overhead_ms", "microbatch"} & set(asked):
        raise Wrong(f"{min(fixed)} is given: leave it out")
    if isinstance(count := asked["slices"], int) and count > 0 and LONG.model.sequence % count:
        raise Wrong(f"{LONG.model.sequence:,} tokens don't make {count} equal slices")
    if "split" in asked:
        raise Wrong("split backwards are the next chapter's: leave split out")
    return sliced_row(LONG, num_microbatches=8, overhead_ms=OVERHEAD_MS, **asked)
