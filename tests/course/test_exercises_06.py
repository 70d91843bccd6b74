"""Chapter 6: the checkers refuse wrong answers and say what is wrong; its solutions, the chapter's test runs."""

from __future__ import annotations

import pytest

import pplab as pp
from conftest import assert_explained
from pplab.course import zero_bubble


def one_f_one_b(num_ranks, num_microbatches):
    return pp.build("1F1B", num_ranks=num_ranks, num_microbatches=num_microbatches)


def zb_h2(num_ranks, num_microbatches):
    return pp.build("ZB-H2", num_ranks=num_ranks, num_microbatches=num_microbatches)


def weights_at_once(num_ranks, num_microbatches):
    rows = one_f_one_b(num_ranks, num_microbatches).rows
    return [
        [f"{a.stage}{kind}{a.microbatch}" for a in row for kind in ("IW" if a.kind.name == "B" else "F")]
        for row in rows
    ]


def broken(num_ranks, num_microbatches):
    return [][num_ranks]


ALL_LAST = f"{zero_bubble.LAST_ROW} {' '.join(f'3W{m}' for m in range(8))}"
AT_ONCE = " ".join(f"{a} 3W{a[2:]}" if a[1] == "I" else a for a in zero_bubble.LAST_ROW.split())
LOOP = [[r + 4 * v for v in range(4)] for r in range(4)]

WRONG = [
    (zero_bubble.small_weights, 0.035, "takes every W to fill a gap"),
    (zero_bubble.small_weights, 0.179487, "that is 1F1B's"),
    (zero_bubble.small_weights, 11.9 / 73.6, "that is the ratio"),
    (zero_bubble.products, (6, 6), "have no weights"),
    (zero_bubble.products, (4, 4), "attention multiplies too"),
    (zero_bubble.products, (4, 8), "the other way round"),
    (zero_bubble.products, (5, 5), "are two products"),
    (zero_bubble.products, (1, 2), "make twelve in the backward"),
    (zero_bubble.products, (8,), "expected two numbers (of I, of W), got 1"),
    (zero_bubble.products, 12, "expected two numbers"),
    (zero_bubble.place_weights, zero_bubble.LAST_ROW, "3W0 is missing"),
    (zero_bubble.place_weights, ALL_LAST, "it takes 31: rank 3 waits inside its row"),
    (zero_bubble.place_weights, AT_ONCE, "some W's delay the input gradients"),
    (zero_bubble.place_weights, "3F0 hello", "hello"),
    (zero_bubble.place_weights, 8, "expected a row of actions"),
    (zero_bubble.zb_h1_builder, one_f_one_b, "no less than 1F1B's"),
    (zero_bubble.zb_h1_builder, zb_h2, "no rank may hold more than 4"),
    (zero_bubble.zb_h1_builder, weights_at_once, "ZB-H1 takes 27"),
    (zero_bubble.zb_h1_builder, broken, "your function raised IndexError"),
    (zero_bubble.zb_h1_builder, 27, "expected a function"),
    (zero_bubble.least_memory, one_f_one_b(4, 8), "it takes 33, and holds 4 + 3 + 2 + 1 = 10"),
    (zero_bubble.least_memory, pp.build("ZB-H1", num_ranks=4, num_microbatches=8), "4 + 4 + 4 + 4 = 16; one rank can"),
    (zero_bubble.least_memory, one_f_one_b(2, 4), "keep 4 ranks"),
    (zero_bubble.least_memory, [["0B0"]], "0F0 is missing"),
    (zero_bubble.balanced_placement, LOOP, "rank 0 would hold the most"),
    (zero_bubble.balanced_placement, [[0, 7], [1, 6], [2, 5], [3, 4]], "four ranks with four stages each"),
    (zero_bubble.balanced_placement, [[0, 1, 2, 3]] * 4, "on exactly one rank"),
    (zero_bubble.balanced_placement, 16, "expected a list of four lists"),
    (zero_bubble.affordable_overhead, 12 / 64, "share of B = 6"),
    (zero_bubble.affordable_overhead, 3 / 32, "what each half may be longer"),
    (zero_bubble.affordable_overhead, 1 / 64, "both halves are longer"),
    (zero_bubble.affordable_overhead, 0.25, "that is with 8 microbatches"),
    (zero_bubble.affordable_overhead, 0.5, "the number is smaller"),
    (zero_bubble.affordable_overhead, 0.031, "0.031 is near: give 3 digits"),
    (zero_bubble.small_weights, 0.14, "0.14 is near: give 3 digits"),
    (zero_bubble.small_weights, 0.179, "that is 1F1B's"),
    (zero_bubble.small_weights, 0.162, "that is the ratio"),
    (zero_bubble.least_held_for_zero, 7, "here it leaves 6"),
    (zero_bubble.least_held_for_zero, 9, "16 of the 18"),
    (zero_bubble.least_held_for_zero, 11, "one less is enough"),
    (zero_bubble.table_5, (0.124, 0.0674, 0.04), "ZB-H2: 0.04 isn't it; the number is larger"),
    (zero_bubble.table_5, (0.124, 0.0674), "expected three numbers"),
    (zero_bubble.table_5, 0.124, "expected three numbers"),
]


