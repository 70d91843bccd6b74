"""The tests that need a GPU, and some chapters, as parts of `make gpu`: pytest runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial

from gpu_setting import ROOT, Part, Setting, piece

_NO_TESTS = 5  # pytest's exit status
RUNNING: set[int] = set()  # groups of processes, for whoever ends this one


@piece(90, "pytest")
def tests(setting: Setting, part: Part) -> None:
    """Run the tests that need a GPU, with every number of ranks and every way to share the devices in turn."""
    # Only the files that have such tests: others may import what a machine with a GPU lacks.
    files = sorted(str(path) for path in ROOT.glob("tests/*/test_*.py") if "mark.gpu" in path.read_text())
    for name in setting.size.tests:
        run = partial(run_pytest, name, [*files, "-m", "gpu", "-k", name], PPLAB_TEST_DEVICE=setting.device)
        part.attempt(name, run)


@piece(90, "pytest", "nbval", "ipykernel", "matplotlib")
def chapters(setting: Setting, part: Part) -> None:
    """Execute chapters that take a GPU or train much, to see whether every cell ends, with its asserts."""
    if setting.device == "cpu":
        part.leave_out("all of it", "`make test` executes them on the CPU")
        return
    for name in setting.size.chapters:
        part.attempt(name, partial(run_pytest, name, ["--nbval-lax", f"notebooks/{name}.ipynb"]))


def run_pytest(what: str, arguments: list[str], **environment: str) -> dict:
    """Run pytest, and return a row with its closing line. Everything that it has started has ended afterwards."""
    command = [sys.executable, "-m", "pytest", *arguments, "-q", "-rs", "-p", "no:cacheprovider"]
    started, env = time.monotonic(), os.environ | environment
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=said, start_new_session=True)
        RUNNING.add(process.pid)
        try:
            process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            RUNNING.discard(process.pid)
        said.seek(0)
        text = said.read()
    print(text, flush=True)
    closing_line = (text.strip().splitlines() or [""])[-1].strip("= ")
    wrong = [] if process.returncode in (0, _NO_TESTS) else [text[-4000:]]
    row = {"what": what, "closing_line": closing_line, "seconds": round(time.monotonic() - started, 1)}
    return {**row, "wrong": wrong}
