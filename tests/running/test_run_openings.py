"""How much of the package runs, and so has to be read, in one plain run: in the pool's process and on the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
from torch import nn

import modules
import pplab as pp
from pplab.runtime import Extra, Job, Listener, Pool
from size import tokens

pytestmark = pytest.mark.slow

MOST_FILES, MOST_TOKENS = 16, 18_100
ROOT = str(Path(pp.__file__).parent)
OPENED: set[str] = set()


def look(frame: FrameType, event: str, what: object) -> None:
    """Note the file of a function of the package's that is called, but for a model: that is the caller's."""
    name = frame.f_code.co_filename
    if event == "call" and frame.f_code.co_name != "<module>" and name.startswith(ROOT) and "models" not in name:
        OPENED.add(name)


def traced(engine: Callable, context: object, job: Job) -> object:
    """On a rank: carry out the job while `look` looks on. What has called this runs, too."""
    OPENED.clear()
    frame = sys._getframe()
    while frame := frame.f_back:
        look(frame, "call", None)
    sys.setprofile(look)
    try:
        return engine(context, job)
    finally:
        sys.setprofile(None)


@dataclass(frozen=True)
class Openings(Extra):
    """Which files of the package the ranks open."""

    name = "openings"

    def check(self, job: Job) -> Job:
        return replace(job, engine=partial(traced, job.engine))

    def listen(self, rank: object) -> Listener:
        return _Opened()

    def finish(self, job: Job, reports: Sequence[set[str]]) -> set[str]:
        return set().union(*reports)


class _Opened(Listener):
    def report(self) -> set[str]:
        return OPENED


def test_a_plain_run_opens_sixteen_files():
    """Whole files are counted of whatever functions run, once the pool is up."""
    workload = modules.workload(nn.Linear(6, 6), nn.Linear(6, 6))
    schedule = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    with Pool(2, device="cpu", transport="shared") as pool:
        pool.train(schedule, workload, Openings())  # the pool is up, and what ranks import is there
        OPENED.clear()
        sys.setprofile(look)
        try:
            run = pool.train(schedule, workload, Openings())
        finally:
            sys.setprofile(None)
    on_ranks = run.extras["openings"]
    assert f"{ROOT}/runtime/executor.py" in on_ranks and f"{ROOT}/runtime/pool.py" in OPENED - on_ranks
    sizes = {str(Path(name).relative_to(ROOT)): tokens(Path(name)) for name in OPENED | on_ranks}
    assert len(sizes) <= MOST_FILES and sum(sizes.values()) <= MOST_TOKENS, sizes
