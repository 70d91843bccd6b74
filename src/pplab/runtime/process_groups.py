"""Send tensors between ranks by gloo or NCCL, over one one-way channel for every ordered pair of
ranks that exchange something.

Receives are posted ahead, and sends are waited for late. A channel carries its messages in the
order of sending, and the receiver posts its receives in the same order (`lower` ensures it). So a
transport that keeps this order, like NCCL, doesn't deadlock as long as three things are true: a GPU
has room for the transfers of four channels at once, it has queues for them, and no host waits for
it (`tests/gpu_machine.py`).

On NCCL every channel has a process group of its own, and with it a stream of its own, so transfers
run next to the compute stream. torch orders them by events. A send or a receive starts after what
the compute stream was given before it, and `wait` lets the compute stream, not the host, wait for
the end. Until then this file keeps a reference to the tensor: in `sending` until the work has
completed on the GPU or `flush` has made the compute stream wait for it, and for a posted receive
until its buffers are taken. The allocator reuses memory in the compute stream's order, so it can't
give such memory away too early either.

A host that allocates may wait for its whole GPU, and hosts that wait while messages are on their
GPUs may hang. So the first two passes of a run use gloo. The memory for each message is still made
on the GPU, where and when it will be made later, and what is sent is kept there until the flush,
since over NCCL it may have to wait for its receive until then.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..actions import Action
from .comm import Comm, Home, content_of, naming
from .context import RankContext
from .workload import Tensors

_MOST_PARTS = 16  # tensors of one message


class GroupComm(Comm):
    """`Comm` by process groups. On NCCL each channel has its own, and on gloo all channels share
    one.
    """

    def __init__(self, context: RankContext, home: Home, key: str):
        super().__init__(context, home, key)
        self.channel, self.wire, self.watch = context.channel, context.wire, context.watch
        # What comes, and where it shall be.
        self.posted: dict[Action, list[tuple[dist.Work, Tensor, Tensor]]] = {}
        # Per peer, in the order to post them.
        self.unposted: dict[int, deque[Action]] = defaultdict(deque)
        self.sending: list[tuple[dist.Work, Tensor]] = []
        self.reserved: list[Tensor] = []  # what NCCL may have to keep until the flush

    def warm_up(self, channels: Sequence[tuple[int, int]]) -> None:
        """Send one number through every channel, in one order for all ranks."""
        for source, target in channels:
            what = f"the channel from rank {source} to rank {target}"
            self.watch(f"opening {what}")  # NCCL may take seconds: each has the pool's patience
            group = self.channel(source, target)  # which all ranks make, in this order
            with naming(what):
                if source == self.rank:
                    dist.send(torch.zeros(1, device=self.wire), target, group=group)
                elif target == self.rank:
                    dist.recv(torch.zeros(1, device=self.wire), source, group=group)

    def post(self, receive: Action) -> None:
        """Get ready to receive. If shapes are new, this happens only in `receive`, when they are
        known.
        """
        waiting = self.unposted[self.peer(receive)]
        waiting.append(receive)
        while waiting:
            made = self.made(waiting[0])
            if made not in self.specs and not self.store.check([self.key + str(made)]):
                return
            self._post(waiting.popleft())

    def receive(self, receive: Action) -> Tensors:
        """Wait for a message that was announced with `post`, and return its tensors."""
        while receive not in self.posted:
            self._post(self.unposted[self.peer(receive)].popleft())
        arrived = self.posted.pop(receive)
        with naming(f"{receive} from rank {self.peer(receive)}"):
            for work, _, _ in arrived:
                work.wait()
        return tuple(room if came is room else room.copy_(came) for _, came, room in arrived)

    def send(self, send: Action, tensors: Tensors) -> None:
        """Start sending. The tensors are kept until they have gone."""
        if len(self.agree(send, tensors)) > _MOST_PARTS:
            raise ValueError(
                f"{send} carries {len(tensors)} tensors, and at most {_MOST_PARTS} can cross a "
                "boundary: join some of them"
            )
        self.sending = [(work, kept) for work, kept in self.sending if not work.is_completed()]
        peer = self.peer(send)
        group = self.channel(self.rank, peer)
        for part, tensor in enumerate(tensors):
            tensor = tensor.contiguous()
            if self.reserves:
                self.reserved.append(tensor)
            tensor = tensor.to(self.wire)
            work = dist.isend(tensor, peer, group=group, tag=_tag(send, part))
            self.sending.append((work, tensor))

    def flush(self) -> None:
        """Wait until everything sent has gone."""
        with naming("finishing what was sent"):
            for work, _ in self.sending:
                work.wait()
        self.sending.clear()
        self.reserved.clear()

    def _post(self, receive: Action) -> None:
        peer, posted = self.peer(receive), []
        group = self.channel(peer, self.rank)
        for part, (shape, dtype) in enumerate(self.expected(receive)):
            room = came = torch.empty(shape, dtype=dtype, device=self.device)
            if self.wire != self.device:
                came = torch.empty_like(room, device=self.wire)
            work = dist.irecv(came, peer, group=group, tag=_tag(receive, part))
            posted.append((work, came, room))
        self.posted[receive] = posted


def _tag(action: Action, part: int) -> int:
    """A number for a tensor of a message, equal at both ends."""
    stage, forward, microbatch = content_of(action)
    return ((stage * 2 + forward) * 65536 + microbatch) * _MOST_PARTS % 2**31 + part
