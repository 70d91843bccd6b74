"""The pipeline that the reader builds: the course's files are right on any number of ranks, and its checkers
tell broken ones apart."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pplab as pp
from conftest import on_fake_gpus
from pplab_course import messages, spine

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
MOST_LINES = {  # with something in them
    "pipe_naive.py": 60,
    "pipe_gpipe.py": 75,
    "pipe_1f1b.py": 90,
    "pipe_early.py": 95,
}
CHECKERS = {
    "pipe_naive.py": spine.naive_file,
    "pipe_gpipe.py": spine.gpipe_file,
    "pipe_1f1b.py": spine.one_f_one_b_file,
    "pipe_early.py": messages.early_file,
}
SCHEDULES = {"pipe_naive.py": "naive", "pipe_gpipe.py": "GPipe", "pipe_1f1b.py": "1F1B", "pipe_early.py": "1F1B"}


SIZES = [("pipe_naive.py", ranks, 1) for ranks in (1, 2, 3)]
SIZES += [(file, *size) for file in [*MOST_LINES][1:] for size in ((2, 1), (3, 4), (2, 5))]


@pytest.fixture(autouse=True)
def leaves_no_process() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def broken(folder: Path, file: str, *changes: tuple[str, str]) -> Path:
    """A copy of a course's file with each text replaced by another; the text must be there once."""
    text = (NOTEBOOKS / file).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "my_pipe.py").write_text(text)
    return folder / "my_pipe.py"


@pytest.mark.parametrize("file", MOST_LINES)
def test_a_file_is_short_and_needs_torch_alone(file):
    text = (NOTEBOOKS / file).read_text()
    assert sum(bool(line.strip()) for line in text.splitlines()) <= MOST_LINES[file]
    imported = re.findall(r"^(?:import|from) (\w+)", text, re.M)
    assert set(imported) <= {"torch", *sys.stdlib_module_names} and f"python {file}" not in text and file in text


@pytest.mark.slow
@pytest.mark.parametrize("file, ranks, M", SIZES)
def test_a_file_has_the_gradients_of_one_process_and_the_order_of_its_schedule(file, ranks, M):
    ran = spine.run(file, ranks, M=M, PACE=0)
    assert ran.failure is None and ran.num_steps == 3
    for report in ran.reports:
        assert report.gradients.error < 1e-5 and report.gradients.missing == 0
        said = float(re.search(r"gradients within (\S+) of", report.printed)[1])
        assert said == pytest.approx(report.gradients.error, rel=0.5)
    schedule = pp.build(SCHEDULES[file], num_ranks=ranks, num_microbatches=M)
    assert all(ran.timeline(step).schedule.rows == schedule.rows for step in range(3))
    if file != "pipe_naive.py":
        said = [int(re.search(r"held (\d+)", report.printed)[1]) for report in ran.reports]
        assert said == list(schedule.peak_in_flight)


def judged() -> list:
    """The files; two are solutions of chapters 4 and 5, which test_notebooks.py has judged at every commit."""
    return [pytest.param(file, marks=[pytest.mark.long] * (at > 1)) for at, file in enumerate(MOST_LINES)]


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize("file", judged())
def test_the_courses_file_is_accepted_and_takes_the_predicted_time(file):
    verdict = CHECKERS[file](file)
    assert verdict, verdict
    held = {"pipe_gpipe.py": "8, 8, 8, 8 of 8", "pipe_1f1b.py": "4, 3, 2, 1 of 8", "pipe_early.py": "7, 5, 3, 1 of 12"}
    assert f"the ranks hold {held.get(file)} forwards" in verdict.says or "the ranks hold" not in verdict.says
    assert ("the ranks hold" in verdict.says) is (file in held)


