"""What `make bench` records of a processor, and `make gpu` of a GPU: durations of stages, predictions, runs."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gpu_tables
import pytest
import records
import torch
from torch.utils.flop_counter import FlopCounterMode

import pplab as pp
from pplab.lab import results
from stage_rows import stages_are_sane

ROOT = Path(__file__).parents[3]


@pytest.fixture
def gpu(monkeypatch):
    """benchmarks/gpu.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    return gpu


@pytest.mark.slow
def test_make_bench_records_what_cores_do(gpu, tmp_path, monkeypatch, capsys):
    """On three cores: two ranks run without pace, and four don't."""
    import gpu_box

    monkeypatch.setattr(gpu_box, "cores", lambda: 3)
    monkeypatch.setattr(gpu_box, "processor", lambda: "A Processor (R) 7")
    names = ("GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "DualPipeV")
    monkeypatch.setitem(gpu.SIZES, "cores", replace(gpu.SIZES["small"], ranks=(2, 4), schedules=names))
    (command,) = re.findall(r"benchmarks/gpu\.py (--device cpu .*)", (ROOT / "Makefile").read_text())
    assert gpu.main([*command.split(), "--folder", str(tmp_path)]) == 0, capsys.readouterr().out
    (recording,) = results.load(tmp_path)
    assert recording.path.name == "a-processor-r-7-3-cores.json" and recording.title().startswith(
        "A Processor (R) 7, 3"
    )
    states = {part["name"]: part["state"] for part in recording.data["parts"]}
    assert [name for name, state in states.items() if state == "done"] == ["stages", "predicted", "runs"]
    assert {state for state in states.values()} == {"done", "not run"} and recording.data["kind"] == "cpu"
    left_out = dict(records.not_run(recording))
    assert left_out["predicted: 4 ranks"] == left_out["runs: 4 ranks"] == "there are 3 cores"
    assert left_out["copies: all of it"] == "only stages, predicted, runs was asked for"
    stages_are_sane(recording.rows("stages"), {"fp32": ("core",)})
    (row,) = recording.rows("predicted")
    assert (row["measured"], row["num_ranks"], row["num_stages"], row["dtype"]) == ("ZB-H1", 2, 2, "fp32")
    assert [each["schedule"] for each in row["schedules"]] == ["ZB-H1", "GPipe", "1F1B"]
    for row in recording.rows("runs"):
        assert row["sharing"] == "cores" and row["dtype"] == "fp32"
        assert row["measured"]["makespan_ms"] > row["predicted"]["makespan_ms"] * 0.99 > 0
    assert {row["schedule"] for row in recording.rows("runs")} == set(names)
    shown = gpu_tables.tables(tmp_path)
    lengths = {"durations": 1, "stages": 2, "predicted": 3, "runs": 5, "not run": len(left_out)}
    assert {name: len(table) for name, table in shown.items()} == lengths


@pytest.fixture
def stages(gpu):
    """benchmarks/gpu_stages.py."""
    import gpu_stages

    return gpu_stages


def on_cpu() -> SimpleNamespace:
    return SimpleNamespace(device=torch.device("cpu"))


def test_operations_are_those_that_run(stages):
    """torch counts the same, but for attention: it counts both halves of what the mask leaves one of, and its forward,
    which the backward computes again."""
    subject = stages.Subject(on_cpu(), 32, 16, 2, "fp32")
    found = {}
    for kind, call in subject.round():
        with FlopCounterMode(display=False) as counter:
            call()
        found.setdefault(kind, []).append(counter.get_total_flops())
    counted = stages.counted_flops(32, 16, 2)
    attention = counted["F"] - counted["W"]  # both of the products, half of each
    assert attention == 2 * 2 * 2 * 16 * 16 * 32 and found["W"] == [counted["W"]]
    assert found["autograd's B"] == found["B"] and found["torch's W"] == found["W"]
    by_torch = {"F": 2, "B": 5, "I": 5}  # halves of two products are one; see above
    for kind, products in by_torch.items():
        weights = {"F": 1, "B": 2, "I": 1}[kind] * counted["W"]
        assert set(found[kind]) <= {weights, weights + products * attention}, kind


@pytest.mark.parametrize("dtype, near", [("fp32", 1e-5), ("bf16", 0.05)])
def test_the_halves_are_those_of_a_run(stages, dtype, near):
    """What is measured as I and W leaves the gradients of what is measured as B, and so do autograd and PyTorch's
    halves, one after the other."""
    stages._modules.cache_clear()  # whose gradients other tests have added to
    subject = stages.Subject(on_cpu(), 32, 16, 2, dtype)
    found = {}
    for kind, call in subject.round():
        call()
        if kind in ("autograd's B", "torch's W"):
            found[kind] = [parameter.grad.clone() for parameter in subject.module.parameters()]
    assert (subject.whole.deferred is None) == (dtype == "fp32")  # in mixed precision B isn't autograd's
    both = zip(
        subject.whole.module.named_parameters(), subject.halves.module.parameters(), *found.values(), strict=True
    )
    for (name, whole), halves, by_autograd, twice in both:
        for other in (halves.grad, by_autograd, twice - by_autograd):
            assert torch.allclose(whole.grad, other, atol=near * whole.grad.abs().max()), name
    assert not any((subject.halves.held, subject.halves.due, subject.whole.held))


def test_long_forwards_end_a_width(stages, monkeypatch):
    import gpu_setting

    row = {"ms": {"F": 5.0}}
    monkeypatch.setattr(stages, "_stage", lambda pool, width, *more: {**row, "width": width})
    size = replace(gpu_setting.SIZES["small"], longest_ms=4.0, widths=(16, 32))
    part = gpu_setting.Part("stages", [])
    stages.stages.run(gpu_setting.Setting("cpu", 2, size), part)
    assert [each["width"] for each in part.rows] == [16, 32]
    assert [each["why"] for each in part.left_out] == ["a forward takes 5 ms already"] * 2


def test_one_schedule_predicts_those_of_its_placement(gpu):
    from gpu_ranks import _alike

    names = ("GPipe", "DualPipeV", "1F1B", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble", "InterleavedZeroBubble")
    found = _alike([pp.build(name, num_ranks=2, num_microbatches=4) for name in names])
    assert {first.name: [each.name for each in others] for first, others in found} == {
        "ZB-H1": ["GPipe", "1F1B"],
        "ZBVZeroBubble": ["DualPipeV"],
        "InterleavedZeroBubble": ["Interleaved1F1B"],
    }


def test_what_launches_pace_counts_for_no_assumption(tmp_path):
    ratios = [{"B/F": [1, b, 3], "(I+W)/B": [1, 1, 1], "I/F": [1, 1, 1], "W/F": [1, 1, 1]} for b in (1.0, 1.9, 2.1)]
    rows = [
        {"width": 768, "dtype": "bf16", "tokens": 1024 * 2**i, "ratios": each, "pace": "GPU" if i else "launches"}
        for i, each in enumerate(ratios)
    ]
    more = {name: dict.fromkeys("FBIW", 1.0) for name in ("ms", "flops", "tflops")} | {"layers": 2, "rounds": 3}
    part = {"name": "stages", "state": "done", "seconds": 0, "rows": [{**row, **more} for row in rows]}
    records.write(tmp_path / "a.json", [part], device="A", command="", versions={})
    ((_, *cells),) = gpu_tables.tables(tmp_path)["durations"]
    assert cells == ["768", "bf16", "1.90 to 2.10", *["1.00 to 1.00"] * 3, "-", "-", "1,024 tokens"]
    assert statistics.mean(row["ratios"]["B/F"][1] for row in rows[1:]) == 2.0


@pytest.mark.parametrize("part", ["stages", "copies", "predicted", "runs", "versus"])
def test_rows_without_what_the_tables_show_are_no_recording(tmp_path, part):
    rows = [{"name": part, "state": "done", "seconds": 0, "rows": [{"figure": 1}]}]
    records.write(tmp_path / "a.json", rows, device="A", command="", versions={})
    with pytest.raises(ValueError, match=f"a.json is damaged.*records in its part {part}; found KeyError"):
        gpu_tables.tables(tmp_path)
