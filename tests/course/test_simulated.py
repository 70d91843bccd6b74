"""A reader's file on simulated ranks: the same verdict as with torch and processes, and a hang that is explained."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import test_spine
from wrong_files import WRONG, WrongFile

import pplab as pp
import pplab_course
from pplab_course import gpipe, observed, simulated, spine
from pplab_course.simulated import modules, tensors
from pplab_course.simulated.replay import Replay
from pplab_course.simulated.telling import hang, hints
from pplab_course.verdict import Wrong

NOTEBOOKS = test_spine.NOTEBOOKS
FILES = ("pipe_naive.py", "pipe_gpipe.py", "pipe_1f1b.py")


@pytest.fixture
def on_simulated_ranks(monkeypatch):
    """What the page has: checkers run files on simulated ranks."""
    monkeypatch.setattr(pplab_course, "has_processes", False)


@pytest.mark.parametrize("sends_wait", [True, False])
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("ranks, M", [(2, 4), (3, 5), (4, 8)])
def test_a_file_has_its_gradients_its_order_and_the_predicted_time(file, ranks, M, sends_wait):
    M = 1 if file == "pipe_naive.py" else M
    ran = simulated.run(file, ranks, M=M, PACE=ranks * M * 0.001, sends_wait=sends_wait)
    assert ran.failure is None and ran.num_steps == 3
    assert all(report.gradients.error < 1e-12 and report.gradients.missing == 0 for report in ran.reports)
    schedule = pp.build(test_spine.SCHEDULES[file], num_ranks=ranks, num_microbatches=M)
    assert all(ran.timeline(step).schedule.rows == schedule.rows for step in range(3))
    assert ran.timeline().makespan == pytest.approx(pp.simulate(schedule, pp.Costs(1, 1, 1)).makespan)


@pytest.mark.parametrize("file", FILES)
def test_the_checkers_accept_the_courses_files(on_simulated_ranks, file):
    verdict = test_spine.CHECKERS[file](file)
    assert verdict, verdict


ON_PROCESSES = {  # a process can end without an exception, and threads need one
    "os.abort": "ends the process",
    "os._exit": "ends the process",
    "pipe_early.py": "has threads",
}


def simulable() -> list:
    shown = [(str(row), row) for row in test_spine.BROKEN]
    return [row for text, row in shown if not any(piece in text for piece in ON_PROCESSES)]


def test_the_exceptions_are_in_the_table_of_broken_files():
    shown = str(test_spine.BROKEN)
    assert all(piece in shown for piece in ON_PROCESSES) and len(simulable()) == len(test_spine.BROKEN) - 4


@pytest.mark.parametrize("file, changes, says", simulable())
def test_a_broken_file_is_told_as_with_processes(tmp_path, on_simulated_ranks, file, changes, says):
    verdict = test_spine.CHECKERS[file](test_spine.broken(tmp_path, file, *changes))
    assert verdict.right is False and re.search(says, verdict.says), verdict


def test_a_faulty_buffer_is_found_and_its_repair_accepted(tmp_path, on_simulated_ranks, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpipe.begin_repair()
    verdict = gpipe.repaired_file("my_repair.py")
    assert verdict.right is False and "lies where microbatch 0's is held" in verdict.says, verdict
    Path("my_repair.py").write_text((NOTEBOOKS / "pipe_gpipe.py").read_text())
    assert gpipe.repaired_file("my_repair.py")


FILE_CELLS = [
    ("02_naive", "my_pipe.py", lambda: spine.shown("pipe_naive.py", "send", "receive", "step").text),
    ("03_gpipe", "my_gpipe.py", lambda: spine.shown("pipe_gpipe.py", "forward", "backward", "step").text),
    ("03_gpipe", "my_repair.py", lambda: spine.with_faults("pipe_gpipe.py", gpipe.SPEEDUP)),
    ("04_1f1b", "my_1f1b.py", lambda: spine.shown("pipe_gpipe.py", "step").text),
]


@pytest.mark.parametrize("chapter, name, text", FILE_CELLS)
def test_a_cell_that_is_a_file_is_the_courses_file_without_what_the_reader_writes(chapter, name, text):
    cells = json.loads((NOTEBOOKS / f"{chapter}.ipynb").read_text())["cells"]
    found = [source for cell in cells if (source := "".join(cell["source"])).startswith(f"%%writefile {name}\n")]
    own = re.sub(r'pipe_\w+.py"""', f'{name}"""', text(), count=1)  # how its reader starts it
    assert [each.partition("\n")[2].rstrip() for each in found] == [own.rstrip()]


TORCH_DIFFERS = {"an irecv that nobody waits for"}  # gloo hangs once the receive is thrown away


def verdict_of(wrong: WrongFile, folder: Path, run) -> tuple[str, str, observed.Ran]:
    """Its kind, what is said of it, and the run."""
    path, (ranks, M) = folder / "my_pipe.py", wrong.size
    path.write_text(wrong.text)
    ran = run(path, ranks, M=M, PACE=0.0125 * ranks * M)
    if any(report.stuck for report in ran.reports):
        return "hangs", ran.failure, ran
    try:
        spine.check_run(ran, path)
    except Wrong as error:
        return "fails" if ran.failure else "gradients", str(error), ran
    name = test_spine.SCHEDULES[wrong.file]
    verdict = test_spine.CHECKERS[wrong.file](path)
    return ("right" if verdict else "order"), f"{name}: {verdict.says}", ran


SLOWEST = [  # five to ten seconds each; others tell the same causes
    "one rank's backwards in another order",
    "targets of another microbatch",
    "the exchange stands inside the if",
    "a warm-up that is one too short, on rank 1",
]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in SLOWEST)) for name in WRONG])
def test_a_wrong_file_is_told_by_its_cause(tmp_path, on_simulated_ranks, name):
    wrong = WRONG[name]
    kind, said, _ = verdict_of(wrong, tmp_path, simulated.run)
    ranks, M = wrong.size
    shown = hints(simulated.replayed(tmp_path / "my_pipe.py", ranks, M=M))
    assert kind == wrong.kind and re.search(wrong.says, " ".join([said, *shown]), re.S), (kind, said, shown)


BOTH_WAYS = ["1F1B's order, and GPipe's messages", "half a message", "the loss isn't scaled"]


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in BOTH_WAYS)) for name in WRONG],
)
def test_with_torch_a_wrong_file_has_the_same_kind_of_verdict(tmp_path, name):
    """And a file that hangs or fails stands in the same lines. The three that aren't long have each kind."""

    def run(*arguments: object, **settings: object) -> observed.Ran:
        return observed.run(*arguments, limit_s=6, **settings)

    wrong = WRONG[name]
    kind, said, ran = verdict_of(wrong, tmp_path, run)
    assert (kind == wrong.kind) is (name not in TORCH_DIFFERS), said
    if kind == wrong.kind and kind in ("hangs", "fails"):
        ranks, M = wrong.size
        shown = simulated.run(tmp_path / "my_pipe.py", ranks, M=M, PACE=0.0125 * ranks * M)
        places = {rank: report.place for rank, report in enumerate(shown.reports) if report.error or report.stuck}
        assert places == {rank: ran.reports[rank].place for rank in places}


