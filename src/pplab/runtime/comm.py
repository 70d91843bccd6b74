"""Tensors between ranks: one one-way channel for every ordered pair of ranks that exchange something.

Receives are posted ahead, sends are waited for late. A channel carries its messages in the order of sending, and the
receiver posts its receives in that same order (`lower` sees to it): so a transport that keeps order, like NCCL, can't
deadlock either. Shapes and dtypes are agreed once per stage through the pool's store, and checked at every send:
gloo would accept a message that is too short without a word.

On NCCL every channel has a process group, and with it a stream, of its own: transfers run beside the compute stream.
torch orders them by events: a send or a receive starts after what the compute stream was given before it, and `wait`
lets the compute stream, not the host, wait for the end. A tensor stays referenced here until then (`sending` until the
work has completed on the GPU, or `flush` has made the compute stream wait for it; a posted receive's buffers until they
are taken), so the allocator, which reuses memory in the compute stream's order, can't give it away too early.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..actions import RECV_B, RECV_F, SEND_F, Action
from ..deps import other_end

Spec = list[tuple[tuple[int, ...], torch.dtype]]

_MOST_PARTS = 16  # tensors of one message


class LostPeer(RuntimeError):
    """Communication with another rank failed: that rank, not this one, has the cause."""


@dataclass
class _Receive:
    buffers: list[Tensor]
    works: list[dist.Work]


class Comm:
    """This rank's ends of the channels of one run.

    `home[stage, microbatch]` is a rank; `key` names the run in the store; `groups[source, target]` is the process group
    of a channel where a channel needs its own (NCCL). `staged`: tensors cross through the host's memory, because the
    transport can't reach the ranks' device.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        home: Mapping[tuple[int, int], int],
        store: dist.Store,
        key: str,
        groups: Mapping[tuple[int, int], dist.ProcessGroup],
        staged: bool,
    ):
        self.rank, self.home, self.store, self.key, self.groups = rank, home, store, key, groups
        self.device = device
        self.wire = torch.device("cpu") if staged else device
        self.posted: dict[Action, _Receive] = {}
        self.unposted: dict[int, deque[Action]] = defaultdict(deque)  # per peer, in the order to post them
        self.sending: list[tuple[dist.Work, Tensor]] = []
        self.specs: dict[int, Spec] = {}  # what a stage gives the next one

    def warm_up(self, channels: Sequence[tuple[int, int]]) -> None:
        """Send one number through every channel, in one order for all ranks."""
        for source, target in channels:
            group = self.groups.get((source, target))
            with naming(f"the channel from rank {source} to rank {target}"):
                if source == self.rank:
                    dist.send(torch.zeros(1, device=self.wire), target, group=group)
                elif target == self.rank:
                    dist.recv(torch.zeros(1, device=self.wire), source, group=group)

    def post(self, receive: Action) -> None:
        """Get ready to receive. In the first step this may happen only in `receive`, when the shapes are known."""
        waiting = self.unposted[self.peer(receive)]
        waiting.append(receive)
        while waiting and self._is_agreed(producer(waiting[0])):
            self._post(waiting.popleft())

    def receive(self, receive: Action) -> tuple[Tensor, ...]:
        """Wait for a message that was announced with `post`; returns its tensors."""
        while receive not in self.posted:
            self._post(self.unposted[self.peer(receive)].popleft())
        arrived = self.posted.pop(receive)
        with naming(f"{receive} from rank {self.peer(receive)}"):
            for work in arrived.works:
                work.wait()
        return tuple(x.to(self.device) for x in arrived.buffers)

    def send(self, send: Action, tensors: tuple[Tensor, ...]) -> None:
        """Start sending; the tensors are kept until they have gone."""
        self.check(send, tensors)
        self.sending = [(work, kept) for work, kept in self.sending if not work.is_completed()]
        peer = self.peer(send)
        for part, tensor in enumerate(tensors):
            tensor = tensor.to(self.wire).contiguous()
            work = dist.isend(tensor, peer, group=self.groups.get((self.rank, peer)), tag=_tag(send, part))
            self.sending.append((work, tensor))

    def check(self, send: Action, tensors: tuple[Tensor, ...]) -> Spec:
        """Shapes and dtypes of a message, agreed with the receiver; ValueError when they aren't what was agreed."""
        spec = [(tuple(x.shape), x.dtype) for x in tensors]
        stage = producer(send)
        if send.kind is SEND_F and stage not in self.specs:
            self._agree(stage, spec)
        expected = self.expected(send)
        if spec != expected:
            raise ValueError(f"{send} carries {_show(spec)}, but its stages agreed on {_show(expected)}")
        return spec

    def flush(self) -> None:
        """Wait until everything sent has gone."""
        with naming("finishing what was sent"):
            for work, _ in self.sending:
                work.wait()
        self.sending.clear()

    def _post(self, receive: Action) -> None:
        buffers = [torch.empty(shape, dtype=dtype, device=self.wire) for shape, dtype in self.expected(receive)]
        peer = self.peer(receive)
        group = self.groups.get((peer, self.rank))
        works = [dist.irecv(x, peer, group=group, tag=_tag(receive, part)) for part, x in enumerate(buffers)]
        self.posted[receive] = _Receive(buffers, works)

    def expected(self, action: Action) -> Spec:
        """The tensors of a message: all that the producing stage returns, or the gradients of its real-valued ones."""
        spec = self._agreed(producer(action))
        if action.kind in (SEND_F, RECV_F):
            return spec
        return [(shape, dtype) for shape, dtype in spec if dtype.is_floating_point]

    def _agree(self, stage: int, spec: Spec) -> None:
        if len(spec) > _MOST_PARTS:
            raise ValueError(f"stage {stage} returns {len(spec)} tensors: at most {_MOST_PARTS} can cross a boundary")
        self.specs[stage] = spec
        listed = [(shape, str(dtype).removeprefix("torch.")) for shape, dtype in spec]
        self.store.set(f"{self.key}/{stage}", json.dumps(listed))

    def _is_agreed(self, stage: int) -> bool:
        return stage in self.specs or self.store.check([f"{self.key}/{stage}"])

    def _agreed(self, stage: int) -> Spec:
        if stage not in self.specs:
            listed = json.loads(self.store.get(f"{self.key}/{stage}"))
            self.specs[stage] = [(tuple(shape), getattr(torch, dtype)) for shape, dtype in listed]
        return self.specs[stage]

    def peer(self, action: Action) -> int:
        """The rank at the other end of a communication."""
        return self.home[other_end(action).stage, action.microbatch]


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn a transport's error into LostPeer that says during what."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise LostPeer(f"{what}: {error}") from error


def size_of(spec: Spec) -> int:
    """The bytes of a message."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in spec)


def producer(action: Action) -> int:
    """The stage whose output, or the gradient of whose output, a communication carries."""
    return action.stage if action.kind in (SEND_F, RECV_B) else action.stage - 1


def _tag(action: Action, part: int) -> int:
    """One number for both ends of a message's tensor."""
    direction = 0 if action.kind in (SEND_F, RECV_F) else 1
    return ((producer(action) * 2 + direction) * 65536 + action.microbatch) * _MOST_PARTS % 2**31 + part


def _show(spec: Spec) -> str:
    return " and ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in spec) or "no tensor"
