"""CUDA MPS for ranks that share a GPU: their kernels run side by side, each rank's on a part of the multiprocessors.

Without it, processes take turns on a GPU: only one of them computes at a time. NVIDIA's MPS puts the work of several
processes of one user on the GPU together, and CUDA_MPS_ACTIVE_THREAD_PERCENTAGE limits how many multiprocessors each of
them may fill. The daemon is started as the user, with its pipes in a folder of the pool; no setting of the device is
touched. It ends with the pool, also when the pool's process is killed: a shell that waits at the daemon's side sees the
pipe from the pool close.

What it can show: ranks that compute at the same time, and so wait for each other as in a pipeline of smaller GPUs.
What it can't: memory bandwidth, caches, copy engines, power and clock are still shared, and the percentage is a limit,
no reservation. `probe.multiply_times` on one rank and on all at once says how far the ranks slow each other down.

torch's green contexts partition the multiprocessors too, but within one process: several processes still take turns.
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

from ..errors import unknown

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


def choose_share(share: str, devices: Sequence[str]) -> int | None:
    """How much of its GPU a rank may fill, in per cent, or None where MPS isn't asked for.

    ValueError where the ranks share no GPU, or the control program is missing.
    """
    if share not in ("turns", "mps"):
        raise unknown("share", share, ("turns", "mps"))
    if share == "turns":
        return None
    most = max(Counter(devices).values())
    if not devices[0].startswith("cuda") or most == 1:
        where = "the CPU" if not devices[0].startswith("cuda") else "a GPU each"
        raise ValueError(f'share="mps" is for ranks that share a GPU, and these have {where}: leave it out')
    if shutil.which(CONTROL) is None:
        raise ValueError(
            f"share=\"mps\" needs {CONTROL}, which comes with NVIDIA's driver, and it isn't on the PATH: "
            'install the driver\'s utilities, or take share="turns"'
        )
    return 100 // most


class Mps:
    """A running MPS daemon of one pool. RuntimeError when it doesn't start."""

    def __init__(self, folder: Path, percentage: int):
        pipes, logs = folder / "mps", folder / "mps-log"
        pipes.mkdir()
        logs.mkdir()
        self._logs = logs
        self._daemons = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        self.environment = {**self._daemons, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage)}  # of every rank
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
                    f'{CONTROL} did not answer within {START_S:.0f} s: take share="turns"; it said: {said or "nothing"}'
                )
            time.sleep(0.05)

    def num_clients(self) -> int:
        """The processes that the daemon's servers know as theirs. A rank that isn't among them takes turns."""
        servers = _numbers(self._ask("get_server_list"))
        return sum(len(_numbers(self._ask(f"get_client_list {server}"))) for server in servers)

    def close(self) -> None:
        """End the daemon and its servers, and wait until they are gone."""
        self._guard.stdin.close()
        try:
            self._guard.wait(END_S + 5)
        except subprocess.TimeoutExpired:
            os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()

    def _environment(self) -> dict[str, str]:
        """The daemon's. It sees all GPUs: one that saw some of them would number them anew, and the ranks, which see
        the same ones by CUDA_VISIBLE_DEVICES, would choose among the new numbers by the old."""
        kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return {**kept, **self._daemons}

    def _ask(self, command: str) -> str | None:
        """The control program's answer; None when there is none."""
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
