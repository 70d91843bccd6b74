"""The one seam of a run: who listens is told what begins and ends, in order, and the core loads nothing that wasn't
asked for."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import modules
import pplab as pp
from pplab import lab
from pplab.lab.shell import commands
from pplab.runtime import Pool

pytestmark = pytest.mark.slow

SCHEDULE = pp.build("1F1B", num_ranks=2, num_microbatches=2)
ROW_0 = """
item 0F0 ( action 0F0 ( ) ) send 0SEND_F0 ( )
item 0F1 ( action 0F1 ( ) ) send 0SEND_F1 ( )
receive 0RECV_B0 ( ) item 0B0 ( action 0B0 ( again 0 ( ) ) )
receive 0RECV_B1 ( ) item 0B1 ( action 0B1 ( again 0 ( ) ) )
"""
ROW_1 = """
receive 1RECV_F0 ( ) item 1F0 ( action 1F0 ( ) ) item 1B0 ( action 1B0 ( ) ) send 1SEND_B0 ( )
receive 1RECV_F1 ( ) item 1F1 ( action 1F1 ( ) ) item 1B1 ( action 1B1 ( ) ) send 1SEND_B1 ( )
"""


def workload() -> modules.Modules:
    return modules.workload(nn.Linear(6, 6), nn.Linear(6, 6))


@pytest.fixture(scope="module")
def pool():
    with Pool(2, device="cpu") as pool:
        yield pool


def test_who_listens_is_told_what_begins_and_ends(pool):
    """A first pass, no warm-up, one measured step; stage 0 runs its forwards again."""
    heard = "steps step row item action receive send again update optimizer"
    options = {"steps": 1, "warmup": 0, "optimizer": functools.partial(torch.optim.SGD, lr=0.1)}
    run = pool.train(SCHEDULE, workload(), modules.Diary(frozenset(heard.split())), lab.Recompute([0]), **options)
    for (written, _), row in zip(run.extras["diary"], (ROW_0, ROW_1), strict=True):
        expected = f"step ( row ( {row} ) ) steps ( step ( row ( {row} ) update ( optimizer ( ) ) ) )"
        assert " ".join(written).split() == expected.split()


def test_only_what_it_asks_for_is_a_listener_told(pool):
    run = pool.train(SCHEDULE, workload(), modules.Diary(frozenset(["steps", "update"])), steps=2, optimizer=None)
    for written, _ in run.extras["diary"]:
        assert " ".join(written) == "steps ( update ( ) update ( ) )"


def test_an_extra_that_refuses_does_so_before_anything_starts():
    with Pool(2, device="cpu") as pool:
        with pytest.raises(ValueError, match="a diary needs events"):
            pool.train(SCHEDULE, workload(), modules.Diary(frozenset()))
        assert pool.pids == ()


PLAIN = """
import sys
sys.path.insert(0, {tests!r})

if __name__ == "__main__":
    from running.test_listener import loaded_by_a_plain_run
    print(*loaded_by_a_plain_run())
"""


def loaded_by_a_plain_run() -> set[str]:
    with Pool(2, device="cpu") as pool:
        run = pool.train(SCHEDULE, workload(), modules.Diary(frozenset(["steps"])), steps=1)
        assert "diary" not in pool.train(SCHEDULE, workload(), steps=1).extras
    return set().union(*(loaded for _, loaded in run.extras["diary"]))


def test_a_plain_run_loads_nothing_that_it_was_not_asked_for(tmp_path):
    """What an extra is made of is imported where it is sent: this one's module knows nothing of `pplab.lab`.

    In a program of its own: a fork server that is up may have imported more, for other tests.
    """
    (tmp_path / "script.py").write_text(PLAIN.format(tests=str(Path(__file__).parents[1])))
    command = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    loaded = set(done.stdout.split())
    assert "pplab.runtime.executor" in loaded
    extras = {path.partition(":")[0] for path in commands.EXTRAS} | {
        "pplab.lab.extras.meter",
        "pplab.lab.extras.pace",
    }
    assert not extras & loaded and not {name for name in loaded if name.startswith("pplab_course")}
    assert not {"pplab.runtime.process_groups", "pplab.runtime.reduction"} & loaded
