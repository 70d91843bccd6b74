"""Checkers for chapter 17, slices and what people run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt

from ..builders import build
from ..lab.case import Case
from ..lab.sliced_case import sliced_row
from ..lab.sliced_schedules import check_slices
from ..lab.slices import Slices
from .answers import schedule_of, told_bill
from .verdict import Verdict, Wrong, checker, checker_of_each, first_wrong, number, one_or_several, right, told

LONG = replace(Case(), model=replace(Case().model, sequence=32768))  # exercise 5: four times as long
BEST_KNOWN = {"slices": 32, "cut": (8, 8, 9, 7), "warmup_per_rank": 3, "recompute": (1, 0, 0, 0)}
OVERHEAD_MS, NEAR = 1.0, 2.0  # what every action takes beside its work; dollars
BROKEN = [  # exercise 3: one sequence in three slices, on two ranks
    "0F0 0F1 0F2 0B0 0B1 0B2",
    "1F0 1F1 1F2 1B0 1B1 1B2",
]
CAUSES = {"A": "overhead", "B": "uneven", "C": "messages", "D": "as hoped"}
WHY = {
    "A": "its actions take as much longer as there are more of them, and idle time is what it should be",
    "B": "later slices take longer than earlier ones, and ranks wait for them",
    "C": "slices are short, and each waits as long for its message as a whole sequence did",
    "D": "idle time fell to a fourth, and nothing got longer",
}


def enough_slices(answer: object) -> Verdict:
    """1F1B on 8 ranks: into how many slices, for at most two whole activations on rank 0?"""
    traps = {
        8: "that gives 15 / 8 = 1.875: fewer are enough",
        6: "that gives 13 / 6, which is more than 2",
        4: "P / 2 slices: but rank 0 also holds the slices of a whole sequence",
    }
    return number(answer, 7, "(8 + k - 1) / k is 2 at k = 7", traps=traps)


def golden_cut(answer: object) -> Verdict:
    """Half of a forward is attention: after which share of the sequence is half of the work done?"""
    traps = {
        0.5: "that is half of the tokens; later tokens take longer",
        sqrt(0.5): "that is where all of the work is attention",
        (3 - sqrt(5)) / 2: "that is the second slice's share",
    }
    return number(answer, (sqrt(5) - 1) / 2, "(1 - a) x + a x² = 1/2 at a = 1/2: the golden ratio", traps=traps)


@one_or_several
@checker()
def repair(answer: object) -> Verdict:
    """One sequence in three slices on two ranks, in an order in which gradients of keys and values arrive in time."""
    schedule = schedule_of(answer, (2, 2, 3), "2 ranks, 2 stages and 3 slices")
    with told("", ValueError):
        check_slices(schedule, 3)
    took = Slices.even(3).simulate(schedule).makespan
    best = Slices.even(3).simulate(build("Seq1F1B", num_ranks=2, num_microbatches=3, slices=3)).makespan
    if took > best + 1e-9:
        raise Wrong(f"it trains, and takes {took:g}; {best:g} is possible")
    return right(f"{took:g}, and every slice's backward comes after the backwards of those that read its keys")


@checker_of_each("ABCD")
def teams(answer: dict) -> Verdict:
    """Why four slices did or didn't help."""
    letter = first_wrong(answer, CAUSES, sorted(CAUSES.values()))
    if letter:
        raise Wrong(f"{letter}: {WHY[letter]}")
    return right("slices trade a shorter bubble for more and shorter actions")


@checker("a dict of what lab.sliced_row takes, with slices", lambda answer: isinstance(answer, Mapping))
def long_sequences(answer: Mapping[str, object]) -> Verdict:
    """Four sequences of 32,768 tokens a step: what `lab.sliced_row` takes, for the smallest bill."""
    if "slices" not in answer:
        raise Wrong(f"how many slices? Expected the key slices among {', '.join(map(str, answer)) or 'none'}")
    with told("", ValueError, TypeError):
        row = _row(answer)
    return told_bill(row, _row(BEST_KNOWN).dollars, NEAR)


def _row(asked: Mapping[str, object]) -> object:
    if fixed := {"num_microbatches", "overhead_ms", "microbatch"} & set(asked):
        raise Wrong(f"{min(fixed)} is given: leave it out")
    return sliced_row(LONG, num_microbatches=4, overhead_ms=OVERHEAD_MS, **asked)
