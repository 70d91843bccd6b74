"""Checkers of chapter 6."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from ..actions import Action
from ..builders import build
from ..costs import Costs
from ..schedule import Schedule
from ..simulator import simulate
from ..timeline import Timeline
from .answers import builder, in_whole_backwards, schedule_of, shape_of
from .verdict import Verdict, checker, number, numbers, one_or_several, right, values_of, wrong


@one_or_several
def where_is(answer: object) -> Verdict:
    """24 layers, P=4, V=3, placed in a loop: layer 17's stage and rank, and one forward's messages."""
    why = "12 stages of two layers: layer 17 is in stage 8, on rank 8 mod 4 = 0; 12 stages have 11 boundaries"
    return numbers(answer, (8, 0, 11), why, ("stage", "rank", "messages"))


def transfers(answer: object) -> Verdict:
    """P=8, V=3: how many times the messages of 1F1B?"""
    traps = {
        3: "not V times: the way from a rank's last stage to the next rank comes on top",
        23: "that is how many boundaries there are; 1F1B has seven",
    }
    return number(answer, 23 / 7, "VP-1 = 23 boundaries instead of P-1 = 7", traps=traps)


@in_whole_backwards(stage_per_rank=False)
def even_groups_builder(answer: object) -> Verdict:
    """Write `rows(num_ranks, num_microbatches)`: interleaved 1F1B, V=2, at the floor for every M from P on.

    No rank may hold more stages than groups of nearly equal size take.
    """

    def judge(timeline: Timeline, P: int, M: int) -> str | None:
        floor = (2 * M + P - 1) * 3
        if timeline.makespan > floor:
            return f"it takes {timeline.makespan:g} (F = 1 and B = 2 of a stage); {floor} is possible"
        enough = ceil(M / (M // P)) + 2 * (P - 1) + 1
        if (peak := max(timeline.peak_in_flight)) > enough:
            return f"one rank holds {peak} stages' activations; {enough} are enough"
        return None

    sizes = ((4, 8), (4, 9), (2, 5), (3, 7), (4, 13), (3, 5), (6, 20), (1, 3))
    why = "at the floor at eight sizes, and no group larger than need be"
    return builder(answer, judge, why, sizes, misfit=_not_looped)


def crossover(answer: object) -> Verdict:
    """P=4, M=8: the latency from which eager 1F1B is faster than interleaved 1F1B with two stages per rank."""
    traps = {
        9 / 16: "a message costs interleaving 14 c only up to c = 0.5; beyond, each further unit costs more",
        2.25 / 16: "that is where two stages per rank overtake four",
        1.375: "that is where 1F1B overtakes; eager 1F1B does so much earlier",
    }
    why = "beyond c = 0.5 it is 35.5 + 18 (c - 0.5) against 33 + 6 c: they meet at 13/24"
    return number(answer, 13 / 24, why, traps=traps)


@in_whole_backwards(stage_per_rank=False)
@one_or_several
@checker()
def beat_24(answer: object) -> Verdict:
    """P=3, M=4, V=2, F = B = 1 of a stage: faster than 24, with at most 6 stages held on any rank."""
    schedule = schedule_of(answer)
    if (fault := _not_looped(schedule, 3, 4)) is not None:
        return wrong(fault)
    timeline = simulate(schedule, Costs(1, 0.5, 0.5))
    if max(timeline.peak_in_flight) > 6:
        return wrong(f"it takes {timeline.makespan:g} and holds {timeline.peak_in_flight}: at most 6 on any rank")
    if timeline.makespan >= 24:
        return wrong(f"it holds {timeline.peak_in_flight} and takes {timeline.makespan:g}; less than 24 is possible")
    return right(f"it takes {timeline.makespan:g} and holds {timeline.peak_in_flight}")


@in_whole_backwards(stage_per_rank=False)
def looped_bfs_builder(answer: object) -> Verdict:
    """Write `rows(num_ranks, num_microbatches)` for looped BFS with two stages per rank."""

    def judge(timeline: Timeline, P: int, M: int) -> str | None:
        if (most := max(_changes(row) for row in timeline.schedule.rows)) > 2:
            return f"one rank goes from stage to stage {most} times; breadth first does so twice on the way down and up"
        takes = simulate(build("LoopedBFS", num_ranks=P, num_microbatches=M)).makespan
        if timeline.makespan > takes:
            return f"it takes {timeline.makespan:g}; looped BFS takes {takes:g}"
        return None

    why = "legal at six sizes, as fast as looped BFS, and each stage's weights are wanted once per pass"
    return builder(answer, judge, why, ((4, 8), (2, 4), (3, 5), (1, 3), (4, 2), (6, 6)), misfit=_not_looped)


@one_or_several
def gathers(answer: object) -> Verdict:
    """P=4, M=8, V=2, room for one stage's weights: rank 1's gathers per step, interleaved 1F1B and looped BFS."""
    if values_of(answer) == (18, 2):
        return wrong("those are the changes of stage; the first stage's weights have to be gathered, too")
    both = (build(name, num_ranks=4, num_microbatches=8) for name in ("Interleaved1F1B", "LoopedBFS"))
    expected = [_changes(schedule.rows[1]) + 1 for schedule in both]
    why = "breadth first gathers one stage, the other, and the first again, whatever M is"
    return numbers(answer, expected, why, ("interleaved 1F1B", "looped BFS"))


def _changes(row: Sequence[Action]) -> int:
    """How often an action of the row belongs to another stage than the one before it."""
    return sum(a.stage != b.stage for a, b in zip(row, row[1:], strict=False))


def _not_looped(schedule: Schedule, num_ranks: int, num_microbatches: int) -> str | None:
    """What is wrong with the sizes or the placement of a schedule with two stages per rank, placed in a loop."""
    wanted = num_ranks, 2 * num_ranks, num_microbatches
    if shape_of(schedule) != wanted:
        has, sizes = shape_of(schedule), "{} ranks, {} stages and {} microbatches"
        return f"wanted are {sizes.format(*wanted)}; yours: {sizes.format(*has)}"
    if schedule.placement != (loop := (*range(num_ranks), *range(num_ranks))):
        return f"stages 0, 1, ... must lie on ranks {', '.join(map(str, loop))}"
    return None


@one_or_several
def one_denominator(answer: object) -> Verdict:
    """P=8, M=48: the bubble fractions of GPipe and of V=2, and the M at which GPipe has the latter."""
    names = ("GPipe's fraction", "the interleaved fraction", "microbatches for GPipe")
    why = "7/55 = 12.7 % and 7/103 = 6.8 %, both of all rank-time"
    verdict = numbers(answer, (7 / 55, 7 / 103, 96), why, names, digits=2)
    if verdict.says.startswith(names[1]) and number(values_of(answer)[1], 7 / 96, "", digits=2):
        return wrong("the interleaved fraction: 7/96 is the ratio, idle over ideal; a fraction is idle over total")
    return verdict
