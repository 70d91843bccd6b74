"""A backward in two halves: the same gradients, nothing computed twice, nothing kept that isn't needed."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modules
from pplab.lab import models
from pplab.lab.extras.meter import SavedBytes
from pplab.runtime import Stage, autocast
from pplab.runtime.deferred import Deferred

pytestmark = pytest.mark.slow


class Tied(nn.Module):
    """One weight in two Linears, one of them frozen in its bias."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Recomputed(nn.Module):
    """Keeps its input alone and computes the rest again in the backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6, bias=False))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def stage_of(module: nn.Module, split=False, **options) -> Stage:
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return Stage(module, 1, 3, nn.functional.mse_loss, [1.0], split, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(6, 6),
        lambda: nn.Sequential(nn.Linear(6, 9, bias=False), nn.LayerNorm(9), nn.Linear(9, 6)),
        Tied,
        Recomputed,
    ],
    ids=["linear", "with a norm", "tied and frozen", "recomputed"],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_both_halves_make_what_the_whole_makes(make, dtype):
    """The whole is autograd's own, of the module without a stage around it."""
    torch.manual_seed(0)
    x, g = torch.randn(3, 5, 6), torch.randn(3, 5, 6)
    if dtype:
        g = g.to(dtype)
    whole, halves = stage_of(make()).module, stage_of(make(), True, autocast=dtype)
    batch = modules.batch(3)
    for m in (0, 1, 2):  # 2 isn't split
        of_x = (x + m).requires_grad_()
        with autocast(x.device, dtype):
            whole(of_x).backward(g)
        halves.forward(m, (x + m,), batch)
        (got,) = halves.backward(m, (g,)) if m == 2 else halves.backward_input(m, (g,))
        assert torch.equal(got, of_x.grad)
    assert len(halves.held) + len(halves.due) == 2
    for m in (0, 1):
        halves.backward_weight(m)
    assert len(halves.held) + len(halves.due) == 0
    tolerance = {"rtol": 2e-2, "atol": 2e-1} if dtype else {"rtol": 1e-5, "atol": 1e-5}
    for (name, p), (_, q) in zip(whole.named_parameters(), halves.module.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, **tolerance)


def normed() -> nn.Linear:
    with warnings.catch_warnings(action="ignore"):  # torch has a newer one, of another class than Linear
        return nn.utils.weight_norm(nn.Linear(6, 6))


def hooked() -> nn.Linear:
    linear = nn.Linear(6, 6)
    for p in linear.parameters():
        p.register_hook(lambda gradient: 2 * gradient)
    return linear


def of_rank_0() -> nn.Sequential:
    with warnings.catch_warnings(action="ignore"):  # there is nothing to initialise
        return nn.Sequential(nn.Linear(6, 0, bias=False), nn.Linear(0, 6))


@pytest.mark.parametrize("make", [normed, hooked, of_rank_0])
@pytest.mark.parametrize(("split", "dtype"), [(True, None), (False, torch.bfloat16), (True, torch.bfloat16)])
def test_odd_linears_get_their_gradients(make, split, dtype):
    """A weight that is no parameter, one whose gradient a hook changes, one without elements (as in LoRA of rank 0)."""
    torch.manual_seed(0)
    x, g = torch.randn(3, 5, 6), torch.randn(3, 5, 6).to(dtype or torch.float32)
    whole, stage = make(), Stage(make(), 1, 3, nn.functional.mse_loss, [1.0], split, dtype)
    stage.module.load_state_dict(whole.state_dict())
    with autocast(x.device, dtype):
        whole(x).backward(g)
    stage.forward(0, (x,), modules.batch(3))
    if split:
        stage.backward_input(0, (g,))
        stage.backward_weight(0)
    else:
        stage.backward(0, (g,))
    for (name, p), (_, q) in zip(whole.named_parameters(), stage.module.named_parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=2e-2, atol=2e-1 if dtype else 1e-5, msg=name)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_a_microbatch_keeps_does_not_depend_on_its_backward(dtype):
    """The inputs of both Linears and nothing of their weights, whether the stage splits its backwards or not."""
    kept = []
    for split in (False, True):
        stage = stage_of(nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 6)), split, autocast=dtype)
        meter = SavedBytes([*stage.module.parameters()])
        stage.hold = meter.hold
        with meter:
            stage.forward(0, (torch.randn(2, 6),), modules.batch(2))
        kept.append(meter.held)
    of_received, size = 0 if dtype is None else 2 * 6 * 4, 4 if dtype is None else 2
    assert kept == [of_received + (2 * 6 + 2 * 64) * size] * 2


def test_the_input_gradient_leaves_linears_weights_alone():
    stage = stage_of(nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6)), True)
    stage.forward(0, (torch.randn(4, 6),), modules.batch(4))
    stage.backward_input(0, (torch.randn(4, 6),))
    first, norm, second = stage.module
    assert all(p.grad is None for p in (*first.parameters(), *second.parameters()))
    assert all(p.grad is not None for p in norm.parameters())
    assert stage.deferred.unsplit == {"LayerNorm"}
    assert [tuple(x.shape) for product in stage.due[0] for x in product[1:3]] == [(4, 9), (4, 6), (4, 6), (4, 9)]
    kept = [weakref.ref(x) for product in stage.due[0] for x in product[1:3]]
    stage.backward_weight(0)
    assert all(p.grad is not None for p in stage.module.parameters()) and not stage.due
    # Nor does a weight's gradient remember what it was made of.
    assert not any(p.grad.requires_grad for p in stage.module.parameters()) and not any(x() for x in kept)


@pytest.mark.parametrize("make", [models.gpt, models.distilbert])
def test_nothing_is_multiplied_twice(make):
    """Matrix products of I and W are those of the whole backward, counted by torch's profiler."""
    options = {"num_layers": 2, "width": 32} if make is models.gpt else {"checkpoint": "small", "length": 24}
    workload = make(batch_size=4, source="sample", **options)
    batch = workload.batch(0)
    counts = {}
    for split in (False, True):
        stage = Stage(workload.build_stage(0, 2), 0, 2, workload.loss, [1.0], split)
        (out,) = stage.forward(0, (), batch)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            if split:
                stage.backward_input(0, (torch.ones_like(out),))
                stage.backward_weight(0)
            else:
                stage.backward(0, (torch.ones_like(out),))
        products = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"}
        counts[split] = sum(event.count for event in profile.key_averages() if event.key in products)
    assert counts[True] == counts[False] > 0


def test_layers_go_when_their_stage_does():
    """Without the collector: on a GPU, weights that stay would count in the next run's memory."""
    gc.disable()
    try:
        layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        kept, deferred = weakref.ref(layers[0]), Deferred(layers)
        assert deferred.unsplit == set() and layers(torch.ones(1, 2)).shape == (1, 2)
        del layers, deferred
        assert kept() is None
    finally:
        gc.enable()
