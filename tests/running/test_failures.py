"""Whatever goes wrong in a rank ends all ranks within seconds, raises one error that says what, and leaves nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import hurts
import psutil
import pytest
import torch
from torch import nn

import modules
import pplab as pp
from pplab.runtime import Job, Options, Pool, RankError, failures, processes
from pplab.runtime.rank import train

pytestmark = pytest.mark.slow

SCHEDULE = pp.build("1F1B", num_ranks=2, num_microbatches=4)


def good() -> list[nn.Module]:
    return [nn.Linear(6, 6), nn.Linear(6, 6)]


def leftovers() -> tuple:
    """What a process can leave behind: processes, shared memory, temporary files, open files, listening ports."""
    me = psutil.Process()
    shared = shared_memory_of(me.pid)
    ranks = [p.pid for p in running(me) if "pplab rank" in p.name() or len(p.cmdline()) == 0]
    ports = [c.laddr for c in me.net_connections(kind="inet") if c.status == "LISTEN"]
    temporary = sorted(
        p for p in os.listdir(os.environ.get("TMPDIR", "/tmp")) if p.startswith((f"pplab-{me.pid}", "torch_"))
    )
    return ranks, shared, temporary, len(me.open_files()), ports


def running(process: psutil.Process) -> list[psutil.Process]:
    """Its children and theirs. A zombie, which has ended, is taken note of when the next process is started."""
    found = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


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


def test_a_stage_that_changes_what_it_is_given(pool):
    error = fail(pool, [nn.Linear(6, 6), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6))])
    assert error.rank == 1 and "a stage must not change what it is given: let its first module" in error.cause


def test_gradients_of_no_weight(pool):
    workload = modules.workload(*[each.requires_grad_(False) for each in good()])
    assert len(pool.train(SCHEDULE, workload, steps=2).losses) == 2  # as the error advises
    with pytest.raises(RankError, match="no weight that requires a gradient: .* or leave check_gradients out"):
        pool.train(SCHEDULE, workload, steps=1, check_gradients=True)


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


@pytest.mark.parametrize(("rank", "in_backward"), [(0, True), (1, False)])
@pytest.mark.parametrize("how", ["sleep", "hold the GIL"])
def test_a_rank_that_holds_the_others_up_is_the_one_that_is_named(fork_server, rank, in_backward, how):
    stages = good()
    stages[rank] = hurts.Hurts(how, "backward" if in_backward else "forward", at=3, width=6)
    with Pool(2, device="cpu", timeout_s=2) as pool:
        error = fail(pool, stages)
    assert (error.rank, str(error.action)) == (rank, f"{rank}{'B' if in_backward else 'F'}2")
    place = r'\(File ".*/hurts.py", line \d+\)'
    assert re.search(
        f"no rank made progress for . s: rank {rank} at {error.action} {place}; rank {1 - rank} (waits )?(at|while) ",
        error.cause,
    )


def test_who_hangs_after_its_row_is_found_at_its_line_of_python():
    """As where a metric is summed over the pipeline's ranks, and a rank without such a layer returns early."""
    with Pool(2, device="cpu", timeout_s=2) as pool, pytest.raises(RankError) as caught:
        pool.train(SCHEDULE, modules.workload(*good()), modules.SummedByOne(), steps=1)
    assert re.search(
        r'rank 1 after its row \(File ".*/modules.py", line \d+\); rank 0 while comparing', caught.value.cause
    )


def test_a_rank_that_lets_another_run_into_a_time_out_is_named(fork_server, monkeypatch):
    """The other one's failure is a consequence, also when it comes before the pool's patience ends."""
    monkeypatch.setattr(processes, "_PEERS_S", -57.0)
    with Pool(2, device="cpu", timeout_s=60) as pool:
        started = time.monotonic()
        with pytest.raises(RankError) as caught:
            pool.run(hurts.halting, 0, "sleep")
    assert caught.value.rank == 0 and time.monotonic() - started < 30
    assert re.search(r"rank 0 at the barrier \(File .*\); rank 1 failed at the barrier: ", caught.value.cause)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_idle_is_named_and_not_the_one_that_misses_it(pool, rank):
    for _ in range(3):
        pool.run(modules.chatter)
        os.kill(pool.pids[rank], signal.SIGKILL)
        error = fail(pool, good())
        assert error.rank == rank and error.cause.startswith(f"rank {rank} was killed (SIGKILL) ")


