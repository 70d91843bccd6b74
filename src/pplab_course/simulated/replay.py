"""Run a file on several simulated ranks, one after the other in one thread.

A rank runs until it would wait. Then `Blocked` unwinds it. When what it waits for has come, it runs
again from its start. Its log answers what it did before (messages, waits), and `tensors.remembered`
answers what it computed. Only after that is it live. Times are virtual: `time.sleep` moves a rank's
clock, and computing takes no time.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import io
import linecache
import os
import random
import sys
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from . import tensors
from .modules import Module, stand_in

MOST_LINES = 100_000  # of all ranks together; a run of the course's has five thousand
KEPT = 5_000  # events at either end of a run that goes on for too long
MOST_MESSAGES = 400
NOT_HERE = {"threading", "concurrent", "multiprocessing", "socket"}

Stack = list[tuple[str, int]]  # functions and lines of the reader's file, the innermost first


class Blocked(BaseException):
    """Raised to unwind a rank that would wait."""


class TooMuch(BaseException):
    """Raised to end a file that runs for too long."""


@dataclass(eq=False)
class Message:
    """A send or a receive that a rank has posted."""

    number: int
    rank: int
    kind: str  # "send" or "receive"
    peer: int
    shape: tuple[int, ...]
    posted: float
    stack: Stack
    numbers: list[float]
    samples: tuple[int, int] | None
    match: Message | None = None
    done: float | None = None  # when a rank that waits for it goes on


@dataclass
class Wait:
    """Something for which a rank stands still: its message, or a meeting of all ranks."""

    what: str
    message: Message | None
    came: dict[int, float] = field(default_factory=dict)  # who is at the meeting, and since when


@dataclass
class Event:
    """Something that a rank did. `start` differs from `time` if it took some time."""

    rank: int
    time: float
    kind: str  # line, post, stand, go, F, B, end, fail
    lines: list[int]
    number: int | None = None  # of the message, the forward or the backward
    start: float = 0.0


class Rank(tensors.Computing):
    """One of the ranks: its log, its clock, and where it stands."""

    def __init__(self, replay: Replay, number: int):
        self.replay, self.number = replay, number
        # events: what was asked, the answer, the clock
        self.log: list[tuple[tuple, object, float]] = []
        self.state = "new"  # then "waits", "ended" or "failed"
        self.waits: Wait | None = None
        self.error: BaseException | None = None
        self.stood: Stack = []  # where it waits or failed
        super().__init__()

    def begin(self) -> None:
        super().begin()
        self.events = self.meetings = 0
        self.is_live = self.is_unwinding = False
        self.actions: list[tuple[str, int, float, float]] = []
        self.shared: list[tuple[int, int]] = []
        self.lies: dict[int, int] = {}
        self.passed: list[int] = []
        self.notes: dict[str, tuple[float, Stack]] = {}
        self.operations: list = []
        self.printed, self.names = io.StringIO(), {}

    # ---- what its tensors tell
    def check(self) -> None:
        if self.is_unwinding:  # in an `except` or `finally` of the file
            raise Blocked

    def note(self, words: str) -> None:
        self.notes.setdefault(words, (self.clock, self.replay.stack()))

    def called(self, module: Module, given: tuple, output: tensors.Tensor, start: float) -> None:
        if module is not self.names.get("stage"):
            return
        number = sum(kind == "F" for kind, *_ in self.actions)
        self.actions.append(("F", number, start, self.clock))
        self.event("F", number, start)
        place = given[0].data_ptr()
        self.shared += [(other, number) for other, lay in self.lies.items() if lay == place]
        self.lies[number] = place
        if output.node:
            output.node.hooks.append(lambda gradient: self.passed.append(number))

    def walks_back(self, walk: Callable[[], None]) -> None:
        self.passed.clear()
        start = self.clock
        walk()
        for number in self.passed:
            self.lies.pop(number, None)
            self.actions.append(("B", number, start, self.clock))
            self.event("B", number, start)

    # ---- events
    def event(self, kind: str, number: int | None = None, start: float | None = None) -> None:
        """Note what a live rank does, for the player."""
        if self.is_live and not self.is_unwinding:
            lines = [line for _, line in self.replay.stack()]
            began = self.clock if start is None else start
            self.replay.events.append(Event(self.number, self.clock, kind, lines, number, began))

    def answer(self, asked: tuple, live: Callable) -> object:
        """The log's answer to this event, or the result of `live` now."""
        self.check()
        at, self.events = self.events, self.events + 1
        if at == len(self.log):
            self.go_live()
            self.log.append((asked, live(), self.clock))
        before, answer, self.clock = self.log[at]
        if before != asked:
            raise RuntimeError(
                f"run again, rank {self.number} asks for {asked} and not for {before}: simulated "
                "ranks need a file that does the same each time"
            )
        return answer

    def go_live(self) -> None:
        """From here on, watch the rank's lines, in all calls that it is in."""
        if not self.is_live:
            self.is_live = True
            frame = sys._getframe(1)
            while frame:
                if frame.f_code.co_filename == self.replay.name:
                    frame.f_trace = self.replay.watch
                frame = frame.f_back
            sys.settrace(self.replay.watch)

    def wait(self, wait: Wait, ready: Callable[[], float | None]) -> None:
        """Stand still until `ready` gives the time at which the rank goes on."""

        def live() -> None:
            number, done = wait.message and wait.message.number, ready()
            if done is None:
                self.waits, self.stood = wait, self.replay.stack()
                self.event("stand", number)
                self.is_unwinding = True
                raise Blocked
            start, self.clock = self.clock, max(self.clock, done)
            if self.waits or self.clock > start:
                self.event("go", number, start)
            self.waits = None

        self.answer(("wait", wait.what), live)


