"""Whole jobs with planted faults: the graph replays what ran, causes are named, and what is predicted comes true."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from functools import cache
from itertools import product
from math import inf
from pathlib import Path
from statistics import fmean

import pytest

import pplab_course
from pplab import lab
from pplab.__main__ import main
from pplab.lab.measuring import explaining
from pplab.lab.measuring.explaining import _taken_away
from pplab.lab.measuring.job import ACTION, Change, TracedJob
from pplab.lab.measuring.suspects import Seen, find

TRACES = Path(__file__).with_name("traces")
JOBS = TRACES / "job"  # recorded with planted.py, without operators inside others
COURSE = Path(pplab_course.__file__).with_name("two_faults")  # recorded likewise
WHOLE = sorted({path.parent for path in TRACES.rglob("rank*.json.gz")} - {TRACES / "evaluation", TRACES / "unnamed"})


@cache
def explained(name: str) -> lab.ExplainedJob:
    return lab.explain(COURSE if name == "slow3-late0-2x2" else JOBS / name)


@pytest.mark.parametrize("folder", WHOLE, ids=lambda folder: str(folder.relative_to(TRACES)))
def test_without_a_change_every_step_ends_when_it_did_and_the_parts_of_an_iteration_add_up(folder):
    """To the microsecond, and so do all events: of jobs that run by torch's interpreter, on GPUs, and of one step."""
    found = explained(folder.name) if folder.parent == JOBS else lab.explain(folder)
    job, mean = found.job, fmean(found.iterations)
    ends = [0.0] * job.num_steps
    for row in job.rows.values():
        for event in row:
            if event.kind == ACTION:
                ends[event.step] = max(ends[event.step], event.end)
    assert job.replay() == pytest.approx(ends, abs=1e-3)
    assert job.lengths(ends)[0] > 0
    assert sum(found.bars.values()) == pytest.approx(mean)
    for row in found.ranks:
        parts = [row[name] for name in ("computing", "other work", "own idle", "waiting")]
        assert sum(parts) == pytest.approx(mean) and min(parts) > -0.01 * mean
    assert ("± of a cause" in str(found)) == bool(found.causes)
    data = json.loads(json.dumps(found.to_dict()))
    assert len(data["ranks"]) == len(found.job.rows) and str(found.table) in str(found)


def test_a_suspect_that_stays_doubtful_is_replayed_once(monkeypatch):
    replayed, replay = [], TracedJob.replay
    monkeypatch.setattr(explaining, "_error", lambda saved: inf)  # so that all are doubtful
    monkeypatch.setattr(TracedJob, "replay", lambda job, change=None: replayed.append(change) or replay(job, change))
    found = lab.explain(TRACES / "validated")
    assert found.causes == () and len(found.doubtful) > 2
    changes = [frozenset((each.durations | each.gaps | each.transits).items()) for each in replayed[1:]]
    assert len(changes) >= len(found.doubtful) and len(changes) == len(set(changes))


def test_a_change_moves_what_follows_from_it():
    """One action of the last rank, for which all others wait, takes 100 ms more: its step is that much longer."""
    job = lab.read_traces(JOBS / "none-4")
    first = next(event for event in job.rows[3] if event.kind == ACTION and event.step == 1)
    longer = job.replay(Change({first: first.duration + 100}))
    added = [after - before for after, before in zip(longer, job.replay(), strict=True)]
    assert added[:2] == [pytest.approx(0), pytest.approx(100, abs=15)] and added[2] == pytest.approx(added[3])


