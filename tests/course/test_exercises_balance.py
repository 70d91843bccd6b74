"""The checkers of the chapter on balance refuse wrong answers and say what is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from checkers import builds, slow, table_tests

from pplab import lab
from pplab.lab import Case
from pplab_course import balance as exercise

EQUAL = SimpleNamespace(equal=True)


class FakeRun(SimpleNamespace):
    """What the last checker reads of a run."""


MODEL = "GPT with 8 layers of width 128, batch 16 x 128 bytes"
HELD = {
    "peak_bytes": (6_300_000, 6_400_000, 4_700_000),
    "bytes_of": (0, 130_000, 4_700_000),
    "recomputed_of": (6_300_000, 6_200_000, 0),
}


def other(schedule=None, workload=MODEL, gradients=EQUAL, **held):
    """A run, and what of it is other than it should be."""
    job = SimpleNamespace(workload=SimpleNamespace(name=workload))
    held = SimpleNamespace(**{**HELD, **held})
    return FakeRun(schedule=schedule or builds("1F1B")(3, 8), job=job, gradients=gradients, held=held)


RUN = other()
EVEN = {"schedule": "V-Half", "cut": None, "recompute": False}
V_HALF = EVEN | {"cut": (4, 4, 6, 5, 5, 4, 6, 6), "recompute": (1, 0, 0, 0, 0, 0, 0, 0)}


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
    (exercise.checkpointed, 3, "expected a function of a module"),
    (exercise.checkpointed, lambda module: 3, "your stage raised TypeError"),
    (exercise.checkpointed, partial(recomputing, draw_again=False), "microbatch 0: the input's gradient isn't"),
    (exercise.checkpointed, partial(recomputing, restore=False), "microbatch 2: the output isn't"),
    (exercise.checkpointed, partial(recomputing, keep=True), "with autograd: only the input may be kept"),
    (
        exercise.checkpointed,
        partial(recomputing, backwards=0),
        "microbatch 0: expected the input's gradient, got NoneType",
    ),
    (exercise.slow_gpu, 3, "expected the slow GPU's rank and four numbers of layers"),
    (exercise.slow_gpu, (4, (8, 8, 8, 8)), "expected a rank from 0 to 3 and counts"),
    (exercise.slow_gpu, (0, (8, 8, 8)), "expected 4 numbers of layers, got 3"),
    (exercise.slow_gpu, (0, (5, 10, 10, 7)), "6.38 s, but rank 0 would hold 51.9 of its 40 GB"),
    (exercise.slow_gpu, (1, (10, 4, 9, 9)), "but rank 0 would hold 94.3 of its 80 GB"),
    (exercise.slow_gpu, (3, (9, 9, 9, 5)), "but rank 0 would hold"),
    (exercise.slow_gpu, (3, (7, 10, 11, 4)), "it fits and takes"),
    (exercise.capped, (3, 3, 2, 2), "rank 0 would hold 48 MB: 4 in flight of 12"),
    (exercise.capped, (1, 1, 3, 5), "it fits, and its slowest stage takes 17; 11 fits as well"),
    (exercise.capped, (1, 2, 4, 4), "the stages have 11 layers, and there are 10"),
    (exercise.capped, (5, 5), "expected 4 numbers of layers, got 2"),
    (exercise.capped, "1243", "expected 4 numbers of layers, got 1: (1243,)"),
    (exercise.fits, 9, "expected what `pool.train(...)` returned"),
    (exercise.fits, other(schedule=builds("1F1B")(2, 8)), "expected a run of 1F1B"),
    (exercise.fits, other(workload="GPT with 2 layers"), "expected models.gpt(batch_size=16)"),
    (exercise.fits, other(gradients=None), "run it with check_gradients=True"),
    (exercise.fits, other(gradients=SimpleNamespace(equal=False)), "aren't those of one process"),
    (exercise.fits, other(peak_bytes=(19_000_000, 1, 1), recomputed_of=()), "rank 0 holds 19.0 MB at its peak"),
    (
        exercise.fits,
        other(bytes_of=(0, 130_000, 100), recomputed_of=(6_300_000, 6_200_000, 4_600_000)),
        "stage 2 recomputes for nothing",
    ),
    (exercise.tied_gb, 57.8, "that is with one table"),
    (exercise.tied_gb, 14.43, "the weights in single precision"),
    (exercise.tied_gb, 79.1, "not all four"),
    slow(exercise.pictures_cut, ("ZB-V", (5, 5)), "expected one of GPipe, 1F1B, Interleaved1F1B"),
    slow(exercise.pictures_cut, ("Interleaved1F1B", (1, 3, 3, 3)), "519 ms, but rank 1 would hold 30.3 of its 28 MB"),
    slow(exercise.pictures_cut, ("Interleaved1F1B", (2, 2, 3, 3)), "rank 0 would hold 60.9 of its 56 MB"),
    slow(exercise.pictures_cut, ("1F1B", (5, 5)), "it fits and takes 543 ms; there is a faster one"),
    slow(exercise.pictures_cut, ("1F1B", (5, 4)), "10 in all"),
    (exercise.thirteen, {"schedule": "1F1B"}, "expected the keys schedule, cut, recompute"),
    (exercise.thirteen, EVEN | {"schedule": "1F1B"}, "it doesn't fit: rank 0 would hold 87.1 GB"),
    (exercise.thirteen, EVEN | {"schedule": "ZB-V"}, "it doesn't fit: rank 0 would hold 90.0 GB"),
    (exercise.thirteen, EVEN, "it doesn't fit: rank 0 would hold 83.3 GB"),
    (exercise.thirteen, V_HALF, "it fits: 4.00 s, $135.77, which is $3.04 more than the best that we know"),
    (exercise.thirteen, EVEN | {"cut": (10, 10)}, "cut"),
    (exercise.thirteen, EVEN | {"schedule": "one GPU"}, "one GPU is no schedule"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_answers_may_differ_where_several_are_right():
    assert exercise.slow_gpu((1, (8, 5, 10, 9))) and exercise.slow_gpu([0, [3, 10, 11, 8]]) and exercise.fits(RUN)
    best = lab.partition(
        exercise.CAPPED_TIMES, 4, activations=exercise.CAPPED_BYTES, in_flight=(4, 3, 2, 1), cap=exercise.CAP
    )
    assert exercise.capped(best) and best == (1, 2, 4, 3)


@pytest.mark.slow
def test_no_cut_with_the_slow_gpu_is_faster():
    """Of all that fit by a count of layers: what each rank has of them, in GB, and of the head's time on the last."""
    found, layer, sequence = {}, 3.926, 1.141
    for half, *cut in product(range(4), range(1, 13), range(1, 13), range(1, 13)):
        counts = (*cut, 32 - sum(cut))
        gb = [n * (layer + (4 - r) * sequence) + 9.5 * (r in (0, 3)) for r, n in enumerate(counts)]
        room = [exercise.SLOW_GB if r == half else 80 for r in range(4)]
        if 1 <= counts[-1] <= 12 and all(a < b for a, b in zip(gb, room, strict=True)):
            found[half, counts] = exercise.with_slow_gpu(half, counts)[0]
    assert min(found.values()) >= exercise.with_slow_gpu(*exercise.SLOW)[0] - 1e-9
    each = [min(step for (half, _), step in found.items() if half == rank) for rank in range(4)]
    assert [f"{step:.2f}" for step in each] == ["6.51", "6.57", "6.57", "6.59"]


