"""Whatever goes wrong in a rank ends all ranks within seconds, raises one error that says what, and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch import nn

import modules
import pplab as pp
from pplab.runtime import Options, Pool, RankError, failures
from pplab.runtime.options import Job
from pplab.runtime.training import train

pytestmark = pytest.mark.slow

SCHEDULE = pp.build("1F1B", num_ranks=2, num_microbatches=4)


def good() -> list[nn.Module]:
    return [nn.Linear(6, 6), nn.Linear(6, 6)]


def leftovers() -> tuple:
    """What a process can leave behind: processes, shared memory, temporary files, open files, listening ports."""
    me = psutil.Process()
    shared = shared_memory_of(me.pid)
    ranks = [p.pid for p in me.children(recursive=True) if "pplab rank" in p.name() or len(p.cmdline()) == 0]
    ports = [c.laddr for c in me.net_connections(kind="inet") if c.status == "LISTEN"]
    temporary = sorted(
        p for p in os.listdir(os.environ.get("TMPDIR", "/tmp")) if p.startswith((f"pplab-{me.pid}", "torch_"))
    )
    return ranks, shared, temporary, len(me.open_files()), ports


def shared_memory_of(pid: int) -> list[str]:
    """What lies in shared memory under a process's number."""
    return sorted(name for name in os.listdir("/dev/shm") if str(pid) in name) if os.path.isdir("/dev/shm") else []


@pytest.fixture(scope="module")
def fork_server() -> None:
    """It and its helpers stay for the session."""
    with Pool(2, device="cpu", timeout_s=60) as warm:
        warm.run(modules.chatter)


@pytest.fixture
def pool(fork_server):
    """A pool; afterwards it must be down, able to start again, and everything must be gone."""
    before = leftovers()
    with Pool(2, device="cpu", timeout_s=60) as pool:
        yield pool
        assert pool.pids == ()
        run = pool.train(SCHEDULE, modules.workload(*good()), steps=1, check_gradients=True)
        assert run.gradients.equal
        pids = pool.pids
    deadline = time.monotonic() + 5
    while leftovers() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers() == before
    assert not any(psutil.pid_exists(pid) for pid in pids)


def fail(pool: Pool, stages: list[nn.Module], seconds: float = 30, **options) -> RankError:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.train(SCHEDULE, modules.workload(*stages), steps=50, **options)
    assert time.monotonic() - started < seconds
    assert not multiprocessing_children()
    return caught.value


def multiprocessing_children() -> list:
    import multiprocessing

    return [p for p in multiprocessing.active_children() if p.name.startswith("pplab")]


def test_an_exception_in_a_forward_names_rank_action_and_traceback(pool):
    error = fail(pool, [nn.Linear(6, 6), modules.RaisesInForward()])
    assert error.rank == 1 and error.action == pp.parse("1F2")
    assert error.cause == "rank 1 failed at 1F2: ArithmeticError: the third forward fails"
    assert 'raise ArithmeticError("the third forward fails")' in str(error)
    assert "modules.py" in error.remote_traceback


def test_an_exception_in_a_backward(pool):
    error = fail(pool, [modules.RaisesInBackward(), nn.Linear(6, 6)])
    assert error.rank == 0 and error.action == pp.parse("0B0")
    assert "ArithmeticError: the backward fails" in error.cause


def test_an_exception_in_an_optimizer(pool):
    error = fail(pool, good(), optimizer=modules.raising_optimizer)
    assert error.rank in (0, 1) and "failed in the optimizer: ArithmeticError: the optimizer fails" in error.cause


def test_a_stage_that_changes_its_shape(pool):
    error = fail(pool, [modules.Growing(), nn.Linear(7, 6)])
    assert error.action == pp.parse("0SEND_F1")
    assert "0SEND_F1 carries float32 [2, 8], but its stages agreed on float32 [2, 7]" in error.cause


def test_stages_that_do_not_fit(pool):
    error = fail(pool, [nn.Linear(6, 5), nn.Linear(6, 6)])
    assert error.rank == 1 and error.action == pp.parse("1F0") and "cannot be multiplied" in error.cause


def test_a_loss_that_fails(pool):
    workload = modules.Modules(good(), modules.batch(), nn.functional.nll_loss)
    with pytest.raises(RankError, match="rank 1 failed at 1F0"):
        pool.train(SCHEDULE, workload)