def test_a_rank_that_is_killed_at_a_barrier(pool):
    with pytest.raises(RankError, match=r"rank 1 was killed \(SIGKILL\) at the barrier: all ranks were ended"):
        pool.run(hurts.halting, 1, "SIGKILL")


def test_a_rank_that_is_killed_while_it_waits(pool, tmp_path):
    threading.Thread(target=strike, args=(pool, tmp_path, signal.SIGKILL, 1)).start()
    error = fail(pool, [modules.Slow(str(tmp_path), 5), nn.Linear(6, 6)])
    assert error.rank == 1
    assert error.cause == "rank 1 was killed (SIGKILL) while it waited at 1F0 for 1RECV_F0: all ranks were ended"


def test_a_kill_for_want_of_memory_is_recognised(pool):
    """The system counts them; here it seems to have counted one since the pool started."""
    pool.run(modules.chatter)
    pool._ranks.oom_kills -= 1
    with pytest.raises(RankError, match="rank 1 was killed .* the system had run out of memory: take smaller microba"):
        pool.run(hurts.halting, 1, "SIGKILL")


@pytest.mark.parametrize(("what", "says"), [("batch", "while loading batch 2"), ("stage", "while building its stages")])
def test_what_fails_before_a_step_is_named(pool, what, says):
    with pytest.raises(RankError, match=f"rank 1 failed {says}: OSError: the file is gone") as caught:
        pool.train(SCHEDULE, modules.Broken(what), steps=4)
    assert caught.value.action is None


@pytest.mark.parametrize("width", [16, 1024])
def test_an_idle_rank_that_is_stopped_holds_no_job_up(pool, width):
    """A job of 4 MB is more than a pipe takes."""
    pool.run(modules.chatter)
    while pool._ranks.statuses[0].doing != "idle":  # it has answered, and is about to be
        time.sleep(0.01)
    os.kill(pool.pids[0], signal.SIGSTOP)
    with pytest.raises(RankError, match=r"rank 0 was stopped \(SIGSTOP\) while idle"):
        pool.run(modules.echo, torch.zeros(width, width))


def test_a_stopped_rank_is_called_so_also_by_a_pool_that_has_little_patience(fork_server):
    with Pool(2, device="cpu", timeout_s=1.5) as pool:
        with pytest.raises(RankError, match=r"rank 1 was stopped \(SIGSTOP\) at the barrier") as caught:
            pool.run(hurts.halting, 1, "SIGSTOP")
    assert caught.value.rank == 1


def test_a_rank_that_is_stopped_while_it_answers(pool):
    with pytest.raises(RankError, match=r"rank 0 was stopped \(SIGSTOP\) while answering"):
        pool.run(hurts.answer_in_part, 0, "SIGSTOP")


def test_a_job_that_is_long_on_its_way_arrives(fork_server):
    """Bytes that move are progress."""
    numbers = torch.arange(400_000)  # 13 pieces
    with Pool(2, device="cpu", timeout_s=2) as pool:
        pool.run(modules.read_slowly, 0.25)
        started = time.monotonic()
        assert all(torch.equal(answer, numbers) for answer in pool.run(modules.echo, numbers))
        assert time.monotonic() - started > 3


def test_a_fork_server_that_is_killed(pool):
    """One that is stopped is among tests/attacks/test_surroundings.py."""
    pool.run(modules.read_slowly, 0.25)  # no answer comes before the pool has looked
    server = forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGKILL)
    while failures.state(server) != "Z":
        time.sleep(0.01)
    wait([process.sentinel for process in pool._ranks.processes])  # its last thread may end after its first
    with pytest.raises(RankError, match="^the fork server, which starts the ranks, was killed: all ranks were ended$"):
        pool.run(modules.echo, torch.zeros(1))


