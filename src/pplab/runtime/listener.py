"""The one seam of a run: whoever wants to look on, or to do more than training, is told what begins and what ends.

event        what                     around
"steps"      None                     all measured steps
"step"       None                     one step, from the barrier at which it starts
"row"        the batch                the rank's row
"item"       an action or overlap     an item of the row, once what it needs is there
"action"     an action                each half of an overlap, too
"call"       an action                the same by torch's runtime, which tells of no items
"receive"    the receive              waiting for a message
"send"       the send                 handing a message over
"again"      the stage                a forward that runs a second time, in its backward
"update"     None                     what follows a measured step's row
"optimizer"  None                     of that, the optimizer's step
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from .options import Job
    from .training import Rank


class Listener:
    """Is told of the `events` it names, on one rank."""

    events: ClassVar[frozenset[str]] = frozenset()

    def begin(self, event: str, what: object) -> None:
        """Something begins."""

    def end(self, event: str, what: object) -> None:
        """It has ended. When it fails instead, the run is over, and nobody is told."""

    def report(self) -> object:
        """What the caller's process is to know of it; picklable."""


class Extra:
    """What a run is to do beside training: a frozen dataclass of what was asked for, in a file of its own."""

    name: ClassVar[str]  # under which what it found stands in `Run.extras`

    def check(self, job: Job) -> Job:
        """Before anything starts, in the caller's process: the job as it shall be. Raises ValueError if it can't."""
        return job

    def check_devices(self, job: Job, devices: Sequence[str], transport: str) -> None:
        """Raise ValueError where these devices, with tensors crossing this way, can't do it."""

    def listen(self, rank: Rank) -> Listener | None:
        """On every rank, once its stages are there."""

    def finish(self, job: Job, reports: Sequence[object]) -> object:
        """Afterwards, in the caller's process: what all ranks' listeners reported becomes what the Run says."""
        return reports[0]


class Listeners:
    """All listeners of a rank, as the function by which the executor says what it is about to do."""

    def __init__(self, listeners: Iterable[Listener]):
        self._of: dict[str, list[Listener]] = defaultdict(list)
        for listener in listeners:
            for event in listener.events:
                self._of[event].append(listener)

    def __call__(self, event: str, what: object = None) -> AbstractContextManager:
        """A context: who listens is told when it is entered, and in the opposite order when it is left."""
        listeners = self._of.get(event)
        return _Around(listeners, event, what) if listeners else _NOBODY

    def remove(self, listener: Listener) -> None:
        """Tell a listener nothing more."""
        for event in listener.events:
            self._of[event].remove(listener)

    def clear(self) -> None:
        """Tell nobody anything more."""
        self._of.clear()


_NOBODY = nullcontext()


class _Around:
    __slots__ = ("event", "listeners", "what")

    def __init__(self, listeners: list[Listener], event: str, what: object):
        self.listeners, self.event, self.what = listeners, event, what

    def __enter__(self) -> None:
        for listener in self.listeners:
            listener.begin(self.event, self.what)

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            for listener in reversed(self.listeners):
                listener.end(self.event, self.what)
