"""The checkers of chapter 8 refuse wrong answers and say what is wrong; what is right, the chapter's solutions show."""

from __future__ import annotations

from checkers import builds, raises, table_tests

import pplab as pp
from pplab import lab
from pplab.course import dualpipe as exercise


def twice(name, more=0):
    """A function from a DualPipeV to a schedule on twice as many ranks."""
    return lambda folded: builds(name)(2 * folded.num_ranks, 2 * folded.num_microbatches + more)


def alone(folded):
    """DualPipe's rows with the halves of every pair one after the other."""
    return [[action for item in row for action in pp.actions.parts(item)] for row in twice("DualPipe")(folded).rows]


def forwards_first(folded):
    """A stage on two ranks and two directions, as in DualPipe, but each in GPipe's order."""
    P, M = 2 * folded.num_ranks, folded.num_microbatches
    ways = [(r, range(M)) for r in range(P)], [(P - 1 - r, range(M, 2 * M)) for r in range(P)]
    both = list(zip(*ways, strict=True))
    return [[f"{s}{kind}{m}" for kind in "FB" for s, order in way for m in order] for way in both]


def paired(cap):
    def rows(P, M):
        return exercise.paired(builds("1F1B", in_flight=[cap(P, s) for s in range(P)])(P, M).rows)

    return rows


def side_by_side(folded):
    """Two DualPipeVs that never meet."""
    both = lab.replicate(folded, 2).rows
    return [*both[: folded.num_ranks], *both[: folded.num_ranks - 1 : -1]]


WRONG = [
    (exercise.unfold, side_by_side, "goes through all 2 ranks and back: yours sends 0 messages"),
    (exercise.pairs, 3, "that is with 8 microbatches"),
    (exercise.pairs, 20, "have no partner"),
    (exercise.pairs, 10, "both directions count"),
    (exercise.parameters_and_peaks, (1 / 8, 1 / 8, 9, 8.5), "DualPipe's parameters: 0.125 isn't it"),
    (exercise.parameters_and_peaks, (1 / 4, 1 / 8, 9, 17), "DualPipeV's peak: 17 isn't it; the number is smaller"),
    (exercise.parameters_and_peaks, (1 / 4, 1 / 8), "expected 4 numbers"),
    (exercise.unfold, 3, "expected a function of a schedule"),
    (exercise.unfold, raises, "your function raised IndexError"),
    (
        exercise.unfold,
        lambda folded: folded,
        "expected 2 ranks, 2 stages and 4 microbatches; your schedule has 1 rank, 2 stages",
    ),
    (exercise.unfold, lambda folded: folded.rows + folded.rows[::-1], "0F0"),
    (exercise.unfold, twice("DualPipe", more=2), "expected 2 ranks, 2 stages and 4 microbatches"),
    (exercise.unfold, twice("1F1B"), "the stages are on ranks (0, 1); DualPipe has them on ((0, 1), (0, 1))"),
    (exercise.unfold, alone, "DualPipe takes"),
    (exercise.unfold, forwards_first, "DualPipe takes"),
    (exercise.fit, (3, -3), "yours says 0, and the simulation 2"),
    (exercise.fit, (1, 1), "P=4, F=I=3, W=1: yours says 4, and the simulation 8"),
    (exercise.fit, 3, "expected two numbers"),
    (exercise.fit, ("3", "-1"), "expected two numbers"),
    (exercise.break_even, 2.7, "a pair of half stages"),
    (exercise.break_even, 2.875, "that is DualPipe's"),
    (exercise.break_even, 1.4375, "has more pairs on a rank"),
    (exercise.break_even, 1.5, "the number is smaller"),
    (exercise.promises_too_much, (1, 1, 1), "it promises 2, which is what there is"),
    (exercise.promises_too_much, (3, 4, 2), "it promises 9, and there is 8, less"),
    (exercise.promises_too_much, (3, -4, 2), "backward_input must be a number"),
    (exercise.promises_too_much, (3, 4), "expected three durations (F, I, W), got (3, 4)"),
    (exercise.promises_too_much, 3, "expected three durations (F, I, W), got 3"),
    (exercise.promises_too_much, (3, float("nan"), 2), "must be a number"),
    (exercise.fit, (float("nan"), 1), "yours says nan"),
    (exercise.promises_too_much, ("a", 4, 1), "forward must be a number"),
    (exercise.paired_builder, 1, "expected a function"),
    (exercise.paired_builder, paired(lambda P, s: P - s), "is possible"),
    (exercise.paired_builder, paired(lambda P, s: 2 * (P - s) + (s == 0)), "are enough"),
    (exercise.paired_builder, raises, "your function raised IndexError"),
    (exercise.both_copies, 1, "expected a function of two lists"),
    (exercise.both_copies, lambda a, b: [(x + y) / 2 for x, y in zip(a, b, strict=True)], "half of what one process"),
    (exercise.both_copies, lambda a, b: a, "not the gradients of one process"),
    (exercise.both_copies, lambda a, b: a + b, "expected 4 gradients, one per parameter, got 8"),
    (exercise.both_copies, raises, "your function raised IndexError"),
    (exercise.both_copies, lambda a, b: ["a"] * 4, "your function raised TypeError"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_any_right_answer_is_accepted():
    assert exercise.unfold(twice("DualPipe"))
    assert exercise.promises_too_much((1, 1, 2)) and exercise.promises_too_much((2, 1, 1))
    assert exercise.paired_builder(paired(lambda P, s: 2 * (P - s)))


def test_only_neighbours_of_different_microbatches_are_paired():
    rows = pp.Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]).rows
    made = [[str(item) for item in row] for row in exercise.paired(rows)]
    assert made == [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    assert exercise.backward_first(lambda: "output", lambda: "gradient") == ("output", "gradient")
