"""Profiler traces: summaries of constructed traces whose answer is known, and traces of real ranks of both engines."""

from __future__ import annotations

import functools
import json

import pytest
import torch

import pplab as pp
from pplab import lab
from pplab.lab import models
from pplab.lab.measuring.profiles import PHASES, ProfileReport, profile_table, summarise
from pplab.runtime import Pool


def span(name: str, start: float, end: float, category: str = "user_annotation") -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start * 1e3, "dur": (end - start) * 1e3}


def memory(at: float, change: int, device: int = 0) -> dict:
    return {"ph": "i", "name": "[memory]", "ts": at * 1e3, "args": {"Bytes": change, "Device Type": device}}


HOST = [
    span("pp.step", 0, 100),
    span("pp.warmup", 0, 30),
    span("pp.forward", 0, 30),
    span("pp.steady", 30, 60),
    span("pp.backward", 40, 60),
    span("pp.drain", 60, 80),
    span("pp.backward", 60, 80),
    span("pp.optimizer_step", 90, 100),
    span("gloo:recv", 20, 40),
    span("gloo:send", 30, 35),  # at the same time as a receive: counted once
    span("aten::mm", 0, 100, "cpu_op"),
]


def test_a_constructed_trace():
    found = summarise({"traceEvents": HOST}, rank=3)
    assert (found.rank, found.step_ms, found.compute_ms, found.communication_ms) == (3, 100, 80, 20)
    assert found.overlap_ms == 10
    assert (found.utilisation, found.communication_share, found.overlap_share) == (0.8, 0.2, 0.5)
    assert found.phases_ms == {"warmup": 30, "steady": 30, "drain": 20}
    assert found.peak_bytes is None


def test_steps_are_averaged():
    again = [{**event, "ts": event["ts"] + 200e3} for event in HOST]
    outside = [span("pp.forward", 120, 180)]  # between the steps: of no step
    assert summarise({"traceEvents": HOST + again + outside}) == summarise({"traceEvents": HOST})


def test_on_a_gpu_kernels_count():
    kernels = [
        span("gemm", 10, 50, "kernel"),
        span("ncclDevKernel_SendRecv", 40, 70, "kernel"),
        span("Memcpy DtoH", 70, 80, "gpu_memcpy"),
        span("Memcpy DtoD (Device -> Device)", 60, 65, "gpu_memcpy"),
    ]
    found = summarise({"traceEvents": HOST + kernels})
    assert (found.compute_ms, found.communication_ms, found.overlap_ms) == (45, 40, 15)
    assert found.phases_ms == {"warmup": 30, "steady": 30, "drain": 20}  # nothing tells the device's


def test_on_a_gpu_phases_are_the_devices_and_the_first_step_is_left_out():
    """The host launches a phase before the device is there, on two streams at once."""

    def step(at: float, late: float) -> list[dict]:
        shifted = [{**event, "ts": event["ts"] + at * 1e3} for event in HOST]
        on_device = [("warmup", 10, 40), ("warmup", 20, 45), ("steady", 45, 85), ("drain", 85, 95)]
        spans = [span(f"pp.{name}", at + a + late, at + b + late, "gpu_user_annotation") for name, a, b in on_device]
        return [*shifted, *spans, span("gemm", at + 10 + late, at + 50 + late, "kernel")]

    found = summarise({"traceEvents": [*step(0, 5), *step(200, 0)]})
    assert found.phases_ms == pytest.approx({"warmup": 35, "steady": 40, "drain": 10})
    assert (found.step_ms, found.compute_ms) == (100, 40)
    slow = [{**event, "dur": event["dur"] * 1.5} if event["name"] == "pp.step" else event for event in step(0, 5)]
    assert summarise({"traceEvents": [*step(200, 0), *slow]}) == found  # whatever the order in the file


def test_memory_is_a_running_sum():
    changes = [memory(-5, 999), memory(1, 100), memory(2, 300), memory(3, -300), memory(4, 50)]
    assert summarise({"traceEvents": HOST + changes}, resident_bytes=1000).peak_bytes == 1400
    assert summarise({"traceEvents": HOST + changes + [memory(5, 7, device=1)]}).peak_bytes == 7


def test_a_trace_without_steps_is_refused(tmp_path):
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": HOST[1:]}))
    with pytest.raises(ValueError, match=r"no pp.step span among the trace's 10 events.*lab.Profile"):
        summarise(path)


def test_ranks_profiled_share_a_line():
    ranks = tuple(summarise({"traceEvents": HOST}, rank, resident_bytes=0) for rank in range(2))
    line = profile_table([ProfileReport("1F1B", ranks)]).splitlines()[1]
    assert line.split() == ["1F1B", "100.0", "80.0%", "20.0%", "50.0%", "0.0", "MB"]


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
    profile = run.extras["profile"]
    assert [rank.path for rank in profile.ranks] == [str(folder / f"rank{rank}.json.gz") for rank in range(2)]
    for rank, found in enumerate(profile.ranks):
        assert found == summarise(found.path, rank, resident_bytes=found.peak_bytes - summarise(found.path).peak_bytes)
        ran = [
            span for t in run.timelines for span in t.spans_of(rank) if len(span.action) == 3
        ]  # pairs have waits inside
        busy = sum(span.end - span.start for span in ran) / len(run.timelines)
        assert 0.6 * busy < found.compute_ms < found.step_ms  # spans lie inside the timeline's; the optimizer adds
        assert 0 < found.communication_ms <= found.step_ms
        assert found.overlap_ms <= found.communication_ms
        assert all(found.phases_ms[phase] >= 0 for phase in PHASES)
        assert sum(found.phases_ms.values()) < found.step_ms
        weights = sum(
            p.numel() * 4 for stage in s.stages_of(rank) for p in gpt.build_stage(stage, s.num_stages).parameters()
        )
        assert found.peak_bytes > 4 * weights  # weights, gradients, two moments
    assert lab.run_to_dict(run)["profile"]["ranks"][1]["rank"] == 1
    assert name in str(profile)


@pytest.mark.slow
def test_nothing_is_recorded_unasked(pool):
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    run = pool.train(s, models.gpt(batch_size=8, num_layers=2, width=32, num_heads=2, source="sample"))
    assert run.extras == {} and "profile" not in lab.run_to_dict(run)
