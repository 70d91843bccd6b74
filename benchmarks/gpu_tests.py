"""The tests that need a GPU, as a part of `make gpu`. As a plugin of pytest, it says each outcome when it is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from gpu_setting import LATE, ROOT, Late, Part, Setting, piece

_OUTCOMES, _KNOWN = "PPLAB_OUTCOMES", "PPLAB_KNOWN"  # files: what came of tests, and the names of those to leave out
_LOOK_S = 0.5
_MOST_S = 3600.0
RUNNING: set[int] = set()  # groups of processes, for whoever ends this one


@piece(40, "pytest")
def tests(setting: Setting, part: Part) -> None:
    """The tests that need a GPU, each one's outcome, with the skipped ones among what wasn't run."""
    for name, row in part.begun.items():
        _add(part, name, row)
    # Only the files that have such tests: others may import what a machine with a GPU lacks.
    files = sorted(path for path in ROOT.glob("tests/*/test_*.py") if "mark.gpu" in path.read_text())
    command = ["-m", "pytest", *(str(path.relative_to(ROOT)) for path in files), "-m", "gpu", "-q"]
    command += ["-p", "no:cacheprovider", "-p", "gpu_tests", *setting.size.tests]
    part.more["command"] = f"PPLAB_TEST_DEVICE={setting.device} python {' '.join(command)}"
    print(f"== {part.more['command']}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        outcomes, known, said = (Path(folder, name) for name in ("outcomes", "known", "said"))
        outcomes.touch()
        known.write_text("\n".join(part.begun))
        paths = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PPLAB_TEST_DEVICE": setting.device, "PYTHONPATH": paths}
        env |= {_OUTCOMES: str(outcomes), _KNOWN: str(known)}
        with said.open("w") as out, outcomes.open() as lines:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True
            )
            RUNNING.add(process.pid)
            try:
                _follow(process, lines, part)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                RUNNING.discard(process.pid)
        text = said.read_text()
    print(text, flush=True)
    part.ran = True
    part.more["closing_line"] = (text.strip().splitlines() or [""])[-1].strip("= ")
    if process.returncode and not part.errors and not (process.returncode == 5 and part.rows):  # 5: none was left
        part.errors.append(f"pytest ended with {process.returncode}: {text[-2000:]}")


def _follow(process: subprocess.Popen, lines: object, part: Part) -> None:
    """Add outcomes as they come."""
    waited, ended = 0.0, False
    while not ended:
        try:
            process.wait(_LOOK_S)
            ended = True
        except subprocess.TimeoutExpired:
            waited += _LOOK_S
        for line in lines:
            name, row = json.loads(line)
            _add(part, name, row)
        if not ended and waited > _MOST_S:
            raise Late(LATE)


def _add(part: Part, name: str, row: dict) -> None:
    """One test's outcome."""
    if row["outcome"] == "skipped":
        part.leave_out(row["test"], row["why"])
    part.add(name, row)


def pytest_collection_modifyitems(items: list) -> None:
    """Leave out what is known."""
    known = set(Path(os.environ[_KNOWN]).read_text().splitlines())
    items[:] = [item for item in items if item.nodeid not in known]


def pytest_runtest_logreport(report: object) -> None:
    """Say what came of a test: of its call, or of what it was made up of where that didn't pass."""
    if report.when != "call" and report.passed:
        return
    row = {"test": report.nodeid.rpartition("::")[2], "outcome": report.outcome, "seconds": round(report.duration, 3)}
    if report.skipped:
        row["why"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    if report.failed:
        row["wrong"] = [report.longreprtext[-2000:]]
    with open(os.environ[_OUTCOMES], "a", buffering=2**20) as file:  # a line at once
        file.write(json.dumps([report.nodeid, row]) + "\n")
