"""FSDP's law, phase by phase, against layers one after the other; and the case without a pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pplab as pp
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


def test_a_row_that_does_not_fit_is_refused():
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


def test_shards_of_a_layout_by_hand():
    """8 layers on 16 ranks in nodes of 8: two tensor and two context ranks of four replicas, four sequences of each."""
    model = lab.Transformer(8, 1024, 512, vocabulary=32_000)
    machine = lab.Machine(8, pp.Link(), pp.Link(1e-5, 10e9), flops=1e14, memory=80e9)
    layout, layer, table = lab.Layout(tp=2, cp=2, dp=4), 12 * 1024**2, 32_000 * 1024
    weights = (8 * layer + 2 * table) / 2  # of a tensor rank, over eight others
    ring = {each: 7 * (1e-5 + each * weights / 8 / 10e9) for each in (2, 4)}  # bytes of a weight, and of a gradient
    held = {0: 18 * weights, 1: (6 + 12 / 8) * weights, 2: (2 + 16 / 8) * weights}
    held[3] = 18 / 8 * weights + 2 * 2 * table / 2  # two matrices whole
    for at_a_time in (1, 4):
        F = at_a_time * (8 * (2 * layer * 512 + 2 * 512**2 * 1024) + 2 * table * 512) / 1e14 / 4
        passes = 4 // at_a_time
        step = {
            0: passes * F + (passes - 1) * 2 * F + max(2 * F, 2 * ring[4]),
            1: max(F, ring[2]) + (passes - 1) * 3 * F + max(2 * F, ring[4]),
            2: max(F, ring[2]) + (passes - 1) * F + passes * max(2 * F, ring[4]),
            3: passes * (max(F, ring[2]) + max(2 * F, ring[2] + ring[4])),
        }
        for zero in range(4):
            found = lab.fsdp_plan(model, machine, layout, 16, at_a_time, zero=zero)
            assert (found.zero, found.microbatch, found.recomputed) == (zero, at_a_time, (0,))
            assert found.step_s == pytest.approx(step[zero]) and found.compute_s == pytest.approx(passes * 3 * F)
            assert found.memory_bytes == pytest.approx(held[zero] + at_a_time * 8 * 34 * 512 * 1024 / 4)
    best = lab.fsdp_plan(model, machine, layout, 16)
    every = [lab.fsdp_plan(model, machine, layout, 16, n, zero=z).step_s for n in (1, 2, 4) for z in (1, 2, 3)]
    assert best.step_s == pytest.approx(min(every)) and min(every) < 0.9 * max(every)


def test_shards_of_experts_are_of_those_that_have_the_same():
    model, free = lab.Transformer(2, 512, 128, mlp_width=1024), pp.Link(0, 1e15)
    machine, experts = lab.Machine(8, free, pp.Link(0, 1e9), 1e14, 80e9), lab.ExpertLayers(16, used=2, gpus=8)
    shared, own = 2 * 4 * 512**2, 2 * 2 * 2 * 512 * 512  # of two layers: two of its 16 experts a rank
    found = lab.fsdp_plan(model, machine, lab.Layout(dp=16), 16, 1, zero=3, experts=experts)
    activations = 2 * (model.layer_bytes(1) + 2 * model.boundary_bytes(1))
    assert found.memory_bytes == pytest.approx(18 * (shared / 16 + own / 2) + 2 * (shared + own) + activations)
    sent = {size: (15 / 16 * shared + 1 / 2 * own) * size / 1e9 for size in (2, 4)}  # between two nodes
    assert found.step_s == pytest.approx(sent[2] + sent[2] + sent[4])


def test_as_many_layers_run_again_as_it_takes():
    """And where all of them don't suffice, the plan says how much it is."""
    model = lab.Case().model
    machine = lab.Case(gigabits=3600).machine
    for memory in (90e9, 60e9, 45e9):
        found = lab.fsdp_plan(model, replace(machine, memory=memory), lab.Layout(dp=8), 16, 2, zero=3)
        (again,) = found.recomputed
        layer, given = 2 * model.layer_bytes(1), 2 * model.boundary_bytes(1)
        fewer = found.memory_bytes + (layer - given) * (1 if again > 1 else 0)
        assert found.memory_bytes <= memory and (again == 0 or again == 1 or fewer > memory)
    none = lab.fsdp_plan(model, replace(machine, memory=20e9), lab.Layout(dp=8), 16)
    assert none.memory_bytes > 20e9 and none.recomputed == (32,) and (none.zero, none.microbatch) == (3, 1)


@pytest.mark.parametrize(
    ("layout", "batch", "asked", "said"),
    [
        (lab.Layout(pp=2, dp=2), 16, {}, "without a pipeline there is no pp, got .*pp=2.*: give pp=1, or take plan"),
        (lab.Layout(dp=4), 6, {}, "6 sequences don't divide among 4 ranks"),
        (lab.Layout(dp=4), 16, {"microbatch": 3}, "a batch of 16 doesn't divide into 4 replicas of microbatches of 3"),
        (lab.Layout(dp=4), 16, {"zero": 4}, "zero must be 1, 2 or 3, or 0 for replicas, got 4"),
        (
            lab.Layout(dp=4),
            16,
            {"experts": lab.ExpertLayers(9, 3, 3)},
            "3 GPUs that share experts are .*don't divide these 4",
        ),
    ],
)
def test_what_is_no_step_without_a_pipeline_is_refused(layout, batch, asked, said):
    with pytest.raises(ValueError, match=said):
        lab.fsdp_plan(lab.Case().model, lab.Case().machine, layout, batch, **asked)
