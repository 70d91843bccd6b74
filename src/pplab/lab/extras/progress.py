"""A bar that says how far a run is, while it runs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from ...optional import bring
from ...runtime import Batch, Extra, Job, Listener, Rank, Status
from ..shell import is_torchrun
from .clip import own_stages

EVERY_S = 0.1  # how often the bar is drawn again


@dataclass(frozen=True)
class Progress(Extra):
    """Show a bar on standard error while the ranks work: steps done, the last one's loss, time, and tokens a second
    (padding among them), or samples where the inputs are no tokens. Passes before the measured steps don't count.

    Ranks write these numbers into memory that the caller's process sees, so no step waits for the bar. Under torchrun
    the rank that has the loss shows it. In a notebook it is drawn by ipywidgets where those are installed.
    """

    name = "progress"
    flag = {
        "name": "--progress",
        "default": "terminal",
        "choices": ["terminal", "always", "never"],
        "help": "when to show a bar while the ranks work",
    }

    @classmethod
    def from_flag(cls, when: str) -> Progress | None:
        """None where nobody would see it."""
        return cls() if when == "always" or (when == "terminal" and sys.stderr.isatty()) else None

    @contextmanager
    def during(self, job: Job, statuses: Callable[[], Sequence[Status]]) -> Iterator[None]:
        """Draw the bar in a thread of the caller's process."""
        holder = next(rank for rank in range(job.schedule.num_ranks) if _has_loss(rank, job))
        if is_torchrun() and int(os.environ["RANK"]) != holder:
            yield
            return
        for status in statuses():  # a pool's are those of its last run
            status.steps = 0
        bar, over = _bar(job), threading.Event()

        def follow() -> None:
            while not over.wait(EVERY_S):
                _draw(bar, job, statuses())

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            _draw(bar, job, statuses())
            bar.close()

    def listen(self, rank: Rank) -> Listener:
        """Write what this rank knows into its status."""
        return _Telling(rank)

    def finish(self, job: Job, reports: Sequence[object]) -> None:
        """Nothing stays."""


def _has_loss(rank: int, job: Job) -> bool:
    return job.schedule.num_stages - 1 in own_stages(rank, job.schedule)


class _Telling(Listener):
    events = frozenset(("row", "turn"))

    def __init__(self, rank: Rank):
        self.rank, self.units = rank, 0

    def begin(self, event: str, what: Sequence[Batch] | Sequence[float]) -> None:
        """A batch's tokens, or its samples, are counted."""
        if event == "row":
            firsts = [each.inputs[0] for each in what]
            self.units = sum(len(x) if x.is_floating_point() else x.numel() for x in firsts)

    def end(self, event: str, what: Sequence[Batch] | Sequence[float]) -> None:
        """A measured step is done."""
        if event == "turn":
            status, trace = self.rank.context.status, self.rank.clock.traces[-1]
            status.loss, status.units, status.seconds = what[-1], self.units, (trace.end - trace.start) / 1e9


def _bar(job: Job):
    if find_spec("ipywidgets"):
        tqdm = bring("tqdm.auto").tqdm
    else:
        tqdm = bring("tqdm").tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no thread that outlives the bar

    began = f" from step {job.first_step}" * bool(job.first_step)
    shape = "{desc} {n_fmt}/{total_fmt} {bar} {elapsed}<{remaining}{postfix}"
    return Bar(total=job.options.steps, desc=f"step{began}", bar_format=shape, mininterval=0, leave=True)


def _draw(bar, job: Job, statuses: Sequence[Status]) -> None:
    """Say how far all ranks are; until a step is done, what they do."""
    steps = min((status.steps for status in statuses), default=0)
    if not steps:
        bar.set_postfix_str(statuses[0].phase.decode(errors="replace") if statuses else "starting ranks")
        return
    seconds, units = max(status.seconds for status in statuses), statuses[0].units
    said = [f"{1000 * seconds:.0f} ms a step"]
    if len(statuses) == job.schedule.num_ranks or job.schedule.copies == 1:  # else others have a part of it
        said.insert(0, f"loss {sum(status.loss for status in statuses):.4f}")
    if seconds:
        said.append(f"{units / seconds:,.0f} {'samples' if units == job.workload.batch_size else 'tokens'}/s")
    if not bar.n:
        bar.start_t = time.time() - steps * seconds  # the time that is left follows from the steps alone
    bar.n, bar.last_print_t = steps, time.time()  # without which it would end without a new line
    bar.set_postfix_str(", ".join(said))
