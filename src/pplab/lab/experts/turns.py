"""Turns of what runs on one rank: one half of an overlap computes at a time, and the other while
the first is on the wire.

An action computes from its start to its end, except while its tokens are on the wire. Then it gives
the rank's compute away, and takes it back later. If it is alone it gets it back at once.

Paced pieces last as long as they should, by a clock of the action's own that starts with it. If a
thread sleeps too long, the next piece doesn't start later for it, but if a piece computes too long,
it does. While one half lasts, the other may compute, and by its clock its own piece begins where
the first one's ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from ...actions import Action, I, W
from ...runtime import Stage
from ..extras import random_state, set_random_state
from .pieces import ATTENTION, EXPERTS, ORDER, Pieces
from .wire import COMBINE, DISPATCH

WAITS, COMPUTES, ON_THE_WIRE, DONE = "waits to compute", "computes", "is on the wire", "is done"
# so long after it should be back, nobody waits any more for a half that is on the wire
_GRACE_S = 0.001


@dataclass(eq=False)
class Half:
    """An action that runs, alone or as a half of an overlap."""

    action: Action
    at_s: float  # when what it has done so far should have ended
    state: str = WAITS
    random: Sequence[Tensor] = ()  # where its random numbers stand, while another half computes
    behind: str | None = None  # the piece that its backward is in
    due: int = 0  # weights' gradients that it had put off when that began

    @property
    def turn(self) -> tuple[float, int]:
        """The half with the lower turn goes first."""
        return self.at_s, ORDER[self.action.kind]

    @property
    def key(self) -> tuple[int, int]:
        """The key under which a forward leaves something for its backward, so that the backward's
        half finds it.
        """
        return self.action.stage, self.action.microbatch


@dataclass
class Late:
    """How far the times of paced pieces were from what they should have been."""

    pieces: int = 0
    overran: int = 0  # of these: their own work took longer
    overran_s: float = 0.0


@dataclass(eq=False)
class Turns:
    """Decides which half computes on this rank. `pieces` sets how long pieces last at least (None:
    as long as they take).
    """

    device: torch.device
    pieces: Pieces | None = None
    late: Late = field(default_factory=Late)

    def __post_init__(self) -> None:
        self.seconds = self.pieces.seconds if self.pieces else {}
        self.halves: dict[tuple[int, int], Half] = {}
        self._changed, self._own = threading.Condition(), threading.local()
        self._computes: Half | None = None
        self._drew: Half | None = None  # whose random numbers are the device's
        self._free_at_s = 0.0
        self.stages: Mapping[int, Stage] = {}
        # Of an input gradient that has run: its pieces that compute, and how many weights'
        # gradients each has put off.
        self.put_off: dict[tuple[int, int], list[tuple[str, int]]] = {}

    @property
    def key(self) -> tuple[int, int] | None:
        """The key of the half that this thread runs."""
        half = getattr(self._own, "half", None)
        return half and half.key

    def half(self, key: tuple[int, int] | None) -> Half | None:
        """The half that runs what belongs to that key."""
        return self.halves.get(key)

    def together(self, actions: Sequence[Action]) -> list[Half]:
        """Let these halves begin now, at the same time."""
        now = time.perf_counter()
        state = random_state(self.device)
        halves = [Half(action, now, random=state) for action in actions]
        self.halves.update((half.key, half) for half in halves)
        self._drew = None
        return halves

    def apart(self, halves: Sequence[Half]) -> None:
        """Say that they are done. The first one's random numbers go on as if it had run alone."""
        if self._drew not in (None, halves[0]):
            set_random_state(self.device, halves[0].random)
        self._drew = None

    def run(self, half: Half) -> None:
        """Say that this thread runs that half."""
        self._own.half = half

    def begin(self, action: Action) -> None:
        """Begin an action in this thread. This returns once it may compute."""
        half = getattr(self._own, "half", None)
        if half is None:
            half = self._own.half = self.halves[action.stage, action.microbatch] = Half(
                action, time.perf_counter()
            )
        self._take(half)

    def end(self) -> None:
        """End it."""
        half, self._own.half = self._own.half, None
        self._backward_piece(half)
        for piece, _ in self.put_off.pop(half.key, []) if half.action.kind is W else []:
            self.lasts(half, piece)  # another engine has computed them in one go
        self._give(half, DONE)

    def give(self, half: Half, name: str, backward: bool) -> None:
        """Called when its tokens go on the wire, so that others may compute."""
        if backward:
            self._backward_piece(half)
            half.behind = EXPERTS if name == COMBINE else ATTENTION
        else:
            self.lasts(half, ATTENTION if name == DISPATCH else EXPERTS)
        self._give(half, ON_THE_WIRE, self.seconds.get(name, 0))

    def take_back(self, half: Half, name: str) -> None:
        """Called when its tokens are there. It waits until it may compute."""
        if self.seconds:
            self._count(half)
            self._sleep(half)
        else:
            half.at_s = time.perf_counter()
        self._take(half)

    def pause(self, half: Half) -> None:
        """Called when a piece of it is done. The other half may compute before it goes on."""
        self._give(half, WAITS)
        self._take(half)

    def lasts(self, half: Half, piece: str, times: int = 1) -> None:
        """Called when a piece has computed. It waits until the piece's time is up, and what the
        other half computes meanwhile counts from then on.
        """
        if self.seconds:
            half.at_s += times * self.seconds[piece]
            self._count(half)
            with self._changed:
                self._release(half)
            self._sleep(half)

    def _backward_piece(self, half: Half) -> None:
        """Called when a backward has finished what it computed since its tokens were on the wire,
        if they were.
        """
        if half.behind:
            self.lasts(half, half.behind, 1 if half.action.kind is I else 2)
            if half.action.kind is I:
                stage = self.stages.get(half.action.stage)
                due = len(stage.due[half.action.microbatch]) if stage else 0
                self.put_off.setdefault(half.key, []).append((half.behind, due - half.due))
                half.due = due

    def _count(self, half: Half) -> None:
        """Count a piece whose own work is done, in time or too late."""
        self.late.pieces += 1
        if (late_s := time.perf_counter() - half.at_s) > 0:
            self.late.overran += 1
            self.late.overran_s += late_s
            half.at_s += late_s

    def _sleep(self, half: Half) -> None:
        """Sleep until what it has done so far should have ended."""
        if (left_s := half.at_s - time.perf_counter()) > 0:
            time.sleep(left_s)

    def _give(self, half: Half, state: str, seconds: float = 0) -> None:
        with self._changed:
            self._release(half)
            half.state, half.at_s = (
                state,
                half.at_s + seconds if self.seconds else time.perf_counter(),
            )
            if state is DONE:
                del self.halves[half.key]

    def _release(self, half: Half) -> None:
        if self._computes is half:
            self._computes, self._free_at_s = None, half.at_s
            self._changed.notify_all()

    def _take(self, half: Half) -> None:
        with self._changed:
            half.state = WAITS
            while wait_s := self._waits(half):
                self._changed.wait(None if wait_s == inf else wait_s)
            self._computes, half.state = half, COMPUTES
            half.at_s = max(half.at_s, self._free_at_s)
            if half.random and self._drew is not half:
                if self._drew:
                    self._drew.random = random_state(self.device)
                set_random_state(self.device, half.random)
                self._drew = half

    def _waits(self, half: Half) -> float:
        """How long a half may wait before it looks again, or 0 when it may compute."""
        if self._computes is not None:
            return inf
        for other in self.halves.values():
            if other is not half and other.turn < half.turn:
                if other.state is WAITS:
                    return inf
                # it is back at a moment that is known
                if other.state is ON_THE_WIRE and self.seconds:
                    if (left := other.at_s + _GRACE_S - time.perf_counter()) > 0:
                        return left
        return 0
