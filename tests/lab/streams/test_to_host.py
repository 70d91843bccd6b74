"""Activations that wait on the host: the same gradients, and the device's memory is really let go."""

from __future__ import annotations

import pytest
import torch

import pplab as pp
from conftest import built, names_of_schedules
from pplab import lab
from pplab.lab import models
from to_host import ToHost

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gpt():
    return models.gpt(batch_size=8, num_layers=8, width=32, num_heads=2, context=16, source="sample")


@pytest.mark.parametrize("name", names_of_schedules())
def test_every_schedule_has_one_processes_gradients_and_holds_what_is_simulated(pool, gpt, name):
    s = built(pp.builders.find(name), 2, 8)
    plain = pool.train(s, gpt, lab.Meter(), steps=1, warmup=0)
    run = pool.train(s, gpt, lab.Meter(), ToHost(), steps=2, check_gradients=True)
    assert run.gradients.equal, run
    assert run.held.bytes_of == plain.held.bytes_of
    found = run.extras["to_host"]
    told = found.offload(plain.held.bytes_of)
    instant, almost = (lab.Offload(out, share=told.share).simulate(s) for out in (0, 1e-9))  # a copy out, then one back
    assert run.held.peak_bytes == tuple(map(round, instant.peak_held(plain.held.memory)))
    assert found.peak_on_host == tuple(map(round, almost.peak_on_host(plain.held.memory)))
    assert ("peak on the host" in str(run)) and told.simulate(s, run.costs).timeline.makespan > 0


def test_the_devices_memory_goes_and_the_bits_come_back(pool, gpt):
    s = pp.build("GPipe", num_ranks=2, num_microbatches=8)
    plain, run = (pool.train(s, gpt, lab.Meter(), *extras, steps=3, optimizer=sgd) for extras in ((), (ToHost(),)))
    assert run.losses == plain.losses
    assert max(run.held.peak_bytes) < 0.5 * min(plain.held.peak_bytes)
    half = pool.train(s, gpt, lab.Meter(), ToHost(share=[0.5, 0]), steps=1)
    moved, kept = half.extras["to_host"].copied_bytes, plain.held.bytes_of
    assert 0.4 * kept[0] < moved[0] <= 0.5 * kept[0] and moved[1] == 0 == half.extras["to_host"].peak_on_host[1]
    assert half.held.peak_bytes[1] == plain.held.peak_bytes[1]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_it_goes_with_mixed_precision_slices_and_pairs(pool, gpt):
    s = pp.build("ZB-H1", num_ranks=2, num_microbatches=4)
    assert pool.train(s, gpt, ToHost(), steps=1, autocast=torch.bfloat16, check_gradients=True).gradients.equal
    sliced = pp.build("Seq1F1B", num_ranks=2, num_microbatches=8, slices=2)
    assert pool.train(sliced, models.sliced(gpt, 2), ToHost(), steps=1, check_gradients=True).gradients.equal
    pairs = pp.build("DualPipeV", num_ranks=2, num_microbatches=4)
    assert pool.train(pairs, gpt, ToHost(ahead=2), lab.Beside(), steps=1, check_gradients=True).gradients.equal


def test_what_cannot_be_is_said(pool, gpt):
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    for extras, says in (
        ([ToHost(share=[1, 1, 1])], "share has 3 values for 2 stages"),
        ([ToHost(), lab.Recompute([0])], "don't go together"),
        ([ToHost(), ToHost()], "a run has one ToHost"),
        ([lab.TorchEngine(), ToHost()], "ToHost needs pplab's engine"),
    ):
        with pytest.raises(ValueError, match=says):
            pool.train(s, gpt, *extras)
    for wrong in ({"share": 2}, {"ahead": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ToHost(**wrong)
