"""A bar that says how far a run is, while it runs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ...optional import bring
from ...runtime import Extra, Job, Listener, Rank, Status
from ..shell import is_torchrun
from .clip import own_stages

EVERY_S = 0.1  # how often the bar is drawn again


@dataclass(frozen=True)
class Progress(Extra):
    """Show a bar on standard error while the ranks work: steps done, the last one's loss, time. Passes before the
    measured steps don't count.

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
        schedule = job.schedule
        if is_torchrun() and schedule.num_stages - 1 not in own_stages(int(os.environ["RANK"]), schedule):
            yield
            return
        for status in statuses():  # a pool's are those of its last run
            status.steps = 0
        began = f" from step {job.first_step}" * bool(job.first_step)
        over = threading.Event()
        with _bar()(total=job.options.steps, desc=f"step{began}", mininterval=0) as bar:

            def draw() -> None:
                told = statuses()
                bar.update(min((status.steps for status in told), default=0) - bar.n)
                if bar.n and (len(told) == schedule.num_ranks or schedule.copies == 1):  # else others have a part of it
                    bar.set_postfix_str(f"loss {sum(status.loss for status in told):.4f}")
                elif not bar.n:
                    bar.set_postfix_str(told[0].phase.decode(errors="replace") if told else "starting ranks")

            def follow() -> None:
                while not over.wait(EVERY_S):
                    draw()

            thread = threading.Thread(target=follow, daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
                draw()

    def listen(self, rank: Rank) -> Listener:
        """Write what this rank knows into its status."""
        return _Telling(rank)

    def finish(self, job: Job, reports: Sequence[object]) -> None:
        """Nothing stays."""


class _Telling(Listener):
    events = frozenset(("turn",))

    def __init__(self, rank: Rank):
        self.status = rank.context.status

    def end(self, event: str, what: Sequence[float]) -> None:
        """A measured step is done."""
        self.status.loss = what[-1]


def _bar() -> type:
    class Bar(bring("tqdm.auto").tqdm):
        monitor_interval = 0  # no thread that outlives the bar

    return Bar
