"""MPS is started, used and ended as NVIDIA documents it, tried with a stand-in for its control program: that nothing
stays behind can be seen without a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from gpu_mps import CONTROL, Mps

import modules
import pplab as pp
from conftest import ROOT
from pplab import lab
from pplab.runtime import Pool, RankError, devices

pytestmark = pytest.mark.slow

# Serves until "quit" as nvidia-cuda-mps-control does, with one server and as many clients as the file `clients` says.
DAEMON = """#!/bin/sh
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
if [ "$1" = -f ]; then
  echo $$ > nvidia-cuda-mps-control.pid
  sleep 1000 & echo $! > server
  [ -p control ] || mkfifo control
  cat control > /dev/null  # until somebody says quit
  exit 0
fi
[ -p control ] || { echo "Cannot find MPS control daemon process" >&2; exit 1; }
read command argument
case "$command" in
  get_server_list) cat server;;
  get_client_list) seq 100 $((99 + ${FAKE_CLIENTS:-2}));;
  quit) echo quit > control;;
esac
"""


@pytest.fixture
def control(tmp_path, monkeypatch) -> Path:
    """A folder on the PATH with a control program that works."""
    path = tmp_path / "bin" / CONTROL
    path.parent.mkdir()
    path.write_text(DAEMON)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def started(folder: Path, num_ranks: int = 2) -> Mps:
    """A daemon for ranks that share one GPU."""
    mps = Mps()
    mps.check(["cuda:0"] * num_ranks)
    mps.start(folder)
    return mps


class OnCpu(Mps):
    """Takes ranks on the CPU for ranks that share a GPU."""

    def check(self, devices: list[str]) -> None:
        """As if they shared one."""
        super().check(["cuda:0"] * len(devices))


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes that know an MPS folder, without this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("CUDA_MPS_PIPE_DIRECTORY", "").startswith(str(folder)):
                found.append(process)
        except psutil.Error:
            pass
    return found


def assert_gone(folder: Path) -> None:
    """Within some seconds no process knows the folder, and nothing is in it: what was killed needs a moment to end."""
    until = time.monotonic() + 15
    while (processes_of(folder) or any(folder.glob("mps*"))) and time.monotonic() < until:
        time.sleep(0.05)
    assert not processes_of(folder) and not any(folder.glob("mps*"))


def test_a_daemon_is_started_asked_and_ended(control, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    mps = Mps()
    mps.check(["cuda:0"] * 4)
    assert mps.start(tmp_path) == {
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mps"),
        "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "mps-log"),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    }
    assert mps.num_clients() == 2
    assert len(processes_of(tmp_path)) >= 3  # the guard, the daemon, its server
    assert not any("CUDA_VISIBLE_DEVICES" in process.environ() for process in processes_of(tmp_path))
    mps.close()
    mps.close()
    assert_gone(tmp_path)


def test_a_daemon_that_does_not_quit_is_killed(control, tmp_path, monkeypatch):
    monkeypatch.setattr("gpu_mps.END_S", 1)
    control.write_text(DAEMON.replace("echo quit > control", "true"))
    mps = started(tmp_path)
    mps.close()
    until = time.monotonic() + 5
    while processes_of(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert not processes_of(tmp_path)


def test_a_daemon_that_does_not_start_says_why(control, tmp_path, monkeypatch):
    monkeypatch.setattr("gpu_mps.START_S", 1)
    control.write_text('#!/bin/sh\necho "MPS is not supported here"; exit 1\n')
    with pytest.raises(RuntimeError, match="did not answer within 1 s: leave Mps out; .*MPS is not supported here"):
        started(tmp_path)
    assert_gone(tmp_path)


def test_a_daemon_ends_with_the_process_that_started_it(control, tmp_path):
    code = f"""
        import time
        from pathlib import Path
        import sys
        sys.path.append({str(ROOT / "benchmarks")!r})
        from gpu_mps import Mps
        mps = Mps()
        mps.check(["cuda:0"] * 2)
        mps.start(Path({str(tmp_path)!r}))
        print("up", flush=True)
        time.sleep(100)
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "up\n"
    assert processes_of(tmp_path)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert_gone(tmp_path)


@pytest.mark.parametrize("clients", [2, 1])
def test_a_pools_ranks_get_their_share_and_take_mps_along_when_they_end(control, monkeypatch, clients):
    monkeypatch.setenv("FAKE_CLIENTS", str(clients))
    with Pool(2, device="cpu", beside=OnCpu()) as pool:
        found = pool.run(modules.environment, "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        assert found[0] == found[1] and found[0][1] == "50"
        folder = Path(found[0][0]).parent
        assert any("MPS lists 1 of 2 ranks" in note for note in pool.notes) == (clients == 1)
    assert_gone(folder)
    assert not folder.exists()
    with Pool(2, device="cpu", beside=OnCpu()) as pool:
        folder = Path(pool.run(modules.environment, "CUDA_MPS_PIPE_DIRECTORY")[0][0]).parent
        with pytest.raises(RankError):
            pool.run(modules.crash)
        assert_gone(folder)
        assert not folder.exists()
        again = Path(pool.run(modules.environment, "CUDA_MPS_PIPE_DIRECTORY")[0][0]).parent
        assert again != folder and processes_of(again)
    assert_gone(again)
    assert not again.exists()


def test_what_mps_is_not_for_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="these have the CPU: leave it out"):
        Pool(2, device="cpu", beside=Mps())
    with pytest.raises(ValueError, match="these have a GPU each"):
        Mps().check(["cuda:0", "cuda:1"])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=f"needs {CONTROL}.*isn't on the PATH"):
        Mps().check(["cuda:0", "cuda:0"])


@pytest.mark.parametrize(
    "devices, percentage", [(["cuda:0"] * 4, 25), (["cuda:0", "cuda:1", "cuda:0"], 50)], ids=["one", "two"]
)
def test_a_share_is_an_equal_part_of_the_fullest_gpu(control, devices, percentage):
    mps = Mps()
    mps.check(devices)
    assert mps.percentage == percentage


def test_notes_say_what_a_shared_gpu_shows(control, tmp_path):
    taking_turns = devices.notes(["cuda:0"] * 4, 8)[0]
    assert taking_turns.startswith("4 ranks share 1 GPU, where processes take turns")
    mps = started(tmp_path, 4)
    beside, clients = mps.notes()
    mps.close()
    assert clients.startswith("MPS lists 2 of 4 ranks")
    assert beside.startswith("4 ranks share 1 GPU by MPS")
    assert "at most 25 % of the multiprocessors" in beside and "only as far as" in beside
    assert devices.notes(["cuda:0", "cuda:1"], 8) == []
    notes = lab.Pace(pp.Costs(unit="ms")).notes
    assert notes(["cpu"] * 2, []) == []
    assert "the durations say nothing about the GPU" in notes(["cuda:0"] * 2, ["turns"])[1]
    (paced,) = notes(["cpu"] * 4, ["4 ranks share 2 cores"])
    assert "the order and the waits are the schedule's" in paced and "share" not in paced
