"""The page of reports: its programs print what it says, with the PyTorch that is installed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

INSTALLED = [*map(int, version("torch").split(".")[:2])]
PAGE = (Path(__file__).parents[2] / "book/reports.md").read_text()
PROGRAM = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", flags=re.M | re.S)
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^##+ ", PAGE, flags=re.M)[1:]}
NEWER = re.compile(r"From (\d+)\.(\d+) on it prints:\n\n```text\n(.*?)^```$", flags=re.M | re.S)
REPORTS = {title: PROGRAM.search(text) for title, text in SECTIONS.items() if "```python" in text}


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def test_every_program_of_the_page_is_a_report_with_its_output():
    assert PAGE.count("```python") == len(REPORTS) >= 10 and all(REPORTS.values())
    assert all(re.search(r"^Expected: |\bExpected: ", SECTIONS[title]) for title in REPORTS)


RUN_ALL = """
import functools, os, runpy, signal, sys
import torch.distributed.pipelining  # once: it takes longer than most programs
import torch.multiprocessing as mp

mp.spawn = functools.partial(mp.start_processes, start_method="fork")  # so in their ranks, too

for folder in sys.argv[1:]:
    if not (child := os.fork()):
        signal.alarm(120)  # ends it if it hangs
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(f"{folder}/{stream.name}", os.O_CREAT | os.O_WRONLY), stream.fileno())
        os.chdir(folder)
        runpy.run_path(f"{folder}/report.py", run_name="__main__")
        sys.exit()
    with open(f"{folder}/<stderr>", "a") as complaints:
        complaints.write(f"ended with {os.waitpid(child, 0)[1]}")
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """What each program prints, and its complaints with how it ended: each forks from one process that has torch."""
    folders = {title: tmp_path_factory.mktemp("report") for title in REPORTS}
    for title, folder in folders.items():
        program = REPORTS[title].group(1)
        at = re.sub(r"args=\(\d+,\)", f"args=({free_port()},)", program)
        assert at != program or "spawn" not in program
        (folder / "report.py").write_text(at)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", RUN_ALL, *map(str, folders.values())]
    subprocess.run(command, env=environment, check=True, timeout=300)
    names = "<stdout>", "<stderr>"
    return {title: tuple((folder / name).read_text() for name in names) for title, folder in folders.items()}


@pytest.mark.long  # of a pinned torch: test_every_program_of_the_page_is_a_report_with_its_output compares what it said
@pytest.mark.parametrize("title", REPORTS)
def test_a_report_holds(title, printed):
    said, complaints = printed[title]
    assert complaints.endswith("ended with 0"), complaints
    lines = [line for line in said.splitlines() if not line.startswith("USDT:")]  # the profiler's own
    expected = REPORTS[title].group(2)
    for *since, newer in NEWER.findall(SECTIONS[title]):
        if INSTALLED >= [*map(int, since)]:
            expected = newer
    assert lines == expected.splitlines(), complaints
