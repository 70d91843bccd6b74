"""Whether GPUs under NCCL can come to the end of what their hosts enqueue.

The machine has no times: streams are first in, first out; a transfer is a rendezvous of all its ranks, two for a
message; its kernel occupies a place on its GPU from its start to its end. PyTorch's ordering of streams is assumed as
its documentation has it: a transfer starts after what the compute stream was given before it, and an action after the
receive that it waits for. The transfers' first use of a group isn't part of it, nor is the memory's edge, where an
allocator that finds no room frees what it caches, and waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from gpu_calls import Call, Together, host_calls
from pplab.actions import Action, Overlap
from pplab.deps import other_end
from pplab.errors import ScheduleError, positive_int, unknown
from pplab.schedule import Schedule


@dataclass(eq=False)
class _Work:
    """Something in a stream. A transfer also has its channel or group, and the ranks that it needs."""

    what: Action | Overlap | Together
    stream: Hashable
    needs: tuple[_Work, ...]
    ranks: tuple[int, ...] = ()
    started: bool = False
    done: bool = False


@dataclass
class GpuMachine:
    """GPUs with streams, one for each rank, that run a schedule's step as the runtime enqueues it.

    `kernels` is how many transfers can be on a GPU at once, `queues` the number of hardware queues onto which streams
    are mapped in turn (the setting CUDA_DEVICE_MAX_CONNECTIONS); None: enough. `run_ahead` is how many items of its row
    a host may have enqueued that haven't ended (the runtime's hosts: 2); None: any number. `waits` has pairs (rank, i):
    before its call i, that host waits for everything that its GPU was given, as some calls of CUDA do; "all": every
    host before each of its calls, as with CUDA_LAUNCH_BLOCKING=1. `room` is how many messages a channel has buffers
    for: so many sends end before their receives start, as NCCL's do with small messages. `in_order`: a rank's transfers
    start in the order in which its host asked for them (NCCL_LAUNCH_ORDER_IMPLICIT=1; with an old driver they even run
    one after the other). `one_stream` puts all of a rank's transfers on one stream, as a single communicator does.
    `experts` is that of `host_calls`.

    With enough kernels and queues, nothing that starts can keep anything else from starting, so one run decides for
    all orders in which GPUs could run it. With fewer, a deadlock that is found is real, and none found is no proof.
    """

    schedule: Schedule
    ahead: int = 1
    kernels: int | None = None
    queues: int | None = None
    run_ahead: int | None = None
    waits: Collection[tuple[int, int]] | Literal["all"] = ()
    room: int = 0
    in_order: bool = False
    one_stream: bool = False
    experts: bool = False
    most_resident: int = field(default=0, init=False)  # transfers on one GPU at once, in the run

    def __post_init__(self) -> None:
        for name in ("kernels", "queues", "run_ahead"):
            if (given := getattr(self, name)) is not None:
                positive_int(name, given)
        positive_int("room", self.room, 0)
        self.calls = host_calls(self.schedule, ahead=self.ahead, experts=self.experts)
        self.home = self.schedule.home()
        if isinstance(self.waits, str) and self.waits != "all":
            raise unknown("set of waits", self.waits, ("all",))
        self.stops = [len(calls) for calls in self.calls]  # no host gets further
        ranks = range(len(self.calls))
        self.position = [0 for _ in ranks]
        self.given: list[list[_Work]] = [[] for _ in ranks]  # all of a GPU's, in the order of the host
        self.computes: list[list[_Work]] = [[] for _ in ranks]
        self.items: list[list[int]] = [[] for _ in ranks]  # how much of `computes` was there when each began
        self.joined: list[dict[object, deque[_Work]]] = [defaultdict(deque) for _ in ranks]  # to wait for
        self.streams: list[dict[Hashable, deque[_Work]]] = [defaultdict(deque) for _ in ranks]
        self.hardware: list[dict[Hashable, deque[_Work]]] = [defaultdict(deque) for _ in ranks]
        self.to_start: list[deque[_Work]] = [deque() for _ in ranks]  # transfers, as the host asked for them
        self.resident = [0 for _ in ranks]
        self.came: dict[tuple, deque[_Work]] = defaultdict(deque)  # started, by channel or group and rank

    def run(self) -> GpuMachine:
        """Run the step; returns the machine. ScheduleError when it can't go on, with what every rank waits for."""
        self.settle()
        if not all(self.idle(rank) for rank in range(len(self.calls))) or self.waiting():
            raise self._stuck()
        return self

    def idle(self, rank: int) -> bool:
        """Whether a GPU has done all that it was given."""
        return all(work.done for work in self.given[rank])

    def waiting(self) -> list[tuple[int, Call]]:
        """Before which call each host stands that hasn't asked for everything, with its rank."""
        each = enumerate(zip(self.position, self.calls, strict=True))
        return [(rank, calls[at]) for rank, (at, calls) in each if at < len(calls)]

    def settle(self) -> None:
        """Run until nothing moves."""
        ranks = range(len(self.calls))
        while any([self._host(rank) for rank in ranks] + [self._gpu(rank) for rank in ranks]):
            pass

    def _host(self, rank: int) -> bool:
        """Let a host enqueue as far as it may; whether it did."""
        before = self.position[rank]
        while self.position[rank] < self.stops[rank]:
            what, of = self.calls[rank][self.position[rank]]
            waits = self.waits == "all" or (rank, self.position[rank]) in self.waits
            if waits and not self.idle(rank):
                break
            if what == "compute" and not self._may_begin(rank):
                break
            self._enqueue(rank, what, of)
            self.position[rank] += 1
        return self.position[rank] > before

    def _may_begin(self, rank: int) -> bool:
        """Whether the item before the last `run_ahead - 1` has ended."""
        computes, began, lag = self.computes[rank], self.items[rank], self.run_ahead
        if not lag or len(began) < lag:
            return True
        return computes[(len(computes) if lag == 1 else began[1 - lag]) - 1].done

    def _enqueue(self, rank: int, what: str, of: Action | Overlap | Together) -> None:
        compute = next((x for x in reversed(self.given[rank]) if not x.ranks), None)
        needs = () if compute is None else (compute,)
        if what in ("wait", "join"):
            work = _Work(of, "compute", (*needs, self.joined[rank][of].popleft()))
        elif what in ("compute", "go on"):
            work = _Work(of, "compute", needs)
        else:
            ranks = of.ranks if what == "start" else (rank, self.home[other_end(of).stage, of.microbatch])
            ranks = ranks[::-1] if what == "post" else ranks  # a channel leads from its first rank to its second
            name = of.name if what == "start" else "channel"
            work = _Work(of, "transfers" if self.one_stream else (name, ranks), needs, ranks)
            self.joined[rank][of].append(work)
            self.to_start[rank].append(work)
        if what == "compute":
            self.items[rank].append(len(self.computes[rank]))
        if what in ("compute", "go on"):
            self.computes[rank].append(work)
        self.given[rank].append(work)
        self.streams[rank][work.stream].append(work)
        number = list(self.streams[rank]).index(work.stream)
        self.hardware[rank][number % self.queues if self.queues else number].append(work)

    def _gpu(self, rank: int) -> bool:
        """Start what stands at the heads of a GPU's queues and can start; whether something did."""
        moved = False
        for queue in self.hardware[rank].values():
            while queue:
                work = queue[0]
                if self.streams[rank][work.stream][0] is not work or not all(x.done for x in work.needs):
                    break
                if work.ranks and self.kernels and self.resident[rank] >= self.kernels:
                    break
                if work.ranks and self.in_order and self.to_start[rank][0] is not work:
                    break
                queue.popleft()
                work.started = moved = True
                if work.ranks:
                    self.to_start[rank].remove(work)
                    self.resident[rank] += 1
                    self.most_resident = max(self.most_resident, self.resident[rank])
                    self._meet(rank, work)
                else:
                    self._end(rank, work)
        return moved

    def _meet(self, rank: int, work: _Work) -> None:
        """A transfer has started: it ends once it has started on all of its ranks, or is a send that finds room."""
        key = (getattr(work.what, "name", "channel"), work.ranks)
        self.came[key, rank].append(work)
        came = [self.came[key, each] for each in work.ranks]
        if all(came):
            for each, other in zip(work.ranks, [queue.popleft() for queue in came], strict=True):
                if other is not work and work.what not in (other.what, _other_end(other.what)):
                    raise ScheduleError(
                        f"{other.what} meets {work.what} in the channel from rank {work.ranks[0]} to {work.ranks[-1]}",
                        "post a channel's receives in the order of its sends",
                    )
                if not other.done:
                    self._end(each, other)
        if isinstance(work.what, Action):
            for send in islice(came[0], self.room):
                if not send.done:
                    self._end(work.ranks[0], send)

    def _end(self, rank: int, work: _Work) -> None:
        work.done = True
        self.streams[rank][work.stream].popleft()
        self.resident[rank] -= bool(work.ranks)

    def _stuck(self) -> ScheduleError:
        said, waiting = [], dict(self.waiting())
        for rank in range(len(self.calls)):
            host = f"host before {' '.join(map(str, waiting[rank]))}" if rank in waiting else "host has enqueued all"
            spins = [str(x.what) for x in self.given[rank] if x.started and not x.done]
            said.append(f"rank {rank}: {host}{', running ' + ' '.join(spins) if spins else ''}")
        how = "post receives later (ahead=0), let no host wait, or give the GPU more kernels and queues"
        return ScheduleError(f"deadlock on GPUs: {'; '.join(said)}", how)


def _other_end(what: object) -> object:
    return other_end(what) if isinstance(what, Action) else what


def hanging_waits(schedule: Schedule, *, ahead: int = 1, room: int = 0) -> list[tuple[int, Call]]:
    """If every host waits for its whole GPU before each of its calls: the calls at which they stand in the end, each
    with its rank; none where the step ends.

    A host that waits less often is never behind, and nor is its GPU. So where nothing is found, no waits hang,
    of whichever hosts, before whichever calls. With few waits, it may end all the same.
    """
    machine = GpuMachine(schedule, ahead, room=room, waits="all")
    machine.settle()
    return machine.waiting()
