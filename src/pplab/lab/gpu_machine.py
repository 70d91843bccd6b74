"""What hosts enqueue on GPUs under NCCL, and whether the GPUs can come to the end of it.

The calls are those of the runtime's `Executor`, which runs here with a transport and stages that only write down what
they are asked. The machine has no times: streams are first in, first out; a send and its receive are one rendezvous; a
transfer's kernel occupies a place on its GPU from its start to its end. PyTorch's ordering of streams is assumed as its
documentation has it: a transfer starts after what the compute stream was given before it, and an action after the
receive that it waits for. Reducers, and the transfers' first use of a group, aren't part of it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from ..actions import RECV_B, RECV_F, Action
from ..deps import other_end
from ..errors import ScheduleError, positive_int
from ..lowering import lower
from ..runtime.executor import Executor
from ..schedule import Schedule

Call = tuple[str, Action]  # "compute", "post", "wait" or "send", and of what


class _Written:
    """A transport that writes down its calls."""

    def __init__(self, calls: list[Call]):
        self.calls = calls

    def post(self, receive: Action) -> None:
        self.calls.append(("post", receive))

    def receive(self, receive: Action) -> tuple:
        self.calls.append(("wait", receive))
        return ()

    def send(self, send: Action, tensors: tuple) -> None:
        self.calls.append(("send", send))


class _Host(Executor):
    """The runtime's executor, whose actions compute nothing."""

    def act(self, action: Action, received: tuple) -> tuple:
        self.comm.calls.append(("compute", action))
        return ()


def host_calls(schedule: Schedule, *, ahead: int = 1) -> tuple[tuple[Call, ...], ...]:
    """What each rank's host asks of its GPU in one step, in order, if receives are posted `ahead` actions early.

    Row r is rank r's: ("compute", F, B, I or W), ("post", a receive), ("wait", the receive), ("send", a send).
    """
    rows = []
    for rank, row in enumerate(lower(schedule, ahead=ahead)):
        calls: list[Call] = []
        _Host(rank, row, {}, schedule.num_stages, schedule.home(), _Written(calls)).run(())
        rows.append(tuple(calls))
    return tuple(rows)


@dataclass(eq=False)
class _Work:
    """Something in a stream. A transfer also has its message's channel."""

    action: Action
    stream: Hashable
    needs: tuple[_Work, ...]
    channel: tuple[int, int] | None = None
    started: bool = False
    done: bool = False


