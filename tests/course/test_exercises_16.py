"""Chapter 16: the checkers refuse wrong answers and say what is wrong; its solutions, the chapter's test runs."""

from __future__ import annotations

import pytest
from checkers import builds, table_tests

import pplab as pp
from pplab import lab
from pplab.course import how_good as exercise

V_HALF, ZB_V = (builds(name)(4, 8) for name in ("V-Half", "ZBVZeroBubble"))
LOOP = [[r + 4 * v for v in range(4)] for r in range(4)]
IN_A_V = [4, 4, 4, 4, 5, 5, 4, 2]


def block(**starts: float) -> lab.Block:
    return lab.Block(starts, placement=(0, 1, 2), interval=3)


SLOWER = {"0F": 0, "1F": 1, "2F": 2, "2B": 3, "1B": 5, "0B": 10}
WRONG = [
    (exercise.two_stays, (5, 5), "at most: that is 30 / 6"),
    (exercise.two_stays, (6, 6), "on average: an average isn't rounded"),
    (exercise.two_stays, 6, "expected 2 numbers in a row"),
    (exercise.balanced_placement, LOOP, "rank 0 would hold the most"),
    (exercise.balanced_placement, [[0, 7], [1, 6], [2, 5], [3, 4]], "four ranks with four stages each"),
    (exercise.balanced_placement, [[0, 1, 2, 3]] * 4, "on exactly one rank"),
    (exercise.balanced_placement, 16, "expected a list of four lists"),
    (exercise.repair, exercise.BROKEN, "expected a lab.Block"),
    (exercise.repair, block(**SLOWER), "rank 0 holds 4"),
    (exercise.repair, lab.zb_v_block(3), "keep one stage on each of three ranks"),
    (exercise.repair, lab.Block(block(**SLOWER).starts, (0, 1, 2), 6), "keep the interval of 3"),
    (exercise.misfit, (7, "W + 2F >= 2I"), "that is the work"),
    (exercise.misfit, (17, "W + 2F >= 2I"), "halves of a rank's share"),
    (exercise.misfit, (8.5, "W + 2I >= 2F"), "isn't the condition that fails"),
    (exercise.misfit, 8.5, "expected a number and a condition"),
    (exercise.misfit, (8.5,), "got 1 answers"),
    (exercise.beat_v_half, V_HALF, "it takes 86.5, V-Half 86.5"),
    (exercise.beat_v_half, ZB_V, "it takes 78, but a rank holds 4 activations"),
    (exercise.beat_v_half, builds("InterleavedZeroBubble")(4, 8), "keep the V"),
    (exercise.beat_v_half, builds("ZB-H1")(4, 8), "two stages each"),
    (exercise.beat_v_half, 84.5, "expected a row of actions"),
    (exercise.smaller_cards, ("ZB-V", IN_A_V), "it doesn't fit: rank 0 would hold 74"),
    (exercise.smaller_cards, ("V-Half", IN_A_V), "$2.62 more than the best that we know"),
    (exercise.smaller_cards, ("a perfect pipeline", IN_A_V), "has no cut"),
    (exercise.smaller_cards, ("V-Quarter", IN_A_V), "V-Quarter"),
    (exercise.smaller_cards, ("V-Half", [32]), "cut"),
    (exercise.smaller_cards, "V-Half", "expected a schedule and a cut"),
    (exercise.smaller_cards, ("V-Half",), "got 1 answers"),
]
test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_every_plan_in_which_actions_meet_is_refused():
    with pytest.raises(ValueError, match="rank 0"):
        block(**exercise.BROKEN)


def test_the_best_known_is_found_again():
    cut = [4, 4, 5, 5, 3, 4, 5, 2]
    plan = exercise.SMALL.plan("ZB-V", 16, cut=cut)
    found = lab.search(4, 16, placement="V", costs=plan.costs, memory=plan.memory, limit=64e9, tries=3000)
    assert exercise.SMALL.row(found.schedule, 16, cut=cut).dollars == pytest.approx(exercise.BEST_KNOWN, abs=1e-3)


def test_a_better_one_than_ours_is_welcome(monkeypatch):
    monkeypatch.setattr(exercise, "BEST_KNOWN", 100)
    assert "tell us" in exercise.smaller_cards("V-Half", IN_A_V).says
    assert pp.simulate(V_HALF, exercise.V_COSTS).makespan == exercise.V_HALF
