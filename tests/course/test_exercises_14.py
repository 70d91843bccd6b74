"""Chapter 14's checkers refuse wrong answers and say what is wrong; its four patients have four illnesses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from checkers import raises, slow, table_tests

from pplab.course import own_model as exercise
from pplab.lab.case import Case

TRUTH = dict(exercise.ILL)
FITS = {"schedule": "V-Half", "cut": None, "recompute": False}


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


WRONG = [
    (exercise.tied_gb, 51.4, "that is with one table"),
    (exercise.tied_gb, 14.43, "the weights in single precision"),
    (exercise.tied_gb, 70.3, "not all four"),
    slow(exercise.skipping, 1, "expected a function of (net, num_stages)"),
    slow(exercise.skipping, raises, "with 2 stages: your function raised IndexError"),
    slow(exercise.skipping, whole_model, "with 2 stages: the stages have 24 parameters together, and the model 12"),
    slow(exercise.skipping, through_only, "with 2 stages: the last stage's output isn't the model's"),
    slow(exercise.skipping, detached, "with 2 stages: the gradient of first.weight differs"),
    slow(exercise.weight, len, "rows of 6, 6, 2 and 3 labels: with the weights [2.0, 2.0]"),
    slow(exercise.weight, all_labels, "A row's first one is nobody's next"),
    slow(exercise.weight, at_least_one, "what may a microbatch count for that has no label at all?"),
    slow(exercise.weight, none, "expected counts, not all of them 0"),
    slow(exercise.weight, raises, "your function raised IndexError"),
    slow(exercise.batches, raises, "rows_of(0): your function raised IndexError"),
    slow(exercise.batches, none, "rows_of(0): expected four row numbers"),
    slow(exercise.batches, global_numbers, "is another batch for another rank"),
    slow(exercise.batches, remembers, "is another batch for another rank"),
    slow(exercise.batches, same_epochs, "two epochs have one order"),
    slow(exercise.batches, whole_batches, "the same four rows stay together"),
    (exercise.causes, "dropout", "expected a dict with the keys A, B, C and D"),
    (
        exercise.causes,
        {**TRUTH, "A": "labels counted as rows"},
        "A: not labels counted as rows; one microbatch is right",
    ),
    (
        exercise.causes,
        {**TRUTH, "B": "dropout"},
        "B: not dropout; one microbatch is wrong already, the same every time",
    ),
    (exercise.causes, {**TRUTH, "D": "noise"}, "D: expected one of dropout"),
    slow(exercise.pictures_cut, ("ZB-V", (5, 5)), "expected one of GPipe, 1F1B, Interleaved1F1B"),
    slow(exercise.pictures_cut, ("Interleaved1F1B", (1, 3, 3, 3)), "519 ms, but rank 1 would hold 30.3 of its 28 MB"),
    slow(exercise.pictures_cut, ("Interleaved1F1B", (2, 2, 3, 3)), "rank 0 would hold 60.9 of its 56 MB"),
    slow(exercise.pictures_cut, ("1F1B", (5, 5)), "it fits and takes 543 ms; there is a faster one"),
    slow(exercise.pictures_cut, ("1F1B", (5, 4)), "10 in all"),
    (exercise.thirteen, {"schedule": "1F1B"}, "expected the keys schedule, cut, recompute"),
    (exercise.thirteen, FITS | {"schedule": "1F1B"}, "it doesn't fit: rank 0 would hold 80.4 GB"),
    (exercise.thirteen, FITS | {"schedule": "ZB-V"}, "it doesn't fit: rank 0 would hold 83.0 GB"),
    (exercise.thirteen, FITS, "it fits: 3.90 s, $132.25, which is $5.87 more than the best that we know"),
    (exercise.thirteen, FITS | {"cut": (10, 10)}, "cut"),
    (exercise.thirteen, FITS | {"schedule": "one GPU"}, "is no schedule of four ranks"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_the_best_known_answer_fits():
    verdict = exercise.thirteen(exercise.BEST_KNOWN)
    assert verdict and "$0.00" in verdict.says


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
def test_the_pages_workload_computes_in_stages_what_it_computes_whole():
    cells = json.loads((Path(__file__).parents[2] / "notebooks" / "14_own_model.ipynb").read_text())["cells"]
    (note,) = (text for cell in cells if "class Copying(Workload)" in (text := "".join(cell["source"])))
    from pplab.runtime.workload import check_workload

    names = {}
    exec(re.search(r"```python\n(.*?)```", note, re.S)[1], names)
    workload = names["Copying"]()
    check_workload(workload)
    batch = workload.batch(3)
    (x,) = batch.inputs
    for stage in range(3):
        x = workload.build_stage(stage, 3)(x)
    assert workload.loss(x, batch.target) == workload.loss(workload.build_whole()(*batch.inputs), batch.target) > 0


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
@pytest.mark.parametrize("card", exercise.CARDS)
def test_the_chapters_search_with_one_card_for_all_ranks_doesnt_find_the_cut_of_pictures(card):
    stages = {name: 4 if name == "Interleaved1F1B" else 2 for name in exercise.CHOICES}
    found = [(*exercise.judged(name, cut), name, cut) for name in stages for cut in exercise._cuts(stages[name])]
    fitting = [(ms, name, cut) for ms, held, name, cut in found if max(held) <= card]
    assert not fitting or not exercise.pictures_cut(min(fitting)[1:])


def test_what_the_chapter_says_of_the_last_exercise():
    case = Case(model=exercise.LLAMA_2_13B)
    assert f"{16 * case.model.layer_parameters / 1e9:.1f}" == "5.1"
    assert case.row("V-Half", 16).fits and round(case.row("V-Half", 16).dollars) == 132
