"""The checkers refuse wrong answers and say what is wrong; what is right, the chapters' solutions show."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import pytest
from checkers import slow, table_tests

import pplab as pp
from conftest import assert_explained
from pplab.course import bubble_math, naive, one_f_one_b
from pplab.course.verdict import Verdict, number


def lifo_rows(num_ranks, num_microbatches):
    order = range(num_microbatches)
    return [[f"{r}F{m}" for m in order] + [f"{r}B{m}" for m in reversed(order)] for r in range(num_ranks)]


def ones_sent(loss, received, sent):
    loss.backward()
    sent.backward(received.new_ones(received.shape))


ONE_ROW_OF_1 = one_f_one_b.STUCK_ROWS.replace("1F0,1F1,1F2,1B0,1B1,1B2", "1F0,1F1,1B0,1F2,1B1,1B2")
ONE_ROW_OF_0 = one_f_one_b.STUCK_ROWS.replace("0F0,0F1,0B0,0F2,0B1,0B2", "0F0,0F1,0F2,0B1,0B0,0B2")

WRONG = [
    (bubble_math.idle_cells, 9, "one rank's"),
    (bubble_math.idle_cells, 40, "40 isn't it; the hint may help"),
    (bubble_math.idle_cells, 400, "the number is much smaller"),
    (bubble_math.idle_cells, "36", "write it without quotes"),
    (bubble_math.as_fraction, 20, "in per cent: give it as a share of 1"),
    (bubble_math.as_fraction, 0.25, "the ratio itself"),
    (bubble_math.as_fraction, 1 / 3, "the other way"),
    (bubble_math.least_microbatches, 140, "keeps the ratio"),
    (bubble_math.least_microbatches, 132, "a little more than 5 %"),
    (bubble_math.path_of_78, ["0F0", "1F0"], "takes 2: look for a longer one"),
    (bubble_math.path_of_78, ["0F0", "2F0"], "2F0 doesn't have to wait for 0F0"),
    (bubble_math.path_of_78, ["0F99"], "0F99 isn't an action of this schedule"),
    (bubble_math.path_of_78, ["hello"], "'hello' is not an action"),
    (bubble_math.path_of_78, 78, "expected a row of actions"),
    (bubble_math.path_of_78, "0F0 1F0", "takes 2: look for a longer one"),
    (bubble_math.path_of_78, "0F0,1F0", "takes 2: look for a longer one"),
    (bubble_math.best_microbatches, 16, "takes 39.9; try fewer"),
    (bubble_math.best_microbatches, 4, "takes 46.2; try more"),
    (bubble_math.best_microbatches, 3, "choose one of 1, 2, 4"),
    (bubble_math.repair, bubble_math.BROKEN_CHART.replace("1B1,1B3", "1B1,1B2,1B3"), "run 1B0 before 1F3"),
    (bubble_math.best_microbatches, [8], "choose one of 1, 2, 4"),
    (bubble_math.repair, bubble_math.BROKEN_CHART, "1B2 is missing"),
    (bubble_math.repair, "0F0,0B0\n", "must keep 3 ranks"),
    (bubble_math.repair, "0F0 0B0\n1F0 1B0\n", "your schedule has 2 ranks, 2 stages (on rank 0, 1) and 1 microbatch"),
    (bubble_math.repair, bubble_math.BROKEN_CHART.split(), "1B2 is missing"),
    (bubble_math.repair, 18, "expected a row of actions for each rank"),
    (bubble_math.repair, "missing.csv", "missing.csv"),
    (bubble_math.repair, pp.build("naive", num_ranks=3, num_microbatches=4), "runs, in 36"),
    (bubble_math.makespan, lambda P, M, F, B: M * (F + B), "the simulation takes"),
    (bubble_math.makespan, lambda P, M: 1, "raised TypeError"),
    (bubble_math.makespan, 33, "expected a function"),
    (bubble_math.makespan, lambda P, M, F, B: float("nan"), "gives nan"),
    (bubble_math.tokens_per_second, (2.13, 0.099, 246000), "efficiency: 0.099 isn't it; the number is larger"),
    (bubble_math.tokens_per_second, (2130, 0.901, 246000), "that is in ms; the question asks for s"),
    (bubble_math.tokens_per_second, (2.13, 90.14, 246000), "efficiency: that is in per cent"),
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
    assert bubble_math.tokens_per_second((2.13, 0.901, 246_000)) and bubble_math.tokens_per_second(
        (2.13, 0.9014, 2.46e5)
    )
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
    layers = naive.whole()
    for check, answer, says in (
        (naive.three_stages, [layers[:3], layers[3:]], "expected three modules, got 2"),
        (naive.three_stages, [layers[:1], layers[1:2], layers[2:]], "nothing to train"),
        (naive.three_stages, [layers[:2], layers[4:5], layers[5:]], "don't compute what the whole model does"),
        (naive.three_stages, [layers[:1], layers[4:5], layers[2:]], "the stages don't fit together"),
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
