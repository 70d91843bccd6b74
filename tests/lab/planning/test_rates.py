"""Small work is slow: what a machine's `host`, `hbm` and `ring_over` bring, on runs that weren't fitted."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from math import log
from pathlib import Path
from types import SimpleNamespace

import pytest

import pplab as pp
from pplab import lab
from pplab.actions import B, F
from pplab.lab import Layout, Machine, State, Transformer, machine_of, plan, profiled

ROOT = Path(__file__).parents[3]
PLAYBOOK = json.loads((ROOT / "benchmarks" / "playbook_rows.json").read_text())
H100 = machine_of("h100", 8, 50e9)
OVER = {int(nodes): speed for nodes, speed in PLAYBOOK["all_reduce"].items() if nodes != "what"}
TOLD = replace(H100, flops=440e12, host=4.5e-3, hbm=0.9 * 3.35e12, ring_over=OVER)  # the first two fitted


def nanotrons_cut(model: Transformer, pp: int) -> list[int]:
    """Blocks go on to the next stage once their weights are more than the stages so far should have."""
    blocks = [0] + [model.layer_parameters] * model.num_layers + [0, model.table_parameters, 0]
    cut, stage, so_far = [0] * pp, 0, 0
    for at, weights in enumerate(blocks):
        so_far += weights
        cut[stage] += 1 <= at <= model.num_layers
        stage += stage < pp - 1 and so_far > sum(blocks) * (stage + 1) / pp
    return cut


def errors(machine: Machine) -> dict[int, list[float]]:
    """log(predicted / measured) by tensor degree: of runs with PP 1 or TP 1 that weren't fitted and didn't stall."""
    found: dict[int, list[float]] = {}
    for name, rows in PLAYBOOK["rows"].items():
        model = Transformer(**PLAYBOOK["shared"], **PLAYBOOK["models"][name])
        for row in rows:
            run = SimpleNamespace(**dict(zip(PLAYBOOK["columns"], row, strict=True)))
            fitted = name in ("1B", "8B") and run.gpus <= 16
            if not fitted and not run.stalled and 1 in (run.tp, run.pp) and run.tp <= 8:
                layout, how = Layout(run.tp, run.pp, run.dp), {"shard_optimizer": bool(run.zero)}
                planned = plan(model, machine, layout, 256, run.microbatch, cut=nanotrons_cut(model, run.pp), **how)
                found.setdefault(run.tp, []).append(log(planned.step_s / run.step_s))
    return found


def test_runs_that_werent_fitted_are_within_a_tenth():
    told, plain = errors(TOLD), errors(H100)
    assert sum(map(len, PLAYBOOK["rows"].values())) == 1738 and sum(map(len, told.values())) == 320
    assert max(statistics.median(map(abs, each)) for each in told.values()) < 0.1
    assert statistics.median(map(abs, sum(told.values(), []))) < 0.085
    assert statistics.median(map(abs, sum(plain.values(), []))) > 0.13 and statistics.median(plain[8]) < -0.2


def test_a_layer_takes_what_its_host_needs_and_what_goes_through_memory():
    model, plain = Transformer(8, 2048, 4096, heads=16), replace(H100, flops=400e12)
    layer = model.layer_flops(1) / 400e12
    for tp, host in ((1, 0.1 * layer), (1, 30 * layer), (4, 30 * layer)):
        costs = plan(model, replace(plain, host=host), Layout(tp, 4), 8, cut=(1, 2, 2, 3)).costs
        bare = plan(model, plain, Layout(tp, 4), 8, cut=(1, 2, 2, 3)).costs
        for stage, n in enumerate((1, 2, 2, 3)):
            assert costs.of(F, stage) == pytest.approx(max(bare.of(F, stage), n * host / 3))
            assert costs.of(B, stage) == pytest.approx(max(bare.of(B, stage), n * host * 2 / 3))
    touched = plan(model, replace(plain, hbm=3e12), Layout(2, 4), 8)
    assert touched.compute_s == pytest.approx(
        plan(model, plain, Layout(2, 4), 8).compute_s + 8 * 2 * 6 * model.layer_bytes(1) / 2 / 3e12
    )
    assert plan(model, replace(H100, host=1), Layout(), 8).bound == "host" and touched.bound == "computing"
    frozen = plan(model, replace(plain, host=30 * layer), Layout(pp=4), 8, state=State(2, 0, 0)).costs
    assert frozen.of(B, 0) == pytest.approx(2 * 10 * layer)


def test_a_ring_over_nodes_is_as_fast_as_measured_and_as_its_ports():
    assert TOLD.ring_link([range(8)]).bandwidth == pytest.approx(367e9)
    assert TOLD.ring_link([range(32)]) == pp.Link(0, 160e9)
    assert TOLD.ring_link([range(0, 32, 4)]) == pp.Link(0, 100e9)  # two of each node
    assert TOLD.ring_link([range(48)]) == pp.Link(0, 160e9)  # of six nodes: as of four
    with pytest.raises(ValueError, match="nodes of ring_over must be an integer of at least 1, got 0"):
        replace(H100, ring_over={0: 1e9})
    with pytest.raises(ValueError, match="host must be a number from 0 to"):
        replace(H100, host=-1)


def test_two_sizes_tell_the_gpu_from_its_memory_and_its_host():
    """Of an H100's own recording, two layers as two stages: W moves nothing, and its attention is in I."""
    rows = json.loads((ROOT / "results" / "nvidia-h100-80gb-hbm3.json").read_text())["parts"]
    found = next(part["rows"] for part in rows if part["name"] == "stages")
    took = {row["tokens"]: row["ms"] for row in found if (row["width"], row["dtype"]) == (768, "bf16")}
    model = Transformer(2, 768, 512, heads=12)
    costs = {
        tokens // 512: pp.Costs(*([ms[kind] / 2] * 2 for kind in "FIW"), backward=[ms["B"] / 2] * 2, unit="ms")
        for tokens, ms in took.items()
    }
    machine, _ = profiled(model, H100, {size: costs[size] for size in (2, 64)})
    assert 1.5e-3 < machine.host < 2e-3 and 2.5e12 < machine.hbm < 3.35e12 and 380e12 < machine.flops < 450e12
    for size, own in costs.items():
        planned = plan(model, machine, Layout(pp=2), 2 * size, size)
        ratio = (planned.costs.of(F, 0) + planned.costs.of(B, 0)) * 1e3 / (own.of(F, 0) + own.of(B, 0))
        assert 0.85 < ratio < 1.2 and planned.bound == ("host" if size <= 16 else "computing")
    with pytest.raises(ValueError, match="they waited for the host both times"):
        profiled(model, H100, {size: costs[size] for size in (2, 8)})
    assert profiled(model, TOLD, costs[64], 64)[0].host == TOLD.host


