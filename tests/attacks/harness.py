"""Victims and what is left of them. A victim is a program that something is done to; a function of `victims.py`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import psutil

HERE = Path(__file__).parent
SHARED = Path("/dev/shm")
GONE_S = 5.0  # by then nothing of what has ended may be left


class Victim:
    """A running victim, its processes, and all that it can leave: it has a folder of its own for temporary files."""

    def __init__(self, keeper: int, folder: Path):
        self.keeper, self.folder = psutil.Process(keeper), folder

    def said(self) -> list[dict]:
        """What the victim has said so far, by `victims.say`."""
        path = self.folder / "said"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def printed(self) -> str:
        """What it and its processes printed."""
        return (self.folder / "out").read_text(errors="replace") if (self.folder / "out").exists() else ""

    def wait_for(self, word: str, seconds: float = 60) -> dict:
        """Wait until the victim says a word; returns all that it says with it."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if found := [each for each in self.said() if each["word"] == word]:
                return found[-1]
            assert self.keeper.is_running(), f"it ended before it said {word!r}:\n{self.printed()[-2000:]}"
            time.sleep(0.01)
        raise AssertionError(f"it didn't say {word!r} within {seconds} s:\n{self.printed()[-2000:]}")

    def processes(self) -> list[psutil.Process]:
        """The victim's processes that live, the victim first."""
        with suppress(psutil.NoSuchProcess):
            return [each for each in self.keeper.children(recursive=True) if lives(each)]
        return []

    def left(self, family: Iterable[int], seconds: float = GONE_S) -> tuple[list[str], float]:
        """What is still there after so many seconds, and how long it took until nothing was.

        `family` are the processes that the victim had: in shared memory, what carries their numbers is theirs.
        """
        started = time.monotonic()
        while True:
            found = [f"process {name_of(each)}" for each in self.processes()]
            found += [f"/dev/shm/{name}" for name in shared(family)] + in_folder(self.folder / "tmp")
            took = time.monotonic() - started
            if not found or took > seconds:
                return found, took
            time.sleep(0.02)

    def end(self) -> None:
        """End whatever is left of it."""
        with suppress(psutil.NoSuchProcess):
            family = [each.pid for each in self.keeper.children(recursive=True)]
            self.keeper.terminate()
            gone_by = time.monotonic() + 20
            while self.keeper.is_running() and time.monotonic() < gone_by:
                time.sleep(0.01)
            for name in shared(family):
                shutil.rmtree(SHARED / name, ignore_errors=True)


def lives(process: psutil.Process) -> bool:
    """Whether it is more than a number that nobody has asked for yet."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def name_of(process: psutil.Process) -> str:
    """A process in a few words."""
    with suppress(psutil.NoSuchProcess):
        return f"{process.pid} ({process.status()}) {' '.join(process.cmdline())[-80:]}"
    return str(process.pid)


def shared(pids: Iterable[int]) -> list[str]:
    """What lies in shared memory under the numbers of these processes."""
    mine = {str(pid) for pid in pids}
    names = os.listdir(SHARED) if SHARED.is_dir() else []
    return sorted(name for name in names if mine & set(re.split("[-_.]", name)))


def in_folder(folder: Path) -> list[str]:
    """What lies in a folder of temporary files, but for the cache that torch keeps there for the next program."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [f"$TMPDIR/{path.name}" for path in paths if not path.name.startswith("torchinductor_")]


@contextmanager
def victims() -> Iterator[Callable[..., Victim]]:
    """A function that starts victims: `start("owner", "idle")`. All that it started ends with the block."""
    command = [sys.executable, str(HERE / "keeper.py")]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE)
    started: list[Victim] = []
    one_by_one = threading.Lock()
    with server, tempfile.TemporaryDirectory(prefix="victims-") as place:
        assert server.stdout.readline() == "ready\n"

        def start(function: str, *arguments: object, limit_s: float = 120) -> Victim:
            with one_by_one:
                folder = Path(place) / str(len(started))
                (folder / "tmp").mkdir(parents=True)
                order = {"function": function, "arguments": arguments, "folder": str(folder), "limit_s": limit_s}
                server.stdin.write(json.dumps(order) + "\n")
                server.stdin.flush()
                started.append(Victim(int(server.stdout.readline()), folder))
                return started[-1]

        try:
            yield start
        finally:
            for each in started:
                each.end()


def row(what: str, tries: list[dict], *, blames: bool = False) -> dict:
    """What became of some tries of one thing: each has `ended`, `left`, `seconds`, `seen`, maybe `blamed`."""
    seconds = [each["seconds"] for each in tries]
    wrong = [each for each in tries if not each["ended"] or each["left"] or (blames and not each["blamed"])]
    return {
        "what": what,
        "tried": len(tries),
        "right": len(tries) - len(wrong),
        "ended": sum(each["ended"] for each in tries),
        "blamed": sum(each["blamed"] for each in tries) if blames else None,
        "left": sum(bool(each["left"]) for each in tries),
        "seen": (wrong or tries)[0]["seen"],
        "seconds": [round(median(seconds), 2), round(max(seconds), 2)],
        "wrong": [{key: each.get(key) for key in ("how", "seen", "left", "seconds")} for each in wrong[:5]],
    }


def two_at_a_time(one: Callable[..., dict], plan: Iterable[tuple]) -> list[dict]:
    """What becomes of each entry of a plan."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda entry: one(*entry), plan))


def check(rows: list[dict]) -> None:
    """Every try ended in time, named the right rank, and left nothing."""
    for each in rows:
        assert each["tried"] and not each["wrong"], json.dumps(each, indent=1)
        assert each["ended"] == each["tried"] and each["left"] == 0 and each["blamed"] in (None, each["tried"]), each
