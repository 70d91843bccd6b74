"""Checkers of the chapter on DualPipeV, and what its cells send to ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pplab.actions import Action, B, F, I, Overlap, W
from pplab.builders import build
from pplab.costs import Costs
from pplab.lab import Case, ExpertLayers, Pieces, num_messages
from pplab.lab.planning import LLAMA_3_8B
from pplab.schedule import Schedule
from pplab.simulator import simulate
from pplab.timeline import Timeline

from .answers import builder, row_of, schedule_from, shape_of, sizes_of, told_bill
from .verdict import (
    Verdict,
    Wrong,
    checker,
    checker_of_each,
    matched,
    number,
    one_or_several,
    right,
    told,
    wrong,
)

# A stage with a layer of experts, whose pieces take a unit each: half of F and a third of B is
# all-to-all.
MIXTURE = replace(Pieces().costs(build("naive", num_ranks=1, num_microbatches=1), 1), unit="")


CAUSES = ("in turn", "nothing to hide", "network", "elsewhere")
CLUSTERS = dict(zip("ABCD", CAUSES, strict=True))
# In ms: F, B, the two with all experts on one GPU, and a pair
TIMES = {
    "A": (40, 60, 20, 40, 99),
    "B": (22, 42, 20, 40, 61),
    "C": (70, 90, 20, 40, 103),
    "D": (40, 60, 20, 40, 62),
}

TWICE_AS_LONG = Case(replace(LLAMA_3_8B, sequence=16384), gigabits=100, experts=ExpertLayers())
BEST_KNOWN = {
    "schedule": "DualPipeV",
    "num_microbatches": 8,
    "cut": (3, 4, 3, 4, 4, 5, 5, 4),
    "recompute": (3, 4, 3, 4, 0, 0, 0, 0),
}
NEAR = 2.0  # dollars


def paired(rows: Iterable[Sequence]) -> list[list[Action | Overlap]]:
    """The rows where every F that is directly followed by a B of a different microbatch forms an
    overlap with it.
    """
    made = []
    for row in rows:
        row, new = list(row), []
        while row:
            first = row.pop(0)
            pairs = row and (first.kind, row[0].kind) == (F, B)
            if pairs and first.microbatch != row[0].microbatch:
                first = Overlap(first, row.pop(0))
            new.append(first)
        made.append(new)
    return made


def pairs(answer: object) -> Verdict:
    """Count the pairs that a rank runs in DualPipe, P=4, M=20."""
    traps = {
        3: "that is with 8 microbatches",
        20: "the first forwards and the last backwards have no partner",
        10: "each direction's forwards pair with the other's backwards: both directions count",
    }
    return number(answer, 15, "all but five forwards of a rank have a partner", traps=traps)


@checker("a function of a schedule")
def unfold(answer: object) -> Verdict:
    """Write a function from a DualPipeV schedule (P ranks, M microbatches) to the rows of DualPipe
    (2P ranks, 2M).
    """
    for P, M in ((1, 2), (2, 4), (3, 7), (4, 8)):
        with told(f"from {P} ranks and {M} microbatches: "):
            schedule = schedule_from(answer, build("DualPipeV", num_ranks=P, num_microbatches=M))
            if fault := _unfolded(schedule, P, M):
                raise Wrong(fault)
    return right("four sizes unfold into DualPipe's placement, time and memory")


def _unfolded(schedule: Schedule, P: int, M: int) -> str | None:
    """Why a schedule isn't the DualPipe from which a DualPipeV of that size was cut, or None."""
    expected = build("DualPipe", num_ranks=2 * P, num_microbatches=2 * M)
    if fault := _elsewhere(schedule, expected):
        return fault
    if (sent := num_messages(schedule)) != (least := num_messages(expected)):
        return (
            f"a microbatch goes through all {2 * P} ranks and back: yours sends {sent} messages, "
            f"DualPipe {least}"
        )
    made, right_one = simulate(schedule, MIXTURE), simulate(expected, MIXTURE)
    if made.makespan != right_one.makespan:
        return f"it takes {made.makespan}; DualPipe takes {right_one.makespan}"
    if made.peak_in_flight != right_one.peak_in_flight:
        return f"the peaks are {made.peak_in_flight}; DualPipe holds {right_one.peak_in_flight}"
    return None


def _elsewhere(schedule: Schedule, dualpipe: Schedule) -> str | None:
    """Why a schedule doesn't have DualPipe's sizes and placement, or None."""
    P, stages, M = shape_of(dualpipe)
    if shape_of(schedule) != (P, stages, M):
        wanted = f"{P} ranks, {stages} stages and {M} microbatches"
        return f"expected {wanted}; your schedule has {sizes_of(schedule)}"
    if schedule.placement != dualpipe.placement:
        return (
            f"the stages are on ranks {schedule.placement}; DualPipe has them on "
            f"{dualpipe.placement}"
        )
    return None


def break_even(answer: object) -> Verdict:
    """Find how long DualPipeV's F&B may be so that it takes ZB-V's 25.5, with P=4, M=8 and
    F=I=W=1/2 per half stage.
    """
    traps = {
        2.7: "that is of a full stage: a pair of half stages takes 1.5 when nothing is hidden",
        2.875: "that is DualPipe's, and of a full stage",
        1.4375: "that is DualPipe's; DualPipeV has more pairs on a rank, and starts from 27",
    }
    return number(answer, 1.35, "a tenth of a pair hidden is enough", traps=traps)


# for which rows are judged, asked or not
OTHERS = (Costs(), Costs(2, 1, 1), Costs(3, 4, 2), Costs(1, 2, 1), MIXTURE)


