"""The checkers refuse wrong answers and say what is wrong; what is right, the chapters' solutions show."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import pytest
from checkers import builds, raises, slow, table_tests

import pplab as pp
from conftest import assert_explained
from pplab.course import gpipe, naive, one_f_one_b
from pplab.course.verdict import Verdict, number


def lifo_rows(num_ranks, num_microbatches):
    order = range(num_microbatches)
    return [[f"{r}F{m}" for m in order] + [f"{r}B{m}" for m in reversed(order)] for r in range(num_ranks)]


def deadlocked_rows(num_ranks, num_microbatches):
    return [[f"{r}{kind}{m}" for m in range(num_microbatches) for kind in "BF"] for r in range(num_ranks)]


def fixed_rows(num_ranks, num_microbatches):
    return lifo_rows(2, 4)


def undersized(num_ranks, num_microbatches):
    return [["0F0"]]


def ones_sent(loss, received, sent):
    loss.backward()
    sent.backward(received.new_ones(received.shape))


ONE_ROW_OF_1 = one_f_one_b.STUCK_ROWS.replace("1F0,1F1,1F2,1B0,1B1,1B2", "1F0,1F1,1B0,1F2,1B1,1B2")
ONE_ROW_OF_0 = one_f_one_b.STUCK_ROWS.replace("0F0,0F1,0B0,0F2,0B1,0B2", "0F0,0F1,0F2,0B1,0B0,0B2")

WRONG = [
    (naive.idle_share, 83.3, "in per cent: give it as a share of 1"),
    (naive.idle_share, 6 / 7, "one of six ranks works"),
    (naive.idle_share, 0.167, "the share that works"),
    (naive.idle_share, 0.83, "0.83 is near: give 3 digits"),
    (naive.idle_share, float("nan"), "nan isn't it"),
    (naive.idle_share, 0, "the number is larger"),
    (naive.idle_share, float("inf"), "the number is smaller"),
    (naive.three_stages, 3, "expected a list of three torch modules"),
    (naive.diagnose, dict.fromkeys("ABCD", "no detach"), "A: not 'no detach'. What makes autograd keep"),
    (naive.diagnose, {"A": "x", "B": "x", "C": "x", "D": "x"}, "expected one of no gradient sent"),
    (naive.diagnose, "no detach", "expected a dict"),
    (naive.best_cut, 0, "one rank works 32 ms"),
    (naive.best_cut, 6, "expected the number of the layer"),
    (naive.naive_builder, lifo_rows, "one rank at a time takes"),
    (gpipe.peak_of_rank_2, 8, "that was with 8"),
    (gpipe.largest_microbatches, 27, "20.25 GB"),
    (gpipe.largest_microbatches, 20 / 0.75, "cut further"),
    (gpipe.weights_of_means, lambda tokens: [1 / len(tokens)] * len(tokens), "equal factors are right only for equal"),
    (gpipe.weights_of_means, lambda tokens: [1], "gives 1 factors for 2 microbatches"),
    (gpipe.weights_of_means, lambda tokens: tokens, "[4.0, 4.0], which doesn't give the mean: if every token had the"),
    (gpipe.weights_of_means, lambda tokens: [float("nan")] * len(tokens), "which doesn't give the mean"),
    (gpipe.weights_of_means, lambda tokens: ["half"] * len(tokens), "raised ValueError"),
    (gpipe.overhead_from_a_sweep, (40, 2), "overhead: 2 isn't it; the number is smaller"),
    (gpipe.overhead_from_a_sweep, 40, "expected 2 numbers"),
    (gpipe.overhead_from_a_sweep, (40,), "expected 2 numbers (work, overhead), got 1"),
    (gpipe.gpipe_builder, builds("1F1B"), "the peaks are (2, 1)"),
    (gpipe.gpipe_builder, deadlocked_rows, "rank 0 runs 0B0 before 0F0"),
    (gpipe.gpipe_builder, fixed_rows, "at 4 ranks and 8 microbatches: expected a stage on each of 4 ranks"),
    (gpipe.gpipe_builder, lambda P, M: ..., "your function returned Ellipsis: it must return the rows"),
    (gpipe.gpipe_builder, raises, "your function raised IndexError"),
    (gpipe.gpipe_builder, undersized, "0B0 is missing"),
    (one_f_one_b.phases, (2, 8, 2), "warm-up forwards: 2 isn't it"),
    (one_f_one_b.phases, "373", "expected 3 numbers in a row (warm-up forwards, steady pairs, cool-down backwards)"),
    (one_f_one_b.phases, {3, 7}, "expected 3 numbers in a row"),
    (one_f_one_b.peaks, (6, 5, 4, 3, 2, 1), "rank 0: 6 isn't it"),
    (one_f_one_b.megabytes, (512, 128, 512), "all ranks under 1F1B: 512 isn't it"),
    (one_f_one_b.one_f_one_b_builder, lifo_rows, "the peaks are (8, 8, 8, 8); 1F1B holds (4, 3, 2, 1)"),
    (one_f_one_b.least_memory_at_latency_1, (4, 3, 2, 1), "(4, 3, 2, 1) takes 49"),
    (one_f_one_b.least_memory_at_latency_1, (7, 5, 3, 1), "holds 16 in all; less is enough"),
    (one_f_one_b.least_memory_at_latency_1, (7, 5), "in_flight has 2 values for 4 ranks"),
    (one_f_one_b.least_memory_at_latency_1, "6531", "expected a number for each of four ranks"),
    (one_f_one_b.least_memory_at_latency_1, (6.5, 5, 3, 1), "'float' object"),
    (one_f_one_b.unstick, one_f_one_b.STUCK_ROWS, "deadlock: rank 0 waits at 0B0 for 1B0"),
    (one_f_one_b.unstick, pp.build("naive", num_ranks=3, num_microbatches=3), "reorder one row only"),
    (one_f_one_b.unstick, ONE_ROW_OF_1, "with row 1 reordered it runs, in 18: no order of this row"),
    (one_f_one_b.unstick, ONE_ROW_OF_0, "with row 0 reordered it runs, in 16: another order of it takes 15"),
    (one_f_one_b.slow_rank, 105, "that is GPipe's"),
    slow(naive.backward_by_hand, lambda loss, received, sent: loss.backward(), "0.weight has no gradient"),
    slow(naive.backward_by_hand, ones_sent, "isn't that of the whole model"),
    slow(naive.backward_by_hand, lambda _, received, sent: sent.backward(), "your function raised RuntimeError"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_only_one_row_can_be_reordered_to_the_floor():
    """What the verdict on `unstick` says of each row holds for every order of it."""
    stuck = [line.split(",") for line in one_f_one_b.STUCK_ROWS.split()]
    least = []
    for rank, row in enumerate(stuck):
        takes = []
        for order in permutations(row):
            try:
                takes.append(pp.simulate(pp.Schedule([*stuck[:rank], order, *stuck[rank + 1 :]])).makespan)
            except pp.ScheduleError:
                continue
        least.append(min(takes, default=None))
    assert least == [15, 18, None]


def test_rounded_answers_are_right():
    """To three digits or more, of numbers that aren't counts."""
    assert naive.idle_share(0.833) and naive.idle_share(0.8333) and naive.idle_share(Fraction(5, 6))
    for answer, expected, same in (
        (105, 105.4, True),
        (120, 120.3, True),  # its 0 may be a digit
        (100, 100.4, True),
        (100.4, 100, False),  # a count
        (100.0, 100, True),
        (1.05, 1.0549, True),
        (1.050, 1.0551, False),
        (-0.0313, -0.03125, True),
        (0.0, 0.001, False),
    ):
        assert bool(number(answer, expected, "")) is same, (answer, expected)


