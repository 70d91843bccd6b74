"""Run rows against the clock: the loop behind validating, simulating and sweeping.

A work list of ranks: each runs its row until it needs an id that hasn't ended, parks there, and is put back when that
id ends. Ids are those of `Schedule.columns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .schedule import Schedule


class Flow(NamedTuple):
    """How far the rows ran."""

    starts: list[float]
    ends: list[float | None]  # None where it never came to it


def run(schedule: Schedule, durations: Sequence[float], lags: Sequence[float]) -> Flow:
    """Run the rows as far as they go, where what an id makes is on its way at once.

    Of every id: how long it takes, and how long what it waits for takes to arrive. Linear in the number of ids.
    """
    bounds, dep = schedule.columns.bounds, schedule.graph.dep
    position, clock = list(bounds[:-1]), [0] * schedule.num_ranks
    starts: list[float] = [0] * len(dep)
    ends: list[float | None] = [None] * len(dep)
    parked, next_parked = [-1] * len(dep), [-1] * schedule.num_ranks  # two ranks can wait for one overlap
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        now, i, end = clock[rank], position[rank], bounds[rank + 1]
        while i < end:
            d = dep[i]
            if d >= 0:
                arrival = ends[d]
                if arrival is None:
                    next_parked[rank], parked[d] = parked[d], rank
                    break
                arrival += lags[i]
                if arrival > now:
                    now = arrival
            starts[i] = now
            now += durations[i]
            ends[i] = now
            other = parked[i]
            while other >= 0:
                ready.append(other)
                other = next_parked[other]
            i += 1
        clock[rank], position[rank] = now, i
    return Flow(starts, ends)


class Send(NamedTuple):
    """A message that leaves when an id ends."""

    id: int  # of what made it: the id itself, or the gate for what the forward half of an overlap made
    free: list[float]  # when its link is free, in a box that all messages of the link share
    occupancy: float  # how long it keeps the link busy


def run_with_queues(
    schedule: Schedule,
    durations: Sequence[float],
    lags: Sequence[float],
    dep: Sequence[int],
    sends: Sequence[Sequence[Send]],
) -> Flow:
    """Run the rows as `run` does, where a message waits until its link is free.

    A link's messages leave in the order of its source's row, so that no other clock decides. `dep` names the gate where
    the graph names the pair that it belongs to: the pair's two messages arrive apart.
    """
    bounds = schedule.columns.bounds
    position, clock = list(bounds[:-1]), [0] * schedule.num_ranks
    starts: list[float] = [0] * len(dep)
    ends: list[float | None] = [None] * len(dep)
    arrivals: list[float | None] = [None] * len(dep)
    parked: dict[int, int] = {}
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        now, i, end = clock[rank], position[rank], bounds[rank + 1]
        while i < end:
            d = dep[i]
            if d >= 0:
                if arrivals[d] is None:
                    parked[d] = rank
                    break
                now = max(now, arrivals[d] + lags[i])
            starts[i] = now
            now += durations[i]
            ends[i] = now
            for message, free, occupancy in sends[i]:
                free[0] = arrivals[message] = max(now, free[0]) + occupancy
                if message in parked:
                    ready.append(parked.pop(message))
            i += 1
        clock[rank], position[rank] = now, i
    return Flow(starts, ends)
