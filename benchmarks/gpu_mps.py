"""CUDA MPS for ranks that share a GPU, so that their kernels run side by side, each rank's on a part of the
multiprocessors.

Without it, processes take turns on a GPU, and only one of them computes at a time. NVIDIA's MPS puts the work of
several processes of one user on the GPU together, and CUDA_MPS_ACTIVE_THREAD_PERCENTAGE limits how many multiprocessors
each of them may fill. The daemon is started as the user, with its pipes in a folder of the pool, and no setting of the
device is touched. It ends with the pool, even when the pool's process is killed, because a shell that waits next to the
daemon sees the pipe from the pool close.

It can show ranks that compute at the same time, and so wait for each other as in a pipeline of smaller GPUs. But memory
bandwidth, caches, copy engines, power and clock are still shared, and the percentage is a limit, no reservation.
Compare `probe.multiply_times` on one rank and on all at once to see how far the ranks slow each other down.

torch's green contexts partition the multiprocessors too, but within one process, so several processes still take turns.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
START_S = 10.0  # a daemon that doesn't answer after this has failed
END_S = 10.0  # a daemon that is still there this long after "quit" is killed

# $1 is the control program. `cat` ends when the pool closes its end of the pipe, or is gone. What is then still of
# this process group goes last, a server that outlived its daemon included.
_GUARD = """
"$1" -f >"$CUDA_MPS_LOG_DIRECTORY/printed" 2>&1 </dev/null &
daemon=$!
cat >/dev/null
(sleep "$2"; kill -KILL 0) &
echo quit | "$1" >/dev/null 2>&1 || kill $daemon
wait $daemon
rm -rf "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
kill -KILL 0
"""


class Mps:
    """A daemon for one pool: `Pool(4, device="cuda", beside=Mps())`. Ranks that share a GPU get equal parts of it."""

    def __init__(self) -> None:
        self._guard: subprocess.Popen | None = None

    def check(self, devices: Sequence[str]) -> None:
        """Raise ValueError if the ranks share no GPU, or the control program is missing."""
        self._num_ranks, self._num_gpus, most = len(devices), len(set(devices)), max(Counter(devices).values())
        if not devices[0].startswith("cuda") or most == 1:
            where = "the CPU" if not devices[0].startswith("cuda") else "a GPU each"
            raise ValueError(f"Mps is for ranks that share a GPU, and these have {where}: leave it out")
        if shutil.which(CONTROL) is None:
            raise ValueError(
                f"Mps needs {CONTROL}, which comes with NVIDIA's driver, and it isn't on the PATH: install the "
                "driver's utilities, or let the ranks take turns, without Mps"
            )
        self.percentage = 100 // most

    def start(self, folder: Path) -> dict[str, str]:
        """Start the daemon, and return every rank's environment. Raises RuntimeError when it doesn't start."""
        pipes, logs = folder / "mps", folder / "mps-log"
        pipes.mkdir()
        logs.mkdir()
        self._logs = logs
        self._daemons = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "pplab-mps", CONTROL, str(END_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment(),
            start_new_session=True,
        )
        until = time.monotonic() + START_S
        while self._ask("get_server_list") is None:
            if time.monotonic() > until:
                said = self._said()
                self.close()
                raise RuntimeError(
                    f"{CONTROL} did not answer within {START_S:.0f} s: leave Mps out; it said: {said or 'nothing'}"
                )
            time.sleep(0.05)
        return {**self._daemons, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(self.percentage)}

    def notes(self) -> tuple[str, ...]:
        """What ranks on parts of a GPU can't show, and whether MPS took them all, since CUDA goes on without it."""
        gpus = f"{self._num_gpus} GPU{'s' if self._num_gpus > 1 else ''}"
        said = (
            f"{self._num_ranks} ranks share {gpus} by MPS, each with at most {self.percentage} % of the "
            "multiprocessors: losses, gradients and memory are valid; times and bubble are those of GPUs that small "
            "only as far as the ranks don't slow each other down by memory, caches and clock, which they share"
        )
        if (clients := self.num_clients()) >= self._num_ranks:
            return (said,)
        return (
            said,
            f"MPS lists {clients} of {self._num_ranks} ranks as its clients: the others take turns, so the times and "
            "the bubble are not the schedule's",
        )

    def num_clients(self) -> int:
        """The processes that the daemon's servers list as their clients. A rank that isn't among them takes turns."""
        servers = _numbers(self._ask("get_server_list"))
        return sum(len(_numbers(self._ask(f"get_client_list {server}"))) for server in servers)

    def close(self) -> None:
        """End the daemon and its servers, and wait until they are gone."""
        if self._guard is None:
            return
        self._guard.stdin.close()
        try:
            self._guard.wait(END_S + 5)
        except subprocess.TimeoutExpired:
            os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()
        self._guard = None

    def _environment(self) -> dict[str, str]:
        """The daemon's environment. It sees all GPUs. If it saw only some, it would number them from 0, and the ranks,
        which see the same ones by CUDA_VISIBLE_DEVICES, would choose among the new numbers by the old."""
        kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return {**kept, **self._daemons}

    def _ask(self, command: str) -> str | None:
        """The control program's answer, or None without one."""
        try:
            done = subprocess.run(
                [CONTROL], input=f"{command}\n", capture_output=True, text=True, timeout=5, env=self._environment()
            )
        except (subprocess.TimeoutExpired, OSError):
            return None
        return None if done.returncode else done.stdout

    def _said(self) -> str:
        texts = (path.read_text(errors="replace").strip() for path in sorted(self._logs.iterdir()))
        return "\n".join(filter(None, texts))[-2000:]


def _numbers(text: str | None) -> list[int]:
    """The process numbers of a list, one a line."""
    return [int(line) for line in (text or "").split() if line.isdigit()]
