"""One schedule under many costs at once: the simulator's additions and maxima, each on an array of settings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import engine
from ..costs import Costs
from ..schedule import Schedule
from ..simulator import messages
from ..timeline import total
from ..validity import validate

if TYPE_CHECKING:
    import numpy as np

_CHUNK = 1024  # settings at a time: the arrays at work then fit a core's cache


@dataclass(frozen=True)
class Sweep:
    """What `simulate` says under each setting, as arrays with a value per setting: every figure equal to the bit."""

    schedule: Schedule
    settings: tuple[Costs, ...]
    makespan: np.ndarray  # (settings,)
    busy: np.ndarray  # (settings, ranks)
    spans_per_rank: np.ndarray  # (settings, ranks)

    @property
    def idle(self) -> np.ndarray:
        """Per setting and rank, the time not spent in actions."""
        return self.makespan[:, None] - self.busy

    @property
    def bubble_fraction(self) -> np.ndarray:
        """Per setting, idle / (P * makespan)."""
        return total(self.idle.T) / (self.schedule.num_ranks * self.makespan)

    @property
    def bubble_ratio(self) -> np.ndarray:
        """Per setting, idle / ideal."""
        return total(self.idle.T) / total(self.busy.T)

    @property
    def span_bubble_fraction(self) -> np.ndarray:
        """Per setting, 1 - work / span of the rank whose span is the longest."""
        longest = range(len(self.settings)), self.spans_per_rank.argmax(axis=1)
        return 1 - self.busy[longest] / self.spans_per_rank[longest]


def sweep(schedule: Schedule, settings: Sequence[Costs]) -> Sweep:
    """Simulate `schedule` under every one of `settings`.

    Faster than a loop over `simulate` from some ten settings on (`make bench`). Raises as `simulate` does.

    >>> from pplab import build
    >>> sweep(build("1F1B", num_ranks=4, num_microbatches=8), [Costs(latency=c) for c in (0, 1)]).makespan
    array([33., 49.])
    """
    import numpy as np

    settings = tuple(settings)
    if not settings:
        raise ValueError("settings is empty: give at least one pplab.Costs")
    for costs in settings:
        costs.check(schedule.num_stages, schedule.num_ranks)
    validate(schedule)
    order = _order(schedule)
    parts = [_run(schedule, order, settings[i : i + _CHUNK]) for i in range(0, len(settings), _CHUNK)]
    return Sweep(schedule, settings, *(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _order(schedule: Schedule) -> list[int]:
    """The ids so that each comes after what it waits for: by when they start if all take one unit of time."""
    num_ids = len(schedule.columns.kinds)
    starts = engine.run(schedule, [1] * num_ids, [0] * num_ids).starts
    return sorted(range(num_ids), key=starts.__getitem__)


def _run(schedule: Schedule, order: Sequence[int], settings: Sequence[Costs]) -> tuple[np.ndarray, ...]:
    """Makespan, busy and spans under some settings: the engine's loops, on arrays."""
    import numpy as np

    kinds, stages, ranks = schedule.columns.kinds, schedule.columns.stages, schedule.columns.ranks()
    dep, sends = messages(schedule)
    firsts, gates = set(schedule.columns.bounds[:-1]), set(schedule.columns.gates)
    duration = _PerSetting(settings, Costs.of)
    duration_of_pair = _PerSetting(settings, Costs.of_overlap)
    latency = _PerSetting(settings, lambda costs, source, target: costs.link(source, target).latency)
    occupancy = _PerSetting(
        settings, lambda c, source, target, kind, stage: c.occupancy(kind, stage, c.link(source, target).bandwidth)
    )
    late, queues = any(costs.has_latency for costs in settings), any(costs.has_queues for costs in settings)
    zero = np.zeros(len(settings))
    now, busy, first = ([zero] * schedule.num_ranks for _ in range(3))
    free: dict[tuple[int, int], np.ndarray] = {}
    arrivals: dict[int, np.ndarray] = {}
    for i in order:
        rank, d = ranks[i], dep[i]
        start = now[rank]
        if d >= 0:
            arrival = arrivals.pop(d)
            if late and ranks[d] != rank:
                arrival = arrival + latency[ranks[d], rank]
            start = np.maximum(start, arrival)
        if i in firsts:
            first[rank] = start
        if i in gates:
            now[rank] = start
            continue
        lasts = duration[kinds[i], stages[i]] if i - 1 not in gates else duration_of_pair[stages[i - 1], stages[i]]
        now[rank] = end = start + lasts
        busy[rank] = busy[rank] + (end - start)
        for message, target in sends[i]:
            arrivals[message] = end
            if queues and target != rank:
                passed = np.maximum(end, free.get((rank, target), zero))
                passed = passed + occupancy[rank, target, kinds[message], stages[message]]
                free[rank, target] = arrivals[message] = passed
    return np.max(now, axis=0), np.transpose(busy), np.transpose(np.subtract(now, first))


class _PerSetting(dict):
    """A figure under each setting, by what it is of: computed when it is first asked for."""

    def __init__(self, settings: Sequence[Costs], figure: Callable[..., float]):
        self.settings, self.figure = settings, figure

    def __missing__(self, key: tuple[Hashable, ...]) -> np.ndarray:
        import numpy as np

        self[key] = np.array([self.figure(costs, *key) for costs in self.settings], float)
        return self[key]
