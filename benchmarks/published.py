"""Compare measurements that others published with what the course's own functions predict, in results/published.json.

`python benchmarks/published.py` takes the rows of published_rows.json, which were chosen before anything was computed,
and writes for each the prediction, its error, and the error of the bubble formula alone. It takes half a minute on one
core. Each group of rows is a function here. A group's entry in that file tells what was fitted, and to which row.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import records

import pplab as pp
from pplab import lab
from pplab.lab import Layout, Machine, State, Transformer, formulas
from pplab.runtime.pool import versions

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "published_rows.json"
OUT = ROOT / "results" / "published.json"
GIB = 2**30
HALF = State(2, 2, 12)  # gradients of two bytes
DGX_A100 = Machine(8, pp.Link(5e-6, 300e9), pp.Link(10e-6, 25e9), flops=160e12, memory=80e9)
DGX_H100 = Machine(8, pp.Link(5e-6, 450e9), pp.Link(10e-6, 50e9), flops=400e12, memory=80e9)
FREE = Machine(8, pp.Link(), pp.Link(), flops=100e12, memory=80e9)  # only shares matter
Found = tuple[float, float | None]  # our prediction, and the bubble formula's


def busy_share(P: int, M: int, V: int = 1) -> float:
    """The share of all rank-time that the bubble leaves."""
    return 1 - formulas.bubble_fraction(P, M, V)


def steps_from_stages(r: Any) -> Found:
    """A step from the times of its ranks."""
    F, B, M = r.forward_ms, r.backward_ms, r.num_microbatches
    rows = pp.build("1F1B", num_ranks=len(F), num_microbatches=M)
    makespan = pp.simulate(rows, pp.Costs(F, [b / 2 for b in B], [b / 2 for b in B])).makespan
    return makespan / 1e3, (M + len(F) - 1) * statistics.mean(map(sum, zip(F, B, strict=True))) / 1e3


@cache
def _even(layers: int, width: int, sequence: int, vocabulary: int, heads: int, P: int, M: int, cut: tuple = ()) -> Any:
    model = Transformer(layers, width, sequence, heads=heads, vocabulary=vocabulary)
    return lab.plan(model, FREE, Layout(pp=P), M, cut=cut or None, state=HALF)


def cut_against_even(r: Any) -> Found:
    """How much faster a step is with layers moved off the last stage."""
    even, moved = (_even(32, 3072, r.sequence, r.vocabulary, 24, 8, 128, cut) for cut in ((), tuple(r.cut)))
    return even.step_s / moved.step_s, 1


def utilisation(r: Any) -> Found:
    """Model FLOP utilisation with a vocabulary over that with 32k."""
    each = []
    for vocabulary in (r.vocabulary, 32 * 1024):
        step = _even(r.layers, r.width, r.sequence, vocabulary, r.heads, r.num_ranks, r.num_microbatches).step_s
        weights = 12 * r.layers * r.width**2 + vocabulary * r.width
        each.append((6 * weights + 12 * r.layers * r.width * r.sequence) / step)
    return each[0] / each[1], 1


def peak(r: Any) -> tuple[float, None]:
    """The fullest rank's gibibytes, layers spread evenly."""
    found = _even(r.layers, r.width, r.sequence, r.vocabulary, r.heads, r.num_ranks, r.num_microbatches)
    return found.memory_bytes / GIB, None


def replicas(r: Any) -> Found:
    """More replicas, and so fewer microbatches each."""
    more, few = (busy_share(r.num_ranks, M) for M in r.num_microbatches)
    return more / few, more / few


def sharded(r: Any) -> Found:
    """Twice the GPUs, where gathers take longer than the work. Each does half of the work, but receives as much."""
    few, more = (formulas.sharded_step(1, work, 2 * work, 10, 10) for work in r.sequences_per_gpu)
    return few and more / few, r.gpus[0] / r.gpus[1]


