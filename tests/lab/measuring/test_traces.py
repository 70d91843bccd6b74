"""Traces of torch's own classes, recorded from real runs by `tests/record_traces.py`, and what else is given as one."""

import gzip
import json
import re
from pathlib import Path

import pytest

import pplab as pp
from pplab import lab
from pplab.lab.measuring import trace_file
from pplab.runtime import Pool
from record_traces import CASES, record

TRACES = Path(__file__).parent / "traces"
TRAINED = sorted(set(CASES) - {"unnamed", "evaluation"})


def load(case: str, rank: int = 0) -> dict:
    return json.loads(gzip.decompress((TRACES / case / f"rank{rank}.json.gz").read_bytes()))


def save(folder: Path, *traces: dict) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, trace in enumerate(traces):
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))
    return folder


def torch_rows(case: str) -> list[list[str]]:
    """What torch says that its class runs. It runs the halves of an overlap in turn. Its list for 1F1B numbers the
    forwards of later ranks from their rank on; the class's loop numbers them from 0."""
    rows = json.loads((TRACES / case / "rows.txt").read_text())
    rows = [re.findall(r"\d+[FBIW]\d+", " ".join(row)) for row in rows]
    if CASES[case]["name"] == "1F1B":
        firsts = [min(int(action.split("F")[1]) for action in row if "F" in action) for row in rows]
        rows = [
            [re.sub(r"F(\d+)", lambda found, first=first: f"F{int(found[1]) - first}", action) for action in row]
            for row, first in zip(rows, firsts, strict=True)
        ]
    return rows


@pytest.mark.parametrize("case", TRAINED)
def test_rows_are_torchs_and_the_times_add_up(case):
    traced = lab.read_traces(TRACES / case)
    assert len(traced.timelines) == (2 if CASES[case].get("titan") else CASES[case].get("steps", 1))
    for timeline in traced.timelines:
        assert [[*map(str, row)] for row in timeline.schedule.rows] == torch_rows(case)
        assert (timeline.unit, timeline.how) == ("ms", "measured") and min(timeline.starts) == 0
        for rank in range(timeline.schedule.num_ranks):
            spans = timeline.spans_of(rank)
            assert all(a.end <= b.start + 1e-3 for a, b in zip(spans, spans[1:], strict=False))
            assert all(span.start <= span.end for span in spans)
        where = lab.where(timeline)
        for parts in where.by_rank:
            assert sum(parts.values()) == pytest.approx(where.step_time)
        assert pp.simulate(timeline.schedule, lab.calibrate(timeline)).makespan < 1.2 * timeline.makespan


@pytest.mark.parametrize("case", ["1f1b", "interleaved-watched"])
def test_a_watched_action_lasts_as_long_as_its_spans_in_the_trace(case):
    """With the loss, a second span of the last stage's forward; watching twice gives no other span twice."""
    timeline = lab.read_traces(TRACES / case).timelines[0]
    last, zero = timeline.schedule.num_stages - 1, None
    for rank in range(2):
        named = [e for e in load(case, rank)["traceEvents"] if e["name"].startswith("pplab:")]
        zero = min(e["ts"] for e in named) if zero is None else zero
        for span in timeline.spans_of(rank):
            mine = [e for e in named if e["name"] == f"pplab:{span.action}"]
            assert len(mine) == (2 if span.action.stage == last and span.action.kind == "F" else 1)
            assert span.start == pytest.approx((mine[0]["ts"] - zero) / 1e3, abs=2e-3)
            assert span.end == pytest.approx((mine[-1]["ts"] + mine[-1]["dur"] - zero) / 1e3, abs=2e-3)


@pytest.mark.slow
def test_a_run_that_is_recorded_now(tmp_path):
    """Not stripped; a message from rank 0 to rank 1 takes 20 ms more."""
    record(CASES["slow-link"], tmp_path / "now")
    found = lab.read_traces(tmp_path / "now")
    assert [[*map(str, row)] for row in found.timelines[0].schedule.rows] == torch_rows("slow-link")
    at = {str(span.action): span for span in found.timelines[0].spans}
    for m in range(4):  # 20 ms after the message came, which is after it was sent
        assert at[f"1F{m}"].start - at[f"0F{m}"].end > 20 and at[f"3F{m}"].start - at[f"2F{m}"].end > 20
    link = lab.where(found.timelines[0]).links[0, 1]
    assert link.latency > 15


