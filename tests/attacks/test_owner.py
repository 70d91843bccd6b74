"""The program that has a pool is killed, whatever it and its ranks are doing: they end, and nothing stays."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress

import harness
import pytest
from victims import SWIFT_S

pytestmark = pytest.mark.slow

DOING = ["idle", "busy", "starting", "saving", "closing"]
ALONE = ["SIGKILL", "SIGTERM", "SIGHUP", "SIGQUIT"]
ROWS = {  # by title: what the program is doing, the signals, and to whom they go
    "is killed": (DOING, ALONE, "alone"),
    "is killed with its whole group: the terminal is closed, the container is stopped": (DOING, ALONE, "group"),
    "is interrupted, and doesn't catch it": (DOING, ["SIGINT"], "group"),
    "is killed while a rank holds the GIL in C": (["holding the GIL"], ALONE[:3], "alone"),
    "is killed while a rank is stopped": (["stopped"], ALONE[:3], "alone"),
    "is killed with all its processes at once: what is left goes when the next pool starts": (
        ["busy"],
        ["SIGKILL"],
        "all",
    ),
}


def attack(tries: int, seed: int, every: int = 1) -> list[dict]:
    """Each `every`-th row's kinds of death, drawn at random, so many times."""
    draw = random.Random(seed)
    with harness.victims() as start:

        def tried(doing: str, name: str, whom: str, delay_s: float) -> dict:
            victim = start("owner", "busy" if doing == "stopped" else doing)
            up = victim.wait_for("up")
            time.sleep(delay_s + (1 if doing == "holding the GIL" else 0))
            if doing == "stopped":
                os.kill(up["pids"][0], signal.SIGSTOP)
            return _struck(victim, name, whom, start) | {"how": f"{doing}, {name} {whom} after {delay_s:.2f} s"}

        rows = []
        for what, (doings, names, whom) in [*ROWS.items()][every - 1 :: every]:
            plan = [(draw.choice(doings), draw.choice(names), whom, draw.uniform(0, 1)) for _ in range(tries)]
            rows.append(harness.row(what, harness.two_at_a_time(tried, plan)))
        return rows


def _struck(victim: harness.Victim, name: str, whom: str, start) -> dict:
    """Send the signal and see what becomes of the program and of all that was its."""
    family = victim.processes()
    program, number, started = family[0], getattr(signal, name), time.monotonic()
    if whom == "all":
        for each in family:
            each.suspend()  # so that none can clear up after another
        for each in family:
            each.kill()
        while victim.processes():
            time.sleep(0.01)
        seconds = time.monotonic() - started
        start("starts_a_pool").wait_for("done")
        left = harness.shared(each.pid for each in family)
    else:
        with suppress(ProcessLookupError):
            (os.killpg if whom == "group" else os.kill)(program.pid, number)
        left, _ = victim.left([each.pid for each in family], SWIFT_S)
        seconds = time.monotonic() - started
    lines = victim.printed().strip().splitlines() or ["nothing: the program is gone"]
    return {"ended": not harness.lives(program), "left": left, "seconds": seconds, "seen": lines[-1]}


def test_nothing_outlives_the_program_that_had_a_pool():
    """Every other row. `make attack` tries all, again and again."""
    harness.check(attack(tries=1, seed=1, every=2))
