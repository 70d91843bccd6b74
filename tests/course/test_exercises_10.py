"""Chapter 10's checkers refuse wrong answers and say what is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import pplab as pp
from conftest import assert_explained
from pplab import lab
from pplab.course import balance


def fails(times, num_stages):
    return [][1]


def equal(times, num_stages):
    each, more = divmod(len(times), num_stages)
    return [each + (stage < more) for stage in range(num_stages)]


def greedy(times, num_stages):
    counts, start = [], 0
    for left in range(num_stages, 1, -1):
        end, fair = start + 1, sum(times[start:]) / left
        while sum(times[start:end]) < fair and len(times) - end > left - 1:
            end += 1
        counts, start = [*counts, end - start], end
    return [*counts, len(times) - start]


class FakeRun(SimpleNamespace):
    """What the last checker reads of a run."""


SCHEDULE, EQUAL = pp.build("1F1B", num_ranks=2, num_microbatches=8), SimpleNamespace(equal=True)


def other(
    schedule=SCHEDULE,
    workload="GPT with 8 layers of width 128, batch 16 x 128 bytes",
    gradients=EQUAL,
    peak_bytes=(8_400_000, 8_700_000),
    bytes_of=(0, 8_700_000),
    recomputed_of=(8_400_000, 0),
):
    job = SimpleNamespace(workload=SimpleNamespace(name=workload))
    held = SimpleNamespace(peak_bytes=peak_bytes, bytes_of=bytes_of, recomputed_of=recomputed_of)
    return FakeRun(schedule=schedule, job=job, gradients=gradients, held=held)


RUN = other()


def recomputing(module, draw_again=True, restore=True, keep=False, backwards=1):
    """A stage that computes again, with a fault."""
    kept = {}

    def forward(m, x):
        kept[m] = x.detach().requires_grad_(), torch.get_rng_state()
        with torch.set_grad_enabled(keep):
            return module(x)

    def backward(m, gradient):
        x, state = kept.pop(m)
        now = torch.get_rng_state()
        if draw_again:
            torch.set_rng_state(state)
        output = module(x)
        if restore:
            torch.set_rng_state(now)
        for _ in range(backwards):
            output.backward(gradient)
        return x.grad

    return forward, backward


WRONG = [
    (balance.textbook, (30, 0, 1.33), "needs layers that aren't neighbours"),
    (balance.textbook, (40, 0.25, 1), "the limit for many microbatches"),
    (balance.textbook, 40, "expected 3 numbers"),
    (balance.checkpointed, 3, "expected a function of a module"),
    (balance.checkpointed, lambda module: 3, "your stage raised TypeError"),
    (balance.checkpointed, partial(recomputing, draw_again=False), "microbatch 0: the input's gradient isn't"),
    (balance.checkpointed, partial(recomputing, restore=False), "microbatch 2: the output isn't"),
    (balance.checkpointed, partial(recomputing, keep=True), "with autograd: only the input may be kept"),
    (
        balance.checkpointed,
        partial(recomputing, backwards=0),
        "microbatch 0: expected the input's gradient, got NoneType",
    ),
    (balance.beat, 20 / 3, "that is the mean"),
    (balance.beat, 6, "at most 18 of the 20"),
    (balance.beat, 8, "needn't leave equal numbers"),
    (balance.beat, 5, "5 isn't it"),
    (balance.splitter, (2, 2), "expected a function of (times, num_stages)"),
    (balance.splitter, fails, "your function raised IndexError"),
    (balance.splitter, equal, "your slowest stage takes 10; 9 is possible"),
    (balance.splitter, greedy, "is possible"),
    (balance.splitter, lambda times, num_stages: None, "expected 1 numbers of layers, got None"),
    (balance.splitter, lambda times, num_stages: [1] * num_stages, "the stages have 2 layers, and there are 4"),
    (balance.splitter, lambda times, n: [len(times)] + [0] * (n - 1), "expected whole numbers of at least 1"),
    (balance.peak, 200, "that is without recomputation"),
    (balance.peak, 8, "that is between backwards"),
    (balance.peak, 58, "counted twice"),
    (balance.peak, 64, "holds 4 microbatches on rank 0, not 8"),
    (balance.capped, (3, 3, 2, 2), "rank 0 would hold 48 MB: 4 in flight of 12"),
    (balance.capped, (1, 1, 3, 5), "it fits, and its slowest stage takes 17; 11 fits as well"),
    (balance.capped, (1, 2, 4, 4), "the stages have 11 layers, and there are 10"),
    (balance.capped, (5, 5), "expected 4 numbers of layers, got 2"),
    (balance.capped, "1243", "expected 4 numbers of layers, got '1243'"),
    (balance.head_in_a_v, (4,) * 8, "the slowest takes 10.41; 9 is possible"),
    (balance.head_in_a_v, (3, 5, 5, 5, 4, 4, 3, 3), "is as fast"),
    (balance.head_in_a_v, (5, 0, 5, 5, 4, 4, 9, 0), "a stage without a layer"),
    (balance.fits, 9, "expected what `pool.train(...)` returned"),
    (balance.fits, other(schedule=pp.build("GPipe", num_ranks=2, num_microbatches=8)), "expected a run of 1F1B"),
    (balance.fits, other(workload="GPT with 2 layers"), "expected models.gpt(batch_size=16)"),
    (balance.fits, other(gradients=None), "run it with check_gradients=True"),
    (balance.fits, other(gradients=SimpleNamespace(equal=False)), "aren't those of one process"),
    (balance.fits, other(peak_bytes=(16_800_000, 1), recomputed_of=()), "rank 0 holds 16.8 MB at its peak"),
    (balance.fits, other(bytes_of=(0, 100), recomputed_of=(8_400_000, 8_000_000)), "stage 1 recomputes for nothing"),
]


@pytest.mark.parametrize(("check", "answer", "says"), WRONG)
def test_wrong_answers_are_explained(check, answer, says):
    assert_explained(check, answer, says)


@pytest.mark.parametrize("check", dict.fromkeys(check for check, _, _ in WRONG), ids=lambda check: check.__name__)
def test_dots_are_no_answer(check):
    assert check(...).right is None


def test_answers_may_differ_where_several_are_right():
    assert balance.head_in_a_v((3, 5, 5, 5, 4, 4, 4, 2)) and balance.head_in_a_v([0, 1, 2, 3, 6, 7, 8, 5])
    assert balance.splitter(lab.partition) and balance.fits(RUN)
    best = lab.partition(
        balance.CAPPED_TIMES, 4, activations=balance.CAPPED_BYTES, in_flight=(4, 3, 2, 1), cap=balance.CAP
    )
    assert balance.capped(best) and best == (1, 2, 4, 3)


def test_the_peak_is_the_simulators():
    s = pp.build("1F1B", num_ranks=4, num_microbatches=8)
    assert balance.peak(s.peak_held(pp.Memory(2, recomputed=48))[0])


@pytest.mark.slow
def test_the_run_that_fits_is_recognised():
    from pplab import models
    from pplab.runtime import Pool

    with Pool(2, device="cpu") as pool:
        runs = [
            pool.train(RUN.schedule, models.gpt(batch_size=16), steps=1, check_gradients=True, recompute=again)
            for again in (False, [0], True)
        ]
    plain, first, both = map(balance.fits, runs)
    assert first and "rank 0 holds 16.8 MB" in plain.says and "stage 1 recomputes for nothing" in both.says
    assert not balance.fits(replace(runs[1], gradients=None))
