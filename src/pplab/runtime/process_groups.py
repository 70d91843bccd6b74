"""Tensors between ranks by gloo or NCCL: one one-way channel for every ordered pair of ranks that
exchange something.

Receives are posted ahead, sends are waited for late. A channel carries its messages in the order of
sending, in which the receiver posts its receives (`lower` sees to it): so a transport that keeps
order, like NCCL, doesn't deadlock while a GPU has room for the transfers of four channels at once,
queues for them, and no host waits for it (`lab.GpuMachine`).

On NCCL every channel has a process group, and with it a stream, of its own: transfers run beside
the compute stream. torch orders them by events: a send or a receive starts after what the compute
stream was given before it, and `wait` lets the compute stream, not the host, wait for the end. A
tensor stays referenced here until then (`sending` until the work has completed on the GPU, or
`flush` has made the compute stream wait for it; a posted receive's buffers until they are taken),
so the allocator, which reuses memory in the compute stream's order, can't give it away too early.

A host that allocates may wait for its whole GPU, and hosts that wait while messages are on their
GPUs may hang. So a run's first two passes are on gloo, with room for each message made on the GPU,
where and when it will be made later.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..actions import RECV_F, SEND_F, Action
from .comm import Comm, naming, producer
from .rank import RankContext

_MOST_PARTS = 16  # tensors of one message


class GroupComm(Comm):
    """`Comm` by process groups: each channel has its own on NCCL, and all share one on gloo."""

    def __init__(self, context: RankContext, home: Mapping[tuple[int, int], int], key: str):
        super().__init__(context, home, key)
        self.channel, self.wire, self.watch = context.channel, context.wire, context.watch
        self.posted: dict[
            Action, list[tuple[dist.Work, Tensor, Tensor]]
        ] = {}  # what comes, and where it shall be
        self.unposted: dict[int, deque[Action]] = defaultdict(
            deque
        )  # per peer, in the order to post them
        self.sending: list[tuple[dist.Work, Tensor]] = []

    def warm_up(self, channels: Sequence[tuple[int, int]]) -> None:
        """Send one number through every channel, in one order for all ranks."""
        for source, target in channels:
            what = f"the channel from rank {source} to rank {target}"
            self.watch(
                f"opening {what}"
            )  # which may take NCCL seconds: each has the pool's patience
            group = self.channel(source, target)  # which all ranks make, in this order
            with naming(what):
                if source == self.rank:
                    dist.send(torch.zeros(1, device=self.wire), target, group=group)
                elif target == self.rank:
                    dist.recv(torch.zeros(1, device=self.wire), source, group=group)

    def post(self, receive: Action) -> None:
        """Get ready to receive. With shapes that are new, this may happen only in `receive`, when
        they are known.
        """
        waiting = self.unposted[self.peer(receive)]
        waiting.append(receive)
        while waiting and (
            (made := self.made(waiting[0])) in self.specs
            or self.store.check([self.key + str(made)])
        ):
            self._post(waiting.popleft())

    def receive(self, receive: Action) -> tuple[Tensor, ...]:
        """Wait for a message that was announced with `post`; returns its tensors."""
        while receive not in self.posted:
            self._post(self.unposted[self.peer(receive)].popleft())
        arrived = self.posted.pop(receive)
        with naming(f"{receive} from rank {self.peer(receive)}"):
            for work, _, _ in arrived:
                work.wait()
        return tuple(room if came is room else room.copy_(came) for _, came, room in arrived)

    def send(self, send: Action, tensors: tuple[Tensor, ...]) -> None:
        """Start sending; the tensors are kept until they have gone."""
        if len(self.check(send, tensors)) > _MOST_PARTS:
            raise ValueError(
                f"{send} carries {len(tensors)} tensors: at most {_MOST_PARTS} can cross a boundary"
            )
        self.sending = [(work, kept) for work, kept in self.sending if not work.is_completed()]
        peer = self.peer(send)
        for part, tensor in enumerate(tensors):
            tensor = tensor.to(self.wire).contiguous()
            work = dist.isend(
                tensor, peer, group=self.channel(self.rank, peer), tag=_tag(send, part)
            )
            self.sending.append((work, tensor))

    def flush(self) -> None:
        """Wait until everything sent has gone."""
        with naming("finishing what was sent"):
            for work, _ in self.sending:
                work.wait()
        self.sending.clear()

    def _post(self, receive: Action) -> None:
        room = [
            torch.empty(shape, dtype=dtype, device=self.device)
            for shape, dtype in self.expected(receive)
        ]
        came = (
            room
            if self.wire == self.device
            else [torch.empty_like(x, device=self.wire) for x in room]
        )
        group = self.channel(peer := self.peer(receive), self.rank)
        works = [
            dist.irecv(x, peer, group=group, tag=_tag(receive, part)) for part, x in enumerate(came)
        ]
        self.posted[receive] = list(zip(works, came, room, strict=True))


def _tag(action: Action, part: int) -> int:
    """One number for both ends of a message's tensor."""
    direction = 0 if action.kind in (SEND_F, RECV_F) else 1
    return (
        (producer(action) * 2 + direction) * 65536 + action.microbatch
    ) * _MOST_PARTS % 2**31 + part
