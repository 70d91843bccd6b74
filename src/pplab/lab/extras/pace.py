"""Let actions and messages take at least a given time, so that a few cores show a schedule in real
time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ...actions import RECV_B, RECV_F, Action, Kind
from ...costs import Costs
from ...deps import other_end
from ...runtime import Extra, Job, Listener, Rank, cuda, producer
from ..forms import MICROSECONDS
from ..streams import SENDS, posted


@dataclass(frozen=True)
class Pace(Extra):
    """Stretch every action to its duration in `costs`, which need a unit of time, and delay
    messages as its links would. On a GPU an action computes first, and then lasts for its duration.
    `sends` tells who waits for what it sends, as in `simulate_sends`.

    For sequences in slices, `lab.Slices` has the costs of each slice:
    `lab.Pace(slices.costs(schedule, costs))`.
    """

    costs: Costs
    sends: str = SENDS[0]
    name = "pace"

    def check(self, job: Job) -> Job:
        """Raise ValueError for costs without a unit of time or that don't fit, and for rows that no
        framework sends in this way.
        """
        schedule = job.schedule
        if self.waits:
            posted(schedule, self.sends)
            if self.costs.has_queues:
                raise ValueError(
                    f"pace with sends={self.sends!r} needs costs without bandwidth: give latency "
                    "alone"
                )
        self.costs.check(schedule.num_stages, schedule.num_ranks, schedule.num_microbatches)
        if self.costs.unit not in MICROSECONDS:
            raise ValueError(
                'pace needs costs in a unit of time, such as Costs(forward=20, unit="ms"), got '
                f"{self.costs!r}"
            )
        return replace(job, how="paced")

    def check_devices(self, job: Job, devices: Sequence[str], transport: str) -> None:
        """Raise ValueError where a run can't be paced. Messages can be delayed in shared memory
        alone, and torch's runtime paces by kind and stage alone.
        """
        if self.costs.by_microbatch and job.engine_name != "pplab":
            raise ValueError(
                "pace by microbatch needs pplab's engine: torch's actions last as long for all of "
                "them"
            )
        if self.delays and job.engine_name != "pplab":
            raise ValueError(
                "pace with latency or bandwidth needs pplab's engine: torch's messages can't be "
                "delayed"
            )
        if self.delays and transport != "shared":
            raise ValueError(
                'pace with latency or bandwidth needs transport="shared", and these ranks have '
                f"{transport}"
            )

    def listen(self, rank: Rank) -> Listener:
        return _Pacing(self, rank)

    def notes(self, devices: Sequence[str], notes: Sequence[str]) -> Sequence[str]:
        """What is valid in a paced run where ranks share the machine or compute on GPUs."""
        on_cpu = devices[0] == "cpu"
        if on_cpu and not notes:
            return notes
        if on_cpu:
            return [
                f"paced, {len(devices)} ranks on fewer cores: the order and the waits are the "
                "schedule's where every action kept to its time; the durations say nothing about "
                "the machine"
            ]
        return [
            *notes,
            "paced: every action computes on the GPU and then lasts as long as it was told to, so "
            "the order and the waits are the schedule's where every action kept to its time; the "
            "durations say nothing about the GPU",
        ]

    @property
    def unit_s(self) -> float:
        """The unit of the costs."""
        return MICROSECONDS[self.costs.unit] / 1e6

    def seconds(self, num_stages: int) -> dict[Kind, list[float]]:
        """How long each kind lasts at least, per stage, in seconds."""
        return {
            kind: [self.unit_s * self.costs.of(kind, s) for s in range(num_stages)]
            for kind in map(Kind, "FBIW")
        }

    @property
    def waits(self) -> bool:
        """Whether ranks wait for their sends."""
        return self.sends != SENDS[0]

    @property
    def delays(self) -> bool:
        """Whether messages take time, or ranks wait for them."""
        latencies = (self.costs.latency, *(link.latency for link in self.costs.links.values()))
        return any(latencies) or self.costs.has_queues or self.waits


class _Pacing(Listener):
    """Lets a rank's actions last as long as `costs` give, and its messages arrive when their links
    let them. If ranks wait for their sends, a message leaves after both ends have posted it, and
    they use the store to announce that they ask.
    """

    def __init__(self, pace: Pace, rank: Rank):
        self.costs, self.unit_s, self.delays = pace.costs, pace.unit_s, pace.delays
        self.events = frozenset(
            ("action", "receive", "send") if self.delays else ("action", "receive")
        )
        self.rank, self.device, self.comm = rank.context.rank, rank.context.device, rank.comm
        self._begun: dict[Action, float] = {}  # the halves of an overlap may run at once
        self._free_ns: dict[int, int] = {}  # per target: when what was sent has left the link
        self._asked_ns: dict[Action, int] = {}
        self._behind, self._waits = {}, set()
        if pace.waits:
            rows, self._waits = posted(rank.job.schedule, pace.sends)
            self._behind = dict(pairwise(rows[self.rank]))

    def begin(self, event: str, what: Action) -> None:
        """Note when an action starts, and for a message, when it will have left or that it is asked
        for.
        """
        if event == "action":
            settle(self.device)
            self._begun[what] = time.perf_counter()
        elif event == "send":
            target = self.comm.peer(what)
            start = max(time.perf_counter_ns(), self._free_ns.get(target, 0))
            bandwidth = self.costs.link(self.rank, target).bandwidth
            passing = self.costs.occupancy(Kind.F, producer(what), bandwidth, what.microbatch)
            self._free_ns[target] = start + round(1e9 * self.unit_s * passing)
            self.comm.leaves_ns = self._free_ns[target]
        elif self._behind and what not in self._asked_ns:
            self._ask(what)

    def end(self, event: str, what: Action) -> None:
        """Wait until an action's time is up, or a message would be there. Then ask for the messages
        that come next.
        """
        settle(self.device)
        if event == "action":
            _sleep_until(self._begun.pop(what) + self.unit_s * self.costs.of_item(what))
        elif event == "receive":
            if self.delays:
                self._arrive(
                    self.comm.left_ns, self._asked_ns.pop(what, 0), self.comm.peer(what), self.rank
                )
            return
        elif what in self._waits:
            target, key = self.comm.peer(what), self._key(other_end(what))
            self._arrive(self._free_ns[target], int(self.comm.store.get(key)), self.rank, target)
            self.comm.store.delete_key(key)
        while (what := self._behind.get(what)) and what.kind in (RECV_F, RECV_B):
            self._ask(what)

    def _arrive(self, left_ns: int, asked_ns: int, source: int, target: int) -> None:
        _sleep_until(
            max(left_ns, asked_ns) / 1e9 + self.unit_s * self.costs.link(source, target).latency
        )

    def _ask(self, receive: Action) -> None:
        self._asked_ns[receive] = time.perf_counter_ns()
        self.comm.store.set(self._key(receive), str(self._asked_ns[receive]))

    def _key(self, receive: Action) -> str:
        return f"{self.comm.key} asks {receive}"


@contextmanager
def paced(device: torch.device, seconds: float) -> Iterator[None]:
    """Make what runs inside last at least that long, counted until a GPU has done it."""
    settle(device)
    begun = time.perf_counter()
    yield
    settle(device)
    _sleep_until(begun + seconds)


def settle(device: torch.device) -> None:
    """Wait until a GPU has done what it was given to compute.

    It doesn't wait for all streams, because one may hold a receive that was posted early.
    """
    if device.type == "cuda":
        cuda.current_stream(device).synchronize()


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.perf_counter()))