@pytest.mark.slow
@pytest.mark.timed
def test_where_processes_hang_simulated_ranks_say_why(tmp_path):
    file = spine.joined("pipe_gpipe.py", "step", of="pipe_1f1b.py", to=str(tmp_path / "my_hang.py"))
    ran = spine.run(file, 2, M=4, PACE=0, limit_s=4)
    assert "hasn't ended after 4 s" in ran.failure and "Every rank in the circle sends" in ran.why
    shown = repr(ran)
    assert "\nand why, as simulated ranks tell it: Every" in shown and "\nDeadlock, in a circle:\nrank 0 waits" in shown
    assert spine.run("pipe_1f1b.py", 2, M=4, PACE=0).why == ""


def changed(file: str, *changes: tuple[str, str]) -> str:
    return WrongFile(file, (2, 1), "", "", changes).text


def test_a_circle_is_told_with_its_lines_and_what_each_rank_waits_for():
    text = WRONG["1F1B's order, and GPipe's messages"].text
    found = hang(Replay(text, 2, M=8))
    send, up, down = (1 + text[: text.index(code)].count("\n") for code in ("dist.send", "send(y,", "send(x.grad"))
    assert found.is_circle and found.ranks == (0, 1)
    assert found.waits == (
        f"rank 0 waits until rank 1 receives its message 2 (line {send}, called in line {up})",
        f"rank 1 waits until rank 0 receives its message 1 (line {send}, called in line {down})",
    )
    assert found.causes[-1] == "Where sends don't wait for their receive, the same file comes to its end"
    assert hang(Replay(text, 2, M=8, sends_wait=False)) is None and hang(Replay(text, 2, M=1)) is None


def test_a_chain_that_ends_at_a_rank_that_has_ended_is_no_circle():
    found = hang(Replay("import torch.distributed as d\nif d.get_rank() == 1:\n    d.barrier()\n", 3))
    assert not found.is_circle and found.waits == ("rank 1 waits at the barrier for rank 0 and 2 (line 3)",)


