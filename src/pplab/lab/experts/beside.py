"""Run the halves of an overlap at the same time, layer by layer: one computes while the other's
tokens are on the wire.

Each half runs in a thread of its own. On a GPU both put their work into one stream, in the order of
their turns. An all-to-all has a stream of its own, so one half computes while the other's
all-to-all is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue

import torch

from ...actions import Overlap
from ...runtime import Extra, Job, Listener, Rank, Stage, accumulate, cuda
from ..extras import Meter
from .pieces import Pieces
from .turns import DONE, ON_THE_WIRE, Half, Late, Turns
from .wire import wire_of

_LOOK_S = 1.0  # a pair that takes longer says which half it is in


@dataclass(frozen=True)
class Beside(Extra):
    """Run the halves of overlaps at the same time. `pieces` sets how long the pieces of a layer
    last (on a CPU only).

    A `Meter` counts in the first pass, so with a `Meter` the halves of that pass run one after the
    other.
    """

    pieces: Pieces | None = None
    name = "beside"

    def check(self, job: Job) -> Job:
        """Raise ValueError where the workload runs overlaps in a way of its own."""
        if job.workload.overlap is not None:
            raise ValueError(
                "the workload runs its overlaps itself (`overlap`): leave that out, or lab.Beside"
            )
        return replace(job, how="paced") if self.pieces else job

    def check_devices(self, job: Job, devices: Sequence[str], transport: str) -> None:
        """Raise ValueError for pieces on a GPU."""
        if self.pieces and devices[0] != "cpu":
            raise ValueError(
                "pieces are paced on a CPU only, and on a GPU they take as long as they take: "
                "leave `pieces` out"
            )

    def listen(self, rank: Rank) -> Listener:
        turns = wire_of(rank).turns = Turns(rank.context.device, self.pieces)
        turns.stages = rank.stages
        for stage in rank.stages.values():
            stage.backward_weight = partial(weights_in_pieces, stage, turns)
        metered = any(isinstance(extra, Meter) for extra in rank.job.extras)
        rank.overlap = Pairs(turns, rank.context.watch)
        return Taking(turns, rank.overlap, metered)

    def finish(self, job: Job, reports: Sequence[Late]) -> Late:
        return Late(*(sum(getattr(each, name) for each in reports) for name in vars(Late())))

    def lines(self, found: Late) -> list[str]:
        if not found.pieces:
            return []
        too_long = f"{found.overran} took {1e3 * found.overran_s:.1f} ms too long"
        return [f"paced pieces     {found.pieces}, of which {too_long}"]


class Taking(Listener):
    """Lets every action take its turn, in an overlap or alone."""

    events = frozenset(("action", "call", "row", "steps"))

    def __init__(self, turns: Turns, pairs: Pairs, metered: bool):
        self.turns, self.pairs = turns, pairs
        pairs.in_turn = metered

    def begin(self, event: str, what: object) -> None:
        if event == "steps":
            self.turns.late = Late()
        elif event != "row":
            self.turns.begin(what)

    def end(self, event: str, what: object) -> None:
        """An action is done, or a row, after the first of which nobody counts bytes any more."""
        if event == "row":
            self.pairs.in_turn = False
        elif event != "steps":
            self.turns.end()

    def report(self) -> Late:
        self.pairs.close()
        return self.turns.late


class Pairs:
    """Runs the halves of an overlap, each in a thread. A half is a function without arguments, a
    partial one whose first argument is the action. If one fails, its error is raised without
    waiting for the other, because the run of the other is over.
    """

    def __init__(self, turns: Turns, watch: Callable[..., None]):
        self.turns, self.watch, self.in_turn = turns, watch, False
        self._todo: list[SimpleQueue] = []
        self._done: SimpleQueue = SimpleQueue()

    def __call__(self, *calls: partial) -> list[object]:
        """Run them, and return what they return."""
        if self.in_turn:
            return [call() for call in calls]
        while len(self._todo) < len(calls):
            self._todo.append(SimpleQueue())
            threading.Thread(target=self._work, args=(self._todo[-1],), daemon=True).start()
        halves = self.turns.together([call.args[0] for call in calls])
        settings = Settings.of(self.turns.device)
        for number, (todo, half, call) in enumerate(zip(self._todo, halves, calls, strict=False)):
            todo.put((number, half, call, settings))
        made: dict[int, object] = {}
        while len(made) < len(calls):
            number, result, error = self._next(halves)
            if error is not None:
                self.watch(f"at {_shown(halves)} in its {halves[number].action}")
                raise error
            made[number] = result
        self.turns.apart(halves)
        return [made[number] for number in range(len(calls))]

    def close(self) -> None:
        """End the threads."""
        for todo in self._todo:
            todo.put(None)
        self._todo.clear()

    def _next(self, halves: Sequence[Half]) -> tuple[int, object, BaseException | None]:
        """What is done next. After a long wait, `watch` is told where each half is."""
        said = ""
        while True:
            try:
                return self._done.get(timeout=_LOOK_S)
            except Empty:
                left = [half for half in halves if half.state is not DONE]
                where = " and ".join(f"{half.action} {half.state}" for half in left)
                waits = "waits " * all(half.state is ON_THE_WIRE for half in left)
                if (say := f"{waits}at {_shown(halves)} while {where}") != said:
                    self.watch(said := say, bool(waits))

    def _work(self, todo: SimpleQueue) -> None:
        while (given := todo.get()) is not None:
            number, half, call, settings = given
            result, error = None, None
            try:
                self.turns.run(half)
                with settings:
                    result = call()
            except BaseException as raised:
                error = raised
            self._done.put((number, result, error))


@dataclass(frozen=True)
class Settings:
    """The settings that torch keeps per thread, copied from the thread that asks for a pair."""

    device: torch.device
    stream: cuda.Stream | None
    threads: int
    grad: bool

    @classmethod
    def of(cls, device: torch.device) -> Settings:
        """The settings of this thread."""
        stream = cuda.current_stream(device) if device.type == "cuda" else None
        return cls(device, stream, torch.get_num_threads(), torch.is_grad_enabled())

    def __enter__(self) -> None:
        if self.stream is not None:
            cuda.set_device(self.device)
            cuda.set_stream(self.stream)
        elif torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        torch.set_grad_enabled(self.grad)

    def __exit__(self, *error: object) -> None:
        """Does nothing, since a thread of a pair does nothing else."""


def weights_in_pieces(stage: Stage, turns: Turns, microbatch: int) -> tuple[()]:
    """Run `Stage.backward_weight` piece by piece. Between two pieces the other half may compute."""
    products, half = stage.due.pop(microbatch), turns.half((stage.index, microbatch))
    for number, (piece, count) in enumerate(turns.put_off.pop((stage.index, microbatch), [])):
        if number:
            turns.pause(half)
        accumulate(products[:count])
        del products[:count]  # what a piece has used is free when it is done
        turns.lasts(half, piece)
    accumulate(products)
    return ()


def _shown(halves: Sequence[Half]) -> str:
    return str(Overlap(*(half.action for half in halves)))
