"""Checkers of the chapter on GPipe refuse wrong answers and say what is wrong; what is right, its solutions show."""

from __future__ import annotations

import re
from itertools import product

import pytest
from checkers import builds, raises, table_tests

import pplab as pp
from conftest import assert_explained
from pplab_course import gpipe as exercise
from pplab_course import spine


def flushing(P, M, most):
    groups = [range(first, min(first + most, M)) for first in range(0, M, most)]
    return [[f"{r}{kind}{m}" for group in groups for kind in "FB" for m in group] for r in range(P)]


def one_by_one(P, M, most):
    return flushing(P, M, 1)


def never(P, M, most):
    return flushing(P, M, M)


def one_f_one_b(P, M, most):
    return builds("1F1B")(P, M)


def past_the_last(P, M, most):
    """The last flush is as large as the others."""
    return flushing(P, -(-M // most) * most, most)


def even_flushes(P, M, most):
    """As few flushes, all of nearly the same size, and the backwards of each last in, first out."""
    count = -(-M // most)
    bounds = [i * M // count for i in range(count + 1)]
    groups = [range(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
    return pp.Schedule(
        [[a for g in groups for a in [*(f"{r}F{m}" for m in g), *(f"{r}B{m}" for m in reversed(g))]] for r in range(P)]
    )


PLAN = ([8, 8, 6, 4], [9, 9, 8, 6])
WRONG = [
    (exercise.one_rank_recomputes, (28, 28), "rank 1 alone: that is with all three"),
    (exercise.one_rank_recomputes, (24, 28), "rank 0 still has a backward to do"),
    (
        exercise.one_rank_recomputes,
        (27, 28),
        "rank 1 alone: rank 0's last backward takes 2 units: it doesn't recompute",
    ),
    (exercise.one_rank_recomputes, (26, 36), "all three: ranks recompute at the same time"),
    (exercise.one_rank_recomputes, (26, 27), "all three: 27 isn't it"),
    (exercise.one_rank_recomputes, 26, "expected 2 numbers"),
    (exercise.one_rank_recomputes, (float("nan"), 28), "nan isn't it"),
    (exercise.one_rank_recomputes, "2628", "expected 2 numbers"),
    (exercise.larger_cards, (15, 2.65), "microbatches: rank 0 has state, too"),
    (exercise.larger_cards, (8, 2.65), "microbatches: 8 and the state take 113.9 GB: there is room for more"),
    (exercise.larger_cards, (11, 2.65), "microbatches: 11 microbatches and the state take 141.3 GB"),
    (exercise.larger_cards, (10, 1.507), "dollars: the other way round"),
    (exercise.larger_cards, (10, 3.525), "dollars: gigabytes aren't what you pay for"),
    (exercise.larger_cards, (10, 2.5), "dollars: 2.5 isn't it; the number is larger"),
    (exercise.larger_cards, (10, 2.6), "dollars: 2.6 isn't it; the number is larger"),
    (
        exercise.larger_cards,
        (10, 2.69),
        "dollars: that is the chart's count. The bill has messages and the head, too",
    ),
    (exercise.overhead_from_a_sweep, (1, 40), "these are the right numbers, swapped: expected work, then overhead"),
    (exercise.overhead_from_a_sweep, (40, 40), "overhead: that is the work"),
    (
        exercise.overhead_from_a_sweep,
        (40, 2),
        "overhead: with 40 and 2, two microbatches would take 5 (40 / 2 + 2) = 110 ms, not 105",
    ),
    (exercise.overhead_from_a_sweep, 40, "expected 2 numbers"),
    (exercise.overhead_from_a_sweep, (40,), "expected 2 numbers (work, overhead), got 1"),
    (exercise.flushing_builder, one_by_one, "it takes 24 units (F = 1, B = 2), and GPipe with 2 flushes takes 18"),
    (exercise.flushing_builder, never, "at 2 ranks, 4 microbatches and at most 2: rank 0 holds 3 at 0F2"),
    (exercise.flushing_builder, one_f_one_b, "rank 0 starts 0F2 while it holds 1: GPipe finishes a flush before"),
    (
        exercise.flushing_builder,
        past_the_last,
        "at 3 ranks, 7 microbatches and at most 3: you run microbatch 8, and",
    ),
    (exercise.flushing_builder, builds("GPipe"), "your function raised TypeError"),
    (exercise.flushing_builder, lambda P, M, most: flushing(2, 4, 2), "at 4 ranks, 16 microbatches and at most 4"),
    (exercise.flushing_builder, lambda P, M, most: None, "your function returned None: it must return the rows"),
    (exercise.flushing_builder, raises, "your function raised IndexError"),
    (exercise.flushing_builder, 33, "expected a function of (num_ranks, num_microbatches, most)"),
    (exercise.sixteen_sequences, ([8, 8, 8, 8], [8, 8, 8, 8]), "it fits, in 50.5 GB, and costs $126.0: $9.6 more"),
    (exercise.sixteen_sequences, ([7, 6, 6, 7], [8, 8, 8, 8]), "it fits, in 75.4 GB, and costs $122.3: $5.9 more"),
    (exercise.sixteen_sequences, ([8, 8, 8, 6], [9, 9, 8, 6]), "more than the best plan that we know"),
    (exercise.sixteen_sequences, ([6, 6, 6, 6], [8, 8, 8, 8]), "it doesn't fit: rank 0 would hold 84.9 of 80 GB"),
    (exercise.sixteen_sequences, ([7, 5, 6, 7], [8, 8, 8, 8]), "it doesn't fit: rank 1 would hold"),
    (exercise.sixteen_sequences, ([0, 0, 0, 0], [8, 8, 8, 8]), "it doesn't fit: rank 0 would hold 186.9 of 80 GB"),
    (exercise.sixteen_sequences, ([7, 6, 6], [8, 8, 8, 8]), "recompute and cut: expected a number for each of 4 ranks"),
    (exercise.sixteen_sequences, ([9, 6, 6, 7], [8, 8, 8, 8]), "rank 0 can't recompute in 9 layers: it has 8"),
    (exercise.sixteen_sequences, ([7, 6, 6, 5], [8, 9, 8, 6]), "cut must say for each of 4 stages how many of 32"),
    (exercise.sixteen_sequences, ([7, 6, 6, 7], [8, 8, 16, 0]), "cut: expected whole numbers of 1 or more, got 0"),
    (
        exercise.sixteen_sequences,
        ([7.0, 6, 6, 7], [8, 8, 8, 8]),
        "recompute: expected whole numbers of 0 or more, got 7.0",
    ),
    (
        exercise.sixteen_sequences,
        ([float("nan")] * 4, [8, 8, 8, 8]),
        "recompute: expected whole numbers of 0 or more, got nan",
    ),
    (
        exercise.sixteen_sequences,
        ([True] * 4, [8, 8, 8, 8]),
        "recompute: expected whole numbers of 0 or more, got True",
    ),
    (exercise.sixteen_sequences, (16, [8, 8, 8, 8]), "recompute: expected a list of numbers"),
    (exercise.sixteen_sequences, ("all", [8, 8, 8, 8]), "recompute: expected whole numbers of 0 or more, got 'all'"),
    (exercise.sixteen_sequences, ([8, 8, 8, 8], True), "cut: expected a list of numbers"),
    (exercise.sixteen_sequences, ([8, 8, 8, 8],), "expected two lists, such as ([8, 8, 8, 8], [8, 8, 8, 8])"),
    (exercise.sixteen_sequences, ([16], *PLAN), "expected two lists"),
    (exercise.sixteen_sequences, 114, "expected two lists"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG, later=False)


def test_other_right_answers_are_accepted():
    assert exercise.one_rank_recomputes([26.0, 28]) and exercise.one_rank_recomputes(26, 28)
    assert exercise.larger_cards((10, 2.655)) and exercise.larger_cards(10, 2.65) and exercise.larger_cards(10, 2.65483)
    assert exercise.overhead_from_a_sweep((40.0, 1.0)) and exercise.overhead_from_a_sweep(40, 1)
    assert exercise.flushing_builder(even_flushes)
    near = exercise.sixteen_sequences((8, 6, 6, 5), (9, 8, 8, 7))
    assert near and "the best plan that we know costs $0.1 less" in near.says
    assert "costs as much" in exercise.sixteen_sequences(PLAN).says
    assert "costs as much" in exercise.sixteen_sequences(*PLAN).says


def fitting(cut):
    """The plan with as little recomputed as fits, or None: more of it on a rank never makes a step shorter."""
    least = [0, 0, 0, 0]
    while True:
        plan = exercise.planned(least, cut)
        over = [rank for rank in range(4) if plan.held_gb[rank] > plan.case.room_gb]
        if not over:
            return plan, least
        for rank in over:
            least[rank] += 1
        if any(layers < again for layers, again in zip(cut, least, strict=True)):
            return None


def test_no_plan_is_cheaper_than_the_best_one():
    """Of all cuts."""
    least, best = exercise.BEST_PLAN
    dollars = exercise.planned(*exercise.BEST_PLAN).dollars
    cuts = [cut for cut in product(range(4, 12), repeat=4) if sum(cut) == 32]
    found = [plan for cut in cuts if (plan := fitting(cut))]
    assert len(cuts) == 315 and min(plan.dollars for plan, _ in found) == pytest.approx(dollars)
    assert fitting(best)[1] == least and fitting([8, 8, 8, 8])[1] == [7, 6, 6, 7]


def test_by_hand_is_as_simulated():
    schedule = pp.build("GPipe", num_ranks=3, num_microbatches=5)
    takes = [
        pp.simulate(schedule, pp.Costs(1, 1, 1, recompute=again)).makespan
        for again in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (1, 1, 1))
    ]
    assert takes == [21, 26, 26, 26, 28]
    for M, ms in exercise.sweep().items():
        measured = pp.simulate(pp.build("GPipe", num_ranks=4, num_microbatches=M), costs(M))
        assert measured.makespan == pytest.approx(ms)


def costs(M):
    work, overhead = exercise.SWEEP
    third = (work / M + overhead) / 3
    return pp.Costs(third, third, third)


@pytest.mark.slow
def test_the_file_to_repair_is_right_with_one_microbatch_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exercise.begin_repair().startswith("my_repair.py is a GPipe")
    text = (tmp_path / "my_repair.py").read_text()
    assert all(new in text for _, new in exercise.SPEEDUP) and "is there already" in exercise.begin_repair()
    one = spine.run("my_repair.py", 3, M=1, PACE=0)
    assert one.failure is None and all(report.gradients.error < 1e-5 for report in one.reports)
    verdict = exercise.repaired_file("my_repair.py")
    assert verdict.right is False and re.search(
        r"on 2 ranks with 4 microbatches: gradients of ranks 0 and 1 differ from one process's", verdict.says
    ), verdict
    assert "On rank 1 the input of microbatch 1 lies where microbatch 0's is held" in verdict.says
    (tmp_path / "my_repair.py").write_text(text.replace("= stage(x)", "= stage(x.clone())"))
    assert exercise.repaired_file("my_repair.py")
    (tmp_path / "my_gpipe.py").write_text(text)
    for other in ("pipe_gpipe.py", "pipe_naive.py", "my_gpipe.py"):
        assert_explained(exercise.repaired_file, other, "isn't the file that begin_repair() wrote, with a repair")
    assert_explained(exercise.repaired_file, "none.py", "there is no file none.py")
    assert_explained(exercise.repaired_file, 3, "expected the name of the file")


@pytest.mark.slow
def test_wrong_norms_are_explained():
    import torch
    from torch import nn

    for answer, says in (
        (nn.BatchNorm1d(8), "which samples does it look at"),
        (nn.LayerNorm(16), "it fails on 8 samples of 8 features: RuntimeError"),
        (nn.Identity(), "doesn't normalise"),
        (nn.Tanh(), "ten times the input"),
        (torch.ones(3), "expected a torch module"),
    ):
        assert_explained(exercise.a_norm_that_survives, answer, says)