def an_order(source: random.Random, P: int, M: int) -> list[list[tuple[str, int]]]:
    rows = []
    for rank in range(P):
        row, forwards, backwards = [], 0, 0
        lead = source.choice([P - rank, P - rank, P - rank + 1, 1, M])
        while backwards < M:
            ahead = forwards - backwards
            if forwards < M and (ahead == 0 or ahead < lead or source.random() < 0.15):
                row.append(("F", forwards))
                forwards += 1
            else:
                row.append(("B", backwards))
                backwards += 1
        rows.append(row)
    return rows


def test_random_orders_hang_or_take_the_time_that_the_package_says():
    """Sends that don't wait, as validate and simulate have them."""
    text = (NOTEBOOKS / "pipe_gpipe.py").read_text()
    calls = "def step():\n    for kind, m in ORDER[rank]:\n        forward(m) if kind == 'F' else backward(m)\n\n\n"
    text = re.sub(r"def step\(\):.*?\n\n\n", calls, text, flags=re.S)
    small = (("held, counts =", "import json\nORDER = json.loads(os.environ['ORDER'])\nheld, counts ="),)
    small += (("range(12)", "range(ranks)"), ("range(3)", "range(1)"))
    for old, new in small:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    text = text.replace("12 *", "ranks *").replace("32", "4")
    source, deadlocks = random.Random(7), 0
    for _ in range(40):
        P, M = source.choice([(2, 3), (3, 3), (3, 4), (4, 4)])
        rows = an_order(source, P, M)
        schedule = pp.Schedule([[f"{rank}{kind}{m}" for kind, m in row] for rank, row in enumerate(rows)])
        replay = Replay(text, P, M=M, PACE=P * M, sends_wait=False, ORDER=json.dumps(rows))
        states = {rank.state for rank in replay.ranks}
        try:
            pp.validate(schedule)
            took = max(end for rank in replay.ranks for *_, end in rank.actions)
            assert states == {"ended"} and took == pytest.approx(pp.simulate(schedule).makespan), rows
        except pp.ScheduleError as error:
            assert "deadlock" in str(error) and "waits" in states and hang(replay).is_circle, rows
            deadlocks += 1
    assert 5 < deadlocks < 35


def test_it_needs_no_torch():
    code = "import sys, pplab_course.simulated as s; s.run('pipe_1f1b.py', 2, M=2); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=NOTEBOOKS)


@pytest.mark.parametrize(
    "line, says",
    [
        ("nn.SiLU()", "torch.nn.SiLU isn't in the course's stand-in for torch: run this file with torch"),
        ("inputs.softmax(0)", "Tensor.softmax isn't in the course's stand-in"),
        ("torch.optim.Adam(stage.parameters())", "torch.optim.Adam isn't in"),
        ("dist.all_reduce(inputs)", "torch.distributed.all_reduce isn't in"),
        ("stage.state_dict()", "Sequential.state_dict isn't in"),
        ("inputs[0, 1]", r"the index \(0, 1\) of a tensor isn't in"),
        ("import threading", "simulated ranks have no threading"),
        ("dist.isend(inputs, 1 - rank).is_completed()", "Work.is_completed isn't in"),
    ],
)
def test_what_it_lacks_is_told_by_name(line, says):
    ran_text = changed("pipe_naive.py", ("    x = receive(rank", f"    {line}\n    x = receive(rank"))
    error = Replay(ran_text, 2).ranks[0].error
    assert re.search(says, str(error)), error


def test_too_many_messages_and_endless_loops_are_told(monkeypatch):
    monkeypatch.setattr(
        "pplab_course.simulated.replay.MOST_MESSAGES", 40
    )  # ten times as many take a hundred times as long
    many = changed("pipe_naive.py", ("range(3)", "range(300)"))
    assert "more than 40 messages: fewer steps, please" in str([r.error for r in Replay(many, 2).ranks])
    endless = changed("pipe_naive.py", ("    step()\n", "    while True:\n        pass\n"))
    line = 1 + endless[: endless.index("    while True")].count("\n")
    assert f"the loop of line {line}: does it never end" in str([r.error for r in Replay(endless, 2).ranks])
    loops = "def step():\n    m = 0\n    while m < M:\n        forward(m)"
    idle = ("    x = receive(rank - 1, parts[m][0])", "    return\n    x = parts[0][0]")
    innocent = Replay(changed("pipe_gpipe.py", ("def step():", loops), idle), 2)
    line = 1 + innocent.text[: innocent.text.index("while m")].count("\n")
    assert not innocent.ranks[0].error and f"the loop of line {line}:" in str(innocent.ranks[1].error)
    assert len(innocent.events) < 11_000 < innocent.lines