def test_torchtitans_folders_are_steps():
    folder = TRACES / "torchtitan"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.gz")) == [
        f"iteration_{n}/rank{rank}_trace.json.gz" for n in (4, 8) for rank in (0, 1)
    ]
    assert len(lab.read_traces(folder / "iteration_4").timelines) == 1
    both = lab.read_traces(folder)
    assert len(both.timelines) == 2 and not any("left out" in note for note in both.notes)


def test_evaluations_are_left_out():
    found = lab.read_traces(TRACES / "validated")
    assert "steps left out that aren't whole on every rank, or have forwards alone: 2" in found.notes
    with pytest.raises(
        ValueError,
        match="(?s)ranks .0, 1. have no step with all forwards and backwards: 0B0 .*Record it",
    ):
        lab.read_traces(TRACES / "evaluation")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("end", [False, True])
def test_incomplete_steps_are_left_out(tmp_path, rank, end):
    """A recording that begins or ends amid one of three steps, on one rank."""
    whole = lab.read_traces(TRACES / "interleaved").timelines
    traces = [load("interleaved", each) for each in (0, 1)]
    events = sorted(traces[rank]["traceEvents"], key=lambda event: event["ts"])
    names = [i for i, event in enumerate(events) if re.fullmatch(r"PP:\d[FB]\d", event["name"])]
    traces[rank]["traceEvents"] = events[: names[-5]] if end else events[names[5] :]
    found = lab.read_traces(save(tmp_path / "cut", *traces))
    kept = whole[:2] if end else whole[1:]
    assert [t.starts == pytest.approx(other.starts) for t, other in zip(found.timelines, kept, strict=True)]
    assert "steps left out that aren't whole on every rank, or have forwards alone: 1" in found.notes


@pytest.mark.parametrize("offsets", [(0, 1.5), (0, -40), (4, 0, -7, 30)])
def test_clocks_of_hosts_are_tied_as_well_as_the_note_says(tmp_path, offsets):
    """In ms; each rank is a host of its own."""
    case = "1f1b" if len(offsets) == 2 else "1f1b-four"
    truth = lab.read_traces(TRACES / case).timelines[0]
    traces = [load(case, rank) for rank in range(len(offsets))]
    for rank, (trace, offset) in enumerate(zip(traces, offsets, strict=True)):
        trace["host_name"] = f"host{rank}"
        trace["baseTimeNanoseconds"] += round(offset * 1e6)
    found = lab.read_traces(save(tmp_path / "hosts", *traces))
    said = re.fullmatch(
        r"clocks of (\d) hosts tied by their messages, to within ([\d.]+) ms either way", found.notes[0]
    )
    assert int(said[1]) == len(offsets)
    off = [a - b for a, b in zip(found.timelines[0].starts, truth.starts, strict=True)]
    assert max(off) - min(off) <= 2 * float(said[2]) * 1.01
    assert found.timelines[0].others == () == truth.others
    for rank in range(len(offsets)):  # a shift of a whole rank
        first, end = truth.schedule.columns.bounds[rank : rank + 2]
        assert max(off[first:end]) - min(off[first:end]) < 1e-2
    ends = dict(zip(map(str, sum(truth.schedule.rows, ())), found.timelines[0].ends, strict=True))
    starts = dict(zip(map(str, sum(truth.schedule.rows, ())), found.timelines[0].starts, strict=True))
    assert all(starts[f"{s + 1}F{m}"] >= ends[f"{s}F{m}"] - 1e-3 for s in range(len(offsets) - 1) for m in range(4))


def test_clocks_that_run_unevenly_are_not_tied(tmp_path):
    """Two steps by clocks that stood apart by -20 and by 20 ms."""
    traces = [load("validated", rank) for rank in (0, 1)]
    middle = sum(event["ts"] for event in traces[0]["traceEvents"]) / len(traces[0]["traceEvents"])
    for event in traces[1]["traceEvents"]:
        event["ts"] += 2e4 if event["ts"] > middle else -2e4
    for rank in (0, 1):
        traces[rank]["host_name"] = f"host{rank}"
    notes = lab.read_traces(save(tmp_path / "drift", *traces)).notes
    assert "clocks of the hosts aren't tied: no shift of them lets every message arrive after it has left" in notes


