"""Chapter 17: the checkers refuse wrong answers and say what is wrong; its solutions, the chapter's test runs."""

from __future__ import annotations

import pytest
from checkers import builds, table_tests

import pplab as pp
from pplab import lab
from pplab.course import today as exercise

CAUSES = {"A": "overhead", "B": "uneven", "C": "messages", "D": "as hoped"}
IN_TURN = ["0F0 0F1 0F2 0B2 0B1 0B0", "1F0 1F1 1F2 1B2 1B1 1B0"]

WRONG = [
    (exercise.enough_slices, 8, "fewer are enough"),
    (exercise.enough_slices, 4, "slices of a whole sequence"),
    (exercise.enough_slices, 6, "more than 2"),
    (exercise.golden_cut, 0.5, "half of the tokens"),
    (exercise.golden_cut, 0.7071, "where all of the work is attention"),
    (exercise.golden_cut, 0.382, "the second slice's share"),
    (exercise.repair, exercise.BROKEN, "0B0"),
    (exercise.repair, builds("1F1B")(2, 4), "2 ranks, 2 stages and 3 slices"),
    (exercise.repair, [row + " " for row in exercise.BROKEN[:1]], "2 ranks"),
    (exercise.teams, CAUSES | {"B": "as hoped"}, "B: later slices take longer"),
    (exercise.teams, CAUSES | {"A": "luck"}, "got 'luck'"),
    (exercise.teams, "overhead", "expected a dict with the keys A, B, C and D"),
    (exercise.long_sequences, {"cut": [8] * 4}, "how many slices?"),
    (exercise.long_sequences, {"slices": 1, "cut": [8] * 4}, "it doesn't fit: rank"),
    (exercise.long_sequences, {"slices": 8, "cut": [8] * 4, "recompute": True}, "more than the best that we know"),
    (exercise.long_sequences, {"slices": 8, "overhead_ms": 0}, "overhead_ms is given: leave it out"),
    (exercise.long_sequences, {"slices": 8, "cut": [32]}, "cut"),
    (exercise.long_sequences, 8, "expected a dict of what lab.sliced_row takes"),
]
test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_the_teams_measured_what_their_table_says():
    """A's slices take two more per action, B's attention is half of the work, C's messages take eight."""
    whole, sliced = builds("1F1B")(4, 8), pp.build("Seq1F1B", num_ranks=4, num_microbatches=32, slices=4)
    even, ten = lab.Slices.even, pp.Costs(10, 10, 10)
    assert pp.simulate(whole, pp.Costs(12, 11, 11)).makespan == 374
    assert even(4, overhead=2).simulate(sliced, ten).makespan == 402.5
    assert pp.simulate(whole, ten).makespan == 330 and even(4).simulate(sliced, ten).makespan == 262.5
    assert even(4, 0.5).simulate(sliced, ten).makespan == pytest.approx(349.7, abs=0.05)
    assert [round(10 * share, 1) for share in even(4, 0.5).shares] == [1.6, 2.2, 2.8, 3.4]
    late = pp.Costs(10, 10, 10, latency=8)
    assert (pp.simulate(whole, late).makespan, even(4).simulate(sliced, late).makespan) == (458, 646.5)


def test_a_better_bill_is_welcome(monkeypatch):
    monkeypatch.setattr(exercise, "BEST_KNOWN", {"slices": 16, "cut": (8, 8, 8, 8), "recompute": True})
    assert "tell us" in exercise.long_sequences({"slices": 32, "cut": [8, 8, 9, 7], "split": True}).says
    assert exercise.repair(IN_TURN)