# the plants, the causes in their order (kind, ranks, a part of what is said), and what an iteration takes without them
PLANTED = {
    "slow1-2x2": [("slow rank", (1,), r"rank 1 computes 1.[78]\d times .* with stage 0")],
    "slow3-2x2": [("slow rank", (3,), r"rank 3 computes 1.[78]\d times .* with stage 1")],
    "stage2-4": [("slow stage", (2,), "one replica alone doesn't tell apart")],
    "late0-4": [("late rank", (0,), "2[45][0-9] ms in 3 of 3 iterations, after Optimizer.step")],
    "late2-4": [("late rank", (2,), "2[45][0-9] ms in 3 of 3 iterations, after Optimizer.step")],
    "late3-4": [("late rank", (3,), "2[45][0-9] ms in 3 of 3 iterations, after Optimizer.step")],
    "late3-2x2": [("late rank", (3,), "2[45][0-9] ms in 3 of 3 iterations")],
    "tenth1-2": [("late rank", (1,), r"50\d ms in 2 of 13 iterations, to the end of steps 3, 13")],
    "data1-4": [("work", (1,), r"enumerate\(DataLoader\) between the steps, on rank 1 .*: 30\d ms in 3 of 3")],
    "pauses2-4": [("pauses", (2,), "150 ms in 2 of 3 iterations, to the end of steps 2, 3")],
    "nap2-4": [("pauses", (2,), r"pauses in 1 action: 40\d ms in 1 of 3 iterations, to the end of step 2")],
    "link2-4": [("link", (1, 2), r"3[01].\d ms from rank 1 to 2 and 3[01].\d ms from rank 2 to 1")],
    "link2-interleaved": [("link", (1, 2), r"6[01].\d ms from rank 1 to 2 and 6[01].\d ms from rank 2 to 1")],
    "optimizer-4": [("all ranks", (0, 1, 2, 3), "25[0-9] ms in 3 of 3 iterations")],
    "checkpoint-4": [("all ranks", (0, 1, 2, 3), "90[0-9] ms in 1 of 3 iterations, to the end of step 2")],
    "slow3-late0-2x2": [("slow rank", (3,), "1.[78]"), ("late rank", (0,), "20[0-9] ms in 3 of 3")],
    "late2-pauses1-2x2": [("pauses", (1,), ""), ("late rank", (2,), "20[0-9] ms in 3 of 3")],
    "pauses1-link3-4": [("pauses", (1,), ""), ("link", (2, 3), "3[01]")],
    "link1-slow3-4": [("slow stage", (3,), "1.[56]"), ("link", (0, 1), "3[01]")],
}
HEALTHY = {"4": "none-4", "2x2": "none-2x2", "interleaved": "none-interleaved"}


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_named_and_without_it_the_job_is_as_without_a_fault(name):
    found = explained(name)
    large = [cause for cause in found.causes if cause.saves > 0.03 * fmean(found.iterations)]
    assert {(cause.kind, cause.ranks) for cause in large} == {planted[:2] for planted in PLANTED[name]}, str(found)
    for kind, ranks, said in PLANTED[name]:
        assert any((each.kind, each.ranks) == (kind, ranks) and re.search(said, each.what) for each in large), str(
            found
        )
    if healthy := HEALTHY.get(name.rsplit("-")[-1]):
        true, last = explained(healthy).iterations, found.causes[-1]
        assert abs(last.left - fmean(true)) < last.left_error + last.between_runs
        assert f"between two runs: another ±{last.between_runs:.0f}" in str(found)
        assert last.between_runs == found.to_dict()["causes"][-1]["between_runs"] > 0.026 * last.left


@pytest.mark.parametrize("name", HEALTHY.values())
def test_a_job_without_a_fault_has_no_cause(name):
    assert explained(name).causes == (), str(explained(name))


@pytest.mark.parametrize("name", ["late2-pauses1-2x2", "pauses1-link3-4", "none-interleaved"])
def test_no_suspect_saves_more_than_it_has_on_the_critical_path(name):
    """So a suspect that has too little there need not be tried."""
    job = lab.read_traces(JOBS / name)
    lengths, (path,) = job.lengths(job.replay()), job.critical(Change())
    for suspect in find(Seen(job)):
        saved = sum(lengths) - sum(job.lengths(job.replay(suspect.change)))
        assert saved <= _taken_away(suspect.change, path) + 1e-6 <= _taken_away(suspect.change) + 2e-6


def test_a_fault_that_hides_behind_another_is_named():
    """Of a slow rank and a late one, each holds the replicas up for as long as the other."""
    hidden = explained("slow3-late0-2x2").causes[1]
    assert hidden.alone < 0.1 * hidden.saves


def test_faults_that_hide_behind_each_other_are_named_together(tmp_path):
    """Seven replicas with the same pauses: without those of one, the others take as long."""
    groups = [{"ranks": [*range(first, first + 4)]} for first in range(0, 28, 4)]
    for replica, path in product(range(7), sorted((JOBS / "pauses2-4").iterdir())):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        rank = trace["distributedInfo"]["rank"] + 4 * replica
        trace["distributedInfo"] |= {"rank": rank, "pg_config": groups}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace))
    found = lab.explain(tmp_path)
    assert "(and 34 faster links)" in str(found) and "... and 4 ranks that wait longer" in str(found)
    alone = explained("pauses2-4").causes[0]
    assert [(cause.kind, cause.ranks) for cause in found.causes] == [("pauses", (2, 6, 10, 14, 18, 22, 26))], str(found)
    assert found.causes[0].saves == pytest.approx(alone.saves) and "hide behind each other" in found.causes[0].what


