"""Many pools, and many runs in one pool: nothing grows."""

from __future__ import annotations

import harness
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]  # tests/running/test_failures.py looks after each run at what is left

MOST_MB = 25.0  # that a process may have more: what Python and torch keep for later


def attack(tries: int, seed: int) -> list[dict]:
    """So many pools one after the other, and ten times as many runs in one pool."""
    with harness.victims() as start:
        victim = start("grows", tries, 10 * tries, limit_s=3600)
        victim.wait_for("done", 3600)
        said = victim.said()
    return [
        _row("pools, one after the other", [each for each in said if each["word"] == "pool"], said, "pools"),
        _row("runs in one pool", [each for each in said if each["word"] == "run"], said, "runs"),
    ]


def _row(what: str, tries: list[dict], said: list[dict], word: str) -> dict:
    (end,) = (each for each in said if each["word"] == word)
    seen = f"{end['megabytes']:.1f} MB more of memory at the end"
    tries = [each | {"ended": True, "left": [], "seen": seen} for each in tries]
    tries[-1]["left"] = end["left"] + ([seen] if end["megabytes"] > MOST_MB else [])
    return harness.row(what, tries)


def test_nothing_grows():
    harness.check(attack(tries=4, seed=1))