class Replay:
    """Runs a file's text on simulated ranks. A send waits for its receive, unless `sends_wait` is
    false.
    """

    def __init__(
        self,
        text: str,
        ranks: int,
        *,
        name: str = "my_pipe.py",
        sends_wait: bool = True,
        **settings: object,
    ):
        self.text, self.file, self.name, self.sends_wait = text, name, f"<{name}>", sends_wait
        self.settings = {key: str(value) for key, value in settings.items()}
        self.ranks = [Rank(self, number) for number in range(ranks)]
        self.messages: list[Message] = []
        self.queues: dict[tuple, list[Message]] = {}
        self.meetings: list[Wait] = []
        self.events: list[Event] = []
        self.lines, self.is_over = 0, False
        linecache.cache[self.name] = len(text), None, text.splitlines(True), self.name
        self.run()

    def line(self, number: int) -> str:
        """A line's code, without a comment after it."""
        return linecache.getline(self.name, number).split("  #")[0].strip()

    def stack(self) -> Stack:
        """Where in the file the current rank is."""
        frame, found = sys._getframe(1), []
        while frame:
            if frame.f_code.co_filename == self.name:
                found.append((frame.f_code.co_name, frame.f_lineno))
            frame = frame.f_back
        return found

    def watch(self, frame: types.FrameType, what: str, _: object) -> Callable | None:
        """Python's trace function."""
        if frame.f_code.co_filename != self.name:
            return None
        if what == "line":
            self.lines += 1
            tensors.now.event("line")
            if self.lines > MOST_LINES:
                loop = self.loop()
                self.events[KEPT:-KEPT] = [
                    event for event in self.events[KEPT:-KEPT] if event.kind != "line"
                ]
                raise TooMuch(
                    f"{MOST_LINES:,} lines have run, the last ones in the loop of line {loop}: "
                    "does it never end?"
                )
        return self.watch

    def loop(self) -> int:
        """The line where the loop begins that the last lines belong to: the first of those that
        none of the others has called.
        """
        last = [event.lines for event in self.events[-1000:]]
        depth = min(map(len, last))
        return min(lines[0] for lines in last if len(lines) == depth)

    @cached_property
    def without_waits(self) -> Replay:
        """The replay of the same file where sends don't wait."""
        return Replay(self.text, len(self.ranks), name=self.file, sends_wait=False, **self.settings)

    # ---- messages
    def post(self, rank: Rank, kind: str, peer: int, tensor: tensors.Tensor, tag: int) -> Message:
        """Give a message to the network, which joins the n-th send from one rank to another with
        the n-th receive there.
        """
        if len(self.messages) >= 2 * MOST_MESSAGES:
            raise TooMuch(f"more than {MOST_MESSAGES} messages: fewer steps, please")
        numbers = list(tensor.data) if kind == "send" else []
        place, number = self.stack(), len(self.messages)
        message = Message(
            number,
            rank.number,
            kind,
            peer,
            tensor.shape,
            rank.clock,
            place,
            numbers,
            tensor.samples,
        )
        self.messages.append(message)
        if kind == "send" and not self.sends_wait:
            message.done = rank.clock
        rank.event("post", message.number)
        ends = (rank.number, peer) if kind == "send" else (peer, rank.number)
        queue = self.queues.setdefault((*ends, tag), [])
        if queue and queue[0].kind != kind:
            other = queue.pop(0)
            message.match, other.match = other, message
            sent, asked = (message, other) if kind == "send" else (other, message)
            asked.done = max(sent.posted, asked.posted)
            if self.sends_wait:
                sent.done = asked.done
        else:
            queue.append(message)
        return message

    def meeting(self, rank: Rank) -> Wait:
        """The next meeting of all ranks for this rank."""
        if rank.meetings == len(self.meetings):
            self.meetings.append(Wait("barrier", None))
        met = self.meetings[rank.meetings]
        met.came[rank.number] = rank.clock
        return met

    def met(self, meeting: Wait) -> float | None:
        """The time when all have come, or None."""
        return max(meeting.came.values()) if len(meeting.came) == len(self.ranks) else None

    # ---- running
    def run(self) -> None:
        """Run every rank as far as it goes."""
        before, threshold = sys.gettrace(), gc.get_threshold()
        gc.set_threshold(100_000)  # many small lists are made, and hardly a cycle
        try:
            code = compile(self.text, self.name, "exec")
            while going := list(filter(self._goes_on, self.ranks)):
                for rank in filter(self._goes_on, going):
                    self._start(rank, code)
        finally:
            sys.settrace(before)
            gc.set_threshold(*threshold)
            tensors.computes(tensors.Computing())

    def _goes_on(self, rank: Rank) -> bool:
        if self.is_over:
            return False
        if rank.waits is None or rank.state != "waits":
            return rank.state == "new"
        return (rank.waits.message.done if rank.waits.message else self.met(rank.waits)) is not None

    def _start(self, rank: Rank, code: types.CodeType) -> None:
        """Run a rank from its start until it waits or ends."""
        rank.begin()
        tensors.computes(rank)
        modules = self._modules(rank)

        def bring(name: str, *given: object) -> types.ModuleType:
            top = name.partition(".")[0]
            if top in NOT_HERE:
                raise ImportError(
                    f"simulated ranks have no {top}: run this file with torch, in the notebook",
                    name=top,
                )
            if top not in modules:
                return builtins.__import__(name, *given)
            module = modules[top]
            for inner in name.split(".")[1:] if len(given) > 2 and given[2] else ():
                module = getattr(module, inner)
            return module

        own = {**vars(builtins), "__import__": bring}
        rank.names = {"__name__": "__main__", "__file__": self.file, "__builtins__": own}
        try:
            with contextlib.redirect_stdout(rank.printed), contextlib.redirect_stderr(rank.printed):
                if not rank.log:
                    rank.go_live()
                try:
                    exec(code, rank.names)
                finally:
                    sys.settrace(None)
            rank.check()  # an `except:` of the file may have swallowed it
            rank.state, rank.stood = "ended", []
            rank.event("end")
        except BaseException as error:
            self._stopped(rank, error)

    def _stopped(self, rank: Rank, error: BaseException) -> None:
        """Note how a rank was unwound, either because it waits or because it failed."""
        if rank.is_unwinding:
            rank.state = "waits"
            return
        frames = traceback.extract_tb(error.__traceback__)
        rank.stood = [
            (frame.name, frame.lineno) for frame in frames if frame.filename == self.name
        ][::-1]
        rank.state, rank.waits, rank.error = "failed", None, error
        self.is_over |= isinstance(error, TooMuch)  # for the others, too
        rank.event("fail")
        if rank.is_live:
            self.events[-1].lines = [line for _, line in rank.stood]

    def _modules(self, rank: Rank) -> dict[str, object]:
        """The modules that a rank imports instead of torch, and instead of those that differ from
        rank to rank or from run to run.
        """
        from .messages import distributed

        def sleep(seconds: float) -> None:
            rank.clock += float(seconds)

        def now() -> float:
            return rank.clock

        count = str(len(self.ranks))
        who = {
            "RANK": str(rank.number),
            "LOCAL_RANK": str(rank.number),
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
        }
        environment = {**os.environ, **who, **self.settings}
        clocks = {"sleep": sleep, "perf_counter": now, "monotonic": now, "time": now}
        return {
            "torch": stand_in(distributed(self)),
            "time": types.SimpleNamespace(**{**vars(time), **clocks}),
            "os": types.SimpleNamespace(
                **{**vars(os), "environ": environment, "getenv": environment.get}
            ),
            "random": random.Random(rank.number),
        }