IMPORTING = """
import sys
import time
from itertools import chain, repeat
from types import SimpleNamespace

sys.path.append({tests!r})
import modules
from pplab.runtime import Pool, processes

if __name__ == "__main__":
    after = chain([0.0], repeat({seconds}))  # seconds, by the pool's clock, since it asked
    processes.time = SimpleNamespace(monotonic=lambda: time.monotonic() + next(after))
    try:
        with Pool(2, device="cpu", timeout_s={patience}) as pool:
            print(pool.run(modules.echo, "it runs"))
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("seconds", "patience", "says"),
    [(120.0, 20, r"\['it runs', 'it runs'\]"), (900.0, 1000, "the ranks .*fork server did nothing for 90.*")],
)
def test_a_fork_server_has_minutes_to_import_torch_whatever_the_pools_patience(tmp_path, seconds, patience, says):
    """A wheel for CUDA takes more than one from a cold disk."""
    program = tmp_path / "program.py"
    tests = str(Path(__file__).parents[1])
    program.write_text(IMPORTING.format(tests=tests, seconds=seconds, patience=patience))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert re.fullmatch(f"{says}\n", done.stdout), done.stdout + done.stderr[-2000:]


def test_threads_take_turns(pool):
    """And each has its own results."""
    workload, runs = modules.workload(*good()), []
    threads = [
        threading.Thread(target=lambda: runs.append(pool.train(SCHEDULE, workload, steps=2, check_gradients=True)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.gradients.equal for run in runs] == [True] * 3 and len({run.losses for run in runs}) == 1
    pool.close()


def test_a_pool_that_another_thread_closes(pool):
    pool.run(modules.chatter)
    threading.Timer(0.5, pool.close).start()
    with pytest.raises(RankError, match="the pool was closed while it ran"):
        pool.run(hurts.halting, 0, "sleep")


def strike(pool: Pool, folder: Path, number: int, rank: int = 0) -> None:
    """Send a signal to a rank while rank 0 computes, and another rank waits for what it makes (not at a barrier)."""
    while not list(folder.iterdir()) or (rank and not pool._ranks.statuses[rank].doing.startswith("waits at ")):
        time.sleep(0.01)
    os.kill(pool.pids[rank], number)


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
    place = r' \(File ".*/runtime/comm.py", line \d+\)'
    assert re.search(
        f"rank 0 waits at 0B0 for 0RECV_B0{place}; rank 1 waits at 1F1 for 1RECV_F1{place}", caught.value.cause
    )


def test_every_channel_has_the_pools_patience_while_it_opens(monkeypatch):
    """Together they take longer than ranks may that all wait: NCCL needs up to seconds for each."""
    monkeypatch.setattr(failures, "ALL_WAIT_S", 0.5)
    with Pool(3, device="cpu", transport="gloo", timeout_s=20) as pool:
        pool.run(modules.open_slowly, 1.5)
        s = pp.build("1F1B", num_ranks=3, num_microbatches=4)
        started = time.monotonic()
        assert pool.train(s, modules.workload(*good(), nn.Linear(6, 6)), steps=1).losses
        assert time.monotonic() - started > 4 * 1.5


def test_ranks_share_memory_on_disk_where_the_system_has_little_of_it(monkeypatch, tmp_path):
    """As docker, by default."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**26))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Pool(2, device="cpu", timeout_s=60) as pool:
        assert pool.train(SCHEDULE, modules.workload(*good()), steps=1, check_gradients=True).gradients.equal
        assert pool._ranks.folder.parent == tmp_path and list(tmp_path.glob("pplab-*/run1-*")) == []  # mapped, unnamed
    assert list(tmp_path.glob("pplab-*")) == [] and shared_memory_of(os.getpid()) == []


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


def interrupt(after_s: float, again_s: list[float]) -> None:
    """Interrupt this thread, as Ctrl-C does, and again after these times."""

    def handle(*_: object) -> None:
        if again_s:
            signal.setitimer(signal.ITIMER_REAL, again_s.pop(0))
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, after_s)


