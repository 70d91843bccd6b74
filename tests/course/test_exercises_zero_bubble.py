"""Checkers of the chapter on zero bubble refuse wrong answers and say what is wrong; its solutions, the chapter's
test runs."""

from __future__ import annotations

from itertools import product

import pytest
from checkers import builds, raises, slow, table_tests

import pplab as pp
from pplab import lab
from pplab.builders import split_backwards
from pplab_course import zero_bubble as exercise

one_f_one_b = builds("1F1B")


def weights_at_once(num_ranks, num_microbatches):
    rows = one_f_one_b(num_ranks, num_microbatches).rows
    return [
        [f"{a.stage}{kind}{a.microbatch}" for a in row for kind in ("IW" if a.kind.name == "B" else "F")]
        for row in rows
    ]


ALL_LAST = f"{exercise.LAST_ROW} {' '.join(f'3W{m}' for m in range(8))}"
PLACED = """3F0 3I0 3F1 3I1 3F2 3I2 3W0 3F3 3I3 3W1 3F4 3I4 3W2 3F5 3I5 3W3 3F6 3I6 3W4 3F7 3I7 3W5 3W6 3W7""".split()
AT_ONCE = " ".join(f"{a} 3W{a[2:]}" if a[1] == "I" else a for a in exercise.LAST_ROW.split())


def one_shared_sum(inputs, weight, gradients):
    return [g @ weight for g in gradients], sum(gradients).t() @ sum(inputs)


def by_hand(inputs, weight, gradients):
    pairs = list(zip(inputs, gradients, strict=True))
    return [g @ weight for _, g in pairs], sum(g.t() @ x for x, g in pairs)


written: dict = {}
exec(exercise.PUT_OFF, written)
TRUTH = dict(exercise.CLUSTERS)
RULE = {"cut": (8, 9, 9, 6), "recompute": (0, 0, 0, 0), "schedule": "ZB-H1"}

