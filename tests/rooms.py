"""How much room ranks make for receives: counted in a run, and read off the rows."""

from __future__ import annotations

import weakref
from math import prod

import numpy as np
import torch

import pplab as pp
from gpu_calls import host_calls
from pplab.actions import INPUT_GRADIENT, F, parts
from pplab.deps import incoming, other_end
from pplab.runtime import Extra, Listener, process_groups


class Rooms(Extra):
    """The most rooms for receives that a rank has at once."""

    name = "rooms"

    def listen(self, rank) -> Listener:
        return _Counting()

    def finish(self, job, reports) -> tuple[int, ...]:
        return tuple(reports)


class _Counting(Listener):
    """Stands in for torch where rooms are made: out of arrays that tell when they have gone."""

    def __init__(self) -> None:
        self.there = self.most = 0
        process_groups.torch = self

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def empty(self, shape, dtype, device) -> torch.Tensor:
        memory = np.empty(prod(shape) * dtype.itemsize, np.uint8)
        self.there += 1
        self.most = max(self.most, self.there)
        weakref.finalize(memory, self._gone)
        return torch.from_numpy(memory).view(dtype).view(shape)

    def _gone(self) -> None:
        self.there -= 1

    def report(self) -> int:
        process_groups.torch = torch
        assert not self.there
        return self.most


class Sent(Extra):
    """How many messages each rank keeps room for at the end of each pass."""

    name = "sent"

    def listen(self, rank) -> Listener:
        return _Keeping()

    def finish(self, job, reports) -> list[list[int]]:
        return reports


class _Keeping(Listener):
    def __init__(self) -> None:
        self.found: list[int] = []
        flush = process_groups.GroupComm.flush

        def looked_at(comm: process_groups.GroupComm) -> None:
            self.found.append(len(comm.reserved))
            flush(comm)

        process_groups.GroupComm.flush = looked_at

    def report(self) -> list[int]:
        return self.found


def predicted(schedule: pp.Schedule) -> tuple[int, ...]:
    """What the rows ask for: from its post, a message has its room until the backward that uses it has ended."""
    found, home = [], schedule.home()
    for rank, calls in enumerate(host_calls(schedule)):
        there = most = 0
        for what, of in calls:
            there += what == "post"
            most = max(most, there)
            for action in parts(of) if what == "compute" else ():
                if action.kind in INPUT_GRADIENT:  # its gradient's, and that of what its forward took
                    used = (incoming(each, schedule.num_stages) for each in (action, action._replace(kind=F)))
                    there -= sum(home[other_end(each).stage, each.microbatch] != rank for each in used if each)
        found.append(most)
    return tuple(found)
