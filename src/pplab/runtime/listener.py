"""Listeners: the one way to observe a run, or to do more than training in it. A listener is told
when something begins and when it ends.

event        what                     around
"steps"      None                     all measured steps
"turn"       the losses so far        a measured step and what comes before its barrier; its end is
                                      between two steps, untimed, and may set the rank's `last`:
                                      then no other step follows
"step"       None                     one step, from the barrier at which it starts
"row"        its microbatches         the rank's row
"item"       an action or overlap     an item of the row, once what it needs is there
"action"     an action                each half of an overlap, too
"call"       an action                the same by torch's runtime, which tells of no items
"receive"    the receive              waiting for a message
"send"       the send                 handing a message over
"again"      the stage                a forward that runs a second time, in its backward
"update"     None                     what follows a measured step's row
"optimizer"  None                     of that, the optimizer's step

Warm-up passes come before "steps" and have the same events, so count from the beginning of "steps".

Every run has one listener, its clock, which is at the end of this file.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ..actions import Action, Item

if TYPE_CHECKING:
    from .context import Status
    from .options import Job
    from .rank import Rank


class Listener:
    """Is told about the `events` that it names, on one rank."""

    events: ClassVar[frozenset[str]] = frozenset()

    def begin(self, event: str, what: Any) -> None:
        """Called when something begins."""

    def end(self, event: str, what: Any) -> None:
        """Called when it has ended. It isn't called when it fails, because the run is over then."""

    def report(self) -> object:
        """What the caller's process gets from this listener. It must be picklable."""


class Extra:
    """Something that a run does in addition to training: a frozen dataclass of what was asked for,
    in a file of its own.
    """

    name: ClassVar[str]  # under which what it found stands in `Run.extras`
    needs_pplab: ClassVar[str] = (
        ""  # what to say where another engine runs, if it can't go with one
    )

    def check(self, job: Job) -> Job:
        """Return the job as it shall be. Called in the caller's process before anything starts.
        Raises ValueError if the run can't do this.
        """
        return job

    def during(self, job: Job, statuses: Callable[[], Sequence[Status]]) -> AbstractContextManager:
        """A context in the caller's process until the Run is made. It gets the `statuses` of the
        ranks once there are some.
        """
        return nullcontext()

    def check_devices(self, job: Job, devices: Sequence[str], transport: str) -> None:
        """Raise ValueError if these devices, this way to send tensors, or this engine can't do
        it.
        """
        if self.needs_pplab and job.engine_name != "pplab":
            raise ValueError(self.needs_pplab)

    def listen(self, rank: Rank) -> Listener | None:
        """Make a listener for this rank, called on every rank once its stages are there."""

    def finish(self, job: Job, reports: Sequence[Any]) -> object:
        """Turn what the listeners of all ranks reported into what the Run has under this extra's
        name. Called afterwards, in the caller's process.
        """
        return reports[0]

    def notes(self, devices: Sequence[str], notes: Sequence[str]) -> Sequence[str]:
        """What the machine can't show in this run, given what it can't show in any run."""
        return notes

    def lines(self, found: Any) -> Sequence[str]:
        """The lines about what was found in a printed Run."""
        return ()


class Listeners:
    """All listeners of a rank, as the function that the executor calls for whatever it is about to
    do.
    """

    nobody = nullcontext()

    def __init__(self, listeners: Iterable[Listener]):
        self._of: dict[str, list[Listener]] = defaultdict(list)
        for listener in listeners:
            for event in listener.events:
                self._of[event].append(listener)

    def __call__(self, event: str, what: object = None) -> AbstractContextManager:
        """A context. The listeners are told when it is entered, and in the opposite order when it
        is left.
        """
        listeners = self._of.get(event)
        return _around(listeners, event, what) if listeners else self.nobody

    def remove(self, listener: Listener, *events: str) -> None:
        """Stop telling a listener about these events."""
        for event in events:
            self._of[event].remove(listener)

    def clear(self) -> None:
        """Stop telling anybody anything."""
        self._of.clear()


@contextmanager
def _around(listeners: list[Listener], event: str, what: Any) -> Iterator[None]:
    for listener in listeners:
        listener.begin(event, what)
    yield
    for listener in reversed(listeners):
        listener.end(event, what)


@dataclass
class StepTrace:
    """One step of one rank, in nanoseconds of its host's clock."""

    actions: list[tuple[Item, int, int]]
    others: list[tuple[Action | str, int, int]]
    start: int
    end: int
    error_ns: int = 0  # how far off that clock these times can be
    # stages whose forwards ran a second time, within actions
    again: list[tuple[int, int, int]] = field(default_factory=list)


class Clock(Listener):
    """Records, of every step, when its items ran, when the rank waited for messages, which forwards
    ran a second time, and what else took time.

    Marks are set while a step runs and read afterwards. They are nanoseconds of the host's
    monotonic clock, which all processes of the host share.
    """

    events = frozenset(("step", "item", "receive", "again"))
    mark = staticmethod(time.perf_counter_ns)
    error_ns = 0  # how far off the host's clock this step's marks can be

    def __init__(self) -> None:
        self.traces: list[StepTrace] = []

    def tie(self) -> None:
        """Tie marks to the host's clock. This comes before the barrier at which a step starts,
        because it takes ranks different times.
        """

    def catch_up(self) -> None:
        """Wait until all marks can be read."""

    def read(self, mark: Any) -> int:
        """A mark in nanoseconds of the host's clock."""
        return mark

    def begin(self, event: str, what: Any) -> None:
        """Mark the start."""
        if event == "step":
            self._found: dict[str, list] = {"item": [], "receive": [], "again": []}
            self._open: list[object] = []
        self._open.append(self.mark())

    def end(self, event: str, what: Any) -> None:
        """Mark the end; at the end of a step, read all marks."""
        if event == "step":
            self._finish(self._open.pop(), self.mark())
        else:
            self._found[event].append((what, self._open.pop(), self.mark()))

    @contextmanager
    def span(self, label: str) -> Iterator[None]:
        """Record what runs inside as something that the rank did outside its row."""
        start = self.mark()
        yield
        self.add(label, start, self.mark())

    def add(self, what: Item | str, start: object, end: object, event: str = "receive") -> None:
        """Record a stretch from mark to mark, either outside the rank's row or as an "item" of
        it.
        """
        self._found[event].append((what, start, end))

    def _finish(self, start: object, end: object) -> None:
        self.catch_up()
        items, others, again = (
            [(what, self.read(first), self.read(last)) for what, first, last in found]
            for found in self._found.values()
        )
        start, end = self.read(start), self.read(end)
        self.traces.append(StepTrace(items, others, start, end, self.error_ns, again))
