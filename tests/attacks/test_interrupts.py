"""One, two or three interrupts within a tenth of a second, the exception kept as a notebook keeps it: nothing stays."""

from __future__ import annotations

import harness
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]  # tests/running/test_failures.py has six at every commit

TIMES = {1: "an interrupt", 2: "two within 50 ms", 3: "three within 100 ms"}


def attack(tries: int, seed: int) -> list[dict]:
    """So many tries each of one interrupt, two and three, while a pool starts, trains or closes."""
    with harness.victims() as start:
        victim = start("interrupted", [*TIMES] * tries, seed, limit_s=3600)
        victim.wait_for("done", 3600)
        said = [each for each in victim.said() if each["word"] == "try"]
    return [harness.row(what, [each for each in said if each["count"] == count]) for count, what in TIMES.items()]


def test_interrupts_leave_nothing_and_the_pool_can_go_on():
    harness.check(attack(tries=4, seed=1))
