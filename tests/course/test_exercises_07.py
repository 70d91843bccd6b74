"""Chapter 7: the checkers refuse wrong answers and say what is wrong; its solutions, the chapter's test runs."""

from __future__ import annotations

import pytest
from checkers import builds, raises, slow, table_tests

import pplab as pp
from pplab import lab
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
TEAMS = {"A": "overhead", "B": "long W", "C": "barrier", "D": "as hoped"}

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
    (exercise.teams, TEAMS | {"A": "as hoped"}, "A: its I and W take 46 together"),
    (exercise.teams, TEAMS | {"C": "overhead"}, "C: between two actions no rank waits"),
    (exercise.teams, TEAMS | {"D": "luck"}, "D: expected one of as hoped, barrier, long W, overhead, got 'luck'"),
    (exercise.teams, "barrier", "expected a dict with the keys A, B, C and D"),
    (exercise.eight_sequences, ("ZB-H1", [8, 9, 8, 7]), "$3.42 more than the best that we know"),
    (exercise.eight_sequences, ("ZB-H2", [8, 9, 8, 7]), "it doesn't fit: rank"),
    (exercise.eight_sequences, ("ZB-V", [4, 4, 4, 4, 5, 5, 4, 2]), "expected 4 stages, got 8"),
    (exercise.eight_sequences, ("ZB-H1", [32]), "cut"),
    (exercise.eight_sequences, "ZB-H1", "expected a schedule and a cut"),
    (exercise.eight_sequences, ("ZB-H1",), "got 1 answers"),
    (exercise.split_linear, 3, "expected a function"),
    slow(exercise.split_linear, both_now, "nothing is put off"),
    slow(exercise.split_linear, lambda x, w, g: (g @ w, g.t() @ x), "must be a function"),
    slow(exercise.split_linear, lambda x, w, g: (g @ w, lambda: x.t() @ g), "weight must have shape (4, 3)"),
    slow(exercise.split_linear, lambda x, w, g: (2 * g @ w, lambda: g.t() @ x), "of x isn't autograd's"),
    slow(exercise.split_linear, lambda x, w, g: (None, lambda: g.t() @ x), "must have shape (5, 3), got NoneType"),
    slow(exercise.split_linear, lambda x, w, g: g @ x, "your function raised RuntimeError"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_any_right_answer_is_accepted():
    assert exercise.affordable_overhead(0.0313) and exercise.affordable_overhead(0.0312)  # of 0.03125
    assert exercise.small_weights(0.139)
    assert exercise.products([8, 4])
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


def test_the_teams_saved_what_their_table_says():
    def step(name, F, B, I, W):  # noqa: E741
        return pp.simulate(builds(name)(4, 16), pp.Costs(F, I, W, backward=B)).makespan

    measured = [(20, 40, 26, 20), (10, 40, 10, 30), (30, 60, 40, 20)]
    assert [step("1F1B", *t) - step("ZB-H1", *t) for t in measured] == [6, 120, 120]
    assert [2 * 3 * W for *_, W in measured] == [120, 180, 120]
    assert step("ZB-H1", 20, None, 20, 20) == step("ZB-H2", 20, None, 20, 20)  # behind a barrier


def test_the_best_known_bill_is_found_again():
    plan = exercise.CASE.plan("ZB-H1", 8, cut=[8, 9, 9, 6])
    found = lab.search(4, 8, costs=plan.costs, memory=plan.memory, limit=80e9)
    assert exercise.CASE.row(found.schedule, 8, cut=[8, 9, 9, 6]).dollars == pytest.approx(exercise.EIGHT, abs=1e-3)
