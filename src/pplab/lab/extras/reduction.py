"""Gradients of copies are added up while the pipeline drains, not once a rank has run its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...actions import parts
from ...errors import unknown
from ...runtime import Extra, Job, Reducer
from ...schedule import Schedule


@dataclass(frozen=True)
class Drain(Extra):
    """Start adding up the gradients of a stage's copies as soon as a rank has run the last backward of the stage."""

    name = "reduction"
    flag = {
        "name": "--reduction",
        "default": "end",
        "metavar": "WHEN",
        "help": 'when gradients of copies of a stage are added up: "end" of the row, or "drain"',
    }

    @classmethod
    def from_flag(cls, when: str) -> Drain | None:
        """None for the end; ValueError for a word that says nothing."""
        if when not in ("end", "drain"):
            raise unknown("reduction", when, ("end", "drain"))
        return cls() if when == "drain" else None

    def check(self, job: Job) -> Job:
        """Another reducer."""
        return replace(job, reducer=Draining)

    def finish(self, job: Job, reports: Sequence[object]) -> str:
        """The word."""
        return "drain"


class Draining(Reducer):
    """Starts a bucket's sum before the item that follows its stages' last backwards."""

    events = Reducer.events | {"item", "receive"}

    def order(self, held: Mapping[str, Sequence[int]]) -> list[str]:
        """What is done first comes first, by the share of the row that a rank has run then."""
        last = _last_actions(self.schedule)
        self._last = {stage: item for (rank, stage), (_, item) in last.items() if rank == self.rank.context.rank}
        return sorted(held, key=lambda name: (max(last[at][0] for at in last if at[1] in held[name]), name))

    def begin(self, event: str, what: object) -> None:
        """A step starts, or what the rank ran last is done, and what it sent has gone: it goes on."""
        super().begin(event, what)
        if event == "row":
            self._ran, self._left = None, [set(bucket.stages) for bucket in self.buckets]
            return
        item, self._ran = self._ran, None
        for action in parts(item) if item else ():
            if self._last[action.stage] == item:
                for left in self._left:
                    left.discard(action.stage)
        while self.started < len(self.buckets) and not self._left[self.started]:
            self.start()

    def end(self, event: str, what: object) -> None:
        """An item has run, or the row has."""
        if event == "item":
            self._ran = what
        super().end(event, what)


def _last_actions(schedule: Schedule) -> dict[tuple[int, int], tuple[float, object]]:
    """Of every rank and stage that it holds, the stage's last item, and where in the row it is, as a share."""
    found = {}
    for rank, row in enumerate(schedule.rows):
        for position, item in enumerate(row):
            for action in parts(item):
                found[rank, action.stage] = ((position + 1) / len(row), item)
    return found
