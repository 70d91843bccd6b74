"""`make gpu` tried on the CPU: every part runs, fails alone, says what it leaves out, and leaves a recording.

What runs all of it takes long; test_results.py has all parts but those of tests and profiles at every commit.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gpu_tables
import pytest
import records
import torch

import pplab as pp
from conftest import on_fake_gpus
from pplab import lab
from pplab.lab import results
from stage_rows import copies_are_sane, stages_are_sane

ROOT = Path(__file__).parents[3]
TESTED = ["memory_that or test_whether"]

pytestmark = pytest.mark.slow


@pytest.fixture
def gpu(monkeypatch):
    """benchmarks/gpu.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    return gpu


def pieces(functions: dict, seconds: float = 60) -> dict:
    """Parts of these functions."""
    from gpu_setting import Piece

    for function in functions.values():
        function.__doc__ = function.__doc__ or "A part."
    return {name: Piece(function, seconds) for name, function in functions.items()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, str]:
    """The folder of all parts, small, on a GPU that tests/fake_gpus plays and two ranks share; and what was printed."""
    folder = tmp_path_factory.mktemp("results")
    done = on_fake_gpus(["benchmarks/gpu.py", "--size", "small", "--folder", str(folder)], 1)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return folder, done.stdout


@pytest.mark.long
def test_every_part_runs_and_is_recorded(recorded):
    folder, printed = recorded
    (recording,) = results.load(folder)
    data = recording.data
    assert recording.path.name == "fake-gpu.json" and data["kind"] == "cuda" and data["device"] == "Fake GPU"
    assert "gpu.py --size small" in data["command"]
    assert data["versions"]["torch"] == torch.__version__ and data["versions"]["transformers"]
    assert [part["name"] for part in data["parts"]] == [
        *("check", "smoke", "nccl", "chapters", "stages", "copies", "tests", "batch", "predicted"),
        *("gradients", "links", "versus", "runs"),
    ]
    states = {part["name"]: part["state"] for part in data["parts"]}
    assert states.pop("versus") == states.pop("chapters") == "not run" and set(states.values()) == {"done"}
    assert "== nothing failed" in printed and f"== wrote {recording.path}" in printed


@pytest.mark.long
def test_what_was_measured_is_whole(recorded):
    (recording,) = results.load(recorded[0])
    runs, batches = recording.rows("runs"), recording.rows("batch")
    assert [row["batch_size"] for row in batches] == [4 * 2**n for n in range(len(batches))]
    assert batches[-1]["forward_ms"] >= 0.1 > max([row["forward_ms"] for row in batches[:-1]], default=0)
    assert [row["schedule"] for row in recording.rows("smoke")] == ["1F1B", "ZB-H1"]
    assert {(row["schedule"], row["dtype"]) for row in recording.rows("gradients")} == {
        (name, dtype) for dtype in ("bf16", "fp32") for name in ("1F1B", "ZB-H1")
    }
    memory, *by_nccl = recording.rows("nccl")
    assert memory["sharing"] == "turns" and memory["host_ms"] > 0
    assert [(row["schedule"], row["transport"], row["wrong"]) for row in by_nccl] == [
        (name, "nccl", []) for name in ("1F1B", "ZB-H1") * 2
    ]
    assert all(row["latency_ms"] > 0 and len(row["ms_of_bytes"]) == 4 for row in recording.rows("links"))
    assert [(row["schedule"], row["dtype"]) for row in runs] == [
        (name, dtype) for dtype in ("bf16", "fp32") for name in ("1F1B", "ZB-H1")
    ]
    for row in runs:
        assert row["peak_bytes"] == row["predicted_peak_bytes"] and not row["wrong"]
        assert row["sharing"] == "turns" and len(row["allocated_bytes"]) == 2
        assert row["warmup"] == 2 and row["settled"] is None  # one step
        assert row["halved"] == [] and row["batch_size"] == batches[-1]["batch_size"]
        assert lab.timeline_from_dict(row["timelines"][0]).makespan == row["measured"]["makespan_ms"]
        assert sum(row["where"].values()) > 0 and 0 < row["compute_share"] < 1
    stages_are_sane(recording.rows("stages"), {"bf16": ("GPU", "launches"), "fp32": ("GPU", "launches")})
    copies_are_sane(recording)
    (row,) = recording.rows("predicted")
    assert (row["measured"], row["sharing"], row["dtype"]) == ("ZB-H1", "turns", "bf16")
    assert [each["schedule"] for each in row["schedules"]] == ["ZB-H1", "1F1B"] and row["halved"] == []
    assert recording.rows("versus") == []  # torch's runtime takes a GPU for each rank
    assert [row["what"] for row in recording.rows("tests")] == ["2-turns and (bf16 or recomputing)", *TESTED]
    assert all(re.match(r"\d+ passed", row["closing_line"]) and not row["wrong"] for row in recording.rows("tests"))


@pytest.mark.long
def test_nothing_is_left_out_without_a_word(recorded):
    folder, printed = recorded
    (recording,) = results.load(folder)
    left_out = dict(records.not_run(recording))
    assert left_out["runs: 2 ranks with a GPU each"] == "the machine has 1"
    assert "PyTorch's runtime can't send" in left_out["versus: 2 ranks"]
    for what in left_out:
        assert f"not run: {what}" in printed