WRONG = [
    (
        exercise.causes,
        TRUTH | {"A": "network"},
        "A: not 'network'; it takes 51, 41 and 41, and with that it would take 65, 51 and 41",
    ),
    (
        exercise.causes,
        TRUTH | {"D": "splitting"},
        "D: not 'splitting'; it takes 51, 46 and 43.5, and with that it would take 51, 48.25 and 43.25",
    ),
    (exercise.causes, TRUTH | {"C": "rain"}, "C: expected one of barrier, network, short W, splitting, got 'rain'"),
    (exercise.causes, ["barrier"], "expected a dict with the keys A, B, C and D"),
    slow(exercise.repaired, written["put_off"], "three times the last microbatch's"),
    slow(exercise.repaired, one_shared_sum, "isn't autograd's"),
    slow(exercise.repaired, lambda x, w, g: (by_hand(x, w, g)[0], None), "as large as the weight"),
    slow(exercise.repaired, lambda x, w, g: (g, by_hand(x, w, g)[1]), "input gradients were right"),
    slow(exercise.repaired, lambda x, w, g: (by_hand(x, w, g), by_hand(x, w, g)[1]), "input gradients were right"),
    slow(exercise.repaired, lambda x, w, g: by_hand(x, w, g) and by_hand(x, w, g), "12 matrix products"),
    slow(exercise.repaired, raises, "your function raised"),
    (exercise.repaired, 3, "expected a function"),
    (exercise.offer, RULE, "it fits: 5.35 s, $81.62, which is $5.65 more than the best that we know"),
    (exercise.offer, RULE | {"schedule": "ZB-H2"}, "it doesn't fit: rank 1 would hold 107.2 GB"),
    (exercise.offer, RULE | {"cut": (8, 8, 8, 7)}, "cut must say for each of 4 stages"),
    (exercise.offer, RULE | {"schedule": "ZB-V", "cut": None, "recompute": False}, "more than one stage per rank"),
    (exercise.offer, RULE | {"schedule": "ZB-H9"}, "ZB-H9"),
    (exercise.offer, RULE | {"schedule": builds("ZB-H1")(4, 8)}, "keep 4 ranks, one stage on each, and 16"),
    (exercise.offer, {"cut": (8, 9, 9, 6)}, "expected a dict with cut, recompute and schedule"),
    (exercise.weights_last, (27, 8), "makespan: that is ZB-H1's"),
    (exercise.weights_last, (22, 8), "makespan: that is when rank 0 has its last I"),
    (exercise.weights_last, (33, 8), "makespan: that is 1F1B's"),
    (exercise.weights_last, (30, 4), "held: that is ZB-H1's"),
    (exercise.weights_last, 30, "expected 2 numbers in a row (makespan, held), got 30"),
    (exercise.small_weights, 0.035, "takes every W to fill a gap"),
    (exercise.small_weights, 0.179487, "that is 1F1B's"),
    (exercise.small_weights, 11.9 / 73.6, "that is the ratio"),
    (exercise.place_weights, exercise.LAST_ROW, "3W0 is missing"),
    (exercise.place_weights, ALL_LAST, "it takes 31: rank 3 waits inside its row"),
    (exercise.place_weights, AT_ONCE, "some W's delay the input gradients"),
    (exercise.place_weights, list(map(str, builds("ZB-H1")(4, 8).rows[3])), "short enough, but rank 3 holds 4"),
    (exercise.place_weights, "3F0 hello", "hello"),
    (exercise.place_weights, 8, "expected a row of actions"),
    (exercise.zb_h1_builder, one_f_one_b, "no less than 1F1B's"),
    (exercise.zb_h1_builder, builds("ZB-H2"), "no rank may hold more than 4"),
    (exercise.zb_h1_builder, weights_at_once, "ZB-H1 takes 27"),
    (exercise.zb_h1_builder, raises, "your function raised IndexError"),
    (exercise.zb_h1_builder, 27, "expected a function"),
    (exercise.small_weights, 0.14, "0.14 is near: give 3 digits"),
    (exercise.small_weights, 0.179, "that is 1F1B's"),
    (exercise.small_weights, 0.162, "that is the ratio"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_the_table_of_exercise_6_is_simulated():
    found = {letter: exercise.per_step(cause) for letter, cause in exercise.CLUSTERS.items()}
    assert found == {"A": (51, 41, 41), "B": (65, 51, 41), "C": (51, 48.25, 43.25), "D": (51, 46, 43.5)}
    assert exercise.per_step("none") == (51, 41, 36) and exercise.causes(TRUTH)


def searched(cut, recompute):
    answer = {"cut": cut, "recompute": recompute}
    plan = exercise.OFFER.plan("ZB-H1", 16, **answer)
    found = lab.search(4, 16, costs=plan.costs, memory=plan.memory, limit=80e9)
    return {**answer, "schedule": found.schedule}


def test_an_order_near_the_best_known_is_right_too():
    assert exercise.best_known().fits and round(exercise.best_known().dollars, 2) == 75.97
    given = {**exercise.BEST_KNOWN, "schedule": exercise.best_known().timeline.schedule}
    assert exercise.offer(given).says.endswith("$75.97, the best that we know")
    near = exercise.offer(searched((8, 8, 9, 7), (4, 1, 0, 0)))
    assert near and "$0.31 above the best that we know" in near.says


def test_the_offer_asks_for_recomputation():
    """Without it no order gets there: not the best found, and by their floor none with any cut."""
    without = exercise.offer(searched((7, 9, 9, 7), (0, 0, 0, 0)))
    assert not without and "which is $0.74 more than the best that we know" in without.says
    best = exercise.best_known()
    rate, bounds = best.dollars / best.step_s, []
    for cut in product(range(1, 30), repeat=4):
        if sum(cut) == 32:
            longest = max(n * exercise.OFFER.layer_ms + (s == 3) * exercise.OFFER.head_ms for s, n in enumerate(cut))
            if rate * 16 * 3 * longest / 1e3 > best.dollars + 0.8:  # its work alone
                continue
            plan = exercise.OFFER.plan("ZB-H1", 16, cut=cut)
            try:
                problem = lab.Problem(4, 16, costs=plan.costs, memory=plan.memory, limit=80e9)
            except ValueError:  # not even one sequence fits
                continue
            bounds.append(rate * lab.floor(problem).value)
    assert best.dollars + exercise.NEAR < min(bounds) < best.dollars + 0.8


@pytest.mark.slow
def test_a_repair_may_multiply_at_once_what_it_puts_off():
    assert exercise.repaired(by_hand)


def test_any_right_answer_is_accepted():
    assert exercise.small_weights(0.139)
    row = " ".join(PLACED)
    assert exercise.place_weights(row)
    for earlier in ("3F2 3W0 3I2", "3W0 3F2 3I2"):  # W's that need no gap have more than one place
        assert exercise.place_weights(row.replace("3F2 3I2 3W0", earlier))


def test_weights_that_run_last_take_as_long_as_the_exercise_says():
    rows = [split_backwards(row, delay=8) for row in one_f_one_b(4, 8).rows]
    last = pp.simulate(pp.Schedule(rows))
    assert (last.makespan, last.peak_in_flight) == (30, (8,) * 4)
    assert exercise.weights_last((last.makespan, max(last.peak_in_flight)))
