"""Checkers of the chapter on how good an order can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pplab.costs import Costs
from pplab.lab import Block, Case
from pplab.simulator import simulate
from pplab.timeline import Timeline

from .answers import row_of, rows_of, schedule_of, shape_of, sizes_of, told_bill
from .verdict import (
    Verdict,
    Wrong,
    checker,
    checker_of_each,
    matched,
    numbers,
    one_or_several,
    right,
    told,
    values_of,
    wrong,
)

V = (0, 1, 2, 3, 3, 2, 1, 0)
SMALL = {
    "0F": 0,
    "1F": 1,
    "2F": 2,
    "3F": 3,
    "3I": 4,
    "2I": 5,
    "1I": 6,
    "0I": 7,
    "3W": 5,
    "0W": 8,
    "2W": 9,
    "1W": 10,
}


@one_or_several
def small_block(answer: object) -> Verdict:
    """Compute, from lifespan and interval, the most that each rank holds of `SMALL`, a block on a V
    of two ranks, every six units.
    """
    traps = (
        {
            2: "12 units over 6 are 2, which is the average: the bound rounds up stage by stage, "
            "and adds"
        },
        {
            2: "a microbatch stays until its W has run, not only until its I",
            3: "18 units over 6 are 3: round up first",
        },
    )
    why = "rank 0: 9 and 3 units over 6, 2 + 1; rank 1: 10 and 8 units, 2 + 2"
    return numbers(answer, (3, 4), why, ("rank 0", "rank 1"), traps=traps)


@one_or_several
@checker()
def balanced_placement(answer: object) -> Verdict:
    """Place 16 stages on 4 ranks, four on each, so that lifespans add up to the same: a list of
    stage numbers per rank.
    """
    try:
        ranks = [sorted(int(stage) for stage in values_of(stages)) for stages in rows_of(answer)]
    except (TypeError, ValueError):
        return wrong(f"expected a list of four lists of stage numbers, got {answer!r}")
    if [len(stages) for stages in ranks] != [4] * 4:
        return wrong(
            f"expected four ranks with four stages each, got {[len(stages) for stages in ranks]}"
        )
    if sorted(stage for stages in ranks for stage in stages) != list(range(16)):
        return wrong("every stage from 0 to 15 must be on exactly one rank")
    spans = [sum(2 * (16 - stage) for stage in stages) for stages in ranks]
    if len(set(spans)) > 1:
        return wrong(
            f"the ranks' lifespans add up to {spans}: rank {spans.index(max(spans))} would hold "
            "the most"
        )
    return right(f"{spans[0]} on every rank; whether neighbours are close is another question")


LATE = Costs(latency=1)  # of the block to repair: whole backwards of two units, messages of one
BROKEN = {"0F": 0, "1F": 2, "2F": 4, "2B": 5, "1B": 8, "0B": 11}
LEAST = (5, 3, 1)


@checker("a dict of starts, such as BROKEN", lambda answer: isinstance(answer, Mapping))
def repair(answer: Mapping[str, float]) -> Verdict:
    """Move as few actions as possible of `BROKEN`, whose actions meet every three units, so that
    none meet and no rank holds more than it must.
    """
    if set(answer) != set(BROKEN):
        raise Wrong(
            f"expected the starts of {', '.join(BROKEN)}, got "
            f"{', '.join(map(str, answer)) or 'none'}"
        )
    with told("", ValueError, TypeError):
        block = Block(answer, (0, 1, 2), 3, LATE)
    if any(held > least for held, least in zip(block.bound, LEAST, strict=True)):
        raise Wrong(
            f"nothing meets, but the ranks hold up to {block.bound}, and {LEAST} are enough: start "
            "some earlier"
        )
    return right(f"nothing meets, and the ranks hold no more than {block.bound}")


CAUSES = ("unequal times", "both ends", "two copies", "no proof")
TEAMS = dict(zip("ABCD", ("no proof", "unequal times", "two copies", "both ends"), strict=True))
_HINTS = {
    "A": "what has been shown of orders that nobody has tried?",
    "B": "the memory is as planned, and the order is right: what else did the plan assume?",
    "C": "activations are within bounds: what else is on the card before a microbatch comes?",
    "D": "lifespans balance activations: what isn't an activation?",
}


@checker_of_each("ABCD")
def causes(answer: dict) -> Verdict:
    """Find what each of four teams with a frontier overlooked."""
    says = "a frontier is of one placement, one set of times, and activations"
    return matched(answer, TEAMS, CAUSES, _HINTS.get, says)


UNEVEN = Costs(3, 4, 2).finer(2)
V_HALF, IN = 86.5, 6
SHORTEST = 84.5  # in that memory: proved


def _timeline_of(answer: object, costs: Costs, M: int) -> Timeline:
    if isinstance(answer, Block):
        answer = answer.reorder(M, costs)
    if isinstance(answer, Timeline):
        answer = answer.schedule
    return simulate(schedule_of(answer), costs)


@one_or_several
@checker("a lab.Block, a schedule or rows", lambda answer: not isinstance(answer, int | float))
def design(answer: object) -> Verdict:
    """Design a block, a schedule or rows on a V for 4 ranks and 8 microbatches, faster than V-Half
    in its memory, at costs 3, 4, 2.
    """
    timeline = _timeline_of(answer, UNEVEN, 8)
    schedule = timeline.schedule
    if shape_of(schedule) != (4, 8, 8):
        raise Wrong(
            f"expected 4 ranks, 8 stages and 8 microbatches; yours has {sizes_of(schedule)}"
        )
    if schedule.placement != V:
        raise Wrong(f"expected a V, with stages on ranks {V}; yours are on {schedule.placement}")
    if (most := max(timeline.peak_in_flight)) > IN:
        raise Wrong(
            f"it takes {timeline.makespan:g}, but holds {most} activations of a stage: {IN} are "
            "allowed"
        )
    if timeline.makespan >= V_HALF:
        raise Wrong(f"it takes {timeline.makespan:g} and holds {most}; V-Half takes {V_HALF:g}")
    far = timeline.makespan / SHORTEST - 1
    return right(
        f"{timeline.makespan:g}, where V-Half takes {V_HALF:g}; in this memory no order on a V "
        "takes less than "
        f"{SHORTEST:g}: yours is {far:.1%} above that"
    )


SMALLER = replace(Case(), memory_gb=68.7)
NEAR = 2.0  # dollars
# dollars: what lab.search finds under the cut 4+4+3+3+5+5+5+3, recomputing 3+2+1+0+2+1+0+0
BEST_KNOWN = 87.036


@checker(
    "a dict of what lab.Case.row takes, with a schedule", lambda answer: isinstance(answer, Mapping)
)
def smaller_cards(answer: Mapping[str, object]) -> Verdict:
    """Give the arguments of `Case.row` with the smallest bill for 68.7 GB on each card and 16
    sequences a step.
    """
    row = row_of(SMALLER, answer, 16)
    if row.num_microbatches * row.microbatch != 16:
        raise Wrong(
            f"a step has 16 sequences, and yours has {row.num_microbatches * row.microbatch}"
        )
    return told_bill(row, BEST_KNOWN, NEAR)
