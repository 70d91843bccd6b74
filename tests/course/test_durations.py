"""The report of how long the chapters' executions take. It warns; no test asserts a time."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location("durations", Path(__file__).parents[2] / "tools" / "durations.py")
durations = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(durations)


def test_the_chapters_that_take_too_long_are_named():
    said = durations.report({"01_short": 20.4, "02_long": 120.6, "03_longer": 300}).splitlines()
    assert said[1:3] == ["      20 s  01_short", "     121 s  02_long"]
    assert said[-1] == "== WARNING: over 120 s: 02_long (121 s), 03_longer (300 s)"
    assert durations.report({"01_short": 120}).endswith("no chapter takes more than 120 s")
