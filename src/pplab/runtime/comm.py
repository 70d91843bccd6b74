"""Send tensors between ranks: the base of every transport, and the transport through shared memory
for ranks of one host.

Ranks agree on shapes and dtypes through the pool's store, once per stage and kind of microbatch. A
microbatch's own shapes, which all ranks know, are its kind. Every send is checked against what was
agreed, since gloo accepts a message that is too short without an error.

Both ranks map the shared memory, and a pipe announces what lies in it. The sender copies a message
into a free slot and writes the slot's number to the channel's pipe. The receiver copies the message
out and marks the slot as free. A channel starts without slots and makes one whenever none is free.
So it has as many slots as messages were ever under way at once, and no schedule can run out of
them. A rank that waits sleeps in the pipe, and a rank whose peer has died reads the end of the
pipe.

Between ranks on GPUs, one or several, a message goes through the host. It is copied from the
sender's GPU into the slot, which is pinned where the system allows it, and from there to the
receiver's GPU. Both copies wait for the GPU, so they are part of what a shared GPU's measurement
shows.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..actions import RECV_B, RECV_F, SEND_F, Action
from ..deps import other_end
from .workload import Batch, Tensors

if TYPE_CHECKING:
    from .context import RankContext

Home = Mapping[tuple[int, int], int]  # (stage, microbatch) -> rank
Spec = list[tuple[tuple[int, ...], torch.dtype]]

# Producing stage, forward or not, microbatch, bytes, slot, when it has left (ns).
_HEADER = struct.Struct("<iiiqiq")
_ALIGNMENT = 64  # of a slot's tensors; its first bytes say whether it is taken


class LostPeer(RuntimeError):
    """Communication with a different rank failed. The cause is on that rank, not on this one."""


class Comm:
    """This rank's ends of the channels of one run, and what all transports have in common.

    `home[stage, microbatch]` is a rank. `key` names the run in the store.
    """

    warm_up: Callable[[Sequence[tuple[int, int]]], None]  # open these channels
    receive: Callable[[Action], Tensors]  # wait for a message
    send: Callable[[Action, Tensors], None]  # returns when the tensors are free to change

    def __init__(self, context: RankContext, home: Home, key: str):
        self.rank, self.device, self.store = context.rank, context.device, context.store
        self.home, self.key = home, key
        self.kinds: Sequence[str] = ()  # of the step's microbatches
        self.notes: list[str] = []  # for the run
        self.reserves = False  # room on the GPU, for all that a pass over NCCL may need
        # What a stage gives the next one, by the microbatch's kind.
        self.specs: dict[tuple[int, str], Spec] = {}

    def expect(self, microbatches: Sequence[Batch]) -> None:
        """Set the microbatches of the row's next pass. If the shapes of two are equal, so are those
        of their messages.
        """
        self.kinds = [str([tuple(x.shape) for x in each.tensors]) for each in microbatches]

    def agree(self, send: Action, tensors: Tensors) -> Spec:
        """Agree with the receiver on the shapes and dtypes of a message. Raises ValueError if they
        differ from those agreed before.
        """
        spec, made = [(tuple(x.shape), x.dtype) for x in tensors], self.made(send)
        if send.kind is SEND_F and made not in self.specs:
            self.specs[made] = spec
            listed = [(shape, _name(dtype)) for shape, dtype in spec]
            self.store.set(self.key + str(made), json.dumps(listed))
        if spec != (agreed := self.expected(send)):
            raise ValueError(
                f"{send} carries {_show(spec)}, but its stages agreed on {_show(agreed)}"
            )
        return spec

    def expected(self, action: Action) -> Spec:
        """The tensors of a message: all that the stage returned, or the gradients of its
        real-valued ones.
        """
        if (made := self.made(action)) not in self.specs:
            listed = json.loads(self.store.get(self.key + str(made)))
            self.specs[made] = [(tuple(shape), getattr(torch, dtype)) for shape, dtype in listed]
        forward = action.kind in (SEND_F, RECV_F)
        return [each for each in self.specs[made] if forward or each[1].is_floating_point]

    def made(self, action: Action) -> tuple[int, str]:
        """What determines a message's shapes: the stage that made the output (or waits for its
        gradient), and the shapes of the microbatch.
        """
        return producer(action), self.kinds[action.microbatch]

    def post(self, receive: Action) -> None:
        """Get ready for a message. Only transports whose receiver has to provide the memory do
        something here.
        """

    def flush(self) -> None:
        """Wait for what is still under way. Only transports whose messages can still travel after
        they are announced do something here.
        """

    def peer(self, action: Action) -> int:
        """The rank at the other end of a communication."""
        return self.home[other_end(action).stage, action.microbatch]


@dataclass
class _Slot:
    """Memory that two ranks map. Its first byte is 1 while a message is in it."""

    memory: mmap.mmap
    number: int
    content: Tensor  # the memory, as bytes

    def views(self, spec: Spec) -> Iterator[Tensor]:
        """The memory of the slot as the tensors of a message."""
        offset = _ALIGNMENT
        for shape, dtype in spec:
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            yield self.content[offset : offset + nbytes].view(dtype).view(shape)
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class SharedComm(Comm):
    """`Comm` over shared memory. It posts nothing, because a message lies ready when its receiver
    asks for it.

    When a send begins, a listener may set `leaves_ns`, the time at which the message shall count as
    gone, by the host's clock (0: when it really has). `left_ns` is this time for the last message
    received.
    """

    def __init__(self, context: RankContext, home: Home, key: str):
        super().__init__(context, home, key)
        self.pipes = context.pipes
        self.leaves_ns = self.left_ns = 0
        self.outgoing: dict[int, list[_Slot]] = defaultdict(list)  # per target
        self.incoming: dict[tuple[int, int], _Slot] = {}  # per source and number
        # What was announced: bytes, slot, when it left.
        self.arrived: dict[tuple[int, ...], tuple[int, int, int]] = {}

    def warm_up(self, channels: Sequence[tuple[int, int]]) -> None:
        """Open every channel."""
        with naming("opening the channels"):
            self.pipes.open(channels)

    def receive(self, receive: Action) -> Tensors:
        """Wait for a message, and return its tensors."""
        source, content = self.peer(receive), content_of(receive)
        while content not in self.arrived:
            with naming(f"{receive} from rank {source}"):  # sleeps until something is announced
                headers = os.read(self.pipes.ends[source, self.rank], _HEADER.size * 64)
            if not headers:
                raise LostPeer(f"{receive} from rank {source}: it is gone")
            for *message, nbytes, number, left_ns in _HEADER.iter_unpack(headers):
                self.arrived[tuple(message)] = (nbytes, number, left_ns)
        nbytes, number, self.left_ns = self.arrived.pop(content)
        if (slot := self.incoming.get((source, number))) is None:
            slot = self.incoming[source, number] = self._slot(source, self.rank, number, nbytes)
        views = slot.views(self.expected(receive))
        tensors = tuple(view.to(self.device, copy=True) for view in views)
        slot.memory[0] = 0
        return tensors

    def send(self, send: Action, tensors: Tensors) -> None:
        """Copy a message into shared memory and announce it. When this returns, you may change the
        tensors.
        """
        spec = self.agree(send, tensors)
        target = self.peer(send)
        nbytes = _ALIGNMENT + sum(x.nbytes + _ALIGNMENT for x in tensors)
        slots = self.outgoing[target]
        free = [slot for slot in slots if not slot.memory[0]]
        slot = next((slot for slot in free if len(slot.memory) >= nbytes), None)
        if slot is None:
            nbytes = max([nbytes, *(2 * len(slot.memory) for slot in free)])  # they may grow on
            slot = self._slot(self.rank, target, len(slots), nbytes)
            slots.append(slot)
        for view, tensor in zip(slot.views(spec), tensors, strict=True):
            view.copy_(tensor)
        slot.memory[0] = 1
        left_ns, self.leaves_ns = self.leaves_ns or time.perf_counter_ns(), 0
        header = _HEADER.pack(*content_of(send), len(slot.memory), slot.number, left_ns)
        with naming(f"{send} to rank {target}"):
            os.write(self.pipes.ends[self.rank, target], header)

    def _slot(self, source: int, target: int, number: int, nbytes: int) -> _Slot:
        """A slot in memory that the source makes. It has no name any more once the target has
        mapped it, too.
        """
        path = self.pipes.folder / f"{self.key}-{source}-{target}-{number}"
        new = source == self.rank
        with open(path, "x+b" if new else "r+b") as file:
            if new:  # no room is an error now, and no crash later
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:
                os.unlink(path)
            memory = mmap.mmap(file.fileno(), nbytes)
        slot = _Slot(memory, number, torch.frombuffer(memory, dtype=torch.uint8))
        if self.device.type == "cuda":
            from .gpu import pin

            if refused := pin(slot, slot.content):
                self.notes = [
                    "messages cross in memory that this system doesn't pin, so each takes "
                    f"longer: {refused}"
                ]
        return slot


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn an error of the transport into LostPeer, which names what it happened during."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise LostPeer(f"{what}: {error}") from error


def producer(action: Action) -> int:
    """The stage whose output (or the gradient of whose output) a communication carries."""
    return action.stage if action.kind in (SEND_F, RECV_B) else action.stage - 1


def content_of(action: Action) -> tuple[int, ...]:
    """What distinguishes a message from others, equal at both ends: its producer, whether it is an
    output, and its microbatch.
    """
    return producer(action), int(action.kind in (SEND_F, RECV_F)), action.microbatch


def _show(spec: Spec) -> str:
    return " and ".join(f"{_name(dtype)} {list(shape)}" for shape, dtype in spec) or "no tensor"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
