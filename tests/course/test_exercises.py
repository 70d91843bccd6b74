"""The checkers refuse wrong answers and say what is wrong; what is right, the chapters' solutions show."""

from __future__ import annotations


import pytest

import pplab as pp
from conftest import assert_explained
from pplab.course.verdict import Verdict, number


def lifo_rows(num_ranks, num_microbatches):
    order = range(num_microbatches)
    return [[f"{r}F{m}" for m in order] + [f"{r}B{m}" for m in reversed(order)] for r in range(num_ranks)]









WRONG = [
    (bubble_math.idle_cells, 9, "one rank's"),
    (bubble_math.idle_cells, 40, "40 isn't it; the hint may help"),
    (bubble_math.idle_cells, 400, "the number is much smaller"),
    (bubble_math.idle_cells, "36", "write it without quotes"),
    (bubble_math.as_fraction, 20, "in per cent: give it as a share of 1"),
    (bubble_math.as_fraction, 0.25, "the ratio itself"),
    (bubble_math.as_fraction, 1 / 3, "the other way"),
    (bubble_math.least_microbatches, 140, "keeps the ratio"),
    (bubble_math.least_microbatches, 132, "a little more than 5 %"),
    (bubble_math.path_of_78, ["0F0", "1F0"], "takes 2: look for a longer one"),
    (bubble_math.path_of_78, ["0F0", "2F0"], "2F0 doesn't have to wait for 0F0"),
    (bubble_math.path_of_78, ["0F99"], "0F99 isn't an action of this schedule"),
    (bubble_math.path_of_78, ["hello"], "'hello' is not an action"),
    (bubble_math.path_of_78, 78, "expected a row of actions"),
    (bubble_math.path_of_78, "0F0 1F0", "takes 2: look for a longer one"),
    (bubble_math.path_of_78, "0F0,1F0", "takes 2: look for a longer one"),
    (bubble_math.best_microbatches, 16, "takes 39.9; try fewer"),
    (bubble_math.best_microbatches, 4, "takes 46.2; try more"),
    (bubble_math.best_microbatches, 3, "choose one of 1, 2, 4"),
    (bubble_math.repair, bubble_math.BROKEN_CHART.replace("1B1,1B3", "1B1,1B2,1B3"), "run 1B0 before 1F3"),
    (bubble_math.best_microbatches, [8], "choose one of 1, 2, 4"),
    (bubble_math.repair, bubble_math.BROKEN_CHART, "1B2 is missing"),
    (bubble_math.repair, "0F0,0B0\n", "must keep 3 ranks"),
    (bubble_math.repair, "0F0 0B0\n1F0 1B0\n", "your schedule has 2 ranks, 2 stages (on rank 0, 1) and 1 microbatch"),
    (bubble_math.repair, bubble_math.BROKEN_CHART.split(), "1B2 is missing"),
    (bubble_math.repair, 18, "expected a row of actions for each rank"),
    (bubble_math.repair, "missing.csv", "missing.csv"),
    (bubble_math.repair, pp.build("naive", num_ranks=3, num_microbatches=4), "runs, in 36"),
    (bubble_math.makespan, lambda P, M, F, B: M * (F + B), "the simulation takes"),
    (bubble_math.makespan, lambda P, M: 1, "raised TypeError"),
    (bubble_math.makespan, 33, "expected a function"),
    (bubble_math.makespan, lambda P, M, F, B: float("nan"), "gives nan"),
    (bubble_math.tokens_per_second, (2.13, 0.099, 246000), "efficiency: 0.099 isn't it; the number is larger"),
    (bubble_math.tokens_per_second, (2130, 0.901, 246000), "that is in ms; the question asks for s"),
    (bubble_math.tokens_per_second, (2.13, 90.14, 246000), "efficiency: that is in per cent"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_rounded_answers_are_right():
    """To three digits or more, of numbers that aren't counts."""
    assert bubble_math.tokens_per_second((2.13, 0.901, 246_000)) and bubble_math.tokens_per_second(
        (2.13, 0.9014, 2.46e5)
    )
    for answer, expected, same in (
        (105, 105.4, True),
        (120, 120.3, True),  # its 0 may be a digit
        (100, 100.4, True),
        (100.4, 100, False),  # a count
        (100.0, 100, True),
        (1.05, 1.0549, True),
        (1.050, 1.0551, False),
        (-0.0313, -0.03125, True),
        (0.0, 0.001, False),
    ):
        assert bool(number(answer, expected, "")) is same, (answer, expected)


@pytest.mark.slow
def test_wrong_modules_are_explained():
    for check, answer, says in (
    ):
        assert_explained(check, answer, says)


def test_a_verdict_reads_well():
    assert repr(Verdict(True, "so it is")) == "✓ right: so it is"
    assert repr(Verdict(False, "no")) == "✗ not yet: no"
