"""Reductions that say when they started: sent to ranks by tests."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from pplab.lab.extras.reduction import Draining
from pplab.runtime import Extra, Job, Listener, Rank, Reducer


class _Timing(Reducer):
    """Knows when it started each sum of a step, and when the row had ended."""

    def begin(self, event: str, what: object) -> None:
        if event == "row":
            _Timing.starts = []
        super().begin(event, what)

    def start(self) -> None:
        _Timing.starts.append(time.perf_counter())
        super().start()

    def end(self, event: str, what: object) -> None:
        if event == "row":
            _Timing.ended = time.perf_counter()
        super().end(event, what)


class _TimingDrain(_Timing, Draining):
    """The same in the drain."""

    events = Draining.events


class _Told(Listener):
    """How long before its row ended each sum of the last step was started, in seconds."""

    def report(self) -> list[float]:
        return [_Timing.ended - start for start in _Timing.starts]


@dataclass(frozen=True)
class Timed(Extra):
    """Says of every rank how long before its row ended it started its sums."""

    name = "timed"
    reducer = _Timing

    def check(self, job: Job) -> Job:
        return replace(job, reducer=self.reducer)

    def listen(self, rank: Rank) -> Listener:
        return _Told()

    def finish(self, job: Job, reports: list[list[float]]) -> list[list[float]]:
        return reports


class TimedDrain(Timed):
    """The same with the reduction in the drain."""

    reducer = _TimingDrain