@pytest.mark.long
def test_the_tables_show_the_recording(recorded):
    folder = recorded[0]
    shown = gpu_tables.tables(folder)
    text = str(shown["runs"])
    assert text.startswith("Training runs and their simulation")
    assert all(word in text for word in ("ZB-H1", "bf16", "turns"))
    page = shown["runs"]._repr_html_()
    assert page.count("<tr>") == 5 and "<th>schedule</th>" in page
    assert "cudaMalloc during a receive" in str(shown["nccl"]) and "passed" in str(shown["tests"])
    assert "the machine has 1" in str(shown["not run"])


def test_no_recording_is_said(tmp_path):
    shown = gpu_tables.tables(tmp_path)
    assert not shown and str(shown) == gpu_tables.NONE
    assert "make gpu" in shown._repr_html_() and shown._repr_html_().count("<p>") == 1
    assert results.load(tmp_path / "nowhere") == ()


@pytest.mark.long
def test_a_page_shows_every_table_that_has_something_in_it(recorded):
    shown = gpu_tables.tables(recorded[0])
    assert len(shown) > 10 and {type(table) for table in shown.values()} == {gpu_tables.Results} and all(shown.values())
    assert shown._repr_html_().count("<table") == str(shown).count("device, date") == len(shown)


def test_the_books_page_shows_what_is_recorded(monkeypatch):
    """Its cell runs in the book's folder, and shows the repository's recordings or one sentence."""
    monkeypatch.chdir(ROOT / "book")
    cell = re.findall(r"```\{code-cell\} python\n(.*?)```", (ROOT / "book" / "gpu.md").read_text(), re.DOTALL)[-1]
    *before, last = [line for line in cell.strip().splitlines() if not line.startswith(":tags:")]
    names: dict = {}
    exec("\n".join(before), names)
    shown = eval(last, names)
    assert isinstance(shown, gpu_tables.Tables)
    recorded = any(recording.data["box"].get("devices") for recording in results.load(ROOT / "results"))
    assert bool(shown) == recorded and ("<code>make gpu</code>" in shown._repr_html_()) == (not recorded)


@pytest.mark.long
def test_the_nearest_recordings_are_found(recorded, tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    (tmp_path / "deep").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "results" / "a.json").write_text((recorded[0] / "fake-gpu.json").read_text())
    monkeypatch.chdir(tmp_path / "deep")
    assert results.find_folder() == tmp_path / "results" and len(gpu_tables.tables()["runs"]) == 4


def test_a_part_that_fails_loses_nothing_else(gpu, tmp_path, monkeypatch, capsys):
    def fails(setting, part):
        part.attempt("the first", lambda: {"figure": 1})
        part.attempt("the second", lambda: 1 / 0)
        part.attempt("the third", lambda: {"figure": 3, "wrong": ["it is odd"]})
        raise OSError("the disk is gone")

    def works(setting, part):
        part.attempt("all", lambda: {"figure": 4})

    monkeypatch.setattr(gpu, "PARTS", pieces({"one": fails, "two": works, "three": works}))
    assert gpu.main(["--device", "cpu", "--size", "small", "--folder", str(tmp_path)]) == 1
    one, two, three = results.load(tmp_path)[0].data["parts"]
    assert one["state"] == "failed" and one["rows"] == [{"figure": 1}, {"figure": 3, "wrong": ["it is odd"]}]
    assert all(said in one["error"] for said in ("ZeroDivisionError", "it is odd", "the disk is gone"))
    assert two["state"] == three["state"] == "done" and two["rows"] == [{"figure": 4}]
    printed = capsys.readouterr().out
    assert "FAILED: one: the second: division by zero" in printed and "== FAILED: one" in printed
    assert ("one: failed", "the second: Traceback (most recent call last):") in records.failed(
        results.load(tmp_path)[0]
    )
    assert "one: failed" in str(gpu_tables.tables(tmp_path)["not run"])
    setting = gpu.Setting("cpu", 2, gpu.SIZES["small"])
    data = gpu.measure(setting, tmp_path / "only.json", "make gpu", only=("two",))
    assert [part["state"] for part in data["parts"]] == ["not run", "done", "not run"]
    assert {"what": "one: all of it", "why": "only two was asked for"} in data["not_run"]


def test_one_part_anew_keeps_the_others(gpu, tmp_path, monkeypatch):
    figures = iter(range(10))

    def works(setting, part):
        """A part."""
        part.leave_out("half", "it is late")
        part.attempt("all", lambda: {"figure": next(figures)})

    def stops(setting, part):
        """A part."""
        raise KeyboardInterrupt

    setting, path = gpu.Setting("cpu", 2, gpu.SIZES["small"]), tmp_path / "box.json"
    monkeypatch.setattr(gpu, "PARTS", pieces({"one": works, "two": works}))
    gpu.measure(setting, path, "first")
    data = gpu.measure(setting, path, "second", only=("two",))
    assert [part["rows"] for part in data["parts"]] == [[{"figure": 0}], [{"figure": 2}]]
    assert [part["by"] for part in data["parts"]] == ["first", "second"]
    assert [each["what"] for each in data["not_run"]] == ["one: half", "two: half"]
    assert json.loads(path.read_text()) == data and not path.with_suffix(".unfinished").exists()
    monkeypatch.setattr(gpu, "PARTS", pieces({"one": works, "two": stops}))
    with pytest.raises(KeyboardInterrupt):
        gpu.measure(setting, path, "third")
    assert json.loads(path.read_text()) == data  # what was recorded stays
    begun = json.loads(path.with_suffix(".unfinished").read_text())
    assert [part["state"] for part in begun["parts"]] == ["done", "not run"]
    assert {"what": "two: all of it", "why": "it was not reached"} in begun["not_run"]
    path.write_text(json.dumps({**data, "versions": {}}))
    with pytest.raises(SystemExit, match="of another machine or other versions"):
        gpu.measure(setting, path, "fourth", only=("two",))