def test_missing_ranks_are_named(tmp_path):
    four = [str(TRACES / "zbv" / f"rank{rank}.json.gz") for rank in range(4)]
    with pytest.raises(ValueError, match="no trace is of rank 2: give those of all ranks"):
        lab.read_traces(four[0], four[1], four[3])
    with pytest.raises(ValueError, match="no trace is of rank 2, rank 3: give those of all ranks"):
        lab.read_traces(*four[:2])
    with pytest.raises(ValueError, match="no trace is of rank 1, rank 2, rank 3"):
        lab.read_traces(TRACES / "job" / "none-4" / "rank0.json.gz")  # which is in a group of its own, too
    traces = [load("1f1b-four", rank) for rank in (0, 2, 3)]
    for trace in traces:
        del trace["distributedInfo"]["pg_config"]  # as in older traces
    with pytest.raises(ValueError, match="ranks .* have no step .*: no rank runs stage 1"):
        lab.read_traces(save(tmp_path / "old", *traces))


def test_of_two_pipelines_the_slowest_is_taken(tmp_path):
    """Ranks 0 and 2 are a pipeline, 1 and 3 the other; the rest of torch's groups are for data."""
    traces = [load("interleaved-watched", rank // 2) for rank in range(4)]
    groups = [{"ranks": ranks} for ranks in ([0, 1, 2, 3], [0, 1], [2, 3], [0, 2], [1, 3])]
    for rank, trace in enumerate(traces):
        trace["distributedInfo"] = {"rank": rank, "world_size": 4, "pg_config": groups}
    folder = save(tmp_path / "several", *traces)
    found = lab.read_traces(folder)
    assert found.timelines[0].starts == lab.read_traces(TRACES / "interleaved-watched").timelines[0].starts
    assert "single steps are those of the slowest of 2 pipelines, of ranks 0, 2" in found.notes
    assert len(lab.read_traces(folder / "rank1.json", folder / "rank3.json").timelines) == 1
    for trace in traces:
        del trace["distributedInfo"]["pg_config"]
    with pytest.raises(
        ValueError,
        match="ranks .* have no step .*: rank 0 runs 0F0, but stage 0 lives on",
    ):
        lab.read_traces(save(tmp_path / "unknown", *traces))


def test_traces_of_different_steps_are_refused(tmp_path):
    traces = [load("1f1b", rank) for rank in (0, 1)]
    traces[1]["baseTimeNanoseconds"] += 10**12
    with pytest.raises(
        ValueError, match="these are of different steps, or of hosts whose clocks differ by more than a step"
    ):
        lab.read_traces(save(tmp_path / "later", *traces))


MEGATRON = {"ph": "X", "cat": "user_annotation", "name": "forward-compute", "ts": 1.0, "dur": 5.0}
OTHERS = {
    "megatron.json": (
        {"distributedInfo": {"rank": 0}, "traceEvents": [MEGATRON]},
        "Megatron-LM's schedules name none by themselves",
    ),
    "alone.json": ({"traceEvents": [MEGATRON]}, "of a rank of torch.distributed; found KeyError: 'distributedInfo'"),
    "text.json": ("Traceback (most recent call last):", "is damaged, or something else: expected a Chrome trace"),
    "nsys.sqlite": ("SQLite format 3\0", "is of Nsight Systems, which isn't read. Record it so, on every rank"),
    "timers.log": (
        "(min, max) times across ranks (ms):",
        "is of Megatron-LM's timers, which aren't read. Record it so",
    ),
    "spans.jsonl": (
        '{"name": "forward", "context": {"span_id": "0x1"}}',
        "is of OpenTelemetry, which isn't read. Record",
    ),
    "rank_0.json": ({"entries": [], "nccl_comm_state": {}}, "is a dump of NCCL's flight recorder: say which schedule"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_trace_of_a_pipeline_says_what_it_lacks(tmp_path, name):
    found, expected = OTHERS[name]
    path = tmp_path / name
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    with pytest.raises(ValueError) as error:
        lab.read_traces(path)
    assert str(path) in str(error.value) and expected in str(error.value)


ROUGH = {
    **{f"ranks {ranks}": ("pg_config", [{"ranks": ranks}], "TypeError") for ranks in (None, 5, [0, None], [[0]])},
    **{
        f"dur {dur}": ("dur", dur, r"pplab:0F0 at ts [\d.]+ lasts ")
        for dur in (-5000, 1e300, float("nan"), float("inf"))
    },
    "ts": ("ts", float("-inf"), "pplab:0F0 at ts -inf lasts "),
}


@pytest.mark.parametrize("name", ROUGH)
def test_rough_values_are_told_with_file_and_event(tmp_path, name):
    key, value, told = ROUGH[name]
    trace = load("1f1b", 0)
    event = next(event for event in trace["traceEvents"] if event["name"] == "pplab:0F0")
    (trace["distributedInfo"] if key == "pg_config" else event)[key] = value
    (tmp_path / "rank0.json").write_text(json.dumps(trace))
    with pytest.raises(ValueError, match=f"rank0.json is damaged, or something else: .* found .*{told}"):
        lab.read_traces(tmp_path / "rank0.json")


def test_what_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "_MOST_BYTES", 2**20)
    (tmp_path / "rank0.json.gz").write_bytes(gzip.compress(bytes(2**21)))
    with pytest.raises(
        ValueError, match="rank0.json.gz is damaged, or something else: .* more than 1 MiB: record fewer"
    ):
        lab.read_traces(tmp_path)


def test_bad_places(tmp_path):
    with pytest.raises(
        ValueError, match="(?s)names no action of a pipeline in its .* torch's Schedule1F1B .*watch_torch"
    ):
        lab.read_traces(TRACES / "unnamed")
    with pytest.raises(ValueError, match=f"{tmp_path}: expected traces of torch.profiler"):
        lab.read_traces(tmp_path)
    with pytest.raises(ValueError, match="nothing given: expected traces of torch.profiler"):
        lab.read_traces()
    with pytest.raises(FileNotFoundError):
        lab.read_traces(tmp_path / "none.json")
    cut = tmp_path / "rank0.json.gz"
    cut.write_bytes((TRACES / "1f1b" / "rank0.json.gz").read_bytes()[:1000])
    with pytest.raises(ValueError, match="is damaged, or something else"):
        lab.read_traces(cut)


def test_on_a_gpu_the_kernels_count(tmp_path):
    """From an H100. The profiler has a span on the GPU of its own for what a forward's name was around; of a backward,
    whose kernels another thread launches, it has none (pytorch/kineto, issue 1132)."""
    found, traces = lab.read_traces(TRACES / "gpu-1f1b"), [load("gpu-1f1b", rank) for rank in (0, 1)]
    mirrors = [
        [e for e in trace["traceEvents"] if e["cat"] == "gpu_user_annotation" and e["name"].startswith("pplab:0F")]
        for trace in traces
    ]
    spans = [span for step in found.timelines for span in step.spans_of(0) if span.action.kind == "F"]
    assert len(spans) == len(mirrors[0]) == 12 and not mirrors[1]
    for span, mirror in zip(spans, sorted(mirrors[0], key=lambda e: e["ts"]), strict=True):
        assert mirror["name"] == f"pplab:{span.action}"
        assert span.end - span.start == pytest.approx(mirror["dur"] / 1e3, abs=2e-3)
    for timeline in found.timelines:  # B multiplies twice as much as F
        took = {kind: sum(e.end - e.start for e in timeline.spans if e.action.kind == kind) for kind in "FB"}
        assert 1.8 < took["B"] / took["F"] < 2.2
    assert "times are those of a GPU's kernels, which don't show how long a message was waited for" in found.notes
    for trace in traces:
        trace["traceEvents"] = [e for e in trace["traceEvents"] if e["cat"] != "kernel"]
    with pytest.raises(ValueError, match="is of a run on GPUs, and has no kernel: record ProfilerActivity.CUDA"):
        lab.read_traces(save(tmp_path / "cpu", *traces))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1F1B", "DualPipe"])
def test_pplabs_own_traces_say_what_its_run_measured(tmp_path, name):
    schedule = pp.build(name, num_ranks=2, num_microbatches=4)
    with Pool(2) as pool:
        run = pool.train(schedule, lab.models.gpt(), lab.Profile(tmp_path), steps=2)
    assert len(lab.explain(tmp_path).iterations) == 1
    found = lab.read_traces(tmp_path)
    assert len(found.timelines) == 2
    for traced, measured in zip(found.timelines, run.timelines, strict=True):
        assert traced.schedule == measured.schedule
        assert traced.makespan == pytest.approx(measured.makespan, rel=0.3)
