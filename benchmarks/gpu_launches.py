"""How long hosts need to ask for what their GPUs do: where that is nearly as long, the asking sets the pace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pplab.actions import Action, Overlap
from pplab.runtime import Extra, Job, Listener, Rank

BOUND = 0.7  # of a GPU's time in its items


@dataclass(frozen=True)
class Launches(Extra):
    """On GPUs: the time that each rank's host spends in the items of its row, as a share of the GPU's in them.

    A GPU that waits for its next kernel takes no less time than its host, so the share is near 1 where launches set the
    pace, whatever the kernels could do; with larger microbatches it falls. On a CPU, which does both, it is None.
    """

    name = "launches"

    def listen(self, rank: Rank) -> Listener:
        """The rank's two times."""
        return _Hosts(rank)

    def finish(self, job: Job, reports: Sequence[float | None]) -> tuple[float | None, ...]:
        """Per rank."""
        return tuple(reports)

    def lines(self, found: Sequence[float | None]) -> Sequence[str]:
        """What the Run says of it."""
        if None in found:
            return ()
        bound = ": bound by launches, take larger microbatches" * (max(found) > BOUND)
        return [f"hosts' share     {', '.join(f'{share:.0%}' for share in found)} of their GPUs' time{bound}"]


class _Hosts(Listener):
    events = frozenset(("steps", "item"))

    def __init__(self, rank: Rank):
        self._rank, self._asked_ns = rank, 0

    def begin(self, event: str, what: Action | Overlap | None) -> None:
        """Count from here: the clock, which comes first, has waited for the GPU."""
        if event == "steps":
            self._asked_ns = 0
        self._began = time.perf_counter_ns()

    def end(self, event: str, what: Action | Overlap | None) -> None:
        """Everything of the item is asked for."""
        if event == "item":
            self._asked_ns += time.perf_counter_ns() - self._began

    def report(self) -> float | None:
        """The share, over the measured steps."""
        if self._rank.context.device.type == "cpu":
            return None
        took_ns = sum(end - start for trace in self._rank.clock.traces for _, start, end in trace.actions)
        return self._asked_ns / took_ns if took_ns else None