RECEIVES = "        dist.recv(tensor, source)"
OTHER_WAYS = [
    (RECEIVES, "        [w.wait() for w in [dist.irecv(tensor, source)]]"),
    (RECEIVES, "        list(map(lambda w: w.wait(), [dist.irecv(tensor, source)]))"),
    (RECEIVES, f"        try:\n    {RECEIVES}\n        finally:\n            print('got', end=' ')"),
    (RECEIVES, f"        try:\n    {RECEIVES}\n        except:\n            tensor = torch.zeros(2)"),
    ("import torch.distributed as dist", "from torch import distributed as dist\nimport torch.nn.functional"),
    ("    send(y, rank + 1)", "    import random\n    random.random()\n    send(y, rank + 1)"),
    ("    step()\n", "    step()\n    torch.optim.SGD(stage.parameters(), lr=0.0).step()\n"),
]


@pytest.mark.parametrize("change", OTHER_WAYS)
def test_other_ways_to_write_it_run_as_well(tmp_path, change):
    (tmp_path / "my_pipe.py").write_text(changed("pipe_naive.py", change))
    ran = simulated.run(tmp_path / "my_pipe.py", 3)
    spine.check_run(ran, tmp_path / "my_pipe.py")


def both(*shapes: tuple[int, ...]) -> tuple[list, list]:
    """The same random numbers as tensors of torch, in double precision, and of the stand-in."""
    import torch

    theirs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    return theirs, [tensors.tensor(each.tolist()).requires_grad_() for each in theirs]


def same(theirs, ours: tensors.Tensor) -> None:
    assert tuple(theirs.shape) == ours.shape
    assert theirs.detach().flatten().tolist() == pytest.approx(ours.numbers, rel=1e-9, abs=1e-9)


OPERATIONS = {
    "arithmetic": (lambda t, a, b: (a + b) * a - a / (b * b + 2) + a**2 * 3 - (1 - a) / 2, [(3, 4), (3, 4)]),
    "a row and a number for all": (lambda t, a, b, c: a * b + c - b, [(3, 4), (4,), ()]),
    "activations": (lambda t, a: t.nn.functional.gelu(a), [(3, 4)]),
    "abs and max": (lambda t, a: a.abs().max() * a.mean() + a.sum(), [(3, 4)]),
    "mse_loss": (lambda t, a, b: t.nn.functional.mse_loss(a, b), [(3, 4), (3, 4)]),
    "mse_loss, its sum": (lambda t, a, b: t.nn.functional.mse_loss(a, b, reduction="sum"), [(3, 4), (3, 4)]),
    "slices": (lambda t, a: a[1:][2] * a[0].sum(), [(4, 8)]),
    "used twice": (lambda t, a: (a * a + a).abs() * a, [(3, 4)]),
    "split": (lambda t, a: a.tensor_split(2)[0] * a.tensor_split(2)[1], [(4, 3)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients_are_torchs(name):
    import torch

    function, shapes = OPERATIONS[name]
    theirs, ours = both(*shapes)
    made, mine = function(torch, *theirs), function(modules.stand_in(modules.StandIn("d")), *ours)
    same(made, mine)
    seed = torch.randn(made.shape, dtype=torch.float64)
    made.backward(seed)
    mine.backward(tensors.tensor(seed.tolist()))
    for a, b in zip(theirs, ours, strict=True):
        same(a.grad, b.grad)


@pytest.mark.slow
def test_layers_have_torchs_gradients_and_sgd_takes_torchs_step():
    import torch

    theirs = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.Linear(5, 4), torch.nn.GELU()).double()
    ours = modules.Sequential(modules.LayerNorm(5), modules.Linear(5, 4), modules.GELU())
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        b.numbers = a.flatten().tolist()
    (x,), (y,) = both((3, 5))
    (theirs(x) ** 2).sum().backward()
    (ours(y) ** 2).sum().backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    modules.SGD(ours.parameters(), lr=0.1).step()
    same(x.grad, y.grad)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        same(a.grad, b.grad)
        same(a, b)


@pytest.mark.parametrize(
    "mistake, says",
    [
        (lambda x: x.sum().backward(), "does not require grad"),
        (lambda x: (x.requires_grad_() * 2).backward(), "implicitly created only for scalar"),
        (lambda x: [y := (x.requires_grad_() * x).sum(), y.backward(), y.backward()], "a second time"),
        (lambda x: x[5], "index 5 is out of bounds"),
        (lambda x: x.item(), "cannot be converted to Scalar"),
        (lambda x: x + x[2:], "must match the size"),
        (lambda x: x.requires_grad_().copy_(x), "in-place operation"),
    ],
)
@pytest.mark.slow
def test_mistakes_are_told_in_torchs_words(mistake, says):
    import torch

    for ones in (torch.ones(2, 2), tensors.full((2, 2), 1.0)):
        with pytest.raises((RuntimeError, IndexError), match=says):
            mistake(ones)
