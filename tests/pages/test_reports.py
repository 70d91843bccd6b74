"""The page of reports: its programs print what it says, with the PyTorch that is installed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "book/reports.md").read_text()
PROGRAM = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", flags=re.M | re.S)
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^##+ ", PAGE, flags=re.M)[1:]}
REPORTS = {title: PROGRAM.search(text) for title, text in SECTIONS.items() if "```python" in text}


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def test_every_program_of_the_page_is_a_report_with_its_output():
    assert PAGE.count("```python") == len(REPORTS) >= 10 and all(REPORTS.values())
    assert all(re.search(r"^Expected: |\bExpected: ", SECTIONS[title]) for title in REPORTS)


@pytest.mark.slow
@pytest.mark.parametrize("title", REPORTS)
def test_a_report_holds(title, tmp_path):
    program, printed = REPORTS[title].groups()
    at = re.sub(r"args=\(\d+,\)", f"args=({free_port()},)", program)
    assert at != program or "spawn" not in program
    (tmp_path / "report.py").write_text(at)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "report.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    said = [line for line in ran.stdout.splitlines() if not line.startswith("USDT:")]  # the profiler's own
    assert said == printed.splitlines()