@pytest.mark.parametrize(("check", "answer", "says"), WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_a_wrong_answer_is_explained(check, answer, says):
    assert_explained(check, answer, says)


def test_other_measures_of_table_5_are_named():
    costs = pp.Costs(18.546, 18.097, 9.321, latency=0.762)
    t = pp.simulate(pp.build("1F1B", num_ranks=8, num_microbatches=64), costs)
    assert "the bubble ratio" in zero_bubble.table_5((t.bubble_ratio, 0, 0)).says
    assert "that is the makespan" in zero_bubble.table_5((t.makespan, 0, 0)).says
    without = pp.simulate(t.schedule, pp.Costs(18.546, 18.097, 9.321))
    assert "without the latency" in zero_bubble.table_5((without.span_bubble_fraction, 0, 0)).says


def test_any_right_answer_is_accepted():
    assert zero_bubble.table_5((0.1240, 0.0674, 0.0444))  # as printed in the paper
    assert zero_bubble.affordable_overhead(0.0313) and zero_bubble.affordable_overhead(0.0312)  # of 0.03125
    assert zero_bubble.small_weights(0.139)
    assert zero_bubble.products([8, 4])
    assert zero_bubble.balanced_placement([[0, 6, 9, 15], [1, 7, 8, 14], [2, 4, 11, 13], [3, 5, 10, 12]])
    assert zero_bubble.place_weights(pp.build("ZB-H1", num_ranks=4, num_microbatches=8).rows[3])


def test_the_memory_that_a_zero_needs_is_enough():
    """What the search finds with it and with one less."""
    costs = pp.Costs(3, 3, 2)
    for limit, bubble in ((10, 0), (9, 2)):
        s = pp.build("ZB-1P", num_ranks=4, num_microbatches=24, costs=costs, limit=limit)
        assert max(pp.simulate(s, costs).spans_per_rank) == 24 * 8 + bubble


@pytest.mark.parametrize("M", [63, 64, 65])
def test_the_affordable_overhead_is_where_the_simulations_cross(M):
    fused = pp.simulate(one_f_one_b(4, M), pp.Costs(3, 4, 2)).makespan
    halves = 4 + 3 / 32, 2 + 3 / 32
    split = pp.simulate(pp.build("ZB-H1", num_ranks=4, num_microbatches=M), pp.Costs(3, *halves)).makespan
    assert (split > fused) == (M > 64) and (split == fused) == (M == 64)


@pytest.mark.slow
def test_wrong_splits_are_explained():
    def both_now(x, weight, gradient):
        of_weight = gradient.t() @ x
        return gradient @ weight, lambda: of_weight

    for answer, says in (
        (3, "expected a function"),
        (both_now, "nothing is put off"),
        (lambda x, weight, gradient: (gradient @ weight, gradient.t() @ x), "must be a function"),
        (lambda x, weight, gradient: (gradient @ weight, lambda: x.t() @ gradient), "weight must have shape (4, 3)"),
        (lambda x, weight, gradient: (2 * gradient @ weight, lambda: gradient.t() @ x), "of x isn't autograd's"),
        (lambda x, weight, gradient: (None, lambda: gradient.t() @ x), "of x must have shape (5, 3), got NoneType"),
        (lambda x, weight, gradient: gradient @ x, "your function raised RuntimeError"),
    ):
        assert says in zero_bubble.split_linear(answer).says
    assert zero_bubble.split_linear(...).right is None
    assert zero_bubble.split_linear(lambda x, weight, gradient: (gradient @ weight, lambda: (x.t() @ gradient).t()))


@pytest.mark.parametrize("check", dict.fromkeys(check for check, _, _ in WRONG), ids=lambda check: check.__name__)
def test_dots_are_no_answer(check):
    assert check(...).right is None
