"""Clipping by the global norm does what torch's clip_grad_norm_ does in one process, whoever holds which gradients."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

import modules
import pplab as pp
from pplab import lab
from pplab.lab import models
from pplab.runtime import Pool, RankError, make_job

pytestmark = pytest.mark.slow

SGD = partial(torch.optim.SGD, lr=0.5)


@pytest.fixture(scope="module")
def pool():
    with Pool(2, device="cpu") as pool:
        yield pool


def stages(count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(6, 6) for _ in range(count)]


def one_process(layers: list[nn.Module], steps: int, limit: float | None) -> tuple[list[float], list[float]]:
    """Losses and norms of plain training in this process."""
    model, batch = nn.Sequential(*layers), modules.batch()
    optimizer = SGD(model.parameters())
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(*batch.inputs), batch.target)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit or math.inf).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipe", "DualPipeV"])
@pytest.mark.parametrize("limit", [0.05, 100.0])
def test_norms_and_losses_are_those_of_one_process(pool, name, limit):
    schedule = pp.build(name, num_ranks=2, num_microbatches=8 if name.startswith("Dual") else 4)
    workload = modules.workload(*stages(schedule.num_stages))
    run = pool.train(schedule, workload, lab.Clip(limit), steps=3, optimizer=SGD)
    losses, norms = one_process(stages(schedule.num_stages), 3, limit)
    assert run.extras["gradient_norms"] == pytest.approx(norms, rel=1e-5)
    assert run.losses == pytest.approx(losses, rel=1e-5)
    assert all(norm > 0.05 for norm in norms)
    assert f"gradient norm    {norms[0]:.4f}" in str(run)
    assert lab.run_to_dict(run)["gradient_norms"] == run.extras["gradient_norms"]
    assert lab.where(run.timeline).mean["clipping"] > 0


def test_clipping_changes_what_is_learnt(pool):
    schedule = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    train = partial(pool.train, schedule, modules.workload(*stages(2)), steps=3, optimizer=SGD)
    free, clipped = train(), train(lab.Clip(0.05))
    assert "gradient_norms" not in free.extras and "gradient norm" not in str(free)
    assert free.losses[0] == clipped.losses[0] and free.losses[2] < clipped.losses[2]


def test_torchs_runtime_clips_the_same(pool):
    schedule = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    workload, extras = modules.workload(*stages(2)), (lab.Clip(0.05), lab.TorchEngine())
    run = pool.train(schedule, workload, *extras, steps=3, optimizer=SGD)
    losses, norms = one_process(stages(2), 3, 0.05)
    assert run.extras["gradient_norms"] == pytest.approx(norms, rel=1e-5)
    assert run.losses == pytest.approx(losses, rel=1e-5)


def test_a_rank_without_gradients_takes_part(pool):
    schedule = pp.build("GPipe", num_ranks=2, num_microbatches=4)
    layers = [stages(1)[0], nn.Tanh()]
    run = pool.train(schedule, modules.workload(*layers), lab.Clip(0.01), steps=1, optimizer=SGD)
    _, norms = one_process([stages(1)[0], nn.Tanh()], 1, 0.01)
    assert run.extras["gradient_norms"] == pytest.approx(norms, rel=1e-5)


def test_frozen_parameters_do_not_count(pool):
    schedule = pp.build("GPipe", num_ranks=2, num_microbatches=4)
    layers = stages(2)
    layers[1].requires_grad_(False)
    run = pool.train(schedule, modules.workload(*layers), lab.Clip(0.01), steps=1, optimizer=SGD)
    assert run.extras["gradient_norms"] == pytest.approx(one_process(layers, 1, 0.01)[1], rel=1e-5)


def test_every_parameter_counts_once():
    """Over ranks, stages and ties: by the rule alone, for every schedule."""
    from pplab.lab.extras.clip import own_parameters

    class Tied(modules.Modules):
        def tied(self, num_stages):
            return {"weight": [(0, "weight"), (num_stages - 1, "weight")]}

    for name, ranks, replicas in itertools.product(("1F1B", "ZBVZeroBubble", "DualPipe"), (2, 4), (1, 2)):
        schedule = lab.replicate(pp.build(name, num_ranks=ranks, num_microbatches=4 * ranks), replicas)
        layers = {stage: nn.Linear(2, 2) for stage in range(schedule.num_stages)}
        one = [nn.Linear(6, 6)], modules.batch(), nn.functional.mse_loss
        for workload, expected in ((modules.Modules(*one), 2 * len(layers)), (Tied(*one), 2 * len(layers) - 1)):
            own = [p for rank in range(schedule.num_ranks) for p in own_parameters(rank, schedule, workload, layers)]
            assert len(own) == len(set(own)) == expected


def test_replicas_of_a_model_with_tied_weights():
    gpt = models.gpt(batch_size=8, num_layers=2, width=32, num_heads=2, context=16, tied=True, source="sample")
    with Pool(4, device="cpu") as pool:
        schedule = lab.replicate(pp.build("1F1B", num_ranks=2, num_microbatches=2), 2)
        run = pool.train(schedule, gpt, lab.Clip(0.5), steps=2, optimizer=SGD)
    whole = gpt.build_whole()
    optimizer, norms = SGD(whole.parameters()), []
    for step in range(2):
        optimizer.zero_grad()
        batch = gpt.batch(step)
        gpt.loss(whole(*batch.inputs), batch.target).backward()
        norms.append(nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item())
        optimizer.step()
    assert run.extras["gradient_norms"] == pytest.approx(norms, rel=1e-5) and min(norms) > 0.5


def test_a_norm_that_is_not_finite_is_an_error_that_says_where():
    layers = stages(2)
    with torch.no_grad():
        layers[1].weight[0, 0] = math.nan
    schedule = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    with Pool(2, device="cpu") as pool:
        with pytest.raises(
            RankError, match="while clipping gradients: FloatingPointError: the gradients of ranks 0, 1"
        ):
            pool.train(schedule, modules.workload(*layers), lab.Clip(1.0), optimizer=SGD)


@pytest.mark.parametrize("limit", [0, -1, math.inf, math.nan, "1", True])
def test_limits_that_are_none_are_refused(limit):
    schedule = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    with pytest.raises(ValueError, match="Clip's max_norm must be a number of more than 0"):
        make_job(schedule, modules.workload(*stages(2)), 2, [lab.Clip(limit)])
