"""Bad surroundings: a run ends right in them, or in one line that says what is wrong and what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time

import harness
import pytest

pytestmark = pytest.mark.slow

RUNS = "it runs$"
MEMORY = f"{RUNS}|(?!FileNotFoundError).*(/dev/shm|shared memory)"
ALONE = {  # what may come of a run, a pattern for the one line; these change the process for good
    "few descriptors": ".*ulimit -n",
    "64 descriptors": RUNS,
    "proxies, a TMPDIR and torchrun's variables that lead nowhere": RUNS,
    "a network interface that isn't there": f"{RUNS}|.*GLOO_SOCKET_IFNAME",
}
ROOTS = {  # these take root
    "no loopback": ".*(127.0.0.1|loopback)",
    "a read-only /dev/shm": MEMORY,
    "no /dev/shm": MEMORY,
    "a tiny /dev/shm": MEMORY,
}
PASSING = {  # one after the other in one process
    "three threads with one pool": f"{RUNS}|RuntimeError: .*thread",
    "a child that the program forks": RUNS,
    "a pool that is forgotten": RUNS,
    "a resource tracker that was killed": RUNS,
    "a fork server that was killed": RUNS,
    "a fork server that is stopped": f"{RUNS}|.*fork server",
}
WITHIN_S = 40.0  # a pool starts, waits for its deadline of nine seconds, and ends

NO_GUARD = """
import hurts
from pplab.runtime import Pool
pool = Pool(2, device="cpu", timeout_s=9)
print(pool.run(hurts.quick))
"""
GUARDED = NO_GUARD.replace("pool = ", 'if __name__ == "__main__":\n  pool = ').replace("print", "  print")


def attack(tries: int, seed: int, every: int = 1) -> list[dict]:
    """Every kind of surroundings so many times, as far as this user can make them; of those that need a program of
    their own, each `every`-th, and of scripts that no pool can start from, all or none."""
    alone = dict([*(ALONE | (ROOTS if can_unshare() else {})).items()][::every])
    says, rows = alone | PASSING, {}
    with harness.victims() as start:

        def tried(*names: str) -> dict[str, dict]:
            victim, family, started = start("surrounded", *names), set(), time.monotonic()
            while victim.keeper.is_running() and time.monotonic() - started < WITHIN_S * len(names):
                family |= {each.pid for each in victim.processes()}
                time.sleep(0.02)
            left, _ = victim.left(family)
            said = {each["name"]: each for each in victim.said() if each["word"] == "outcome"}
            lost = {
                "seen": f"it hangs, or dies: {victim.printed()[-200:]}",
                "left": ["no word of it"],
                "seconds": WITHIN_S,
            }
            found = {name: said.get(name, lost) for name in names}
            found[names[-1]]["left"] += left
            return {name: each | {"ended": bool(re.match(says[name], each["seen"]))} for name, each in found.items()}

        plan = [names for names in (*((name,) for name in alone), tuple(PASSING)) for _ in range(tries)]
        for found in harness.two_at_a_time(tried, plan):
            for name, each in found.items():
                rows.setdefault(name, []).append(each)
    return [*(harness.row(name, each) for name, each in rows.items()), *(_scripts(tries) if every == 1 else ())]


def can_unshare() -> bool:
    """Whether this user may give a process mounts and a network of its own."""
    return subprocess.run(["unshare", "-m", "-n", "true"], capture_output=True).returncode == 0


def _scripts(tries: int) -> list[dict]:
    says = r'.*if __name__ == "__main__":'
    return [
        harness.row(what, [_script(text, stdin, pattern) for _ in range(tries)])
        for what, text, stdin, pattern in (
            ("a script without a main guard", NO_GUARD, False, says),
            ("a script from the standard input", GUARDED, True, rf"\[0, 1\]$|{says}|.*standard input"),
        )
    ]


def _script(text: str, stdin: bool, pattern: str) -> dict:
    """What comes of a script: its last line, or its only one."""
    with tempfile.TemporaryDirectory(prefix="victims-") as folder:
        path = os.path.join(folder, "script.py")
        with open(path, "w") as file:
            file.write(text)
        environment = {**os.environ, "TMPDIR": folder}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(harness.HERE), os.environ.get("PYTHONPATH")]))
        started = time.monotonic()
        with open(path) as source:
            process = subprocess.Popen(
                [sys.executable, "-" if stdin else path],
                stdin=source if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                start_new_session=True,
            )
        try:
            lines = process.communicate(timeout=WITHIN_S)[0].strip().splitlines() or ["nothing"]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            lines = ["it hangs"]
        left = [f"/dev/shm/{name}" for name in harness.shared([process.pid])]
        seconds = time.monotonic() - started
    return {"ended": bool(re.match(pattern, lines[-1])), "seen": lines[-1], "left": left, "seconds": seconds}


def test_bad_surroundings_are_borne_or_named():
    harness.check(attack(tries=1, seed=1, every=4))  # `make attack` tries all; of the scripts, test_failures.py has one
