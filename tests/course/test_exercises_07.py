"""The checkers of chapter 7 refuse wrong answers and say what is wrong; what is right, the chapter's solutions show."""

from __future__ import annotations

import pytest

import pplab as pp
from conftest import assert_explained
from pplab import lab
from pplab.course import dualpipe


def dualpipe_rows(folded):
    return pp.build("DualPipe", num_ranks=2 * folded.num_ranks, num_microbatches=2 * folded.num_microbatches).rows


def larger(folded):
    return pp.build("DualPipe", num_ranks=2 * folded.num_ranks, num_microbatches=2 * folded.num_microbatches + 2).rows


def one_way(folded):
    return pp.build("1F1B", num_ranks=2 * folded.num_ranks, num_microbatches=2 * folded.num_microbatches).rows


def alone(folded):
    """DualPipe's rows with the halves of every pair one after the other."""
    return [[action for item in row for action in pp.actions.parts(item)] for row in dualpipe_rows(folded)]


def forwards_first(folded):
    """A stage on two ranks and two directions, as in DualPipe, but each in GPipe's order."""
    P, M = 2 * folded.num_ranks, folded.num_microbatches
    ways = [(r, range(M)) for r in range(P)], [(P - 1 - r, range(M, 2 * M)) for r in range(P)]
    both = list(zip(*ways, strict=True))
    return [[f"{s}{kind}{m}" for kind in "FB" for s, order in way for m in order] for way in both]


def broken(*anything):
    return anything[5]


def paired(cap):
    def rows(P, M):
        schedule = pp.build("1F1B", num_ranks=P, num_microbatches=M, in_flight=[cap(P, s) for s in range(P)])
        return dualpipe.paired(schedule.rows)

    return rows


def side_by_side(folded):
    """Two DualPipeVs that never meet."""
    both = lab.replicate(folded, 2).rows
    return [*both[: folded.num_ranks], *both[: folded.num_ranks - 1 : -1]]


WRONG = [
    (dualpipe.unfold, side_by_side, "goes through all 2 ranks and back: yours sends 0 messages"),
    (dualpipe.pairs, 3, "that is with 8 microbatches"),
    (dualpipe.pairs, 20, "have no partner"),
    (dualpipe.pairs, 10, "both directions count"),
    (dualpipe.parameters_and_peaks, (1 / 8, 1 / 8, 9, 8.5), "DualPipe's parameters: 0.125 isn't it"),
    (dualpipe.parameters_and_peaks, (1 / 4, 1 / 8, 9, 17), "DualPipeV's peak: 17 isn't it; the number is smaller"),
    (dualpipe.parameters_and_peaks, (1 / 4, 1 / 8), "expected 4 numbers"),
    (dualpipe.unfold, 3, "expected a function of a schedule"),
    (dualpipe.unfold, broken, "your function raised IndexError"),
    (
        dualpipe.unfold,
        lambda folded: folded,
        "expected 2 ranks, 2 stages and 4 microbatches; your schedule has 1 rank, 2 stages",
    ),
    (dualpipe.unfold, lambda folded: folded.rows + folded.rows[::-1], "0F0"),
    (dualpipe.unfold, larger, "expected 2 ranks, 2 stages and 4 microbatches"),
    (dualpipe.unfold, one_way, "the stages are on ranks (0, 1); DualPipe has them on ((0, 1), (0, 1))"),
    (dualpipe.unfold, alone, "DualPipe takes"),
    (dualpipe.unfold, forwards_first, "DualPipe takes"),
    (dualpipe.fit, (3, -3), "yours says 0, and the simulation 2"),
    (dualpipe.fit, (1, 1), "P=4, F=I=3, W=1: yours says 4, and the simulation 8"),
    (dualpipe.fit, 3, "expected two numbers"),
    (dualpipe.fit, ("3", "-1"), "expected two numbers"),
    (dualpipe.break_even, 2.7, "a pair of half stages"),
    (dualpipe.break_even, 2.875, "that is DualPipe's"),
    (dualpipe.break_even, 1.4375, "has more pairs on a rank"),
    (dualpipe.break_even, 1.5, "the number is smaller"),
    (dualpipe.promises_too_much, (1, 1, 1), "it promises 2, which is what there is"),
    (dualpipe.promises_too_much, (3, 4, 2), "it promises 9, and there is 8, less"),
    (dualpipe.promises_too_much, (3, -4, 2), "backward_input must be a finite number"),
    (dualpipe.promises_too_much, (3, 4), "expected three durations (F, I, W), got (3, 4)"),
    (dualpipe.promises_too_much, 3, "expected three durations (F, I, W), got 3"),
    (dualpipe.promises_too_much, (3, float("nan"), 2), "must be a finite number"),
    (dualpipe.fit, (float("nan"), 1), "yours says nan"),
    (dualpipe.promises_too_much, ("a", 4, 1), "forward must be a finite number"),
    (dualpipe.paired_builder, 1, "expected a function"),
    (dualpipe.paired_builder, paired(lambda P, s: P - s), "is possible"),
    (dualpipe.paired_builder, paired(lambda P, s: 2 * (P - s) + (s == 0)), "are enough"),
    (dualpipe.paired_builder, broken, "your function raised IndexError"),
    (dualpipe.both_copies, 1, "expected a function of two lists"),
    (dualpipe.both_copies, lambda a, b: [(x + y) / 2 for x, y in zip(a, b, strict=True)], "half of what one process"),
    (dualpipe.both_copies, lambda a, b: a, "not the gradients of one process"),
    (dualpipe.both_copies, lambda a, b: a + b, "expected 4 gradients, one per parameter, got 8"),
    (dualpipe.both_copies, broken, "your function raised IndexError"),
    (dualpipe.both_copies, lambda a, b: ["a"] * 4, "your function raised TypeError"),
]


@pytest.mark.parametrize(("check", "answer", "says"), WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_a_wrong_answer_is_explained(check, answer, says):
    assert_explained(check, answer, says)


def test_any_right_answer_is_accepted():
    assert dualpipe.unfold(dualpipe_rows)
    assert dualpipe.promises_too_much((1, 1, 2)) and dualpipe.promises_too_much((2, 1, 1))
    assert dualpipe.paired_builder(paired(lambda P, s: 2 * (P - s)))


def test_only_neighbours_of_different_microbatches_are_paired():
    rows = pp.Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]).rows
    made = [[str(item) for item in row] for row in dualpipe.paired(rows)]
    assert made == [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    assert dualpipe.backward_first(lambda: "output", lambda: "gradient") == ("output", "gradient")
