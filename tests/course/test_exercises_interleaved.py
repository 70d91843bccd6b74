"""Checkers of the chapter on interleaved 1F1B refuse wrong answers and say what is wrong; what is right, its
solutions show."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checkers import builds, raises, table_tests

import pplab as pp
from pplab import lab
from pplab.builders import looped_rows
from pplab_course import interleaved as exercise


def groups_of_p(num_ranks, num_microbatches):
    return builds("Interleaved1F1B", group_size=num_ranks)(num_ranks, num_microbatches)


def small_groups_rows(num_ranks, num_microbatches):
    """Groups of two, which deadlock on four ranks."""
    groups = [range(m, min(m + 2, num_microbatches)) for m in range(0, num_microbatches, 2)]
    rows = []
    for r in range(num_ranks):
        down = [f"{s}F{m}" for g in groups for s in (r, r + num_ranks) for m in g]
        up = [f"{s}B{m}" for g in groups for s in (r + num_ranks, r) for m in g]
        warmup = 2 + 2 * (num_ranks - 1 - r)
        pairs = [a for pair in zip(down[warmup:], up, strict=False) for a in pair]
        rows.append(down[:warmup] + pairs + up[len(down) - warmup :])
    return rows


def in_a_v(num_ranks, num_microbatches):
    places = [(r, 2 * num_ranks - 1 - r) for r in range(num_ranks)]
    order = ((0, "F"), (1, "F"), (1, "B"), (0, "B"))
    return [[f"{held[i]}{kind}{m}" for i, kind in order for m in range(num_microbatches)] for held in places]


def undoubled(group_size):
    return looped_rows(3, 4, 2, group_size, 1)


CAUSES = {"A": "overhead", "B": "uneven", "C": "messages", "D": "as hoped"}
IN_TURN = ["0F0 0F1 0F2 0B2 0B1 0B0", "1F0 1F1 1F2 1B2 1B1 1B0"]

WRONG = [
    (exercise.even_groups_builder, groups_of_p, "at 4 ranks and 9 microbatches: it takes 74"),
    (exercise.even_groups_builder, builds("LoopedBFS"), "one rank holds 16 stages' activations; 11 are enough"),
    (exercise.even_groups_builder, builds("1F1B"), "yours: 4 ranks, 4 stages and 8 microbatches"),
    (exercise.even_groups_builder, in_a_v, "must lie on ranks 0, 1, 2, 3, 0, 1, 2, 3"),
    (exercise.even_groups_builder, small_groups_rows, "at 4 ranks and 8 microbatches: deadlock"),
    (exercise.even_groups_builder, raises, "your function raised IndexError"),
    (exercise.even_groups_builder, 28.5, "expected a function"),
    (exercise.crossover, 0.5625, "only up to c = 0.5"),
    (exercise.crossover, 0.140625, "overtake four"),
    (exercise.crossover, 0.54, "0.54 is near: give 3 digits"),
    (exercise.crossover, 1.375, "that is where 1F1B overtakes"),
    (exercise.beat_24, builds("Interleaved1F1B", group_size=3)(3, 4), "holds (8, 6, 4): at most 6"),
    (exercise.beat_24, undoubled(4), "it takes 20 and holds (7, 6, 5): at most 6"),
    (exercise.beat_24, pp.build("1F1B", num_ranks=3, num_microbatches=4), "3 stages and 4 microbatches"),
    (exercise.beat_24, "0F0", "0B0 is missing"),
    (exercise.gathers, (18, 46), "the first stage's weights have to be gathered, too"),
    (exercise.gathers, (19, 38), "M = 16: 38 isn't it"),
    (exercise.golden_cut, 0.5, "half of the tokens"),
    (exercise.golden_cut, 0.7071, "where all of the work is attention"),
    (exercise.golden_cut, 0.382, "the second slice's share"),
    (exercise.repair_slices, exercise.BROKEN, "0B0"),
    (exercise.repair_slices, builds("1F1B")(2, 4), "2 ranks, 2 stages and 3 slices"),
    (exercise.repair_slices, [row + " " for row in exercise.BROKEN[:1]], "2 ranks"),
    (exercise.teams, CAUSES | {"B": "as hoped"}, "B: not 'as hoped'; later slices take longer"),
    (exercise.teams, CAUSES | {"A": "luck"}, "got 'luck'"),
    (exercise.teams, "overhead", "expected a dict with the keys A, B, C and D"),
    (exercise.long_sequences, {"cut": [8] * 4}, "how many slices?"),
    (exercise.long_sequences, {"slices": 1, "cut": [8] * 4}, "it doesn't fit: rank"),
    (exercise.long_sequences, {"slices": 8, "cut": [8] * 4, "recompute": True}, "more than the best that we know"),
    (exercise.long_sequences, {"slices": 8, "overhead_ms": 0}, "overhead_ms is given: leave it out"),
    (exercise.long_sequences, {"slices": 8, "cut": [32]}, "cut"),
    (exercise.long_sequences, {"slices": 8, "split": True}, "the next chapter's"),
    (exercise.long_sequences, {"slices": 6, "cut": [8] * 4}, "don't make 6 equal slices"),
    (exercise.long_sequences, 8, "expected a dict of what lab.sliced_row takes"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG, later=False)


def test_other_right_answers_are_accepted():
    assert exercise.crossover(0.5417) and exercise.crossover(0.542)
    assert exercise.beat_24(pp.Schedule(undoubled(3)))


def test_the_latencies_where_lines_cross_are_those_of_the_simulation():
    def takes(name, V, c, **options):
        s = pp.build(name, num_ranks=4, num_microbatches=8, **options)
        return pp.simulate(s, pp.Costs(latency=c).finer(V)).makespan

    def two(c):
        return takes("Interleaved1F1B", 2, c, stages_per_rank=2)

    assert two(13 / 24) == pytest.approx(takes("eager-1F1B", 1, 13 / 24))
    assert two(2.25 / 16) == pytest.approx(takes("Interleaved1F1B", 4, 2.25 / 16, stages_per_rank=4))
    assert two(1.375) == pytest.approx(takes("1F1B", 1, 1.375))


def test_the_teams_measured_what_their_table_says():
    """A's slices take two more per action, B's attention is half of the work, C's messages take eight."""
    whole, sliced = builds("1F1B")(4, 8), pp.build("Seq1F1B", num_ranks=4, num_microbatches=32, slices=4)
    even, ten = lab.Slices.even, pp.Costs(10, 10, 10)
    assert pp.simulate(whole, pp.Costs(12, 11, 11)).makespan == 374
    assert even(4).simulate(sliced, replace(ten, overhead=2)).makespan == 402.5
    assert pp.simulate(whole, ten).makespan == 330 and even(4).simulate(sliced, ten).makespan == 262.5
    assert even(4, 0.5).simulate(sliced, ten).makespan == pytest.approx(349.7, abs=0.05)
    assert [round(10 * share, 1) for share in even(4, 0.5).shares] == [1.6, 2.2, 2.8, 3.4]
    late = pp.Costs(10, 10, 10, latency=8)
    assert (pp.simulate(whole, late).makespan, even(4).simulate(sliced, late).makespan) == (458, 646.5)


def test_a_better_bill_is_welcome(monkeypatch):
    monkeypatch.setattr(exercise, "BEST_KNOWN", {"slices": 16, "cut": (8, 8, 8, 8), "recompute": True})
    assert "tell us" in exercise.long_sequences({"slices": 16, "cut": [8, 9, 8, 7], "warmup_per_rank": 3}).says
    assert exercise.repair_slices(IN_TURN)