def fitted(reaches: Callable[[float], float], published: float) -> float:
    """The FLOP/s of a GPU with which a plan reaches the published FLOP/s, of the first row in two groups."""
    low, high = published, 3 * published
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) > published else (middle, high)
    return low


def _achieved(r: Any, flops: float) -> float:
    """FLOP/s per GPU as the paper counts them, with whole attention, and everything computed twice forward."""
    model = Transformer(r.layers, r.width, r.sequence, heads=r.heads, vocabulary=r.vocabulary)
    machine = replace(DGX_A100, flops=flops)
    found = lab.plan(model, machine, Layout(r.tp, r.pp, r.dp), r.batch, recompute=True, state=HALF)
    s, h = r.sequence, r.width
    counted = 96 * r.batch * s * r.layers * h * h * (1 + s / (6 * h) + r.vocabulary / (16 * r.layers * h))
    return counted / found.step_s / (r.tp * r.pp * r.dp)


SMALLEST = SimpleNamespace(
    layers=24, width=2304, heads=24, vocabulary=51200, sequence=2048, tp=1, pp=1, dp=32, batch=512
)


@cache
def _a100() -> float:
    return fitted(lambda flops: _achieved(SMALLEST, flops), 137e12)


def sizes(r: Any) -> Found:
    """FLOP/s per GPU of a larger model on more GPUs, over those of the smallest."""
    return _achieved(r, _a100()) / 137e12, busy_share(r.pp, r.batch // r.dp)


@cache
def _rates() -> dict:
    """Bubble rates of the zero-bubble paper's rows, simulated once in some minutes."""
    rows = json.loads((ROOT / "results" / "zero_bubble_table.json").read_text())["parts"][0]["rows"]
    return {(row["times_ms"]["forward"], row["num_microbatches"]): row["span_bubble"] for row in rows}


def zero_bubble(r: Any) -> Found:
    """ZB-1P's or ZB-2P's throughput over 1F1B's, at the paper's profiled times, span against span."""
    rates, ramp = _rates()[r.F_I_W_latency_ms[0], r.num_microbatches], busy_share(r.num_ranks, r.num_microbatches)
    left, name = (1 / 3, "ZB-1P") if r.id.endswith("ZB-1p") else (0, "ZB-2P")
    return (1 - rates[name]) / (1 - rates["1F1B"]), 1 / ramp / (1 + left * (1 / ramp - 1))


def interleaved(r: Any) -> Found:
    """Interleaved 1F1B's throughput over 1F1B's, at the paper's profiled times."""
    (F, I, W, latency), P, M, V = r.F_I_W_latency_ms, r.num_ranks, r.num_microbatches, r.stages_per_rank  # noqa: E741
    costs = pp.Costs(F, I, W, latency=latency)
    plain = pp.simulate(pp.build("1F1B", num_ranks=P, num_microbatches=M), costs).makespan
    rows = pp.build("Interleaved1F1B", num_ranks=P, num_microbatches=M, stages_per_rank=V)
    return plain / pp.simulate(rows, costs.finer(V)).makespan, busy_share(P, M, V) / busy_share(P, M)


def peak_with_scores(r: Any) -> tuple[float, None]:
    """The fullest rank's gibibytes, with attention's scores kept. A rank at an end lacks its last layer."""
    model = Transformer(r.layers, r.width, r.sequence, heads=r.heads, vocabulary=51200, keeps_scores=True)
    stages, options = r.num_ranks * r.stages_per_rank, {}
    cut = [(r.layers + 2) // stages] * stages
    cut[0], cut[-1] = cut[0] - 1, cut[-1] - 1
    if r.stages_per_rank > 1:
        options = {"schedule": "Interleaved1F1B", "stages_per_rank": r.stages_per_rank}
    batch = r.num_microbatches * r.microbatch
    return lab.plan(
        model, FREE, Layout(pp=r.num_ranks), batch, r.microbatch, cut=cut, **options
    ).memory_bytes / GIB, None


def _llama(layers: int, width: int, heads: int, mlp_width: int, sequence: int) -> Transformer:
    return Transformer(layers, width, sequence, 2, heads, 8, mlp_width, True, 128256)


@cache
def _fine_tuned(tp: int, pq: int, dp: int, flops: float, machine: Machine = DGX_H100) -> float:
    """FLOP/s per GPU of the 70 billion on 32 GPUs, whose backwards compute attention's products again."""
    model = _llama(80, 8192, 64, 28672, 4096)
    options = {"schedule": "Interleaved1F1B", "stages_per_rank": 5, "shard_optimizer": True, "state": HALF}
    machine = replace(machine, flops=flops)
    found = lab.plan(model, machine, Layout(tp, pq, dp), 32, recompute=["core_attn"], **options)
    return 3 * 32 * (80 * model.layer_flops(1) + model.head_flops(1)) / found.step_s / 32


@cache
def _h100() -> float:
    return fitted(lambda flops: _fine_tuned(4, 4, 2, flops), 704e12)


def axes(r: Any) -> Found:
    """FLOP/s per GPU of a layout over those of TP 4, PP 4, DP 2."""
    bubble = busy_share(r.pp, 32 // r.dp, 5) / busy_share(4, 16, 5)
    return _fine_tuned(r.tp, r.pp, r.dp, _h100()) / 704e12, bubble


def larger_batch(r: Any) -> Found:
    """More microbatches, all else equal."""
    many, few = (busy_share(r.num_ranks, M, r.stages_per_rank) for M in r.num_microbatches)
    return many / few, many / few


@cache
def _405b(V: int) -> Any:
    cut = [15, *[16] * 6, 15] if V == 1 else [7, *[8] * 14, 7]  # torchtitan's at that commit
    options = {"schedule": "Interleaved1F1B", "stages_per_rank": V} if V > 1 else {}
    model = _llama(126, 16384, 128, 53248, 8192)
    return lab.plan(model, DGX_H100, Layout(8, 8, 8), 256, 4, cut=cut, recompute=True, state=State(4, 4, 8), **options)


def interleaved_405b(r: Any) -> Found:
    """Interleaved 1F1B's throughput over 1F1B's."""
    return _405b(1).step_s / _405b(2).step_s, busy_share(8, 8, 2) / busy_share(8, 8)


def interleaved_405b_holds(r: Any) -> tuple[float, None]:
    """What interleaved 1F1B holds over what 1F1B does."""
    return _405b(2).memory_bytes / _405b(1).memory_bytes, None


def shards(r: Any) -> tuple[float, None]:
    """Gibibytes of state, over few ranks less over many: float32 weights, gradients and moments, all in shards."""
    few, many = (State(4, 4, 8).bytes() / n for n in r.ranks)
    return (few - many) * lab.Case().model.parameters / GIB, None


def all_reduced(r: Any) -> tuple[float, None]:
    """Microseconds that a sum in a box takes."""
    return 1e6 * formulas.ring_all_reduce_time(r.num_ranks, r.bytes, 5e-6, 450e9), None


def ringed(r: Any) -> tuple[float, None]:
    """Milliseconds that a ring takes, in a box or over boxes that it fills."""
    machine = Machine(8, pp.Link(5e-6, 450e9), pp.Link(5e-6, 50e9), flops=1, memory=1, ring=367.2e9, ports=8)
    link = machine.ring_link([range(r.num_ranks)])
    time = formulas.ring_all_reduce_time if r.what == "all-reduce" else formulas.ring_gather_time
    return 1e3 * time(r.num_ranks, r.bytes, link.latency, link.bandwidth), None


def layer(r: Any) -> tuple[float, None]:
    """The time of a layer in forwards: one, and two for the backward."""
    return (1 + 2 + 1) / (1 + 2) if r.of == "recompute" else 2.0, None


def recomputed(r: Any) -> Found:
    """A step with all layers recomputed over one with none."""
    model = Transformer(r.layers, r.width, r.sequence, heads=r.heads, vocabulary=r.vocabulary)
    stages, options = r.num_ranks * r.stages_per_rank, {}
    if r.stages_per_rank > 1:
        options = {"schedule": "Interleaved1F1B", "stages_per_rank": r.stages_per_rank}
    if r.batch % r.num_ranks or r.layers % stages:
        raise ValueError(f"{r.id}: {r.layers} layers over {stages} stages")
    plans = [lab.plan(model, DGX_A100, Layout(8, r.num_ranks), r.batch, recompute=x, **options) for x in (True, False)]
    return plans[0].step_s / plans[1].step_s, 1


# A group's name in charts and tables, and what predicts its rows.
PREDICT: dict[str, tuple[str, Callable[[Any], tuple[float, float | None]]]] = {
    "vocab-csv-step": ("step, from its ranks' times", steps_from_stages),
    "vocab-csv-cut": ("layers moved off the head", cut_against_even),
    "vocab-T5-vocabulary": ("larger vocabulary", utilisation),
    "vocab-T5-memory": ("memory, by vocabulary", peak),
    "narayanan-T2-replicas": ("more replicas", replicas),
    "narayanan-T2-zero3": ("ZeRO-3, twice the GPUs", sharded),
    "narayanan-T1-sizes": ("larger models, more GPUs", sizes),
    "zb-T4-ZB-1p": ("ZB-1P over 1F1B", zero_bubble),
    "zb-T4-ZB-2p": ("ZB-2P over 1F1B", zero_bubble),
    "zb-T4-1F1B-I": ("interleaved over 1F1B", interleaved),
    "zb-T4-memory": ("memory, scores kept", peak_with_scores),
    "bridge-sft70-axes": ("70B: PP or TP doubled", axes),
    "bridge-batch": ("DeepSeek-V3: larger batch", larger_batch),
    "torchtitan-405B": ("405B: interleaved over 1F1B", interleaved_405b),
    "torchtitan-405B-memory": ("405B: its memory", interleaved_405b_holds),
    "torchtitan-8B-shards": ("8B: shards of 8 and 128", shards),
    "h200-all-reduce": ("all-reduce by the switch", all_reduced),
    "h200-ring": ("rings, in and over boxes", ringed),
    "korthikanti-layer": ("a layer under TP 8", layer),
    "korthikanti-T5": ("everything recomputed", recomputed),
}


def computed(rows: Sequence[dict]) -> list[dict]:
    """Each row with its prediction, our error and the bubble formula's, as shares of what was measured."""
    made = []
    for row in rows:
        ours, formula = PREDICT[row["group"]][1](SimpleNamespace(id=row["id"], **row["inputs"]))
        found = {key: row[key] for key in ("id", "group", "measured", "unit")} | {"predicted": float(f"{ours:.5g}")}
        found["error"] = round(ours / row["measured"] - 1, 4)
        found["bubble_error"] = None if formula is None else round(formula / row["measured"] - 1, 4)
        made.append(found)
    return made


def main() -> None:
    started, asked = time.monotonic(), json.loads(ROWS.read_text())
    rows = computed(asked["rows"])
    groups = [{"label": PREDICT[each["name"]][0]} | each for each in asked["groups"]]
    parts = {"published": rows, "groups": groups}
    took = round(time.monotonic() - started)
    done = [{"name": name, "state": "done", "seconds": took, "rows": made} for name, made in parts.items()]
    records.write(OUT, done, device="simulated", command="python benchmarks/published.py", versions=versions())
    for group in groups:
        errors = [row["error"] for row in rows if row["group"] == group["name"]]
        print(f"{group['label']:30} {len(errors):3} rows, {statistics.median(errors):+.1%}")


if __name__ == "__main__":
    main()