def test_an_interrupted_part_keeps_its_rows_and_says_that_it_was_interrupted(gpu, tmp_path, monkeypatch):
    def stops(setting, part):
        """A part."""
        part.attempt("first", lambda: {"figure": 1})
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "PARTS", pieces({"one": stops}))
    with pytest.raises(KeyboardInterrupt):
        gpu.measure(gpu.Setting("cpu", 2, gpu.SIZES["small"]), tmp_path / "box.json", "first")
    begun = json.loads((tmp_path / "box.unfinished").read_text())
    assert [part["rows"] for part in begun["parts"]] == [[{"figure": 1}]]
    assert begun["not_run"] == [{"what": "one: what follows its 1 rows", "why": "it was not reached"}]


def test_an_interrupted_command_goes_on_where_it_was(gpu, tmp_path, monkeypatch, capsys):
    measured, stop_at = [], ["b"]

    def rows(setting, part):
        """A part."""
        for name in "abc":

            def measure(name=name):
                if name in stop_at:
                    raise KeyboardInterrupt
                measured.append((part.name, name))
                return {"figure": name, "wrong": ["it is odd"] * (name == "c" and part.name == "two" and bool(stop_at))}

            part.attempt(name, measure)

    setting, path = gpu.Setting("cpu", 2, gpu.SIZES["small"]), tmp_path / "box.json"
    monkeypatch.setattr(gpu, "PARTS", pieces({"one": rows, "two": rows}))
    with pytest.raises(KeyboardInterrupt):
        gpu.measure(setting, path, "make gpu")
    stop_at.clear()
    data = gpu.measure(setting, path, "make gpu")
    assert measured == [("one", "a"), ("one", "b"), ("one", "c"), ("two", "a"), ("two", "b"), ("two", "c")]
    assert [[row["figure"] for row in part["rows"]] for part in data["parts"]] == [["a", "b", "c"]] * 2
    assert data["not_run"] == [] and not path.with_suffix(".unfinished").exists()
    assert "going on with" in capsys.readouterr().out
    gpu.write(path.with_suffix(".unfinished"), {**data, "command": "another"})
    gpu.measure(setting, path, "make gpu")
    assert len(measured) == 12 and "measured anew" in capsys.readouterr().out
    odd = {**data["parts"][0]["rows"][1], "wrong": ["it is odd"]}
    failed = {**data["parts"][0], "state": "failed", "error": "b: it is odd", "rows": [{"figure": "a"}, odd]}
    gpu.write(path.with_suffix(".unfinished"), {**data, "parts": [{**failed, "names": ["a", "b"]}, data["parts"][1]]})
    del measured[:]
    assert gpu.measure(setting, path, "make gpu")["parts"][0]["state"] == "done"
    assert measured == [("one", "b"), ("one", "c")]  # what came out wrong is measured again


SECONDS = 18
NAUGHTY = """
import sys, time
sys.path.insert(0, "benchmarks")
import gpu
from gpu_setting import piece

@piece(1)
def sleeps(setting, part):
    \"\"\"A part.\"\"\"
    part.attempt("quick", lambda: {"figure": 1})
    part.attempt("sleeps", lambda: time.sleep(600))

@piece(1)
def swallows(setting, part):
    \"\"\"A part.\"\"\"
    try:
        time.sleep(600)  # before its first attempt
    except Exception:
        time.sleep(600)

@piece(1)
def good(setting, part):
    \"\"\"A part.\"\"\"
    part.attempt("all", lambda: {"figure": 2})

@piece(1)
def ignores(setting, part):
    \"\"\"A part.\"\"\"
    part.attempt("first", lambda: {"figure": 3})
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

@piece(1)
def trains(setting, part):
    \"\"\"A part.\"\"\"
    from pplab.runtime import Pool
    with Pool(2, device="cpu") as pool:
        part.attempt("never", lambda: pool.run(time_out))

def time_out(context):
    time.sleep(600)

if __name__ == "__main__":
    every = {each.run.__name__: each for each in (sleeps, swallows, good, ignores, trains)}
    gpu.PARTS.clear()
    gpu.PARTS.update({name: every[name] for name in sys.argv.pop(1).split(",")})
    sys.exit(gpu.main())
"""


@pytest.mark.timed
@pytest.mark.long  # the tests below have deadlines in this process
def test_a_deadline_is_kept_whatever_runs(tmp_path):
    """Parts that sleep for ever, catch what they are told, or wait for ranks: those behind them have their turn."""
    found, not_run, printed = run_naughty(tmp_path, "sleeps,swallows,trains,good", 0)
    assert found == {"sleeps": [1], "swallows": [], "trains": [], "good": [2]}
    assert {what.partition(":")[0] for what, _ in not_run} == {"sleeps", "swallows", "trains"}


