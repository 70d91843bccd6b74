"""Which of the published layouts the planner takes: the sets, the recording, and how they are judged."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import pplab as pp
from pplab import lab

ROOT = Path(__file__).parents[3]
ASKED = json.loads((ROOT / "benchmarks" / "chosen_rows.json").read_text())
PARTS = {part["name"]: part["rows"] for part in json.loads((ROOT / "results" / "chosen.json").read_text())["parts"]}
SAMPLE = (
    "13B 2k, 32 GPUs",
    "1.3B, 8 V100",
    "82 x 13312",
    "llama3-70b, 12 layers, 32768",
    "174.6B, 384",
    "70B fine-tuned",
)


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("chosen", ROOT / "benchmarks" / "chosen.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["chosen"] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["chosen"]


def test_every_set_and_layout_is_recorded_whatever_was_chosen(benchmark):
    assert [row["set"] for row in PARTS["sets"]] == [one["name"] for one in ASKED["sets"]]
    assert len({one["name"] for one in ASKED["sets"]}) == len(ASKED["sets"]) == 72
    assert sum(len(one["rows"]) for one in ASKED["sets"]) == 1119
    assert len(PARTS["layouts"]) == sum(len(measured) for _, measured in benchmark.read()) == 1107
    sources = {source["name"]: source for source in ASKED["sources"]}
    assert {one["source"] for one in ASKED["sets"]} == {*sources} and len(sources) >= 5
    for source in sources.values():
        assert source["address"].startswith("https://") and source["left_out"] and source["copy"]


def test_layouts_have_their_sets_gpus_and_quotes_their_numbers():
    for one in ASKED["sets"]:
        at = {name: n for n, name in enumerate(one["columns"])}
        for row in one["rows"]:
            assert row[at["tp"]] * row[at["pp"]] * row[at["dp"]] * (row[at["cp"]] if "cp" in at else 1) == one["gpus"]
            assert one["batch"] % (row[at["dp"]] * row[at["microbatch"]]) == 0
            if one["source"] in ("bloom", "jz-v100"):
                cells = [cell.strip() for cell in row[-1].split("|")]
                numbers = {float(cell) for cell in cells if cell.replace(".", "").isdigit()}
                took = row[at["measured"]]
                assert took in numbers if took else any("OOM" in cell for cell in cells), row
                assert {row[at["tp"]], row[at["pp"]], row[at["dp"]], row[at["microbatch"]]} <= numbers


def same(now, then):
    """Equal, numbers to a thousandth."""
    if isinstance(then, dict):
        return now.keys() == then.keys() and all(same(now[key], then[key]) for key in then)
    return now == (pytest.approx(then, rel=1e-3, abs=1e-3) if isinstance(then, float) else then)


def recomputed(benchmark, wanted):
    """The names of those sets that are wanted; each is compared with its recording."""
    rows = {row["set"]: row for row in PARTS["sets"]}
    layouts = {(each["set"], each["layout"]): each for each in PARTS["layouts"]}
    for asked, measured in benchmark.read():
        if wanted(asked.name):
            row, each = benchmark.judged(asked, measured)
            assert same(row, rows[asked.name]), (row, rows[asked.name])
            assert all(same(now, layouts[now["set"], now["layout"]]) for now in each), asked.name
            yield asked.name


def test_a_sample_is_what_the_course_predicts_today(benchmark):
    assert len([*recomputed(benchmark, lambda name: name.startswith(SAMPLE))]) == 8
    assert benchmark.schedules() == PARTS["schedules"]
    assert [benchmark.fits(PARTS["layouts"], share) for share in (1, 0.8)] == PARTS["fits"]


@pytest.mark.long  # the sample above is quicker
def test_all_is_what_the_course_predicts_today(benchmark):
    assert len([*recomputed(benchmark, lambda name: True)]) == 72
    assert same(benchmark.scaled(1.4), PARTS["flops"][1])


def test_ranks_and_their_correlation_are_those_of_textbooks(benchmark):
    assert benchmark.ranks([30, 10, 20, 20]) == [4, 1, 2.5, 2.5]
    scores, hours = [86, 97, 99, 100, 101, 103, 106, 110, 112, 113], [2, 20, 28, 27, 50, 29, 7, 17, 6, 12]
    assert benchmark.correlation(scores, hours) == pytest.approx(-29 / 165)  # 1 - 6 * 194 / (10 * 99)
    assert benchmark.correlation([1, 2, 3], [5, 5, 5]) is None and benchmark.correlation([1, 2], [1, 2]) is None


def test_a_choice_that_is_out_of_memory_is_followed_by_the_next(benchmark):
    first, second, third = (benchmark.Candidate(tp, 1, 8 // tp) for tp in (1, 2, 4))
    measured = {first: None, second: 12.0, third: 10.0}
    found = benchmark.taken([first, second, third], measured)
    assert found == {"layout": benchmark.label(second), "out_of_memory": 1, "regret": 0.2}
    assert benchmark.taken([third], measured)["regret"] == 0 and benchmark.taken([first], measured)["regret"] is None


def test_the_rules_are_what_they_say(benchmark):
    def one(tp, pp, microbatch=1, recompute=False):
        return benchmark.Candidate(tp, pp, 64 // (tp * pp), microbatch, recompute)

    given = [one(1, 1, recompute=True), one(4, 1), one(2, 2), one(1, 4, 2), one(1, 4), one(8, 1), one(8, 2)]
    assert sorted(given, key=benchmark.fewest)[:3] == [one(1, 4), one(1, 4, 2), one(2, 2)]
    assert sorted(given, key=benchmark.fewest)[-1] == one(1, 1, recompute=True)
    assert sorted(given, key=benchmark.tensor_first)[:3] == [one(8, 1), one(8, 2), one(4, 1)]


def test_layouts_are_told_apart_as_choose_does(benchmark):
    machine = lab.Machine(8, pp.Link(5e-6, 300e9), pp.Link(10e-6, 6e9), flops=150e12, memory=80e9)
    model = lab.Transformer(24, 4096, 2048, heads=32, vocabulary=50_000)
    rows = lab.choose(model, machine, 32, 64, schedules=["ZBVZeroBubble"]).rows  # whose ranks don't wait for sends
    rows = sorted((row for row in rows if row.plan.zero is None), key=lambda row: row.plan.step_s)
    assert rows[0].slower == 0 and any(row.slower for row in rows) and any(not row.slower for row in rows[1:])

    def step(found, each):
        how = {"schedule": found.timeline.schedule, "cut": found.layers, "recompute": found.recomputed}
        return lab.plan(
            model, each, found.layout, 64, found.microbatch, shard_optimizer=found.shard_optimizer, **how
        ).step_s

    steps = [[step(row.plan, each) for each in benchmark.machines(machine)] for row in rows]
    assert benchmark.slower(steps) == pytest.approx([row.slower for row in rows])


def test_the_group_goes_before_the_rule_and_the_rule_within_it(benchmark, monkeypatch):
    one, two, four, eight = given = [benchmark.Candidate(1, n, 8 // n) for n in (1, 2, 4, 8)]
    step = {four: 10.0, two: 10.2, one: 13.0, eight: 11.0}
    monkeypatch.setattr(benchmark, "predicted", lambda asked, which: (step[which], 0.0))
    asked = benchmark.read()[0][0]
    assert benchmark.equal(asked, given) == [four, two]  # a step 5 % longer than another's can be told from it
    assert benchmark.regrouped(asked, given) == [two, four, eight, one]


def test_memory_and_compute_by_hand(benchmark):
    """One GPU a pipeline, nothing recomputed: state and activations of all layers, six FLOPs per weight and token."""
    asked, measured = next(each for each in benchmark.read() if each[0].name.startswith("13B 2k, 64"))
    (one,) = [c for c in measured if (c.per_pipeline, c.microbatch, c.recompute) == (1, 1, False)]
    step, held = benchmark.predicted(asked, one)
    weights = 40 * (4 * 5120**2 + 3 * 5120 * 13824) + 2 * 128_000 * 5120
    kept = 40 * 2048 * 2 * (8 * 5120 + 3 * 13824)
    assert held == pytest.approx(weights * (4 + 12 / 64) + kept, rel=1e-6)
    products = 6 * (weights - 128_000 * 5120) + 6 * 40 * 2048 * 5120  # the embedding is looked up; half of attention
    gradients = 2 * 63 / 64 * 2 * weights / 25e9
    assert step == pytest.approx(32 * 2048 * products / 156e12 + gradients, rel=1e-3)
    printed = 6 * weights + 12 * 40 * 2048 * 5120  # the sheet's utilisation of 312 TFLOP/s: 0.7057 in 26.5395 s
    assert 2048 * 2048 * printed / (64 * 26.5395 * 312e12) == pytest.approx(0.7057, rel=0.01)


def test_without_sequence_parallelism_norms_are_kept_by_all_tensor_ranks(benchmark):
    shape = {"num_layers": 2, "width": 1024, "sequence": 128, "heads": 8}
    for gated, each in ((False, 10), (True, 8)):  # bytes per token and width
        plain = lab.Transformer(**shape, gated=gated)
        kept = benchmark.Replicated(**shape, gated=gated)
        assert kept.layer_bytes(2) == plain.layer_bytes(2)
        more = replace(kept, tensor_ranks=4).layer_bytes(2) / 4 - plain.layer_bytes(2) / 4
        assert more == pytest.approx(0.75 * each * 2 * 128 * 1024)


def test_stages_have_the_layers_that_the_notes_say(benchmark):
    asked = {one.name: one for one, _ in benchmark.read()}
    uneven = next(one for name, one in asked.items() if name.startswith("78 x 13824, 64 heads"))
    assert benchmark.cut_of(uneven, 12) == (*[7] * 11, 1)
    ends = next(one for name, one in asked.items() if name.startswith("70 x 14336"))
    assert benchmark.cut_of(ends, 12) == (5, *[6] * 10, 5)
    llama = next(one for name, one in asked.items() if name.startswith("30B 2k"))
    assert benchmark.cut_of(llama, 8) == (8, 8, 8, 8, 7, 7, 7, 7)


@pytest.mark.long  # cells of chapter 12 check the first two
@pytest.mark.parametrize("name", ["8 billion", "70 billion on one NVLink", "70 billion", "405 billion"])
def test_the_first_row_has_the_degrees_that_nvidia_publishes(name):
    """Tensor, context and pipeline ranks of Megatron Bridge's archive of summaries, as chapter 12 shows them. In FP8 a
    GPU reaches what gives published rows their speed; of GB300, 72 share an NVLink."""
    network = pp.Link(10e-6, 50e9)
    h100 = lab.machine_of("h100", 8, 50e9, precision="fp8", flops=933.5e12)
    gb300 = lab.Machine(72, pp.Link(5e-6, 900e9), network, flops=2900e12, flops_bf16=2900e12, memory=270e9)
    shared = {"sequence": 8192, "kv_heads": 8, "gated": True, "vocabulary": 128_256}
    middle = lab.Transformer(80, 8192, heads=64, mlp_width=28_672, **shared)
    large = lab.Transformer(126, 16_384, heads=128, mlp_width=53_248, **shared)
    model, machine, gpus, batch, degrees, published = {
        "8 billion": (lab.Case().model, h100, 8, 128, {"cp": 1}, (1, 1, 1)),
        "70 billion on one NVLink": (middle, gb300, 64, 256, {"cp": 1}, (1, 1, 1)),
        "70 billion": (middle, h100, 64, 256, {"cp": 1}, (4, 1, 8)),
        "405 billion": (large, h100, 1024, 1536, {"tp": (4, 8), "cp": (1, 2)}, (8, 2, 8)),
    }[name]
    rows = lab.choose(model, machine, gpus, batch, **degrees).equal
    found = [(row.plan.layout.tp, row.plan.layout.cp, row.plan.layout.pp) for row in rows]
    assert found[0] == published
