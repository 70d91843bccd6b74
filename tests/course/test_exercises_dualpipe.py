"""Checkers of the chapter on DualPipeV refuse wrong answers and say what is wrong; what is right, the chapter's
solutions show."""

from __future__ import annotations

from checkers import builds, raises, table_tests

import pplab as pp
from pplab import lab
from pplab_course import dualpipe as exercise
from pplab_course.dualpipe import MIXTURE


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


def joined(P, M):
    """DualPipe's rows with one more pair, on the middle ranks."""
    rows = [list(row) for row in builds("DualPipe")(P, M).rows]
    for row in rows[P // 2 - 1 : P // 2 + 1]:
        kinds = [item.kind if isinstance(item, pp.Action) else "" for item in row]
        first = next(i for i in range(len(row)) if kinds[i : i + 2] == ["F", "B"])
        row[first : first + 2] = [pp.Overlap(*row[first : first + 2])]
    return rows


def all_together(P, M):
    """Every microbatch of a direction forward before its first backward: DualPipe's placement in much more memory."""
    ways = [(r, range(M // 2)) for r in range(P)], [(P - 1 - r, range(M // 2, M)) for r in range(P)]
    both = list(zip(*ways, strict=True))
    return [[f"{s}{kind}{m}" for kind in "FB" for s, order in way for m in order] for way in both]


def side_by_side(folded):
    """Two DualPipeVs that never meet."""
    both = lab.replicate(folded, 2).rows
    return [*both[: folded.num_ranks], *both[: folded.num_ranks - 1 : -1]]


CLUSTERS = dict(zip("ABCD", ("in turn", "nothing to hide", "network", "elsewhere"), strict=True))
OF_THE_PAGE = {"cut": (3, 4, 4, 5, 3, 4, 5, 4)}  # fits while sequences are half as long


WRONG = [
    (
        exercise.clusters,
        {**CLUSTERS, "A": "network"},
        "A: not 'network'; its halves take 100 apart and 99 in a pair",
    ),
    (exercise.clusters, {**CLUSTERS, "B": "in turn"}, "on the network for 4, so 60 are possible"),
    (exercise.clusters, {**CLUSTERS, "C": "elsewhere"}, "on the network for 100, so 100 are possible"),
    (exercise.clusters, {**CLUSTERS, "D": "slow"}, "D: expected one of in turn, nothing to hide, network, elsewhere"),
    (exercise.clusters, {"A": "in turn"}, "expected a dict with the keys A, B, C and D"),
    (exercise.long_sequences, "DualPipeV", "expected a dict of what lab.Case.row takes"),
    (exercise.long_sequences, OF_THE_PAGE, "which schedule? Expected the key schedule among cut"),
    (exercise.long_sequences, {"schedule": "DualPipeV", **OF_THE_PAGE}, "it doesn't fit: rank 1 would hold 132.2 GB"),
    (exercise.long_sequences, {"schedule": "DualPipeV", "recompute": True}, "more than the best that we know"),
    (exercise.long_sequences, {"schedule": "DualPipeV", "num_microbatches": 16}, "a step has 8 microbatches of one"),
    (exercise.long_sequences, {"schedule": "DualPipeV", "cut": [32]}, "for each of 8 stages how many of 32 layers"),
    (exercise.long_sequences, {"schedule": "DualPipeV", "tickets": 3}, "tickets"),
    (exercise.long_sequences, {"schedule": "a perfect pipeline"}, "is no schedule"),
    (exercise.unfold, side_by_side, "goes through all 2 ranks and back: yours sends 0 messages"),
    (exercise.pairs, 3, "that is with 8 microbatches"),
    (exercise.pairs, 20, "have no partner"),
    (exercise.pairs, 10, "both directions count"),
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
    (exercise.break_even, 2.7, "a pair of half stages"),
    (exercise.break_even, 2.875, "that is DualPipe's"),
    (exercise.break_even, 1.4375, "has more pairs on a rank"),
    (exercise.break_even, 1.5, "the number is smaller"),
    (exercise.improve_dualpipe, 3, "expected two things, a function of (num_ranks, num_microbatches) and the pp.Costs"),
    (exercise.improve_dualpipe, (joined(4, 8), MIXTURE), "expected two things, a function"),
    (exercise.improve_dualpipe, (joined, [MIXTURE, 3]), "or a list of them"),
    (exercise.improve_dualpipe, (joined, []), "or a list of them"),
    (exercise.improve_dualpipe, (joined, 3), "or a list of them"),
    (exercise.improve_dualpipe, (raises, MIXTURE), "at 2 ranks and 4 microbatches: your function raised IndexError"),
    (exercise.improve_dualpipe, (builds("1F1B"), MIXTURE), "the stages are on ranks (0, 1); DualPipe has them on"),
    (
        exercise.improve_dualpipe,
        (builds("DualPipe"), MIXTURE),
        "at 2 ranks and 4 microbatches: 36, and the published rows take 36, with F=4, I=4, W=2, F&B=6",
    ),
    (
        exercise.improve_dualpipe,
        (joined, [MIXTURE, pp.Costs(3, 4, 2)]),  # right for one of the two
        "at 2 ranks and 4 microbatches: 36, and the published rows take 36, with F=3, I=4, W=2, F&B=9",
    ),
    (
        exercise.improve_dualpipe,
        (joined, pp.Costs(3, 4, 2, overlap="max")),  # right for small sizes
        "at 8 ranks and 16 microbatches: 138, and the published rows take 138, with F=3, I=4, W=2, F&B=6",
    ),
    (exercise.improve_dualpipe, (joined, pp.Costs([4] * 4, 4, 2)), "forward has 4 values for 2 stages"),
    (exercise.improve_dualpipe, (all_together, MIXTURE), "the peaks are (4, 4); the published rows hold (3, 3)"),
    (exercise.paired_builder, 1, "expected a function"),
    (exercise.paired_builder, paired(lambda P, s: P - s), "is possible"),
    (exercise.paired_builder, paired(lambda P, s: 2 * (P - s) + (s == 0)), "are enough"),
    (exercise.paired_builder, raises, "your function raised IndexError"),
    (exercise.pause, 22, "that is the bound"),
    (exercise.pause, 21, "what both compute"),
    (exercise.pause, 37, "one after the other"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_any_right_answer_is_accepted():
    assert exercise.unfold(twice("DualPipe"))
    assert exercise.paired_builder(paired(lambda P, s: 2 * (P - s)))
    assert exercise.pause(23)
    assert exercise.improve_dualpipe(joined, [MIXTURE, pp.Costs(10, 10, 3, overlap=16)])


def test_a_bill_is_compared_with_the_best_known():
    best = dict(exercise.BEST_KNOWN)
    assert exercise.long_sequences(best).says.endswith(", the best that we know")
    near = exercise.long_sequences(best | {"recompute": (3, 4, 3, 4, 1, 0, 0, 0)})
    assert near and "above the best that we know" in near.says
    assert not exercise.long_sequences(best | {"recompute": (2, 4, 3, 4, 0, 0, 0, 0)})  # doesn't fit


def test_an_improvement_is_told_where_it_is_none():
    says = exercise.improve_dualpipe(joined, MIXTURE).says
    assert says.startswith(
        "2.7% to 11.1% less time at five sizes, in the same memory. It is worse with F=3, I=4, W=2, "
    )
    assert "81 against 80 at 4 ranks and 8 microbatches" in says and "F=2" not in says and "F=4" not in says
    assert exercise.improve_dualpipe(..., MIXTURE).right is None is exercise.improve_dualpipe(joined, ...).right


def test_only_neighbours_of_different_microbatches_are_paired():
    rows = pp.Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]).rows
    made = [[str(item) for item in row] for row in exercise.paired(rows)]
    assert made == [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
