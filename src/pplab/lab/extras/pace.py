"""Actions and messages last at least as long as they are told to: so a few cores show a schedule in real time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import permutations
from typing import NamedTuple

import torch

from ...actions import Action, Kind
from ...costs import Costs
from ...runtime import Extra, Job, Listener, Rank, cuda, producer
from ..schedules import Slices

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


class PacedLink(NamedTuple):
    """What a message takes at least: messages pass one after the other, then each is under way."""

    latency_s: float
    passing_s: tuple[float, ...]  # of what each stage makes, or of its gradient


@dataclass(frozen=True)
class Pace(Extra):
    """Stretches every action to the durations of `costs`, which need a unit of time, and delays messages as its links
    would. On a GPU an action computes, and then lasts as long as it was told to.

    The costs are those of whole microbatches; where `slices` cut them, each action lasts as long as its slice takes.
    """

    costs: Costs
    slices: Slices | None = None
    name = "pace"

    def check(self, job: Job) -> Job:
        """ValueError for costs without a unit of time, or that don't fit the schedule."""
        self.costs.check(job.schedule.num_stages, job.schedule.num_ranks)
        if self.costs.unit not in _SECONDS:
            raise ValueError(
                f'pace needs costs in a unit of time, such as Costs(forward=20, unit="ms"), got {self.costs!r}'
            )
        if self.slices is not None:
            self.slices.check(job.schedule)
        return replace(job, how="paced")

    def check_devices(self, job: Job, devices: Sequence[str], transport: str) -> None:
        """Messages can be delayed only where they say when they have left; torch's runtime knows of no slices."""
        if self.slices is not None and job.engine_name != "pplab":
            raise ValueError(
                "pace with slices needs pplab's engine: torch's actions last as long as whole microbatches'"
            )
        if self._delays and job.engine_name != "pplab":
            raise ValueError("pace with latency or bandwidth needs pplab's engine: torch's messages can't be delayed")
        if self._delays and transport != "shared":
            raise ValueError(
                f'pace with latency or bandwidth needs transport="shared", and these ranks have {transport}'
            )

    def listen(self, rank: Rank) -> Listener:
        """Stretch this rank's actions and messages."""
        widths, stages = (1,), range(rank.job.schedule.num_stages)
        seconds = {kind: [(each,) for each in of_stages] for kind, of_stages in self.seconds(len(stages)).items()}
        if self.slices is not None:
            widths, unit = self.slices.widths, _SECONDS[self.costs.unit]
            for kind in set(rank.job.schedule.columns.kinds):
                of_stages = (self.slices.durations_of(kind, stage, self.costs) for stage in stages)
                seconds[kind] = [tuple(unit * each for each in of_slices) for of_slices in of_stages]
        return _Pacing(seconds, self._links(rank) if self._delays else {}, rank, widths)

    def notes(self, devices: Sequence[str], notes: Sequence[str]) -> Sequence[str]:
        """What of a paced run is valid where ranks share the machine or compute on GPUs."""
        on_cpu = devices[0] == "cpu"
        if on_cpu and not notes:
            return notes
        if on_cpu:
            return [
                f"paced, {len(devices)} ranks on fewer cores: the order and the waits are the schedule's where every "
                "action kept to its time; the durations say nothing about the machine"
            ]
        return [
            *notes,
            "paced: every action computes on the GPU and then lasts as long as it was told to, so the order and the "
            "waits are the schedule's where every action kept to its time; the durations say nothing about the GPU",
        ]

    def seconds(self, num_stages: int) -> dict[Kind, list[float]]:
        """How long each kind lasts at least, per stage."""
        unit = _SECONDS[self.costs.unit]
        return {kind: [unit * self.costs.of(kind, s) for s in range(num_stages)] for kind in map(Kind, "FBIW")}

    @property
    def _delays(self) -> bool:
        latencies = (self.costs.latency, *(link.latency for link in self.costs.links.values()))
        return any(latencies) or self.costs.has_queues

    def _links(self, rank: Rank) -> dict[tuple[int, int], PacedLink]:
        schedule, unit = rank.job.schedule, _SECONDS[self.costs.unit]
        found = {}
        for pair in permutations(range(schedule.num_ranks), 2):
            link = self.costs.link(*pair)
            passing = (self.costs.occupancy(Kind.F, stage, link.bandwidth) for stage in range(schedule.num_stages))
            found[pair] = PacedLink(unit * link.latency, tuple(unit * each for each in passing))
        return found


class _Pacing(Listener):
    """A rank's actions last as long as `seconds` says, and its messages arrive when `links` let them.

    Both by slice: of each kind and stage, a duration for every slice, and of messages, how large a part (`widths`).
    """

    def __init__(
        self,
        seconds: Mapping[Kind, Sequence[Sequence[float]]],
        links: Mapping[tuple[int, int], PacedLink],
        rank: Rank,
        widths: Sequence[float],
    ):
        self.events = frozenset(("action", "receive", "send") if links else ("action", "receive"))
        self.seconds, self.links, self.rank, self.device = seconds, links, rank.context.rank, rank.context.device
        self.widths = widths
        self.comm = rank.comm
        self._begun: dict[Action, float] = {}  # the halves of an overlap may run at once
        self._free_ns: dict[int, int] = {}  # per target: when what was sent has left the link

    def begin(self, event: str, what: Action) -> None:
        """Note when an action starts; say of a message when it will have left."""
        if event == "action":
            settle(self.device)
            self._begun[what] = time.perf_counter()
        elif event == "send":
            target = self.comm.peer(what)
            start = max(time.perf_counter_ns(), self._free_ns.get(target, 0))
            part = self.widths[what.microbatch % len(self.widths)]
            self._free_ns[target] = start + round(1e9 * part * self.links[self.rank, target].passing_s[producer(what)])
            self.comm.leaves_ns = self._free_ns[target]

    def end(self, event: str, what: Action) -> None:
        """Wait until an action's time is up, or a message would be there."""
        if event == "action":
            settle(self.device)
            of_slices = self.seconds[what.kind][what.stage]
            _sleep_until(self._begun.pop(what) + of_slices[what.microbatch % len(of_slices)])
        elif event == "receive":
            settle(self.device)
            if self.links:
                latency_s = self.links[self.comm.peer(what), self.rank].latency_s
                _sleep_until(self.comm.left_ns / 1e9 + latency_s)


@contextmanager
def paced(device: torch.device, seconds: float) -> Iterator[None]:
    """Make what runs inside last at least that long, until a GPU has done it."""
    settle(device)
    begun = time.perf_counter()
    yield
    settle(device)
    _sleep_until(begun + seconds)


def settle(device: torch.device) -> None:
    """Wait until a GPU has done what it was given to compute.

    Not for all its streams: one may hold a receive that was posted early.
    """
    if device.type == "cuda":
        cuda.current_stream(device).synchronize()


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.perf_counter()))
