"""Small work is slow: what a machine's `host`, `hbm` and `ring_over` bring, on runs that weren't fitted."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from math import log
from pathlib import Path
from types import SimpleNamespace

import pytest

import pplab as pp
from pplab import lab
from pplab.actions import B, F
from pplab.lab import Layout, Machine, Plan, State, Transformer, machine_of, plan, profiled
from pplab.lab.planning.choosing import _compared

ROOT = Path(__file__).parents[3]
PLAYBOOK = json.loads((ROOT / "benchmarks" / "playbook_rows.json").read_text())
MIXTURES = json.loads((ROOT / "benchmarks" / "mixture_rows.json").read_text())
H100 = machine_of("h100", 8, 50e9)
SUMS, GATHERS = (
    {int(nodes): speed for nodes, speed in PLAYBOOK[name].items() if nodes != "what"}
    for name in ("all_reduce", "all_gather")
)
# FLOP/s, host and latency are fitted; nanotron sends no gradients beside its work
FITTED = {"flops": 440e12, "host": 4.5e-3, "host_at": {1: 4.5e-3, 2: 8.5e-3, 4: 12.2e-3, 8: 19.7e-3}}
NANOTRON = {"hbm": 0.9 * 3.35e12, "ring_over": SUMS, "gather_over": GATHERS, "overlaps": False}
TOLD = replace(H100, between=pp.Link(50e-6, 50e9), **FITTED, **NANOTRON)


def nanotrons_cut(model: Transformer, pp: int) -> list[int]:
    """Blocks go on to the next stage once their weights are more than the stages so far should have."""
    blocks = [0] + [model.layer_parameters] * model.num_layers + [0, model.table_parameters, 0]
    cut, stage, so_far = [0] * pp, 0, 0
    for at, weights in enumerate(blocks):
        so_far += weights
        cut[stage] += 1 <= at <= model.num_layers
        stage += stage < pp - 1 and so_far > sum(blocks) * (stage + 1) / pp
    return cut


def planned(machine: Machine, wanted: Callable[[SimpleNamespace], bool]) -> list[tuple[SimpleNamespace, Plan]]:
    """The runs that are wanted and didn't stall, and their plans; of each, whether numbers were fitted to it."""
    found = []
    for name, rows in PLAYBOOK["rows"].items():
        model = Transformer(**PLAYBOOK["shared"], **PLAYBOOK["models"][name])
        for row in rows:
            run = SimpleNamespace(**dict(zip(PLAYBOOK["columns"], row, strict=True)), name=name)
            run.fitted = name in ("1B", "8B") and run.gpus <= 16
            if not run.stalled and wanted(run):
                layout, how = Layout(run.tp, run.pp, run.dp), {"shard_optimizer": bool(run.zero)}
                cut = nanotrons_cut(model, run.pp)
                found.append((run, plan(model, machine, layout, 256, run.microbatch, cut=cut, **how)))
    return found


def simple(run: SimpleNamespace) -> bool:
    return not run.fitted and 1 in (run.tp, run.pp)


def errors(machine: Machine) -> dict[int, list[float]]:
    """log(predicted / measured) by tensor degree: of runs with PP 1 or TP 1 that weren't fitted."""
    found: dict[int, list[float]] = {}
    for run, each in planned(machine, simple):
        found.setdefault(run.tp, []).append(log(each.step_s / run.step_s))
    return found


def off(each: list[float]) -> float:
    return statistics.median(map(abs, each))


def test_runs_that_werent_fitted_are_within_a_tenth():
    told, plain = errors(TOLD), errors(H100)
    assert sum(map(len, PLAYBOOK["rows"].values())) == 1738
    assert [len(told[tp]) for tp in (1, 2, 4, 8, 16, 32)] == [121, 45, 71, 83, 89, 61]
    assert max(off(told[tp]) for tp in (1, 2, 4, 8)) < 0.08 and off(told[16]) < 0.08 and off(told[32]) < 0.19
    assert off(told[1] + told[2] + told[4] + told[8]) < 0.07
    assert off(plain[1] + plain[2] + plain[4] + plain[8]) > 0.13 and statistics.median(plain[8]) < -0.2
    assert off(plain[16]) > 0.4 and off(plain[32]) > 0.6