@pytest.mark.slow
def test_wrong_modules_are_explained():
    import torch
    from torch import nn

    layers = naive.whole()
    for check, answer, says in (
        (naive.three_stages, [layers[:3], layers[3:]], "expected three modules, got 2"),
        (naive.three_stages, [layers[:1], layers[1:2], layers[2:]], "nothing to train"),
        (naive.three_stages, [layers[:2], layers[4:5], layers[5:]], "don't compute what the whole model does"),
        (naive.three_stages, [layers[:1], layers[4:5], layers[2:]], "the stages don't fit together"),
        (gpipe.a_norm_that_survives, nn.BatchNorm1d(8), "which samples does it look at"),
        (gpipe.a_norm_that_survives, nn.LayerNorm(16), "it fails on 8 samples of 8 features: RuntimeError"),
        (gpipe.a_norm_that_survives, nn.Identity(), "doesn't normalise"),
        (gpipe.a_norm_that_survives, nn.Tanh(), "ten times the input"),
        (gpipe.a_norm_that_survives, torch.ones(3), "expected a torch module"),
    ):
        assert_explained(check, answer, says)


@pytest.mark.slow
def test_the_symptoms_are_those_of_the_bugs():
    """What exercise 3 of chapter 2 tells is run here, with the model of exercise 2."""
    import torch
    from torch import nn

    from pplab.lab.models import cut

    x, y = torch.randn(4, 8), torch.randn(4, 2)
    found = {}
    for bug in naive.BUGS:
        model = naive.whole()
        front, back = cut(model, 2)
        sent = front(x)
        received = sent if bug == "no detach" else sent.detach()
        if bug == "no detach":
            received.retain_grad()
        elif bug != "no requires_grad":
            received.requires_grad_()
        nn.functional.mse_loss(back(received), y).backward()
        if bug == "ones sent":
            sent.backward(torch.ones_like(sent))
        right = naive.whole()
        nn.functional.mse_loss(right(x), y).backward()
        front_has = all(p.grad is not None for p in front.parameters())
        pairs = zip(model.parameters(), right.parameters(), strict=True)
        equal = front_has and all(torch.allclose(p.grad, q.grad, atol=1e-6) for p, q in pairs)
        found[bug] = (front_has, equal, received.grad is not None, all(p.grad is not None for p in back.parameters()))
    assert found == {
        "no gradient sent": (False, False, True, True),
        "no detach": (True, True, True, True),
        "no requires_grad": (False, False, False, True),
        "ones sent": (True, False, True, True),
    }


def test_a_verdict_reads_well():
    assert repr(Verdict(True, "so it is")) == "✓ right: so it is"
    assert repr(Verdict(False, "no")) == "✗ not yet: no"