@dataclass
class GpuMachine:
    """GPUs with streams, one for each rank, that run a schedule's step as the runtime enqueues it.

    `kernels` is how many transfers can be on a GPU at once, `queues` the number of hardware queues onto which streams
    are mapped in turn (the setting CUDA_DEVICE_MAX_CONNECTIONS); None: enough. `run_ahead` is how many actions
    a host may have enqueued that haven't ended; None: any number. `device_wait` = (rank, i): before its call i, that
    host waits for everything that its GPU was given, as some calls of CUDA do. `one_stream` puts all of a rank's
    transfers on one stream, as a single communicator does.

    With enough kernels and queues, nothing that starts can keep anything else from starting, so one run decides for
    all orders in which GPUs could run it. With fewer, a deadlock that is found is real, and none found is no proof.
    """

    schedule: Schedule
    ahead: int = 1
    kernels: int | None = None
    queues: int | None = None
    run_ahead: int | None = None
    device_wait: tuple[int, int] | None = None
    one_stream: bool = False
    most_resident: int = field(default=0, init=False)  # transfers on one GPU at once, in the run

    def __post_init__(self) -> None:
        for name in ("kernels", "queues", "run_ahead"):
            if (given := getattr(self, name)) is not None:
                positive_int(name, given)
        self.calls = host_calls(self.schedule, ahead=self.ahead)
        self.home = self.schedule.home()

    def run(self) -> GpuMachine:
        """Run the step; returns the machine. ScheduleError when it can't go on, with what every rank waits for."""
        ranks = range(len(self.calls))
        self.position = [0 for _ in ranks]
        self.given: list[list[_Work]] = [[] for _ in ranks]  # all of a GPU's, in the order of the host
        self.computes: list[list[_Work]] = [[] for _ in ranks]
        self.receives: dict[Action, _Work] = {}
        self.streams: list[dict[Hashable, deque[_Work]]] = [defaultdict(deque) for _ in ranks]
        self.hardware: list[dict[Hashable, deque[_Work]]] = [defaultdict(deque) for _ in ranks]
        self.resident = [0 for _ in ranks]
        self.ends: dict[tuple, deque[_Work]] = defaultdict(deque)  # started, by channel and side
        while any([self._host(rank) for rank in ranks] + [self._gpu(rank) for rank in ranks]):
            pass
        if any(not work.done for row in self.given for work in row) or any(
            at < len(calls) for at, calls in zip(self.position, self.calls, strict=True)
        ):
            raise self._stuck()
        return self

    def _host(self, rank: int) -> bool:
        """Let a host enqueue as far as it may; whether it did."""
        before = self.position[rank]
        while self.position[rank] < len(self.calls[rank]):
            what, action = self.calls[rank][self.position[rank]]
            computes, lag = self.computes[rank], self.run_ahead
            if self.device_wait == (rank, self.position[rank]) and not all(x.done for x in self.given[rank]):
                break
            if what == "compute" and lag and len(computes) >= lag and not computes[-lag].done:
                break
            self._enqueue(rank, what, action)
            self.position[rank] += 1
        return self.position[rank] > before

    def _enqueue(self, rank: int, what: str, action: Action) -> None:
        compute = next((x for x in reversed(self.given[rank]) if x.channel is None), None)
        needs = () if compute is None else (compute,)
        if what == "compute" or what == "wait":
            work = _Work(action, "compute", (*needs, self.receives[action]) if what == "wait" else needs)
        else:
            peer = self.home[other_end(action).stage, action.microbatch]
            channel = (rank, peer) if what == "send" else (peer, rank)
            work = _Work(action, "transfers" if self.one_stream else channel, needs, channel)
        if what == "compute":
            self.computes[rank].append(work)
        elif what == "post":
            self.receives[action] = work
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
                if work.channel and self.kernels and self.resident[rank] >= self.kernels:
                    break
                queue.popleft()
                work.started = moved = True
                if work.channel:
                    self.resident[rank] += 1
                    self.most_resident = max(self.most_resident, self.resident[rank])
                    self._meet(work)
                else:
                    self._end(rank, work)
        return moved

    def _meet(self, work: _Work) -> None:
        """A transfer has started: it ends with its other end, if that has started too."""
        receives = work.action.kind in (RECV_F, RECV_B)
        others = self.ends[work.channel, not receives]
        if not others:
            self.ends[work.channel, receives].append(work)
            return
        other = others.popleft()
        if other_end(other.action) != work.action:
            raise ScheduleError(
                f"{other.action} meets {work.action} in the channel from rank {work.channel[0]} to {work.channel[1]}",
                "post a channel's receives in the order of its sends",
            )
        source, target = work.channel
        self._end(target if receives else source, work)
        self._end(source if receives else target, other)

    def _end(self, rank: int, work: _Work) -> None:
        work.done = True
        self.streams[rank][work.stream].popleft()
        self.resident[rank] -= work.channel is not None

    def _stuck(self) -> ScheduleError:
        said = []
        for rank, (at, calls) in enumerate(zip(self.position, self.calls, strict=True)):
            host = f"host before {' '.join(map(str, calls[at]))}" if at < len(calls) else "host has enqueued all"
            spins = [str(x.action) for x in self.given[rank] if x.started and not x.done]
            said.append(f"rank {rank}: {host}{', running ' + ' '.join(spins) if spins else ''}")
        how = "post receives later (ahead=0), or give the GPU more kernels and queues"
        return ScheduleError(f"deadlock on GPUs: {'; '.join(said)}", how)


def hanging_waits(schedule: Schedule, *, ahead: int = 1) -> list[tuple[int, Call]]:
    """Before which calls a wait for the whole device would never end, each with its rank; there `ahead=0` is safe, if
    it has none."""
    found = []
    for rank, calls in enumerate(host_calls(schedule, ahead=ahead)):
        for at, call in enumerate(calls):
            try:
                GpuMachine(schedule, ahead, device_wait=(rank, at)).run()
            except ScheduleError:
                found.append((rank, call))
    return found