NO_GRADIENT_ASKED = (".requires_grad_()", "")
NO_SHARE = (" * len(x) / len(inputs)", "")
EQUAL_SHARES = (" * len(x) / len(inputs)", " / M")
NEVER_OUT = ("held.pop(m)", "held[m]")
ONE_AHEAD_LESS = ("min(ranks - 1 - rank, M)", "max(min(ranks - 2 - rank, M), 0)")
NOBODY_AHEAD = ("    ahead = min(ranks - 1 - rank, M)", "    ahead = M")
NO_BACKWARD_SENT = ("    send(x.grad, rank - 1)", "    send(torch.ones_like(x), rank - 1)")
LAYER_TWICE = ("stage = model[12 * rank // ranks :", "stage = model[max(0, 12 * rank // ranks - 1) :")
A_STEP_LATE = [  # the first step's backward in the second one
    ("def step():", "todo, seen = [], []\n\n\ndef step():"),
    ("    y.backward(", "    todo.append((x, y))\n    for x, y in todo * len(seen):\n        y.backward("),
    ("    send(x.grad, rank - 1)", "        send(x.grad, rank - 1)\n    todo[:], seen[:] = todo * (not seen), [1]"),
]

BROKEN = [
    (
        "pipe_naive.py",
        [("    if 0 <= to < ranks:  # beyond the ends of the pipeline there is nobody\n        dist", "    dist")],
        r"rank 1 fails in step, line \d+: send\(y, rank \+ 1\) .*: rank 1 sends to rank 2, and there are 2 ranks",
    ),
    (
        "pipe_naive.py",
        [NO_GRADIENT_ASKED],
        r"on 2 ranks: rank 1 fails .*send\(x.grad, rank - 1\) > in send, .*NoneType",
    ),
    (
        "pipe_naive.py",
        [NO_BACKWARD_SENT],
        r"gradients of rank 0 differ .* times the largest; those of rank 1 are right",
    ),
    ("pipe_naive.py", [LAYER_TWICE], "stages have 52 parameters, the model 48: each must be in one stage"),
    (
        "pipe_naive.py",
        [("    x = receive", "    x == receive")],
        r"rank \d fails in step, line \d+: x == receive.*NameError",
    ),
    (
        "pipe_naive.py",
        [("    y = stage(x)", "    y = stage(x")],
        r"line \d+ isn't Python \('\(' was never closed\): y =",
    ),
    ("pipe_naive.py", [("    y = stage(x)", "    os.abort()")], r"rank \d dies of SIGABRT"),
    ("pipe_naive.py", [("    y = stage(x)", "    os._exit(0)")], r"rank \d exits with 0"),
    ("pipe_naive.py", [("    y = stage(x)", "    y = model(x)")], "rank 0 never calls stage"),
    ("pipe_naive.py", [("    stage.zero_grad()\n", "")], "every gradient is 3 times one process's"),
    ("pipe_naive.py", [("    step()\n", "    with torch.no_grad():\n        step()\n")], "does not require grad"),
    ("pipe_naive.py", [("    send(y, rank + 1)", "    send(y[:5], rank + 1)")], r"rank \d"),
    (
        "pipe_naive.py",
        [
            ("stage = model[", "layers = model["),
        ],
        "NameError: name 'stage'",
    ),
    ("pipe_gpipe.py", [NO_SHARE], "on 2 ranks with 4 microbatches: every gradient is 4 times one process's"),
    (
        "pipe_gpipe.py",
        [EQUAL_SHARES],
        r"on 3 ranks with 5 microbatches: gradients are those of microbatches that all count alike, .* 5, 5, 5 and 4",
    ),
    (
        "pipe_gpipe.py",
        [NEVER_OUT],
        "on 2 ranks with 4 microbatches: after the last step rank 0 still has 4 microbatches in held",
    ),
    ("pipe_naive.py", A_STEP_LATE, "on 2 ranks: rank 0 runs 0F0 twice"),
    ("pipe_1f1b.py", [ONE_AHEAD_LESS], "rank 0 holds 1 forward at most, 1F1B 2; its order takes 24 units"),
    ("pipe_1f1b.py", [NOBODY_AHEAD], "gradients are right, but rank 0 holds 4 forwards at most, 1F1B 2"),
    ("pipe_1f1b.py", [NO_SHARE], "every gradient is 4 times one process's"),
    (
        "pipe_early.py",
        [("min(tickets - 1, M)", "min(ranks - 1 - rank, M)")],
        "rank 0 holds 2 forwards at most, eager-1F1B 3",
    ),
    (
        "pipe_early.py",
        [("    ask(source, m + early)  # may travel while we compute\n", "")],
        r"rank \d fails .*KeyError",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("file, changes, says", BROKEN)
def test_a_broken_file_is_told_by_its_symptom(tmp_path, file, changes, says):
    verdict = CHECKERS[file](broken(tmp_path, file, *changes))
    assert verdict.right is False and re.search(says, verdict.says), verdict


@pytest.mark.slow
@pytest.mark.timed
def test_1f1bs_order_with_gpipes_messages_hangs_and_both_stand_in_send(tmp_path, monkeypatch):
    monkeypatch.setattr(spine, "LIMIT_S", 5.0)  # once they have started
    file = spine.joined("pipe_gpipe.py", "step", of="pipe_1f1b.py", to=str(tmp_path / "my_pipe.py"))
    verdict = spine.one_f_one_b_file(file)
    stands = r"stands in {}, line \d+: send\({}, rank . 1\) > in send, line \d+: dist.send\(tensor, to\)"
    both = f"rank 0 {stands.format('forward', 'y')}; rank 1 {stands.format('backward', 'x.grad')}"
    said = f"it hasn't ended after 5 s: {both}"
    assert verdict.right is False and re.search(said, verdict.says), verdict
    with pytest.raises(ValueError, match="a run that failed has no timeline: it hasn't ended"):
        spine.run(file, 2, M=2, PACE=0, limit_s=3).timeline()
    alone = spine.run(file, 2, M=1, PACE=0)
    assert alone.failure is None, "with one microbatch, nobody sends while his neighbour does"


@pytest.mark.slow
@pytest.mark.timed
def test_a_hang_quotes_the_file_as_it_is_now(tmp_path):
    """The reader's loop: run, see where it stands, edit, run again, in one process."""
    file = spine.joined("pipe_gpipe.py", "step", of="pipe_1f1b.py", to=str(tmp_path / "my_pipe.py"))
    assert "dist.send(tensor, to)" in spine.run(file, 2, M=4, PACE=0, limit_s=3).failure
    text = Path(file).read_text().replace("dist.send(tensor, to)", "dist.send(tensor, dst=to)")
    Path(file).write_text(f"# a line more\n{text}")
    failure = spine.run(file, 2, M=4, PACE=0, limit_s=3).failure
    for name, number, code in re.findall(r"in (\w+), line (\d+): (.*?)(?= > |; |$)", failure):
        assert Path(file).read_text().splitlines()[int(number) - 1].partition("  #")[0].strip() == code, (name, failure)
    assert failure.count("in send") == failure.count("dist.send(tensor, dst=to)") == 2, failure


ON_FOUR_GPUS = """
from pplab_course import spine
if __name__ == "__main__":
    print(spine.run("pipe_early.py", 4, M=8, PACE=0, TICKETS="4,3,2,1", EARLY=1).failure)
"""


@pytest.mark.slow
def test_on_a_machine_with_gpus_the_files_ranks_see_none(tmp_path):
    """They sleep for their pace, and receives that are asked for early, as by this file, may hang on a GPU."""
    (tmp_path / "four.py").write_text(ON_FOUR_GPUS)
    done = on_fake_gpus([str(tmp_path / "four.py")], 4)
    assert done.stdout == "None\n", done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.long  # the test above has the file, started by the course
def test_torchrun_keeps_early_receives_off_the_gpus():
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "notebooks/pipe_early.py"]
    settings = {"OMP_NUM_THREADS": "1", "M": "8", "PACE": "0", "TICKETS": "4,3,2,1", "EARLY": "1"}
    done = on_fake_gpus(command, 4, **settings)
    assert done.returncode == 0 and done.stdout.count("of one process's") == 4, done.stdout + done.stderr


@pytest.mark.slow
def test_a_last_message_that_never_leaves_is_hinted_at(tmp_path, monkeypatch):
    monkeypatch.setattr(spine, "LIMIT_S", 5.0)  # once they have started
    verdict = spine.one_f_one_b_file(
        broken(tmp_path, "pipe_1f1b.py", ("    exchange()  # the last action's message\n", ""))
    )
    assert verdict.right is False and "do all messages leave, the last one of a step, too?" in verdict.says, verdict


@pytest.mark.slow
def test_outputs_that_wait_for_the_first_gradient_are_found(tmp_path):
    inside = ("source))\n    exchange()\n    return", "source))\n        exchange()\n    return")
    verdict = spine.one_f_one_b_file(broken(tmp_path, "pipe_1f1b.py", inside))
    assert verdict.right is False and "rank 1 begins only after all of rank 0's first forwards" in verdict.says, verdict


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"from pplab_course import spine\nprint(spine.run({str(NOTEBOOKS / 'pipe_1f1b.py')!r}, 2, M=2, PACE=0))\n"
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert "do that under `if __name__" in ended.stdout and not ended.stderr, ended


@pytest.mark.slow
def test_torchrun_starts_a_file_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "M": "5", "PACE": "0"}
    process = subprocess.Popen(
        [*command, str(NOTEBOOKS / "pipe_1f1b.py")],
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    printed, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    said = [
        re.fullmatch(r"rank (\d): step \d.\d+ s, held (\d), gradients within \de-0\d of one process's", line)
        for line in sorted(printed.splitlines())
    ]
    assert [match.groups() for match in said] == [("0", "2"), ("1", "1")] and "Warning" not in complaints
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_file_begins_without_the_bodies_that_the_reader_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert spine.begin("pipe_gpipe.py", "forward", "step").startswith(
        "my_pipe.py is a copy of pipe_gpipe.py without the body of"
    )
    text = Path("my_pipe.py").read_text()
    assert text.count("...  # yours\n") == 2 and "requires_grad_" not in text and "held.pop" in text
    assert text == spine.shown("pipe_gpipe.py", "forward", "step").text + "\n"
    assert spine.gpipe_file("my_pipe.py").right is None
    assert spine.gpipe_file("my_pipe.py").says == "write forward and step in my_pipe.py"
    Path("my_pipe.py").write_text("mine")
    assert "stays as it is" in spine.begin("pipe_naive.py", "step") and Path("my_pipe.py").read_text() == "mine"
    with pytest.raises(ValueError, match="unknown function 'steps': did you mean step"):
        spine.shown("pipe_gpipe.py", "steps")


@pytest.mark.parametrize("check", CHECKERS.values())
def test_dots_and_what_is_no_file_are_no_answer(check):
    assert check(...).right is None
    assert (
        "expected the name of your file" in check(3).says
        and "there is no file my_missing.py" in check("my_missing.py").says
    )


def test_what_changes_is_shown_as_text_and_as_a_page():
    shown = spine.changes("pipe_gpipe.py", "pipe_1f1b.py")
    lines = repr(shown).splitlines()
    assert lines[0] == "pipe_gpipe.py → pipe_1f1b.py" and "torchrun" not in repr(shown)
    assert "-         dist.send(tensor, to)" in lines and "+     exchange()" in lines
    old, new = ((NOTEBOOKS / name).read_text().splitlines() for name in ("pipe_gpipe.py", "pipe_1f1b.py"))
    assert {line[2:] for line in lines if line.startswith("-")} <= set(old) - set(new) | {""}
    page = shown._repr_html_()
    assert page.count("<ins") == sum(line.startswith("+") for line in lines[1:])
    assert page.count("<del") == sum(line.startswith("-") for line in lines[1:])
