"""Checkers of the chapter on a model of one's own refuse wrong answers and say what is wrong; its patients have four
illnesses, and its faults strike where they are told to."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from checkers import raises, slow, table_tests

from pplab_course import own_model as exercise

TRUTH = dict(exercise.ILL)


def all_labels(target):
    return (target != -100).sum()


def none(target):
    return 0


def at_least_one(target):
    return (target[:, 1:] != -100).sum().clamp(min=1)


def not_shuffled(step):
    return [4 * (step % 3) + i for i in range(4)]


def remembers(step, seen=[]):  # noqa: B006 (that is the mistake)
    seen.append(step)
    return [(4 * len(seen) + i) % 12 for i in range(4)]


def global_numbers(step):
    import torch

    return torch.randperm(12)[:4]


def whole_batches(step):
    epoch, place = divmod(step, 3)
    return not_shuffled([(0, 1, 2), (2, 0, 1), (1, 2, 0)][epoch][place])


def same_epochs(step):
    return not_shuffled(step % 3)


def whole_model(net, num_stages):
    return [net] * num_stages


def through_only(net, num_stages):
    """Stages that hand on what goes through, and not what goes around."""
    from torch import nn

    layers = [nn.Sequential(*net.layers[4 * i // num_stages : 4 * (i + 1) // num_stages]) for i in range(num_stages)]
    return [nn.Sequential(net.first, layers[0]), *layers[1:-1], nn.Sequential(layers[-1], net.last)]


def detached(net, num_stages):
    """Stages that hand on what goes around without its gradient."""
    from torch import nn

    class Part(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.first = net.first if number == 0 else None
            self.layers = nn.ModuleList(net.layers[4 * number // num_stages : 4 * (number + 1) // num_stages])
            self.last = net.last if number == num_stages - 1 else None

        def forward(self, y, kept=None):
            if self.first is not None:
                y = kept = self.first(y)
            for layer in self.layers:
                y = layer(y)
            return (y, kept.detach()) if self.last is None else self.last(y + kept)

    return [Part(number) for number in range(num_stages)]


STALE = dict(zip("ABCD", [exercise.STATES[i] for i in (1, 3, 0, 2)], strict=True))


def even_cut(name, stage, num_stages, num_layers):
    if not name.startswith("blocks"):
        return name
    layer, rest = name.removeprefix("blocks.").split(".", 1)
    return f"blocks.{stage * (num_layers // num_stages) + int(layer)}.{rest}"


def same_name(name, *sizes):
    return name


NIGHT = exercise.BEST_NIGHT

WRONG = [
    slow(exercise.skipping, 1, "expected a function of (net, num_stages)"),
    slow(exercise.skipping, raises, "with 2 stages: your function raised IndexError"),
    slow(exercise.skipping, whole_model, "with 2 stages: the stages have 24 parameters together, and the model 12"),
    slow(exercise.skipping, through_only, "with 2 stages: the last stage's output isn't the model's"),
    slow(exercise.skipping, detached, "with 2 stages: the gradient of first.weight differs"),
    slow(exercise.weight, len, "rows of 6, 6, 2 and 3 labels: with the weights [2.0, 2.0]"),
    slow(exercise.weight, all_labels, "No position predicts a row's first one"),
    slow(exercise.weight, at_least_one, "what may a microbatch count for that has no label at all?"),
    slow(exercise.weight, none, "expected counts, not all of them 0"),
    slow(exercise.weight, raises, "your function raised IndexError"),
    slow(exercise.batches, raises, "rows_of(0): your function raised IndexError"),
    slow(exercise.batches, none, "rows_of(0): expected four row numbers"),
    slow(exercise.batches, global_numbers, "is another batch for another rank"),
    slow(exercise.batches, remembers, "is another batch for another rank"),
    slow(exercise.batches, same_epochs, "two epochs have the same order"),
    slow(exercise.batches, whole_batches, "the same four rows stay together"),
    (exercise.causes, "dropout", "expected a dict with the keys A, B, C and D"),
    (
        exercise.causes,
        {**TRUTH, "A": "labels counted as rows"},
        "A: not 'labels counted as rows'; one microbatch is right",
    ),
    (
        exercise.causes,
        {**TRUTH, "B": "dropout"},
        "B: not 'dropout'; one microbatch is wrong already, the same every time",
    ),
    (exercise.causes, {**TRUTH, "D": "noise"}, "D: expected one of dropout"),
    (exercise.whole_name, "blocks", "expected a function"),
    (exercise.whole_name, raises, "your function raised IndexError"),
    (exercise.whole_name, same_name, "'blocks.0.up.weight' on stage 1 of 2, 8 layers: got 'blocks.0.up.weight'"),
    (exercise.whole_name, even_cut, "on stage 1 of 4, 6 layers: got 'blocks.1.up.weight', expected 'blocks.2."),
    (exercise.stale, "nothing", "expected a dict with the keys A, B, C and D"),
    (exercise.stale, {**STALE, "A": "weights"}, "A: expected one of a layer's weights"),
    (exercise.stale, {**STALE, "A": "nothing"}, "A: not 'nothing'; its first loss after the break is exactly right"),
    (exercise.stale, {**STALE, "B": "the optimizer's state"}, 'B: not "the optimizer\'s state"; its losses are those'),
    (
        exercise.stale,
        {**STALE, "D": "a layer's weights"},
        'D: not "a layer\'s weights"; its first loss after the break',
    ),
    (exercise.night, {"offer": "spot"}, "minutes: expected how long a run works between two saves, 1 to 600, got None"),
    (
        exercise.night,
        {"offer": "cheap", "minutes": 9},
        "for offer, got 'cheap'",
    ),
    (exercise.night, NIGHT | {"minutes": 60}, "it fits: 10.20 s, $56.19, which is $17.73 more"),
    (exercise.night, NIGHT | {"schedule": "ZB-H2", "cut": None}, "it doesn't fit"),
    (exercise.night, NIGHT | {"num_microbatches": 32}, "a step has sixteen sequences"),
    (exercise.night, {"offer": "spot", "minutes": 21}, "which schedule?"),
    (exercise.night, {"offer": "spot", "minutes": 21, "schedule": "one GPU"}, "is no schedule"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


@pytest.mark.slow
def test_every_patient_has_its_own_signs():
    seen = exercise.patients()
    assert seen == exercise.patients()  # the same at every call
    signs = {name: tuple(x > 1e-5 for x in (p.whole, p.cut, p.again, p.full)) for name, p in seen.items()}
    assert signs == {
        "A": (False, True, False, True),
        "B": (True, True, False, True),
        "C": (False, True, False, False),
        "D": (True, True, True, True),
    }
    assert [p.parameters for p in seen.values()] == [4, 2, 4, 4]


@pytest.mark.slow
def test_patients_draw_the_same_numbers_on_every_processor(monkeypatch):
    """Here torch draws others on an Intel processor than elsewhere, and what the chapter prints is recorded."""
    import torch

    def draws(*given, **how):
        raise AssertionError("on an Intel processor these numbers are others")

    for owner, name in ((torch.nn.functional, "dropout"), (torch, "bernoulli"), (torch.Tensor, "bernoulli_")):
        monkeypatch.setattr(owner, name, draws)
    assert exercise.patients()["D"].again > 0.1


@pytest.mark.slow
def test_who_counts_rows_gets_what_the_chapter_shows():
    import torch
    from transformers import LlamaConfig

    from pplab.lab import models

    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    rows = {"input_ids": torch.ones(4, 6, dtype=torch.long), "attention_mask": torch.eye(6, dtype=torch.long)[:4]}
    given = models.from_transformers(config, rows, batch_size=4)
    assert exercise.counts_rows(given).weight(given.batch(0)) == 4 != given.weight(given.batch(0))
    assert exercise.counts_rows(given).name == given.name


@pytest.mark.slow
def test_the_cases_are_what_they_are_said_to_be():
    for name, case in exercise.cases().items():
        errors = [abs(a - b) for a, b in zip(case.losses, case.uninterrupted, strict=True)]
        assert errors[:3] == [0, 0, 0]
        match STALE[name]:
            case "nothing":
                assert 0 < max(errors) < 1e-5
            case "the optimizer's state":
                assert errors[3] < 1e-6 and errors[4] > 1e-3
            case "the number of the batch":
                assert errors[3] > 1e-2 and abs(case.losses[3] - case.on_batch_0) < 1e-5
            case _:
                assert errors[3] > 1e-2 and abs(case.losses[3] - case.on_batch_0) > 1e-2


def test_a_fault_strikes_in_its_call_once(tmp_path):
    mark = tmp_path / "mark"
    fault = exercise.Fault("raise", str(mark), call=1, once=True)
    fault()
    assert not mark.exists()
    with pytest.raises(ArithmeticError):
        fault()
    assert exercise.marked(mark) <= mark.stat().st_ctime
    exercise.Fault("kill", str(mark), once=True)()  # the mark is there: this process lives
    with pytest.raises(ValueError, match="unknown fault 'crash'"):
        exercise.Fault("crash", os.devnull)


def test_what_the_chapter_says_of_the_cheapest_night():
    best, reserved = exercise.night_row(NIGHT), exercise.night_row(NIGHT | {"offer": "reserved", "minutes": 600})
    assert exercise.night(NIGHT) and 1.4 < best.hours / reserved.hours < 1.5
    assert all(exercise.night_row(NIGHT | {"minutes": m}).dollars >= best.dollars for m in (9, 11, 13))
    assert not exercise.night(NIGHT | {"offer": "spot", "minutes": 20})
    rng, mtbf, done, clock = random.Random(1), 1.0, 0, 0.0
    while done < 20_000:  # ten minutes of work at a time, simulated
        failure = rng.expovariate(1 / mtbf)
        kept = int(failure // (1 / 6 + exercise.SAVE))
        done, clock = done + kept, clock + failure + exercise.RESTART
    assert clock / (done / 6) == pytest.approx(exercise.stretched(1, 1 / 6, mtbf), rel=0.02)


@pytest.mark.slow
@pytest.mark.long  # of torch and transformers alone: no change here changes what it finds
def test_a_traced_distilbert_trains_on_three_ranks():
    """As the chapter's note on tracers, and the page of sources, say."""
    script = Path(__file__).with_name("traced_distilbert.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    done = subprocess.run([sys.executable, *launch], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.count("loss ") == 3, done.stderr
