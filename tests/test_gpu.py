"""The runtime on CUDA: the same numbers as one process, whether every rank has a GPU or they share one. `make gpu`."""

from __future__ import annotations

import functools
import time

import pytest
import torch
from torch import nn

import modules
import pplab as pp
from conftest import built
from pplab import models
from pplab.runtime import Pool, RankError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", params=[1, 2, 4])
def pool(request):
    with Pool(request.param, device="cuda", timeout_s=120) as pool:
        yield pool


@pytest.mark.parametrize("name", [builder.name for builder in pp.builders.ALL])
def test_every_schedule_equals_one_process(pool, name):
    gpt = models.gpt(batch_size=8, num_layers=8, width=64, num_heads=2, context=32, source="sample")
    for num_microbatches in (1, 4, 8):
        s = built(pp.builders.find(name), pool.num_ranks, num_microbatches)
        if s is None:
            continue
        run = pool.train(s, gpt, steps=2, check_gradients=True, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
        assert run.gradients.equal, run
        assert run.peak_in_flight == s.peak_in_flight
        assert run.peak_bytes == run.predicted_peak_bytes


def test_distilbert_equals_one_process(pool):
    workload = models.distilbert(batch_size=8, length=48, checkpoint="small", source="sample")
    s = pp.build("1F1B", num_ranks=pool.num_ranks, num_microbatches=4)
    assert pool.train(s, workload, steps=1, check_gradients=True).gradients.equal


def test_the_timeline_is_one_of_the_device(pool):
    gpt = models.gpt(batch_size=8, num_layers=4, width=256, num_heads=4, context=128, source="sample")
    s = pp.build("1F1B", num_ranks=pool.num_ranks, num_microbatches=4)
    t = pool.train(s, gpt, steps=2).timeline
    at = {span.action: span for span in t.spans}
    for span in t.spans:
        stage, kind, m = span.action
        assert span.end > span.start >= 0
        if kind == "F" and stage:
            assert span.end > at[pp.parse(f"{stage - 1}F{m}")].end


def test_whether_gpus_are_shared_is_said(pool):
    shared = torch.cuda.device_count() < pool.num_ranks
    assert (pool.transport == "shared") == shared
    assert any("share" in note for note in pool.notes) == shared


def test_a_failure_ends_all_ranks():
    with Pool(2, device="cuda") as pool:
        started = time.monotonic()
        with pytest.raises(RankError, match="ArithmeticError: the third forward fails"):
            s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
            pool.train(s, modules.workload(nn.Linear(6, 6), modules.RaisesInForward()))
        assert time.monotonic() - started < 60 and pool.pids == ()