@pytest.mark.slow
def test_the_run_that_fits_is_recognised():
    from pplab.lab import models
    from pplab.runtime import Pool

    with Pool(3, device="cpu") as pool:
        options = {"steps": 1, "warmup": 0, "check_gradients": True}
        gpt = models.gpt(batch_size=16)
        train = partial(pool.train, RUN.schedule, gpt, **options)
        runs = [train(lab.Meter(), *again) for again in ((), [lab.Recompute([0, 1])], [lab.Recompute()])]
        assert "lab.Meter()" in exercise.fits(train()).says
    plain, first, both = map(exercise.fits, runs)
    assert first and "rank 0 holds 19.0 MB" in plain.says and "stage 2 recomputes for nothing" in both.says
    assert not exercise.fits(replace(runs[1], gradients=None))


def test_the_best_known_answer_fits():
    verdict = exercise.thirteen(exercise.BEST_KNOWN)
    assert verdict and verdict.says.endswith("$132.73, the best that we know")


@pytest.mark.slow
@pytest.mark.parametrize("card", exercise.CARDS)
def test_the_chapters_search_with_one_card_for_all_ranks_doesnt_find_the_cut_of_pictures(card):
    stages = {name: 4 if name == "Interleaved1F1B" else 2 for name in exercise.CHOICES}
    found = [(*exercise.judged(name, cut), name, cut) for name in stages for cut in exercise._cuts(stages[name])]
    fitting = [(ms, name, cut) for ms, held, name, cut in found if max(held) <= card]
    assert not fitting or not exercise.pictures_cut(min(fitting)[1:])


def test_what_the_chapter_says_of_the_last_exercise():
    case = Case(model=exercise.LLAMA_2_13B)
    assert f"{18 * case.model.layer_parameters / 1e9:.1f}" == "5.7"
    plain = case.row("1F1B", 16, cut=[9, 10, 11, 10])
    assert (
        plain.fits
        and round(plain.dollars) == 152
        and round(case.row("V-Half", 16, cut=V_HALF["cut"], recompute=V_HALF["recompute"]).dollars) == 136
    )