@pytest.mark.timed
@pytest.mark.long
def test_what_does_not_stop_at_a_deadline_is_ended_and_comes_last_the_next_time(tmp_path):
    found, not_run, printed = run_naughty(tmp_path, "ignores,good", 1)
    assert found == {"ignores": [3], "good": []} and "what runs doesn't stop, and is ended" in printed
    assert "good: all of it" in dict(not_run)
    assert run_naughty(tmp_path, "ignores,good", 1)[0] == {"ignores": [3], "good": [2]}


def run_naughty(folder: Path, names: str, status: int) -> tuple[dict, list, str]:
    """The figures that these parts leave, what they lack, and what was printed; the time is kept."""
    (folder / "program.py").write_text(NAUGHTY)
    words = ["--device", "cpu", "--size", "small", "--folder", str(folder / "results"), "--deadline", str(SECONDS)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(folder / "program.py"), names, *words], cwd=ROOT, env=env, text=True, capture_output=True
    )
    took = time.monotonic() - started
    assert done.returncode == status and took < SECONDS + 1, (took, done.stdout[-3000:], done.stderr[-2000:])
    (recording,) = results.load(folder / "results")
    found = {part["name"]: [row["figure"] for row in part["rows"]] for part in recording.data["parts"]}
    return found, records.not_run(recording), done.stdout


def test_four_short_commands_do_what_a_long_one_does(gpu, tmp_path, monkeypatch):
    """Each goes on where the one before it was ended, and none measures a row again."""
    measured = []

    def rows(setting, part):
        for name in range(12):
            part.attempt(str(name), lambda name=name: time.sleep(0.4) or measured.append(name) or {"figure": name})

    monkeypatch.setattr(gpu, "PARTS", pieces({"one": rows, "two": rows}, seconds=0.9))
    words = ["--device", "cpu", "--size", "small", "--folder", str(tmp_path), "--deadline", "3"]
    counts = []
    while not counts or counts[-1] != [12, 12]:
        assert gpu.main(words) == 0
        (recording,) = results.load(tmp_path)
        counts.append([len(recording.rows(name)) for name in ("one", "two")])
    assert 3 <= len(counts) <= 8 and counts[0][0] > counts[0][1] >= 1  # each has a turn before one has a second
    assert sorted(measured) == sorted([*range(12)] * 2) and records.not_run(recording) == []
    assert not list(tmp_path.glob("*.unfinished"))
    del measured[:]
    assert gpu.main(words) == 0  # once more: what is whole isn't replaced by a part
    assert 0 < len(measured) < 24 and results.load(tmp_path)[0].data == recording.data


def test_a_short_deadline_leaves_every_part_its_turn(gpu, monkeypatch):
    now, turns = [0.0], []
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    parts = pieces({name: lambda setting, part: None for name in "abcdef"}, seconds=100)
    found = {name: ({"state": "not run", "seconds": 0}, [{"why": gpu.NOT_REACHED}]) for name in parts}
    for name, until in gpu._turns(parts, found, 60.0):
        turns.append((name, until - now[0]))
        now[0] = until - 9 * (len(turns) == 1)  # the first is left early
    assert turns[:6] == [(name, 10.0) for name in "abcdef"] and turns[6] == ("a", 9.0) and len(turns) == 7


def test_a_deadline_before_anything_is_measured_is_said(gpu, tmp_path, monkeypatch):
    def rings(*_):
        raise gpu.Late(gpu.LATE)

    monkeypatch.setattr(gpu, "PARTS", pieces({"one": lambda *_: None, "two": lambda *_: None}))
    monkeypatch.setattr(gpu, "_run_part", rings)
    data = gpu.measure(gpu.Setting("cpu", 2, gpu.SIZES["small"]), tmp_path / "box.json", "make gpu --deadline 5")
    assert [each["what"] for each in data["not_run"]] == ["one: all of it", "two: all of it"]
    monkeypatch.setattr(gpu, "measure", rings)
    assert gpu.main(["--device", "cpu", "--folder", str(tmp_path), "--deadline", "9"]) == 1


def test_one_part_on_its_own_leaves_what_was_begun(gpu, tmp_path, monkeypatch):
    """`--only`, between two commands with a deadline."""

    def rows(setting, part):
        for name in range(3):
            part.attempt(str(name), lambda name=name: measured.append(name) or {"figure": name})
            if part.name == "one" and name == 1 and len(measured) == 2:
                raise KeyboardInterrupt

    measured: list[int] = []
    setting, path = gpu.Setting("cpu", 2, gpu.SIZES["small"]), tmp_path / "box.json"
    monkeypatch.setattr(gpu, "PARTS", pieces({"one": rows, "two": rows}))
    with pytest.raises(KeyboardInterrupt):
        gpu.measure(setting, path, "make gpu")
    data = gpu.measure(setting, path, "make gpu --only two", only=("two",))
    assert [len(part["rows"]) for part in data["parts"]] == [0, 3] and measured == [0, 1, 0, 1, 2]
    data = gpu.measure(setting, path, "make gpu")
    assert [len(part["rows"]) for part in data["parts"]] == [3, 3] and measured == [0, 1, 0, 1, 2, 2, 0, 1, 2]
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_row_that_would_not_fit_is_not_started(gpu):
    part = gpu.Part("runs", [], time.monotonic() + 60)
    part._longest = 100.0
    with pytest.raises(gpu.Late):
        part.attempt("long", lambda: {"figure": 1})
    assert part.rows == [] and part.left_out == []


