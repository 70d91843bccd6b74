"""Starts victims, and keeps what becomes of each: run as a program, it reads one victim a line from its input.

torch is imported once, then forked for every victim. Between the two stands a keeper, to whom the system gives all that
the victim leaves behind: so that a harness sees every process of a victim's, whatever these did to be forgotten, and
the keeper can end them all when the victim's time is up, even if there is no harness any more.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def serve() -> None:
    """A victim a line, until the input ends. In the processes that are to be victims, this returns."""
    import torch
    import victims  # noqa: F401 (with all that it imports)

    torch.set_num_threads(1)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are nobody's to wait for
    print("ready", flush=True)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while line := sys.stdin.readline():
        order = json.loads(line)
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if keep(order["limit_s"]) == 0:
                return be(**order)
        print(pid, flush=True)


def keep(limit_s: float) -> int:
    """Returns 0 in the victim. The keeper itself stays until nobody of the victim's is left, or the time is up."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if (victim := os.fork()) == 0:
        return victim
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, end_all)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # there is no harness any more
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def end_all(number: int, frame: object) -> None:
    """Kill all there is below this process, and leave."""
    import psutil

    while below := psutil.Process().children(recursive=True):
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    os._exit(1)


def be(function: str, arguments: list, folder: str, limit_s: float) -> None:
    """Be a victim: a program of its own, in its own session and folders, that calls one function."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["TMPDIR"] = os.path.join(folder, "tmp")
    os.chdir(folder)
    out = os.open("out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    getattr(importlib.import_module("victims"), function)(*arguments)


if __name__ == "__main__":
    serve()