def test_a_link_that_nobody_waited_for_has_an_upper_bound():
    found = lab.explain(TRACES / "slow-stage")
    assert found.links[3, 2][1] and "3->2 at most " in str(found) and "2->3 at most" not in str(found)
    assert {"source": 3, "target": 2, "at most": found.links[3, 2][0]} in found.to_dict()["links"]


def test_names_around_waits_accuse_nobody_of_being_late():
    """Torch's own names begin with the wait for a message, so a late rank, a pause and a link look alike."""
    found = lab.explain(TRACES / "interleaved")
    assert {cause.kind for cause in found.causes} <= {"slow rank", "slow stage", "work"}
    assert any("without lab.watch_torch" in note for note in found.notes)
    assert "Pauses, slow links and late ranks weren't looked for" in str(found)


def test_other_schedules_are_predicted_from_a_job_without_pauses_and_late_ranks_alone():
    assert explained("late0-4").orders == () and "remove these first" in str(explained("late0-4"))
    told = [row.what for row in explained("none-4").orders]
    assert "GPipe" in told and "messages at once" not in told


def test_a_large_step_is_explained_without_other_schedules(monkeypatch):
    monkeypatch.setattr("pplab.lab.measuring.explaining._LARGE", 40)
    found = lab.explain(JOBS / "none-4")
    assert found.orders == () and "steps of more than 40 actions, here 48" in str(found)


def test_the_command_prints_writes_and_draws(tmp_path, capsys):
    page, data = tmp_path / "job.html", tmp_path / "job.json"
    assert main(["explain", str(JOBS / "slow3-2x2"), "--html", str(page), "--json", str(data)]) == 0
    assert "1. rank 3 computes 1." in capsys.readouterr().out
    assert json.loads(data.read_text())["causes"][0]["ranks"] == [3]
    text = page.read_text("utf-8")
    assert "1. rank 3 computes" in text and "<svg" in text and not re.search(r"/\*\w+\*/", text)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert not re.search(r"""(?:src|href|action)\s*=\s*["']?(?!#)(?:https?:)?//|@import|url\(\s*["']?http""", text)


def test_what_a_trace_calls_things_is_no_html(tmp_path):
    for path in (JOBS / "data1-4").iterdir():
        trace = gzip.decompress(path.read_bytes()).replace(b"enumerate(DataLoader)", b"<script>alert(1)</script>")
        (tmp_path / path.name).write_bytes(gzip.compress(trace))
    lab.explain(tmp_path).to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "<script>" not in page and "&lt;script&gt;alert(1)" in page
    with pytest.raises(OSError):
        lab.explain(tmp_path).to_html(tmp_path / "nowhere" / "page.html")


def test_a_rank_without_its_pipeline_is_refused(tmp_path):
    for rank in (0, 1, 2):
        name = f"rank{rank}.json.gz"
        (tmp_path / name).write_bytes((JOBS / "none-2x2" / name).read_bytes())
    with pytest.raises(ValueError, match="ranks 1 are in no whole pipeline: give the traces of all ranks"):
        lab.read_traces(tmp_path)


FOUR = {("slow stage", (0,)), ("late rank", (0,)), ("pauses", (1,)), ("link", (0, 1))}
LIVE = {  # ranks, replicas, and what is named
    "slow@0:1.6,late@0:200,pauses@1:150,link@1:30": (2, 1, FOUR),
    "slow@1:1.8,late@2:200": (2, 2, {("slow rank", (1,)), ("late rank", (2,))}),
}


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize(
    "plants", [pytest.param(each, marks=[pytest.mark.long] * (LIVE[each][1] > 1)) for each in LIVE]
)
def test_what_is_planted_in_a_job_that_runs_now_is_named(tmp_path, plants):
    """Under `pplab.watch`: the program doesn't know pplab, and torch's Schedule1F1B names no action by itself."""
    ranks, replicas, planted = LIVE[plants]
    told = {"RANKS": ranks, "REPLICAS": replicas, "STEPS": 4, "PLANT": plants, "FOLDER": tmp_path}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks * replicas}"]
    ran = subprocess.run(
        [sys.executable, "-m", "pplab.watch", sys.executable, *torchrun, Path(__file__).with_name("planted.py")],
        env=os.environ | {name: str(value) for name, value in told.items()},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ran.returncode == 0, ran.stderr
    found = lab.explain(tmp_path)
    assert {(cause.kind, cause.ranks) for cause in found.causes[: len(planted)]} == planted, found
