"""A rank fails, dies or stands still, wherever it is: the run ends, the rank is named, nothing stays."""

from __future__ import annotations

import harness
import pytest
from victims import FAULTS

pytestmark = [pytest.mark.slow, pytest.mark.long]  # tests/running/test_failures.py has some of each at every commit


def attack(tries: int, seed: int) -> list[dict]:
    """Every fault so many times, those that wait for the pool's deadline less often; signals also among four ranks."""
    signals = "is killed by a signal in a step"
    often = {what: max(1, tries // 4) if fault.stuck else tries for what, fault in FAULTS.items()}
    with harness.victims() as start:
        two = start("ranks", often, seed, 2, limit_s=3600)
        four = start("ranks", {signals: tries}, seed, 4, limit_s=3600)
        for each in (two, four):
            each.wait_for("done", 3600)
        rows = [_row(what, two, what) for what in FAULTS]
        return [
            *rows,
            _row(f"{signals}, one of four", four, signals),
        ]


def _row(title: str, victim: harness.Victim, what: str) -> dict:
    tries = [each for each in victim.said() if each["word"] == "try" and each["what"] == what]
    return harness.row(title, tries, blames=True)


def test_a_rank_that_fails_is_named_and_all_end():
    harness.check(attack(tries=1, seed=1))
