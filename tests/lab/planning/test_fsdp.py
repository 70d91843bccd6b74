"""FSDP's law, phase by phase, against layers one after the other; and the case without a pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pplab import lab
from pplab.lab import formulas
from pplab.lab.planning.formulas import free_bandwidth, free_tokens, sharded_step


def by_layers(layers: int, forward: float, backward: float, gather: float, reduce: float) -> float:
    """A forward and a backward, layer by layer, over one wire: while a layer computes, the next one's weights come, and
    behind them go the gradients of the layer before."""
    now = wire = 0.0
    for compute, after in ((forward, 0), (backward, reduce)):
        wire = here = now + gather / layers
        for left in reversed(range(layers)):
            wire += gather / layers if left else 0
            now, here = max(now, here) + compute / layers, wire
            wire = max(wire, now) + after / layers if after else wire
    return max(now, wire)


@pytest.mark.parametrize("gather", [0.2, 0.9, 1.5, 4])
@pytest.mark.parametrize("reduce", [0.2, 1.0, 2.5])
def test_a_pass_is_what_its_layers_take(gather, reduce):
    told = sharded_step(1, 1, 2, gather, reduce)
    edges = (2 * gather + reduce + 3) / 256
    assert told <= by_layers(256, 1, 2, gather, reduce) <= told + edges


@pytest.mark.parametrize(("g", "r"), [(2, 2), (2, 4), (4, 4), (4, 1)])
def test_the_bandwidth_from_which_it_is_free(g, r):
    n, parameters, forward = 8, 8e9, 0.7
    needed = free_bandwidth(n, parameters, forward, g, r)
    for beta, free in ((1.001 * needed, True), (0.999 * needed, False)):
        sent = [formulas.ring_gather_time(n, size * parameters, 0, beta) for size in (g, r)]
        assert (sharded_step(3, forward, 2 * forward, *sent) == pytest.approx(9 * forward)) == free
    flops, tokens = 400e12, 8192
    assert free_tokens(n, flops, free_bandwidth(n, 1e9, 2e9 * tokens / flops, g, r), g, r) == pytest.approx(tokens)


def test_less_is_sent_where_more_is_kept():
    fsdp, two, one = (sharded_step(4, 1, 2, 1.5, 3, zero=zero) for zero in (3, 2, 1))
    assert (fsdp, two, one) == (4 * (1.5 + 4.5), 1.5 + 3 + 4 * 3, 1.5 + 3 + 3 * 2 + 3)
    assert sharded_step(1, 1, 2, 0.5, 1) == 3


def test_the_case_without_a_pipeline():
    case, summed = lab.Case(state=lab.State(2, 2, 12)), lab.Case()  # gradients in 2 bytes, and in 4
    bills = {gb: [lab.fsdp_row(replace(case, gigabits=gb), m).dollars for m in (4, 16, 64)] for gb in (25, 100, 3600)}
    assert [round(x) for x in bills[25]] == [523, 132, 98] and [round(x) for x in bills[100]] == [131, 89, 84]
    perfect = case.row("a perfect pipeline", 16)
    assert bills[3600] == pytest.approx([perfect.dollars] * 3)
    for m in (4, 16, 64):
        rows = [lab.fsdp_row(case, m, zero=zero) for zero in (1, 2, 3)]
        assert min(row.step_s for row in rows) == lab.fsdp_row(case, m).step_s
        assert all(row.fits and row.busy <= 1 for row in rows)
        assert lab.fsdp_row(summed, m).step_s >= lab.fsdp_row(case, m).step_s
    held = lab.fsdp_row(case, 4, zero=3).held_gb[0]
    assert round(held - 4 * lab.Case().model.table_parameters / 1e9) == 69  # a quarter of the state, and a sequence


def test_what_cannot_be_shared_out_or_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="6 sequences don't divide among 4 ranks"):
        lab.fsdp_row(lab.Case(), 6)
    with pytest.raises(ValueError, match="zero must be 1, 2 or 3, got 4"):
        lab.fsdp_row(lab.Case(), 16, zero=4)
    with pytest.raises(ValueError, match="it doesn't fit in 30 GB"):
        lab.fsdp_row(replace(lab.Case(), memory_gb=30, reserve_gb=0), 4)


def test_replicas_of_frozen_weights_send_nothing():
    """Each has the whole model, and nobody's weights change: so its step is its own sequences' work."""
    frozen = lab.Case(state=lab.State(2, 0, 0))
    row = lab.fsdp_row(frozen, 16)
    alone = replace(frozen, num_ranks=1).row("one GPU", 4)
    assert row.what == "ZeRO-1, 1 at a time" and row.fits
    assert row.step_s == pytest.approx(alone.step_s) and row.held_gb[0] == pytest.approx(alone.held_gb[0])
    assert row.dollars == pytest.approx(frozen.row("a perfect pipeline", 16).dollars)
    assert lab.fsdp_row(frozen, 16, zero=3).step_s > 2 * row.step_s  # shards are gathered all the same