def test_what_was_fitted_is_what_the_fitted_runs_say():
    took: dict[int, list[float]] = {}
    for run, each in planned(TOLD, lambda run: run.fitted and run.gpus == 16 and run.tp > 1 < run.pp):
        if run.microbatch == 1:
            took.setdefault(run.tp, []).append(run.step_s / (256 // run.dp + run.pp - 1) / max(each.layers))
    assert {tp: statistics.median(each) for tp, each in took.items()} == pytest.approx(
        {tp: host for tp, host in TOLD.host_at.items() if tp > 1}, rel=0.01
    )
    assert len(planned(TOLD, lambda run: run.fitted)) == 131
    far = [log(each.step_s / run.step_s) for run, each in planned(TOLD, lambda run: run.fitted and run.tp == 16)]
    assert len(far) == 5 and abs(statistics.median(far)) < 0.02


def test_intervals_hold_four_in_five():
    """Up to 64 GPUs, and beyond, where `Unsure.many` is what the runs of 1B and 8B ask for."""
    held: dict[tuple, list[tuple[bool, float]]] = {}
    for run, each in planned(TOLD, lambda run: simple(run) and run.tp <= 8):
        (row,) = _compared([each], lab.Unsure(), lambda said: None)
        inside, width = row.low_s <= run.step_s <= row.high_s, (row.high_s - row.low_s) / 2 / each.step_s
        held.setdefault((run.gpus > 64, run.gpus > 64 and run.name in ("3B", "80B")), []).append((inside, width))
    few, seen, unseen = (
        (len(each), statistics.mean(inside for inside, _ in each), statistics.median(width for _, width in each))
        for each in (held[False, False], held[True, False], held[True, True])
    )
    assert (few[0], seen[0], unseen[0]) == (157, 103, 60) and max(few[2], seen[2], unseen[2]) < 0.2
    assert few[1] > 0.87 and seen[1] > 0.78 and unseen[1] > 0.87


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
    far = replace(plain, host=layer, host_at={2: 30 * layer})
    took = [far.launching(Layout(*each)) / layer for each in ((2, 8), (1, 16), (2, 1, 8), (2, 4))]
    assert took == pytest.approx([30, 1, 1, 1])
    frozen = plan(model, replace(plain, host=30 * layer), Layout(pp=4), 8, state=State(2, 0, 0)).costs
    assert frozen.of(B, 0) == pytest.approx(2 * 10 * layer)


def test_a_ring_over_nodes_is_as_fast_as_measured_and_as_its_ports():
    assert TOLD.ring_link([range(8)]).bandwidth == pytest.approx(367e9)
    assert TOLD.ring_link([range(32)]) == pp.Link(50e-6, 160e9)
    assert TOLD.ring_link([range(32)], gathers=True) == pp.Link(50e-6, 119e9)
    assert replace(TOLD, gather_over={}).ring_link([range(32)], gathers=True) == pp.Link(50e-6, 160e9)
    assert TOLD.ring_link([range(0, 32, 4)]) == pp.Link(50e-6, 100e9)  # two of each node
    assert TOLD.ring_link([range(48)]) == pp.Link(50e-6, 160e9)  # of six nodes: as of four
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
    machine, _ = profiled(model, replace(H100, host_at={1: 1}), {size: costs[size] for size in (2, 64)})
    assert 1.5e-3 < machine.host < 2e-3 and 2.5e12 < machine.hbm < 3.35e12 and 380e12 < machine.flops < 450e12
    for size, own in costs.items():
        planned = plan(model, machine, Layout(pp=2), 2 * size, size)
        ratio = (planned.costs.of(F, 0) + planned.costs.of(B, 0)) * 1e3 / (own.of(F, 0) + own.of(B, 0))
        assert 0.85 < ratio < 1.2 and planned.bound == ("host" if size <= 16 else "computing")
    with pytest.raises(ValueError, match="they waited for the host both times"):
        profiled(model, H100, {size: costs[size] for size in (2, 8)})
    assert not machine.host_at and profiled(model, TOLD, costs[64], 64)[0].host == TOLD.host


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
    """The FLOP/s don't decide it."""
    for stalls, flops, most in ((False, 400e12, 0.04), (False, 440e12, 0.04), (True, 480e12, 0.11)):
        found = regrets(replace(TOLD, flops=flops), stalls)
        few, many = ([loss for gpus, each in found.items() if (gpus > 64) == far for loss in each] for far in (0, 1))
        assert len(few) == 13 and statistics.median(few) < 0.03
        assert len(many) == 11 + stalls and statistics.median(many) < most


def mixtures(
    told: bool, fitted: Callable[[SimpleNamespace], bool], fits: list[list], near: list[list]
) -> list[tuple[str, float]]:
    """Each mixture's name and log(predicted / measured), with its release's share of a peak, or the last before."""

    def ratio(run: SimpleNamespace, share: float) -> float:
        peak, hbm, inside, between = MIXTURES["gpus"][run.gpu]
        model, experts = Transformer(80, 8192, run.sequence, 2, 64, 8, 28672, True, 128256), None
        if run.model in MIXTURES["models"]:
            model, experts = lab.read_config(MIXTURES["models"][run.model], run.sequence)
            experts = replace(experts, gpus=run.ep, once_per_node=True, whole=run.tp > 1)
        machine = Machine(
            run.per_node, pp.Link(5e-6, inside), pp.Link(10e-6, between), share * peak, 1e12, ports=run.per_node
        )
        if run.precision != "BF16":
            machine = replace(machine, flops=2 * machine.flops, flops_bf16=machine.flops)
        if told:
            machine = replace(machine, hbm=0.9 * hbm, host=8.8e-3 * (experts is not None and not run.graphs))
        deep = run.pp > 1 < run.stages_per_rank
        how = {"schedule": "Interleaved1F1B", "stages_per_rank": run.stages_per_rank} if deep else {}
        how["recompute"] = run.again or False
        layout, how["experts"], how["shard_optimizer"] = Layout(run.tp, run.pp, run.dp, cp=run.cp), experts, True
        took = run.batch * run.sequence / run.tokens_per_s_per_gpu / run.gpus
        return plan(model, machine, layout, run.batch, run.microbatch, **how).step_s / took

    shares: dict[str, float] = {}
    found = []
    for row in [*reversed(fits), *near]:
        run = SimpleNamespace(**dict(zip(MIXTURES["columns"], row, strict=True)))
        if fitted(run):
            low, high = 0.02, 1.5
            for _ in range(18):
                middle = (low + high) / 2
                low, high = (middle, high) if ratio(run, middle) > 1 else (low, middle)
            shares[run.release] = middle
        else:
            last = max(release for release in shares if release <= run.release)
            found.append((run.model, log(ratio(run, shares[last]))))
    return found


@pytest.mark.long
def test_mixtures_with_one_share_of_the_peak():
    """Fitted to the dense 70 billion of each release, and to DeepSeek-V3 on GB200; with recipes' graphs and modules."""
    dense, rows = MIXTURES["dense"], MIXTURES["rows"]
    base = [row for row in rows if row[1:3] == ["DeepSeekV3", "GB200"]]
    others = [row for row in rows if row not in base]
    on_dense, bare = (mixtures(told, lambda run: run.model == "LLAMA3_70B", dense, rows) for told in (True, False))
    on_mixture = mixtures(True, lambda run: (run.model, run.gpu) == ("DeepSeekV3", "GB200"), base, others)
    assert [len(each) for each in (on_dense, bare, on_mixture)] == [69, 69, 64]
    assert [round(100 * off([e for _, e in each])) for each in (on_dense, bare, on_mixture)] == [20, 43, 16]
    assert statistics.median(e for name, e in on_mixture if name == "GPT OSS 120B") < -0.4
    assert off([e for name, e in on_mixture if name != "GPT OSS 120B"]) < 0.12


def test_what_is_reserved_is_one_constant_or_the_copies_of_an_optimizers_step():
    """Where gradients have two bytes, the step's copies in float32 find no room in what activations left: the
    allocator has both, of all parameters of a rank (distrib_optimizer.py:1520 of their code)."""
    part = json.loads((ROOT / "results" / "published.json").read_text())["parts"][0]
    scores = [row for row in part["rows"] if row["group"] == "zb-T4-memory"]
    more = [off([(row["predicted"] + gib) / row["measured"] - 1 for row in scores]) for gib in (0, 1.9)]
    constant, copied = [], []
    for vocabulary, sequence, measured in MIXTURES["reserved"]["rows"]:
        model = Transformer(32, 3072, sequence, heads=24, vocabulary=vocabulary)
        held = plan(model, H100, Layout(pp=8), 128, state=State(2, 2, 12)).memory_bytes
        constant.append(held / 2**30 / measured - 1)
        copies = 4 * (4 * model.layer_parameters + model.table_parameters)
        copied.append((held - H100.reserved + copies) / 2**30 / measured - 1)
    assert len(scores) == len(constant) == 8 and max(map(abs, copied)) < 0.018
    assert [f"{100 * each:.1f}" for each in (*more, off(constant), off(copied))] == ["3.7", "2.1", "4.8", "0.7"]