@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGKILL, "was killed (SIGKILL)"), (signal.SIGSTOP, "was stopped (SIGSTOP)")]
)
def test_a_rank_that_is_killed_or_stopped_in_the_middle_of_a_step(pool, tmp_path, number, says):
    threading.Thread(target=strike, args=(pool, tmp_path, number)).start()
    error = fail(pool, [modules.Slow(str(tmp_path)), nn.Linear(6, 6)])
    assert error.rank == 0 and says in error.cause and error.action is not None
    assert str(error.action) in error.cause


def strike(pool: Pool, folder: Path, number: int) -> None:
    """Send a signal to rank 0 while it computes."""
    while not list(folder.iterdir()):
        time.sleep(0.01)
    os.kill(pool.pids[0], number)


def test_a_crash_outside_python_says_what_the_rank_printed(pool):
    with pytest.raises(RankError, match=r"rank 1 was killed \(SIGABRT\)") as caught:
        pool.run(modules.crash)
    assert "last words of rank 1" in str(caught.value)


def test_a_rank_that_exits(pool):
    with pytest.raises(RankError, match="rank 0 exited with 7"):
        pool.run(modules.leave)


def test_a_deadlock_that_was_not_validated_says_what_each_rank_waits_for(pool, monkeypatch):
    """`train` refuses such a schedule; here it is sent to the ranks behind its back."""
    monkeypatch.setattr(failures, "ALL_WAIT_S", 1.0)
    stuck = pp.Schedule([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    with pytest.raises(pp.ScheduleError, match="deadlock"):
        pool.train(stuck, modules.workload(*good()))
    job = Job(stuck, modules.workload(*good()), Options(steps=1, warmup=0), train)
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(train, job)
    assert time.monotonic() - started < 10
    assert "rank 0 waits at 0B0 for 0RECV_B0; rank 1 waits at 1F1 for 1RECV_F1" in caught.value.cause


def test_no_progress_is_given_up_after_the_timeout():
    with Pool(2, device="cpu", timeout_s=1) as pool:
        with pytest.raises(RankError, match="no rank made progress for"):
            pool.run(time_out)
        assert pool.pids == ()


def time_out(context) -> None:
    time.sleep(60)


def test_something_that_only_a_notebook_can_import_is_refused(pool, monkeypatch):
    def cell(context):
        return 1

    cell.__module__, cell.__qualname__ = "__main__", "cell"
    monkeypatch.setattr(sys.modules["__main__"], "cell", cell, raising=False)
    with pytest.raises(RankError, match="functions and classes that go to ranks must live in a module"):
        pool.run(cell)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import modules, signal
import pplab as pp
from torch import nn
from pplab.runtime import Pool

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    pool = Pool(2, device="cpu")
    pool.run(modules.chatter)
    print(*pool.pids, flush=True)
    schedule = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    try:
        pool.train(schedule, modules.workload(modules.Slow({folder!r}), nn.Linear(6, 6)), steps=100)
    except KeyboardInterrupt:
        print("interrupted", pool.pids, flush=True)
        print(*pool.run(modules.chatter), flush=True)
"""


@contextlib.contextmanager
def started_script(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, list[int]]]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path / "here"))))
    (tmp_path / "here").mkdir()
    process = subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=tmp_path
    )
    try:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        while not list((tmp_path / "here").iterdir()):
            assert process.poll() is None, "the script ended before it trained"
            time.sleep(0.05)
        yield process, pids
    finally:
        process.kill()
        process.communicate()


def wait_until_gone(pids: list[int], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if psutil.pid_exists(pid)]}"
        time.sleep(0.05)


@pytest.mark.parametrize("group", [False, True], ids=["the caller alone", "the whole group, as a notebook does"])
def test_an_interrupt_ends_the_ranks_and_the_pool_can_go_on(tmp_path, group):
    with started_script(tmp_path) as (process, pids):
        (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
        wait_until_gone(pids)
        out = process.stdout.read()
        assert out == "interrupted ()\n0 1\n" and process.wait(timeout=30) == 0


def test_ranks_do_not_outlive_a_caller_that_is_killed(tmp_path):
    with started_script(tmp_path) as (process, pids):
        family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert shared_memory_of(process.pid)
        process.kill()
    wait_until_gone([*pids, *family])
    assert not shared_memory_of(process.pid)