@pytest.mark.parametrize("again_s", [[], [0.02, 0.005]], ids=["once", "three times"])
@pytest.mark.parametrize("when", ["starting", "training", "closing"])
def test_interrupts_leave_nothing_while_the_traceback_is_kept(pool, when, again_s):
    """A notebook keeps the last one, and with it all that its frames hold."""
    kept = []
    if when != "starting":
        pool.run(modules.chatter)
    try:
        try:
            if when == "closing":
                os.kill(pool.pids[0], signal.SIGSTOP)  # it takes all the time that it is given
            interrupt(0.05 if when == "starting" else 0.2, again_s)
            if when == "closing":
                pool.close()
            pool.train(SCHEDULE, modules.workload(modules.Sleeps(1), nn.Linear(6, 6)), steps=50)
        except KeyboardInterrupt as error:
            kept.append(error)
            time.sleep(0.3)
    except KeyboardInterrupt as error:
        kept.append(error)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert kept
    deadline = time.monotonic() + 10
    while ranks_and_guards() or shared_memory_of(os.getpid()):
        assert time.monotonic() < deadline, (ranks_and_guards(), shared_memory_of(os.getpid()))
        time.sleep(0.05)
    assert pool.run(modules.chatter) == [0, 1]
    pool.close()


def ranks_and_guards() -> list[psutil.Process]:
    """What runs for pools of this process; the fork server and its tracker, its own children, stay."""
    mine = os.getpid()
    return [p for p in running(psutil.Process()) if p.ppid() != mine or "multiprocessing" not in str(p.cmdline())]


def test_a_pool_listens_on_its_own_host_alone_and_does_not_mind_nonsense(fork_server):
    with Pool(2, device="cpu", timeout_s=60) as pool:
        first = pool.train(SCHEDULE, modules.workload(*good()), steps=1)
        pids = os.getpid(), *pool.pids
        open_ = [each for pid in pids for each in psutil.Process(pid).net_connections(kind="inet")]
        listening = [each.laddr for each in open_ if each.status == psutil.CONN_LISTEN]
        assert len(listening) >= 3 and {address.ip for address in listening} == {"127.0.0.1"}
        with contextlib.ExitStack() as strangers:
            for address in listening:
                for nonsense in (b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 64, os.urandom(4096), b""):
                    stranger = strangers.enter_context(socket.create_connection(address, timeout=5))
                    stranger.sendall(nonsense)
            assert pool.pids == pids[1:]
            again = pool.train(SCHEDULE, modules.workload(*good()), steps=1)
        assert pool.pids == pids[1:] and len(again.losses) == len(first.losses) == 1


def test_what_a_crash_left_is_swept(fork_server):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    shared = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    left, held, alive = (shared / f"pplab-{pid}-test" for pid in (ended.pid, f"0{ended.pid}", os.getpid()))
    for folder in (left, held, alive):
        folder.mkdir()
        (folder / "board").touch()
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with Pool(1, device="cpu") as pool:
            pool.run(modules.chatter)
            assert not left.exists() and held.exists() and alive.exists()
        os.close(lock)
        with Pool(1, device="cpu") as pool:
            pool.run(modules.chatter)
            assert not held.exists() and alive.exists()
    finally:
        for folder in (left, held, alive):
            shutil.rmtree(folder, ignore_errors=True)


UNGUARDED = """
import sys
sys.path.insert(0, {tests!r})
import modules
from pplab.runtime import Pool, RankError

try:
    with Pool(2, device="cpu", timeout_s=60) as pool:
        pool.run(modules.chatter)
except RankError as error:
    print(error.cause)
"""


def test_a_script_without_a_guard_is_told_so_in_one_line(tmp_path):
    """Ranks are spawned here; tests/attacks try what the fork server starts, and other surroundings."""
    (tmp_path / "script.py").write_text(UNGUARDED.format(tests=str(Path(__file__).parents[1])))
    command = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    says = r"rank . exited with 86 before it started: the ranks import your script.*`if __name__ == \"__main__\":`"
    assert re.fullmatch(f"{says}.*\n", done.stdout), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
