"""Traces of real ranks of both engines."""

from __future__ import annotations

import functools

import pytest
import torch

import pplab as pp
from conftest import traced
from pplab import lab
from pplab.lab import models
from pplab.runtime import Pool


@pytest.fixture(scope="module")
def pool():
    with Pool(2, transport="gloo") as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "pplab") for name in ("1F1B", "ZB-H1", "DualPipeV")),
        ("1F1B", "torch"),
        *(pytest.param(name, "torch", marks=pytest.mark.long) for name in ("ZB-H1", "DualPipeV")),
    ],
)
def test_real_ranks_are_recorded(pool, tmp_path, name, engine):
    s = pp.build(name, num_ranks=2, num_microbatches=4)
    gpt = models.gpt(batch_size=8, num_layers=4, width=128, num_heads=2, context=64, source="sample")
    adam = functools.partial(torch.optim.AdamW, lr=1e-3)
    folder = tmp_path / "new" / "traces"
    by_torch = [lab.TorchEngine()] if engine == "torch" else []
    run = pool.train(s, gpt, *by_torch, lab.Profile(folder), steps=2, optimizer=adam)
    traces = run.extras["profile"]
    assert traces == tuple(str(folder / f"rank{rank}.json.gz") for rank in range(2)) and str(folder) in str(run)
    for rank, trace in enumerate(traces):
        ran = [
            span for t in run.timelines for span in t.spans_of(rank) if len(span.action) == 3
        ]  # pairs have waits inside
        busy, actions, steps = (
            sum(span.end - span.start for span in ran),
            traced(trace, "pplab:"),
            traced(trace, "Prof"),
        )
        assert 0.6 * busy < sum(actions) and max(actions) < max(steps)  # spans lie inside the timeline's
        assert len(steps) == 2 and 0 < max(traced(trace, "gloo:")) <= sum(steps)


@pytest.mark.slow
def test_nothing_is_recorded_unasked(pool):
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    run = pool.train(s, models.gpt(batch_size=8, num_layers=2, width=32, num_heads=2, source="sample"))
    assert run.extras == {} and "profile" not in lab.run_to_dict(run)
