"""Checkers for chapter 16, blocks and the best possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..costs import Costs
from ..footprint import Memory
from ..lab.block import Block
from ..lab.case import Case
from ..lab.controllable import v_half  # noqa: F401 (registers V-Half)
from ..schedule import Schedule
from ..simulator import simulate
from .answers import judge_bill, schedule_of
from .verdict import Verdict, Wrong, checker, number, numbers, one_or_several, right, wrong

BROKEN = {"0F": 0, "1F": 1, "2F": 2, "2B": 4, "1B": 6, "0B": 8}  # exercise 3: no rank has room for its backward
V_HALF = 86.5  # exercise 5: what it takes, and the most that it holds
V_COSTS, V_MEMORY, V_LIMIT = Costs(3, 4, 2).finer(2), Memory(0.5), 3
SMALL = replace(Case(), memory_gb=64)  # exercise 6
BEST_KNOWN = 83.510  # dollars; tests/course/test_exercises_16.py finds it again
NEAR = 1.5  # dollars


@one_or_several
@checker()
def two_stays(answer: object) -> Verdict:
    """Stays of 20 and 10 units at an interval of 6: the most that is held, and the mean."""
    traps = (
        {5: "that is 30 / 6; each stage alone can hold its most at the same moment: round up per stage, then add"},
        {6: "an average isn't rounded"},
    )
    return numbers(answer, (6, 5), "at most 4 + 2, on average 30 / 6", ("at most", "on average"), traps=traps)


@checker()
def balanced_placement(answer: object) -> Verdict:
    """16 stages on 4 ranks, four each: a list of stage numbers per rank, so that lifespans add up to the same."""
    try:
        ranks = [sorted(int(stage) for stage in stages) for stages in answer]
    except (TypeError, ValueError):
        return wrong(f"expected a list of four lists of stage numbers, got {answer!r}")
    if [len(stages) for stages in ranks] != [4] * 4:
        return wrong(f"expected four ranks with four stages each, got {[len(stages) for stages in ranks]}")
    if sorted(stage for stages in ranks for stage in stages) != list(range(16)):
        return wrong("every stage from 0 to 15 must be on exactly one rank")
    spans = [sum(2 * (16 - stage) for stage in stages) for stages in ranks]
    if len(set(spans)) > 1:
        return wrong(f"the ranks' lifespans add up to {spans}: rank {spans.index(max(spans))} would hold the most")
    return right(f"{spans[0]} on every rank; whether neighbours are close is another question")


@checker("a lab.Block", lambda answer: isinstance(answer, Block))
def repair(answer: Block) -> Verdict:
    """1F1B's block on three ranks with whole backwards of two units, in which nothing meets."""
    if tuple(answer.placement) != (0, 1, 2) or set(answer.starts) != set(BROKEN):
        raise Wrong("keep one stage on each of three ranks, with an F and a B each")
    if answer.interval != 3 or (answer.costs.of("B", 0), answer.costs.of("F", 0)) != (2, 1):
        raise Wrong("keep the interval of 3, forwards of 1 and backwards of 2")
    if answer.peak[0] > 3:
        raise Wrong(f"rank 0 holds {answer.peak[0]}: bring its backward back sooner")
    moved = sum(answer.starts[key] != start for key, start in BROKEN.items())
    return right(f"nothing meets, {moved} starts moved; ranks hold {answer.peak}")


@one_or_several
@checker('a number and a condition, such as (7, "W + 2I >= 2F")', lambda answer: isinstance(answer, tuple))
def misfit(answer: tuple[float, str]) -> Verdict:
    """What a further microbatch costs under V-Half at 2, 4, 1, and which condition fails."""
    if len(answer) != 2:
        raise Wrong(f"expected a number and a condition, got {len(answer)} answers")
    traps = {7: "that is the work; simulate two numbers of microbatches", 17: "that is in halves of a rank's share"}
    cost = number(answer[0], 8.5, "", traps=traps)
    if not cost:
        return cost
    if answer[1] != "W + 2F >= 2I":
        raise Wrong(f"8.5 it is, but {answer[1]!r} isn't the condition that fails: put 2, 4 and 1 in")
    return right("8.5 in place of 7: 1 + 2·2 is less than 2·4, so the blocks no longer fit into each other")


@checker()
def beat_v_half(answer: object) -> Verdict:
    """Four ranks, eight microbatches, a V, 3, 4, 2: faster than V-Half's 86.5, and no more than three held."""
    schedule = schedule_of(answer, (4, 8, 8), "4 ranks with two stages each, and 8 microbatches")
    if schedule.placement != (0, 1, 2, 3, 3, 2, 1, 0):
        raise Wrong(f"keep the V, stages on ranks (0, 1, 2, 3, 3, 2, 1, 0), got {schedule.placement}")
    took, held = simulate(schedule, V_COSTS).makespan, max(schedule.peak_held(V_MEMORY))
    if held > V_LIMIT:
        raise Wrong(f"it takes {took:g}, but a rank holds {held:g} activations: at most {V_LIMIT}")
    if took >= V_HALF:
        raise Wrong(f"it takes {took:g}, V-Half {V_HALF:g}")
    return right(f"{took:g}; we know of 84.5, and it is proved that nothing is below 82")


@one_or_several
@checker('a schedule and a cut, such as ("V-Half", [4, 4, 4, 4, 5, 5, 4, 2])', lambda answer: isinstance(answer, tuple))
def smaller_cards(answer: tuple[str | Schedule, Sequence[int]]) -> Verdict:
    """The running case on cards of 64 GB, 16 sequences a step: a schedule and a cut, for the smallest bill."""
    return judge_bill(SMALL, answer, 16, BEST_KNOWN, NEAR)