def test_a_row_that_finds_no_memory_has_half_the_batch(gpu, capsys):
    from gpu_runs import with_room

    from pplab.lab import models
    from pplab.runtime import RankError

    def train(workload, largest=16):
        asked.append(workload.batch_size)
        if workload.batch_size > largest:
            raise RankError(1, None, "rank 1 failed at 0F3: OutOfMemoryError: CUDA out of memory. Tried to allocate")
        return {"figure": workload.batch_size}

    asked, gpt = [], models.gpt(batch_size=64, source="sample")
    row = with_room(train, gpt, 8)
    assert asked == [64, 32, 16] and row["figure"] == row["batch_size"] == 16
    assert [said.partition(":")[0] for said in row["halved"]] == [f"no room for a batch of {n}" for n in (64, 32)]
    assert "on with 32" in capsys.readouterr().out
    part = gpu.Part("runs", [])
    assert part.attempt("none fits", lambda: with_room(lambda w: train(w, 0), gpt, 8)) is None
    assert part.attempt("the next", lambda: {"figure": 1}) and not part.errors
    assert part.left_out[0]["what"] == "runs: none fits" and "CUDA out of memory" in part.left_out[0]["why"]
    with pytest.raises(RankError, match="killed"):
        with_room(lambda workload: (_ for _ in ()).throw(RankError(0, None, "rank 0 was killed")), gpt, 8)


def test_the_batch_is_doubled_until_a_forward_takes_long_enough(gpu, monkeypatch):
    import gpu_runs

    from pplab.runtime import RankError

    def train(schedule, workload, **options):
        """A forward that grows with the batch, on ranks that take turns on a GPU with room for 200 sequences."""
        assert schedule.name == "GPipe" and options["autocast"] is torch.bfloat16
        if workload.batch_size > 200:
            raise RankError(1, None, "rank 1 failed at 0F3: OutOfMemoryError: CUDA out of memory")
        return SimpleNamespace(costs=pp.Costs([workload.batch_size / 10] * schedule.num_stages))

    class Pool(SimpleNamespace):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    pool = Pool(train=train, num_ranks=4, devices=["cuda:0"] * 4)
    monkeypatch.setattr(gpu.Setting, "pool", lambda self, num_ranks, sharing: pool)
    for least_ms, batch_sizes, why in ((1.0, [32, 64], []), (9.0, [32, 64, 128], ["batch: batch 256"])):
        part = gpu.Part("batch", [])
        gpu_runs.batch.run(gpu.Setting("cuda", 1, replace(gpu.SIZES["full"], forward_ms=least_ms)), part)
        assert [row["batch_size"] for row in part.rows] == batch_sizes and not part.errors
        assert part.rows[0]["forward_ms"] == 0.8  # a quarter of 3.2: the others' turns are in that
        assert part.more == {"batch_size": batch_sizes[-1]} and [each["what"] for each in part.left_out] == why


def test_what_is_missing_is_said_before_anything_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Hides:\n"
        "    def __init__(self, finder):\n"
        "        self.finder = finder\n"
        "    def __getattr__(self, name):\n"
        "        return getattr(self.finder, name)\n"
        "    def find_spec(self, name, *more):\n"
        "        if name.partition('.')[0] not in os.environ['HIDDEN'].split(','):\n"
        "            return self.finder.find_spec(name, *more)\n"
        "sys.meta_path[:] = map(Hides, sys.meta_path)\n"
    )
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--size", "small", "--folder", str(tmp_path)]

    def run(hidden: str, *only: str) -> subprocess.CompletedProcess:
        env = {**os.environ, "HIDDEN": hidden, "PYTHONPATH": str(tmp_path)}  # and no pplab: it is the tree's own
        return subprocess.run([*command, "--only", *only], cwd="/", env=env, text=True, capture_output=True)

    command[1] = str(ROOT / command[1])
    bare = "transformers,datasets,pyarrow,huggingface_hub,tokenizers,pytest,psutil,matplotlib,pandas,colorspacious"
    done = run(bare, "smoke", "tests", "chapters")
    first, second, third = done.stdout.splitlines()[:3]
    assert done.returncode == 0, done.stdout + done.stderr
    assert first == "pytest is not installed: not run: chapters, tests"
    assert second == "matplotlib is not installed: not run: chapters" and third.startswith("device 0")
    (recording,) = results.load(tmp_path)
    assert len(recording.rows("smoke")) == 2
    assert ("chapters: all of it", "pytest and matplotlib are not installed") in records.not_run(recording)
    done = run("numpy", "smoke")
    assert done.returncode == 1 and "runs nothing without numpy" in done.stderr and "Traceback" not in done.stderr


def test_what_is_too_old_is_refused_in_a_line(gpu):
    import gpu_needs

    for what, old, fine in (("Python", "3.10", "3.13"), ("torch", "2.9.1+cu128", "2.10.0a0+b558c986e8.nv25.11")):
        gpu_needs.refuse(what, fine)
        with pytest.raises(SystemExit, match=f"^make gpu needs {what} .* or later, and .* has .*$") as refused:
            gpu_needs.refuse(what, old)
        assert "\n" not in str(refused.value)
    for path in (ROOT / "benchmarks" / "gpu.py", Path(gpu_needs.__file__)):  # which an old Python reads first
        ast.parse(path.read_text(), feature_version=(3, 8))


