"""A program is killed in the middle of saving: the checkpoint is the old one or the new one, and nothing is left."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import harness
import pytest

from pplab.lab import Checkpoint

pytestmark = pytest.mark.slow

SIZES = (1_000, 200_000, 4_000_000)  # numbers in a checkpoint
EACH = 1_000_000  # steps from one program's first number to the next one's


def attack(tries: int, seed: int) -> list[dict]:
    """Kill so many programs that do nothing but save, and open what they leave."""
    draw = random.Random(seed)
    with harness.victims() as start, tempfile.TemporaryDirectory() as place:
        path, found = Path(place) / "run.safetensors", []
        for number in range(tries):
            size = draw.choice(SIZES)
            victim = start("saver", str(path), size, number * EACH, EACH)
            victim.wait_for("saved")
            time.sleep(draw.uniform(0, 0.03 if size < SIZES[-1] else 0.12))
            started = time.monotonic()
            victim.processes()[0].kill()
            left, _ = victim.left([])
            victim.keeper.wait(harness.GONE_S)  # until it has buried the program, that is a process to whoever looks
            done = victim.said()[-1]["step"]
            found.append(_opened(path, done) | {"left": left, "seconds": time.monotonic() - started, "how": f"{size}"})
        start("saver", str(path), 10, tries * EACH, 1).wait_for("saved")
        found[-1]["left"] += [each.name for each in path.parent.iterdir() if each != path]
    return [harness.row("is killed while it saves", found)]


def _opened(path: Path, done: int) -> dict:
    """Whether a file is what was saved last, or what was being saved."""
    try:
        opened = Checkpoint.open(path)
        weight = opened.read(["model/weight"])["model/weight"]
    except Exception as error:
        return {"ended": False, "seen": f"{type(error).__name__}: {error}".splitlines()[0]}
    whole = opened.step in (done, done + 1) and bool((weight == opened.step).all())
    return {"ended": whole, "seen": "the old checkpoint, or the new one, whole" if whole else "another checkpoint"}


def test_a_checkpoint_is_the_old_one_or_the_new_one():
    harness.check(attack(tries=8, seed=1))
