"""Chapter 7: the checkers refuse wrong answers and say what is wrong; its solutions, the chapter's test runs."""

from __future__ import annotations

import pytest
from checkers import builds, raises, slow, table_tests

import pplab as pp
from pplab.course import zero_bubble as exercise

one_f_one_b = builds("1F1B")


def weights_at_once(num_ranks, num_microbatches):
    rows = one_f_one_b(num_ranks, num_microbatches).rows
    return [
        [f"{a.stage}{kind}{a.microbatch}" for a in row for kind in ("IW" if a.kind.name == "B" else "F")]
        for row in rows
    ]


def both_now(x, weight, gradient):
    of_weight = gradient.t() @ x
    return gradient @ weight, lambda: of_weight


ALL_LAST = f"{exercise.LAST_ROW} {' '.join(f'3W{m}' for m in range(8))}"
AT_ONCE = " ".join(f"{a} 3W{a[2:]}" if a[1] == "I" else a for a in exercise.LAST_ROW.split())
LOOP = [[r + 4 * v for v in range(4)] for r in range(4)]

WRONG = [
    (exercise.small_weights, 0.035, "takes every W to fill a gap"),
    (exercise.small_weights, 0.179487, "that is 1F1B's"),
    (exercise.small_weights, 11.9 / 73.6, "that is the ratio"),
    (exercise.products, (6, 6), "have no weights"),
    (exercise.products, (4, 4), "attention multiplies too"),
    (exercise.products, (4, 8), "the other way round"),
    (exercise.products, (5, 5), "are two products"),
    (exercise.products, (1, 2), "make twelve in the backward"),
    (exercise.products, (8,), "expected two numbers (of I, of W), got 1"),
    (exercise.products, 12, "expected two numbers"),
    (exercise.place_weights, exercise.LAST_ROW, "3W0 is missing"),
    (exercise.place_weights, ALL_LAST, "it takes 31: rank 3 waits inside its row"),
    (exercise.place_weights, AT_ONCE, "some W's delay the input gradients"),
    (exercise.place_weights, "3F0 hello", "hello"),
    (exercise.place_weights, 8, "expected a row of actions"),
    (exercise.zb_h1_builder, one_f_one_b, "no less than 1F1B's"),
    (exercise.zb_h1_builder, builds("ZB-H2"), "no rank may hold more than 4"),
    (exercise.zb_h1_builder, weights_at_once, "ZB-H1 takes 27"),
    (exercise.zb_h1_builder, raises, "your function raised IndexError"),
    (exercise.zb_h1_builder, 27, "expected a function"),
    (exercise.least_memory, one_f_one_b(4, 8), "it takes 33, and holds 4 + 3 + 2 + 1 = 10"),
    (exercise.least_memory, builds("ZB-H1")(4, 8), "4 + 4 + 4 + 4 = 16; one rank can"),
    (exercise.least_memory, one_f_one_b(2, 4), "keep 4 ranks"),
    (exercise.least_memory, [["0B0"]], "0F0 is missing"),
    (exercise.balanced_placement, LOOP, "rank 0 would hold the most"),
    (exercise.balanced_placement, [[0, 7], [1, 6], [2, 5], [3, 4]], "four ranks with four stages each"),
    (exercise.balanced_placement, [[0, 1, 2, 3]] * 4, "on exactly one rank"),
    (exercise.balanced_placement, 16, "expected a list of four lists"),
    (exercise.affordable_overhead, 12 / 64, "share of B = 6"),
    (exercise.affordable_overhead, 3 / 32, "what each half may be longer"),
    (exercise.affordable_overhead, 1 / 64, "both halves are longer"),
    (exercise.affordable_overhead, 0.25, "that is with 8 microbatches"),
    (exercise.affordable_overhead, 0.5, "the number is smaller"),
    (exercise.affordable_overhead, 0.031, "0.031 is near: give 3 digits"),
    (exercise.small_weights, 0.14, "0.14 is near: give 3 digits"),
    (exercise.small_weights, 0.179, "that is 1F1B's"),
    (exercise.small_weights, 0.162, "that is the ratio"),
    (exercise.least_held_for_zero, 7, "here it leaves 6"),
    (exercise.least_held_for_zero, 9, "16 of the 18"),
    (exercise.least_held_for_zero, 11, "one less is enough"),
    (exercise.table_5, (0.124, 0.0674, 0.04), "ZB-H2: 0.04 isn't it; the number is larger"),
    (exercise.table_5, (0.124, 0.0674), "expected three numbers"),
    (exercise.table_5, 0.124, "expected three numbers"),
    (exercise.split_linear, 3, "expected a function"),
    slow(exercise.split_linear, both_now, "nothing is put off"),
    slow(exercise.split_linear, lambda x, w, g: (g @ w, g.t() @ x), "must be a function"),
    slow(exercise.split_linear, lambda x, w, g: (g @ w, lambda: x.t() @ g), "weight must have shape (4, 3)"),
    slow(exercise.split_linear, lambda x, w, g: (2 * g @ w, lambda: g.t() @ x), "of x isn't autograd's"),
    slow(exercise.split_linear, lambda x, w, g: (None, lambda: g.t() @ x), "must have shape (5, 3), got NoneType"),
    slow(exercise.split_linear, lambda x, w, g: g @ x, "your function raised RuntimeError"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_other_measures_of_table_5_are_named():
    costs = pp.Costs(18.546, 18.097, 9.321, latency=0.762)
    t = pp.simulate(pp.build("1F1B", num_ranks=8, num_microbatches=64), costs)
    assert "the bubble ratio" in exercise.table_5((t.bubble_ratio, 0, 0)).says
    assert "that is the makespan" in exercise.table_5((t.makespan, 0, 0)).says
    without = pp.simulate(t.schedule, pp.Costs(18.546, 18.097, 9.321))
    assert "without the latency" in exercise.table_5((without.span_bubble_fraction, 0, 0)).says


def test_any_right_answer_is_accepted():
    assert exercise.table_5((0.1240, 0.0674, 0.0444))  # as printed in the paper
    assert exercise.affordable_overhead(0.0313) and exercise.affordable_overhead(0.0312)  # of 0.03125
    assert exercise.small_weights(0.139)
    assert exercise.products([8, 4])
    assert exercise.balanced_placement([[0, 6, 9, 15], [1, 7, 8, 14], [2, 4, 11, 13], [3, 5, 10, 12]])
    assert exercise.place_weights(builds("ZB-H1")(4, 8).rows[3])


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
    split = pp.simulate(builds("ZB-H1")(4, M), pp.Costs(3, *halves)).makespan
    assert (split > fused) == (M > 64) and (split == fused) == (M == 64)


@pytest.mark.slow
def test_a_split_may_multiply_in_another_order():
    assert exercise.split_linear(lambda x, w, g: (g @ w, lambda: (x.t() @ g).t()))