def test_little_shared_memory_is_said(gpu):
    from gpu_box import facts, problems

    box = facts("cpu")
    assert Path(box["shared_memory"]["folder"]).is_dir() and box["shared_memory"]["free_bytes"] > 0
    little = problems({**box, "shared_memory": {"folder": "/dev/shm", "free_bytes": 2**29}})
    elsewhere = problems({**box, "shared_memory": {"folder": "/tmp", "free_bytes": 2**40}})
    assert any("has 512 MiB: docker run --shm-size" in said for said in little)
    assert any("/dev/shm is too small" in said for said in elsewhere)


def test_make_gpu_takes_another_environment_and_keeps_its_path():
    env = {**os.environ, "PYTHONPATH": "/theirs"}
    command = ["make", "--dry-run", "--print-data-base", "gpu", f"PY={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True)
    assert f"{sys.executable} benchmarks/gpu.py" in done.stdout and "-m venv" not in done.stdout.partition("\n#")[0]
    (path,) = re.findall(r"^PYTHONPATH := (.*)$", done.stdout, re.MULTILINE)
    assert path == f"{ROOT}/src:/theirs"
    done = subprocess.run([*command, "DEADLINE=540", "ONLY=smoke"], cwd=ROOT, env=env, text=True, capture_output=True)
    assert f"{sys.executable} benchmarks/gpu.py --deadline 540 --only smoke" in done.stdout


def test_a_file_says_how_many_devices_there_are(gpu, tmp_path):
    assert (
        gpu.file_name("NVIDIA H200") == "nvidia-h200.json" and gpu.file_name("NVIDIA H200", 4) == "nvidia-h200-x4.json"
    )
    data = {"device": "A", "kind": "cuda", "date": "2026-01-02T", "box": {"devices": [{}, {}]}, "parts": []}
    assert results.Recording(tmp_path, data).title() == "2 x A, 2026-01-02"
    parts = [{"name": "runs", "date": "2026-02-03T"}]
    assert results.Recording(tmp_path, {**data, "box": {}, "parts": parts}).title("runs") == "A, 2026-02-03"


def test_failing_tests_and_a_pytest_that_does_not_start_are_failures(gpu, tmp_path):
    from gpu_tests import run_pytest

    (tmp_path / "test_some.py").write_text("def test_right():\n    pass\n\ndef test_wrong():\n    assert 1 == 2\n")
    part = gpu.Part("tests", [])
    some = [str(tmp_path / "test_some.py"), "--rootdir", str(tmp_path)]
    for name, words in (("all", []), ("right", ["-k", "right"]), ("none", ["-k", "nothing"]), ("odd", ["--no-such"])):
        part.attempt(name, lambda name=name, words=words: run_pytest(name, [*some, *words]))
    said = {row["what"]: row["closing_line"].partition(" in ")[0] for row in part.rows}
    assert said["all"] == "1 failed, 1 passed" and said["right"] == "1 passed, 1 deselected"
    assert said["none"] == "2 deselected" and [error.partition(":")[0] for error in part.errors] == ["all", "odd"]


@pytest.mark.parametrize(("code", "wrong"), [("1 + 1", False), ("assert 1 == 2", True)])
def test_a_chapter_is_executed_and_its_asserts_count(gpu, tmp_path, code, wrong):
    import nbformat
    from gpu_tests import run_pytest

    cells = [nbformat.v4.new_code_cell("import pplab"), nbformat.v4.new_code_cell(code)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    row = run_pytest("a", ["--nbval-lax", str(tmp_path / "a.ipynb"), "--rootdir", str(tmp_path)])
    assert bool(row["wrong"]) == wrong and row["closing_line"].startswith("1 failed, 1 passed" if wrong else "2 passed")


def test_parts_come_in_the_order_of_their_worth(gpu):
    from gpu_parts import PARTS, in_order

    one, several = ([*in_order(PARTS, count)] for count in (1, 8))
    assert set(one) == set(several) == {*PARTS}
    assert several[:8] == ["check", "smoke", "gradients", "links", "batch", "versus", "predicted", "tests"]
    assert one[:7] == ["check", "smoke", "nccl", "chapters", "stages", "copies", "tests"]
    chapters = [ROOT / "notebooks" / f"{name}.ipynb" for name in gpu.SIZES["full"].chapters]
    assert len(chapters) == 4 and all(path.is_file() and "Pool(" in path.read_text() for path in chapters)


@pytest.mark.parametrize(("num_gpus", "pairs"), [(1, [(0, 1)]), (2, [(0, 1)]), (4, [(0, 1), (1, 2), (2, 3), (3, 0)])])
def test_links_are_those_of_neighbours(gpu, monkeypatch, num_gpus, pairs):
    import gpu_sharing

    class Pool(SimpleNamespace):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(gpu.Setting, "pool", lambda self, num_ranks, sharing: Pool(num_ranks=num_ranks))
    monkeypatch.setattr(gpu_sharing, "_link", lambda pool, pair: {"pair": pair})
    part = gpu.Part("links", [])
    gpu_sharing.links.run(gpu.Setting("cuda", num_gpus, gpu.SIZES["full"]), part)
    assert [row["pair"] for row in part.rows] == pairs


@pytest.mark.parametrize("broken", ["", "0 to 1", "1 to 0"])
def test_bytes_that_arrive_changed_are_noticed(gpu, monkeypatch, broken):
    import gpu_sharing

    wires = {"0 to 1": [], "1 to 0": []}
    rank = [0]

    def send(tensor, other, group):
        wires[f"{rank[0]} to {other}"].append(tensor.clone())

    def recv(tensor, other, group):
        tensor.copy_(wires[way := f"{other} to {rank[0]}"].pop(0))
        tensor[7] += way == broken

    monkeypatch.setattr(gpu_sharing, "dist", SimpleNamespace(send=send, recv=recv))
    wires["1 to 0"].append(
        torch.randint(256, (2, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(64))[1]
    )
    found = []
    for rank[0] in range(3):
        context = SimpleNamespace(rank=rank[0], wire=torch.device("cpu"), channel=lambda *_: None)
        found.append(gpu_sharing.arrives_whole(context, 64, (0, 1)))
    assert found == [broken != "1 to 0", broken != "0 to 1", True]


def test_batches_of_several_lengths_are_parts_of_one():
    from gpu_runs import of_several_lengths

    from pplab.lab import models

    gpt = models.gpt(source="sample", num_layers=2, width=16, num_heads=2, context=16, batch_size=4)
    batches = [of_several_lengths(gpt, 2).batch(step) for step in range(5)]
    assert [each.target.shape[1] for each in batches] == [4, 8, 12, 16, 4]
    assert torch.equal(batches[3].target, gpt.batch(0).target) and torch.equal(
        batches[0].inputs[0], batches[4].inputs[0]
    )


def test_how_ranks_share_follows_the_machine(gpu, monkeypatch):
    small = gpu.SIZES["small"]

    def found(num_gpus: int, num_ranks: int) -> tuple[list[str], list[dict]]:
        left_out: list[dict] = []
        return list(gpu.Setting("cuda", num_gpus, small).sharings(num_ranks, gpu.Part("runs", left_out))), left_out

    ways, left_out = found(4, 2)
    assert ways == ["a GPU each"] and "CUDA_VISIBLE_DEVICES=0" in left_out[0]["why"]
    monkeypatch.setenv("PATH", "")
    ways, left_out = found(1, 4)
    assert ways == ["turns"]
    assert [each["what"] for each in left_out] == ["runs: 4 ranks with a GPU each", "runs: 4 ranks sharing by MPS"]
    assert "nvidia-cuda-mps-control" in left_out[1]["why"]
    monkeypatch.setattr("gpu_setting.Mps.check", lambda self, devices: None)
    assert found(1, 4)[0] == ["mps", "turns"] and found(4, 4)[0] == ["a GPU each"]


def test_a_gpu_is_warm_before_it_is_measured(gpu):
    from gpu_runs import settled, warm_up_steps

    def train(steps: int) -> SimpleNamespace:
        """Steps of 30 ms, but for what the first twenty take more."""
        asked.append(steps)
        times = [30.0 + max(0, 20 - step) for step in range(sum(asked) - steps, sum(asked))]
        return SimpleNamespace(step_time_ms=30.0, step_times_ms=tuple(times))

    asked = []
    full = gpu.SIZES["full"]
    assert warm_up_steps(train, full, "cpu") == 1 and asked == []
    assert warm_up_steps(train, full, "cuda:0") == 17 and asked == [1, 17]  # half a second, and then they agree
    short = replace(full, warm_ms=1.0)
    asked.clear()
    assert warm_up_steps(train, short, "cuda:0") == 2 and asked == [1, 2]
    never = SimpleNamespace(step_time_ms=30.0, step_times_ms=(30.0, 40.0))
    assert warm_up_steps(lambda steps: never, full, "cuda:0") == 200
    assert settled((9.0, 5.0, 5.2)) and not settled((5.0, 5.0, 5.5)) and settled((5.0,)) is None


def test_there_are_up_to_as_many_ranks_as_gpus(gpu):
    full = gpu.SIZES["full"]
    assert gpu.for_machine(full, 1) == gpu.for_machine(full, 4) == full
    eight = gpu.for_machine(full, 8)
    assert eight.ranks == (2, 4, 8) and eight.gpt == {**full.gpt, "num_layers": 16}
    assert eight.tests == ("8-turns", *full.tests)


def test_nccl_on_one_gpu_is_for_ranks_that_share_one(gpu, monkeypatch):
    from one_gpu import OneGpuPool, environment

    from pplab.runtime import gpu as door

    with pytest.raises(ValueError, match="these are on the CPU: take a Pool"):
        OneGpuPool(2, device="cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(door.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="these have a GPU each"):
        OneGpuPool(2, device="cuda")
    shared = OneGpuPool(4, device="cuda")
    assert shared.transport == "nccl" and shared.devices == ["cuda:0", "cuda:1"] * 2
    assert "no time is valid" in shared.notes[-1]
    assert environment(1, (2, 29, 7))["NCCL_HOSTID"] != environment(0, (2, 29, 7))["NCCL_HOSTID"]
    assert environment(1, (2, 30, 0)) == {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def test_facts_of_a_box_and_what_they_mean(gpu):
    from gpu_box import facts, problems, show

    here = facts("cpu")
    assert here["nccl_ranks"] == 0 and here["driver"] is None and re.match(r"device 0: .+, \d+ cores\n", show(here))
    box = {
        "devices": [{"name": "A", "memory_bytes": 2**34, "compute_capability": "9.0", "multiprocessors": 132}] * 2,
        "versions": {"python": "3.12.3", "torch": "2.11.0+cu128", "transformers": "5.17.0"},
        "driver": "580.1",
        "compute_mode": ["Default", "Default"],
        "mig": ["Disabled", "Disabled"],
        "peer_access": [[True, True], [True, True]],
        "nccl_ranks": 2,
        "mps": {"control": True, "running": False},
    }
    assert problems(box) == []
    assert "device 1: A, 16.0 GiB, compute capability 9.0" in show(box) and "NCCL can serve 2 ranks" in show(box)
    h100 = {"name": "A", "memory_bytes": 2**34, "compute_capability": "9.0"}
    for kernels_for, runs in (
        (["sm_75", "sm_90"], True),
        (["sm_80", "compute_80"], True),
        (["sm_80", "sm_100"], False),
        (["sm_90a"], True),
        ([], True),
    ):
        found = problems({**box, "devices": [h100], "kernels_for": kernels_for})
        assert (found == []) == runs and ("compute capability 9.0" in "".join(found)) == (not runs), kernels_for
    worse = {
        **box,
        "versions": {"python": "3.15.0", "torch": "2.9.1", "transformers": "4.57.6"},
        "compute_mode": ["Exclusive_Process", "Default"],
        "peer_access": [[True, False], [True, True]],
        "mps": {"control": True, "running": True},
    }
    said = "\n".join(problems(worse))
    for words in (
        "torch is 2.9.1, and pplab is tested with 2.10 to 2.15",
        "python is 3.15.0, and pplab is tested with 3.11 to 3.14",
        "5.17 on",
        "by MPS only",
        "0 to 1",
        "already",
    ):
        assert words in said
    assert "torch is 2.16.0" in problems({**box, "versions": {**box["versions"], "torch": "2.16.0"}})[0]


@pytest.mark.parametrize("form", [2, None])
def test_a_file_of_another_form_is_refused(tmp_path, form):
    (tmp_path / "a.json").write_text(json.dumps({"form": form, "device": "A", "parts": []}))
    with pytest.raises(ValueError, match=f"its form is {form}, and this pplab reads form 1"):
        results.load(tmp_path)


def test_a_file_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match="a.json is damaged, or something else: expected JSON"):
        results.load(tmp_path)


def test_without_a_gpu_the_command_says_so():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = subprocess.run([sys.executable, "benchmarks/gpu.py"], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 1 and "needs a CUDA device, and torch finds none here" in done.stderr


class FakeEvent:
    """A CUDA event on a stream that reaches it at once, on a clock that runs from another zero."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        FakeEvent.now_ms += 1
        self.at = FakeEvent.now_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


def test_a_gpus_clock_is_tied_to_the_hosts_by_the_closest_readings(monkeypatch):
    from pplab.runtime import gpu

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    readings = iter([0, 90_000, 1_000_000, 1_020_000, 2_000_000, 2_050_000, 3_000_000, 3_070_000, 4_000_000, 4_080_000])
    monkeypatch.setattr(gpu.time, "perf_counter_ns", lambda: next(readings))
    clock = gpu.CudaClock(SimpleNamespace(watch=None))
    clock.tie()
    assert clock.error_ns == 10_000
    clock._found = {"item": []}
    mark = clock.mark()
    clock.catch_up()
    assert clock.read(mark) == 1_010_000 + 4_000_000  # the second of five events is the zero


def test_the_host_stays_two_items_ahead_of_its_gpu_and_says_where_that_is(monkeypatch):
    """Four items, of which the GPU has done none when it is asked: the third waits for the first, the fourth for the
    second, and the end of the step for what is left."""
    from pplab.runtime import gpu

    said, late = [], iter(range(99))

    class Late(FakeEvent):
        def __init__(self, **options):
            super().__init__(**options)
            self.number = next(late)

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            said.append(self.number)

    monkeypatch.setattr(torch.cuda, "Event", Late)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: said.append("all"))
    clock = gpu.CudaClock(SimpleNamespace(watch=lambda *what: said.append(what)))
    clock.tie()
    said.clear()
    clock.begin("step", None)  # event 5
    for name in ("0F0", "0F1", "0B0", "0B1"):
        clock.begin("item", name)
        clock.end("item", name)
    clock.end("step", None)
    waits = [("waits at 0F0", True), 6, ("at 0F0",), 7]
    assert said[:7] == [("at 0F0",), ("at 0F1",), *waits, ("at 0B0",)]
    assert said[7:11] == [("waits at 0F1", True), 8, ("at 0F1",), 9] and said[11] == ("at 0B1",)
    assert [each for each in said[12:] if isinstance(each, int)] == [10, 11, 12, 13] and said[-1] == "all"


def test_the_allocators_peak_is_that_of_the_rank(monkeypatch):
    from pplab.lab.extras.meter import Allocator

    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    said = []
    for name, answer in (("synchronize", None), ("reset_peak_memory_stats", None), ("memory_allocated", 100)):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name, answer=answer: said.append(name) or answer)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 700)
    allocator = Allocator(torch.device("cuda:1"), [layer])
    assert layer.weight.grad is not None and not said
    allocator.begin()
    assert layer.weight.grad is None and allocator.report() == (100, 700)
    assert said == ["synchronize", "reset_peak_memory_stats", "memory_allocated"]