@one_or_several
@checker()
def improve_dualpipe(answer: object) -> Verdict:
    """Improve on DualPipe's published rows in the same memory. Give `rows(num_ranks,
    num_microbatches)`, and the costs with which they are faster.
    """
    expected = (
        "expected two things, a function of (num_ranks, num_microbatches) and the pp.Costs for "
        "which it is faster"
    )
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return wrong(f"{expected}, got {answer!r}")
    rows, claimed = answer
    claimed = claimed if isinstance(claimed, list | tuple) else [claimed]
    if rows is ... or ... in claimed:
        return Verdict(None, "put your answer in place of the dots")
    if not callable(rows) or not claimed or not all(isinstance(costs, Costs) for costs in claimed):
        return wrong(f"{expected} (or a list of them), got {answer!r}")
    gains, worse = [], {}
    for P, M in ((2, 4), (4, 8), (4, 20), (6, 12), (8, 16)):
        with told(f"at {P} ranks and {M} microbatches: ", ValueError):
            made, published = (
                schedule_from(rows, P, M),
                build("DualPipe", num_ranks=P, num_microbatches=M),
            )
            if fault := _elsewhere(made, published):
                raise Wrong(fault)
            if max(made.peak_in_flight) > max(published.peak_in_flight):
                raise Wrong(
                    f"the peaks are {made.peak_in_flight}; the published rows hold "
                    f"{published.peak_in_flight}"
                )
            for costs in claimed:
                mine, theirs = simulate(made, costs).makespan, simulate(published, costs).makespan
                if mine >= theirs:
                    raise Wrong(
                        f"{mine:g}, and the published rows take {theirs:g}, with {_said(costs)}"
                    )
                gains.append(1 - mine / theirs)
            for costs in OTHERS:
                mine, theirs = simulate(made, costs).makespan, simulate(published, costs).makespan
                if mine > theirs and costs not in worse.values():
                    worse[f"{mine:g} against {theirs:g} at {P} ranks and {M} microbatches"] = costs
    found = "; ".join(f"{_said(costs)} ({how})" for how, costs in worse.items())
    less = (
        f"{min(gains):.1%} to {max(gains):.1%} less time at five sizes, in the same memory. It is "
    )
    return right(
        less
        + (
            f"worse with {found}"
            if worse
            else f"no worse with any of {len(OTHERS)} others that were tried"
        )
    )


def _said(costs: Costs) -> str:
    times = ", ".join(f"{kind}={costs.of(kind, 0):g}" for kind in (F, I, W))
    late = f", c={costs.latency:g}" if costs.latency else ""
    return f"{times}, F&B={costs.of_overlap(0, 1):g}{late}"


@checker_of_each("ABCD")
def clusters(answer: dict) -> Verdict:
    """Find why a step is longer than hoped, given a stage's times alone, with all experts on one
    GPU, and in a pair.
    """
    says = (
        "a pair takes at least the longest of four times, and the one that sets it tells what "
        "to change"
    )
    return matched(answer, CLUSTERS, CAUSES, _possible, says)


def _possible(letter: str) -> str:
    F_, B_, computes_f, computes_b, pair = TIMES[letter]
    sent, computed = F_ + B_ - computes_f - computes_b, computes_f + computes_b
    return (
        f"its halves take {F_ + B_} apart and {pair} in a pair; they compute for {computed} and "
        "are on the network for "
        f"{sent}, so {max(F_, B_, computed, sent)} are possible"
    )


@checker(
    "a dict of what lab.Case.row takes, with a schedule", lambda answer: isinstance(answer, Mapping)
)
def long_sequences(answer: Mapping[str, object]) -> Verdict:
    """Give the arguments of `Case.row` with the smallest bill for sequences twice as long, eight to
    a step.
    """
    row = row_of(TWICE_AS_LONG, answer, 8)
    if (row.num_microbatches, row.microbatch) != (8, 1):
        raise Wrong(
            "a step has 8 microbatches of one sequence each: leave num_microbatches and microbatch "
            "out"
        )
    return told_bill(row, TWICE_AS_LONG.row(**BEST_KNOWN).dollars, NEAR)


def paired_builder(answer: object) -> Verdict:
    """Write `rows(num_ranks, num_microbatches)` for paired 1F1B with at most 2(P-s) in flight, for
    M >= 2P.
    """

    def judge(timeline: Timeline, P: int, M: int) -> str | None:
        overlap, both = MIXTURE.of_overlap(0, 0), MIXTURE.of(F, 0) + MIXTURE.of(B, 0)
        floor = P * both + (M - 1) * overlap
        caps = tuple(min(2 * (P - s), M) for s in range(P))
        if timeline.makespan > floor:
            return f"it takes {timeline.makespan:g}; P(F+B) + (M-1)F&B = {floor:g} is possible"
        if any(held > cap for held, cap in zip(timeline.peak_in_flight, caps, strict=True)):
            return f"the peaks are {timeline.peak_in_flight}; {caps} are enough"
        return None

    sizes = ((2, 4), (4, 8), (3, 7), (1, 3), (6, 20))
    return builder(answer, judge, "legal at five sizes, with the formula's time", sizes, MIXTURE)


def pause(answer: object) -> Verdict:
    """Find how long a pair of one layer takes in the best order, with attention 2, experts 5 and
    all-to-alls 4.
    """
    traps = {
        22: "that is the bound: the backward alone takes as long, and the forward's experts have "
        "to wait for it",
        21: "that is what both compute",
        37: "that is one after the other",
    }
    return number(
        answer, Pieces(2, 4, 5, 4).at_best((F, 1), (B, 1)), "one unit above the bound", traps=traps
    )
