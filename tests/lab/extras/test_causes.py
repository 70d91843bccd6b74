"""Gradients that aren't those of one process: what made them differ is named, and nothing else is."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import modules
import pplab as pp
from pplab import lab
from pplab.lab.extras.causes import NOTHING
from pplab.lab.models import Modules

pytestmark = pytest.mark.slow


def net(*between: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), *between, nn.Linear(6, 6))


def squares(*between: nn.Module, kind: type[Modules] = Modules, batches: object = None) -> Modules:
    return kind(net(*between), batches or modules.batch(), functional.mse_loss)


def without_a_number() -> Modules:
    batch = modules.batch()
    batch.inputs[0][0, 0] = torch.nan
    return squares(batches=batch)


def low(dtype: torch.dtype) -> Modules:
    batch = modules.batch()
    return Modules(
        net().to(dtype), pp.runtime.Batch((batch.inputs[0].to(dtype),), batch.target.to(dtype)), functional.mse_loss
    )


def labels(**options: object) -> Modules:
    return Modules(net(nn.Tanh()), modules.ragged, functional.cross_entropy, **options)


def untaught() -> Modules:
    """Every sample has the same loss: only gradients tell that microbatches have unequal numbers of labels."""
    model = net(nn.Tanh())
    for p in model[-1].parameters():
        nn.init.zeros_(p)
    return Modules(model, modules.ragged, functional.cross_entropy)


def factor(reduction: str, of_loss: str, of_gradients: float = 1) -> Modules:
    """A loss that isn't what the workload says, or gradients that rank 1 multiplies."""
    model = nn.Sequential(*net(), modules.GradientOnRank1(of_gradients))
    return Modules(model, modules.batch(), partial(functional.mse_loss, reduction=of_loss), reduction=reduction)


def a_sum_of_labels() -> Modules:
    """Microbatches that count for unequal shares of what is no mean."""
    loss = partial(functional.cross_entropy, reduction="sum")
    return Modules(net(nn.Tanh()), modules.ragged, loss, weight=modules.counted)


SCALED = r"the loss is right, and all gradients are 4 times too {}, and 4 is the number of microbatches: look for"
BOTH = (
    r"the loss, [\d.]+ for [\d.]+, and all gradients are 4 times too {}, and 4 is the number of microbatches: they are "
)
CAUSES = {
    "a sum": (factor("mean", "sum"), [BOTH.format("small") + 'those of a sum, .* give reduction="sum"']),
    "a mean": (factor("sum", "mean"), [BOTH.format("large") + 'those of a mean, .* give reduction="mean"']),
    "a sum of labels": (a_sum_of_labels(), [r"add up to the batch's, [\d.]+: it is a sum; give reduction=\"sum\""]),
    "large gradients": (factor("mean", "mean", 4), [SCALED.format("large")]),
    "small gradients": (factor("mean", "mean", 0.25), [SCALED.format("small")]),
    "gradients of a sum": (factor("sum", "sum", 4), [SCALED.format("large")]),
    "another factor": (factor("mean", "mean", 3), ["the loss is right, and all gradients are 3 times too large: look"]),
    "dropout": (squares(nn.Dropout(0.5)), [r"dropout is active \(in 1\)"]),
    "batch normalisation": (squares(nn.BatchNorm1d(6)), [r"batch normalisation \(in 1\) takes the statistics"]),
    "low precision": (low(torch.bfloat16), [r"weights in bfloat16: rounding alone changes gradients by \de-0[234] "]),
    "low precision by itself": (squares(modules.Low()), ["weights in bfloat16, and the model casts to it by itself"]),
    "not a number": (without_a_number(), ["aren't finite: the batch's inputs has the first"]),
    "no gradient": (
        squares(nn.Identity(), modules.Branch(None)),
        ["without a gradient 2.linear.bias, 2.linear.weight, unknown none. A layer has in its stage the name"],
    ),
    "another name": (
        squares(kind=modules.Renamed),
        ["without a gradient 0.bias, 0.weight, unknown first.bias, first.weight. A layer has"],
    ),
    "the loss": (
        Modules(net(), modules.batch(), modules.more_on_rank_1),
        [r"all gradients are right, and the loss is [\d.]+ for [\d.]+: look for a term without a weight"],
    ),
    "seeds": (squares(kind=modules.Unseeded), ["4 of 4 weights, such as 0.weight, start from other values"]),
    "forward": (squares(modules.Reciprocal()), [r"aren't finite: the output of 1 \(Reciprocal\) has the first"]),
    "backward": (squares(modules.Root()), ["aren't finite: the gradient of 0.bias, in the backward"]),
    "labels": (labels(), ["mean losses average to .* let weight"]),
    "labels at the start": (untaught(), ["mean losses average to .* gradients change by .* let weight"]),
    "batch": (squares(batches=modules.another_batch), [r"batch\(0\) isn't the same when it is made again"]),
    "stages": (squares(kind=modules.Otherwise), ["the stages, one after the other, give another output"]),
    "a state": (squares(modules.Counting()), ["another output for the same batch the second time"]),
    "a rank": (squares(nn.Identity(), modules.OnRank1(2)), [NOTHING]),
    "a rank's numbers": (
        squares(nn.Identity(), modules.OnRank1(float("inf"))),
        ["the run's gradients of 0.bias, 0.weight, 3"],
    ),
    "an error": (
        squares(modules.Evaluated()),
        ["the forward draws random numbers", "not known: looking for it ended in ArithmeticError: only in training"],
    ),
    "several": (
        squares(nn.BatchNorm1d(6), nn.Dropout(0.5), kind=modules.Unseeded),
        ["6 of 6 weights", r"dropout is active \(in 2\)", r"batch normalisation \(in 1\)"],
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named_and_no_other(pool, name):
    workload, expected = CAUSES[name]
    schedule = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    run = pool.train(schedule, workload, lab.Causes(), steps=1, warmup=0)
    assert not run.gradients.equal and len(run.gradients.causes) == len(expected), run
    for cause, words in zip(run.gradients.causes, expected, strict=True):
        assert re.search(words, cause) and f"  cause: {cause}" in str(run), cause
    assert f"in {run.gradients.worst}, the loss " in str(run)


def test_a_run_that_was_not_asked_says_how_to_ask(pool):
    schedule = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    run = pool.train(schedule, squares(nn.Dropout(0.5)), steps=1, warmup=0, check_gradients=True)
    assert "cause: not looked for: pool.train(schedule, workload, lab.Causes()) does" in str(run)


def test_what_has_no_cause_has_none(pool):
    """Batch normalisation that only reads its averages, and dropout that is off, are no cause."""
    workload = squares(nn.BatchNorm1d(6).eval(), nn.Dropout(0.0), nn.Dropout(0.5).eval())
    schedule = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    run = pool.train(schedule, workload, lab.Causes(), steps=1)
    assert run.gradients.equal and run.gradients.causes == () and "cause" not in str(run)
