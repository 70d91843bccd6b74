"""What `make bench` records of a processor, and `make gpu` of a GPU: durations of stages, copies, predictions."""

from __future__ import annotations

import json
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
from stage_rows import copies_are_sane, stages_are_sane

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bench(monkeypatch):
    """benchmarks/bench.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench

    return bench


@pytest.mark.slow
def test_make_bench_records_what_cores_do(bench, tmp_path, monkeypatch, capsys):
    """On three cores: two ranks run without pace, and four don't."""
    import gpu_box
    import gpu_setting

    monkeypatch.setattr(gpu_box, "cores", lambda: 3)
    monkeypatch.setattr(gpu_box, "processor", lambda: "A Processor (R) 7")
    names = ("GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "DualPipeV")
    small = replace(gpu_setting.SIZES["small"], ranks=(2, 4), schedules=names)
    monkeypatch.setitem(gpu_setting.SIZES, "small", small)
    assert bench.main(["--quick", "--only", "cores", "--folder", str(tmp_path)]) == 0, capsys.readouterr().out
    (recording,) = results.load(tmp_path)
    assert recording.path.name == "a-processor-r-7-3-cores.json" and recording.title().startswith(
        "A Processor (R) 7, 3"
    )
    assert [part["name"] for part in recording.data["parts"]] == ["stages", "copies", "offload", "predicted", "cores"]
    assert {part["state"] for part in recording.data["parts"]} == {"done"} and recording.data["kind"] == "cpu"
    assert dict(records.not_run(recording)) == {
        "copies: pinned memory": "needs a GPU",
        "predicted: 4 ranks without pace": "there are 3 cores",
        "cores: 4 ranks without pace": "there are 3 cores",
    }
    stages_are_sane(recording.rows("stages"), {"fp32": ("core",)})
    assert [(row["memory"], row["ways"]) for row in recording.rows("copies")] == [
        ("pageable", ways) for ways in ("out", "back", "out and back")
    ]
    copies_are_sane(recording)
    (row,) = recording.rows("predicted")
    assert (row["measured"], row["num_ranks"], row["num_stages"], row["dtype"]) == ("ZB-H1", 2, 2, "fp32")
    assert [each["schedule"] for each in row["schedules"]] == ["ZB-H1", "GPipe", "1F1B"]
    for row in recording.rows("cores"):
        own = row["free"]
        assert row["makespan_ms"] >= row["predicted_makespan_ms"] > own["predicted_makespan_ms"] > 0
        assert own["makespan_ms"] > own["predicted_makespan_ms"] * 0.99 and 0 < own["bubble_fraction"] < 1
    assert {row["schedule"] for row in recording.rows("cores")} == set(names)
    shown = gpu_tables.tables(tmp_path)
    lengths = {"durations": 1, "stages": 2, "copies": 3, "offload": 1, "predicted": 3, "cores": 5, "not run": 3}
    assert {name: len(table) for name, table in shown.items()} == lengths


@pytest.fixture
def stages(bench):
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
    by_torch = {"F": 2, "B": 5, "I": 5}  # halves of two products are one; see above
    for kind, products in by_torch.items():
        weights = {"F": 1, "B": 2, "I": 1}[kind] * counted["W"]
        assert set(found[kind]) <= {weights, weights + products * attention}, kind


def test_the_halves_are_those_of_a_run(stages):
    """What is measured as I and W leaves the gradients of what is measured as B."""
    subject = stages.Subject(on_cpu(), 32, 16, 2, "fp32")
    for _, call in subject.round():
        call()
    both = zip(subject.whole.module.named_parameters(), subject.halves.module.parameters(), strict=True)
    for (name, whole), halves in both:
        assert torch.allclose(whole.grad, halves.grad, atol=1e-5), name
    assert not any((subject.halves.held, subject.halves.due, subject.whole.held))


def test_a_stage_that_has_no_room_is_left_out(stages, bench, monkeypatch):
    import gpu_setting

    setting = gpu_setting.Setting("cuda", 1, gpu_setting.SIZES["full"])
    card = SimpleNamespace(total_memory=0)
    monkeypatch.setattr(stages.door.cuda, "get_device_properties", lambda device: card)
    for gigabytes, most in ((24, 2**13), (80, 2**15), (141, 2**16)):
        card.total_memory = gigabytes * 10**9
        fits = [tokens for tokens in setting.size.tokens if not stages._no_room(setting, 4096, tokens)]
        assert max(fits) == most, gigabytes
        assert gigabytes > 80 or f"and the GPU has {gigabytes}" in stages._no_room(setting, 4096, 2**16)
        assert not stages._no_room(setting, 768, 2**16)


def test_long_forwards_end_a_width(stages, bench, monkeypatch):
    import gpu_setting

    row = {"ms": {"F": 5.0}}
    monkeypatch.setattr(stages, "_stage", lambda pool, width, *more: {**row, "width": width})
    size = replace(gpu_setting.SIZES["small"], longest_ms=4.0, widths=(16, 32))
    part = gpu_setting.Part("stages", [])
    stages.stages.run(gpu_setting.Setting("cpu", 2, size), part)
    assert [each["width"] for each in part.rows] == [16, 32]
    assert [each["why"] for each in part.left_out] == ["a forward takes 5 ms already"] * 2


def test_one_schedule_predicts_those_of_its_placement(bench):
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
    assert cells == ["768", "bf16", "1.90 to 2.10", *["1.00 to 1.00"] * 3, "1,024 tokens"]
    assert statistics.mean(row["ratios"]["B/F"][1] for row in rows[1:]) == 2.0


@pytest.mark.parametrize("part", ["stages", "copies", "offload", "predicted", "cores"])
def test_rows_without_what_the_tables_show_are_no_recording(tmp_path, part):
    rows = [{"name": part, "state": "done", "seconds": 0, "rows": [{"figure": 1}]}]
    records.write(tmp_path / "a.json", rows, device="A", command="", versions={})
    assert f"a row of {part} has no " in records.problems(json.loads((tmp_path / "a.json").read_text()))[0]
    with pytest.raises(ValueError, match=f"a row of {part} has no "):
        records.load(tmp_path)