def test_memory_that_isnt_the_models_is_counted_where_it_is_told():
    model = Transformer(8, 2048, 4096, heads=16, vocabulary=100_000)
    bare, told = (
        plan(model, replace(H100, reserved=more), Layout(2, 2), 8, state=State(logits=logits))
        for more, logits in ((0, 0), (2e9, 14))
    )
    assert told.held_bytes[0] == pytest.approx(bare.held_bytes[0] + 2e9)
    assert told.held_bytes[1] == pytest.approx(bare.held_bytes[1] + 2e9 + 14 * 100_000 * 4096 / 2)
    for memory in (9e9, 12e9, 16e9):  # fewer layers run again where less is reserved
        tight, wide = (replace(H100, memory=each, reserved=each - memory) for each in (memory + 3e9, memory))
        each = [lab.fsdp_plan(model, machine, Layout(dp=4), 32, 4) for machine in (tight, wide)]
        assert all(found.fits for found in each) and each[0].recomputed == each[1].recomputed


def regrets(machine: Machine, stalls: bool) -> dict[int, list[float]]:
    """By GPUs: how much slower than the best measured `choose`'s first row is that was measured, in each set."""
    found: dict[int, list[float]] = {}
    for name, runs in PLAYBOOK["rows"].items():
        model = Transformer(**PLAYBOOK["shared"], **PLAYBOOK["models"][name])
        for gpus in sorted({run[0] for run in runs}):
            ran: dict[tuple, float] = {}
            for _, tp, stages, dp, size, _, took, _, stalled in (run for run in runs if run[0] == gpus and run[1] <= 8):
                if stalls or not stalled:
                    ran[tp, stages, dp, size] = min(took, ran.get((tp, stages, dp, size), took))
            how = {"microbatch": (1, 2, 4, 8, 16, 32), "schedules": ["1F1B"]}
            for row in lab.choose(model, machine, gpus, 256, **how).rows if len(ran) > 1 else ():
                p = row.plan
                if p.zero != 3 and (took := ran.get((p.layout.tp, p.layout.pp, p.layout.dp, p.microbatch))):
                    found.setdefault(gpus, []).append(took / min(ran.values()) - 1)
                    break
    return found


@pytest.mark.long
def test_the_first_row_is_near_the_best_of_the_playbooks_sets():
    few = [loss for gpus, each in regrets(TOLD, stalls=False).items() if gpus <= 64 for loss in each]
    assert len(few) >= 12 and statistics.median(few) < 0.03
