"""Tensors between the ranks of one host: through memory that both map, announced through a pipe.

A message is copied into a free slot, then its number goes down the channel's pipe; the receiver copies it out and marks
the slot free. A channel starts without slots and makes one whenever none is free: as many as messages were ever under
way at once, so that no schedule can run out of them. A rank that waits sleeps in the pipe, and a rank whose peer has
died reads its end.

Between ranks on GPUs, one or several, a message goes through the host: down from the sender's GPU into the slot, up
from it to the receiver's. Both copies wait for the GPU, so they are part of the times that a shared GPU shows.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..actions import RECV_F, SEND_F, Action
from .comm import Comm, LostPeer, Spec, naming, producer

_HEADER = struct.Struct("<iiiqiq")  # producing stage, forward or not, microbatch, bytes, slot, when it has left (ns)
_PIPE_BYTES = 2**20
_ALIGNMENT = 64  # of a slot's tensors; its first bytes say whether it is taken


class Pipes:
    """A rank's ends of the pipes of a pool, opened as runs need them. Their names vanish once both ends are open."""

    def __init__(self, rank: int, folder: Path, barrier: Callable[[], None]):
        self.rank, self.folder, self.barrier = rank, folder, barrier
        self.ends: dict[tuple[int, int], int] = {}

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Open the pipes of these (source, target) pairs. All ranks must call, with the same pairs."""
        new = [pair for pair in pairs if pair not in self.ends]
        self.ends.update(dict.fromkeys(new, -1))  # also those of others, so that every rank finds the same ones new
        if not new:
            return
        for source, target in new:
            if target == self.rank:
                path = self._path(source, target)
                os.mkfifo(path)
                self.ends[source, target] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.barrier()
        for source, target in new:
            if source == self.rank:
                end = self.ends[source, target] = os.open(self._path(source, target), os.O_WRONLY)
                if hasattr(fcntl, "F_SETPIPE_SZ"):
                    fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.barrier()
        for source, target in new:
            if target == self.rank:
                os.set_blocking(self.ends[source, target], True)
                os.unlink(self._path(source, target))

    def _path(self, source: int, target: int) -> Path:
        return self.folder / f"{source}-{target}"


@dataclass
class _Slot:
    """Memory that two ranks map. Its first byte: 1 while a message is in it."""

    memory: mmap.mmap
    number: int
    tensors: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)  # by producing stage and direction

    def views(self, key: tuple[int, int], spec: Spec) -> list[Tensor]:
        """The slot as a message's tensors."""
        if key not in self.tensors:
            offset, found = _ALIGNMENT, []
            for shape, dtype in spec:
                count = torch.Size(shape).numel()
                at = {"offset": offset, "count": count} if count else {"count": 0}
                found.append(torch.frombuffer(self.memory, dtype=dtype, **at).view(shape))
                offset += _padded(count * dtype.itemsize)
            self.tensors[key] = found
        return self.tensors[key]


class SharedComm(Comm):
    """`Comm` over shared memory. Nothing is posted: a message lies ready when its receiver comes to it."""

    def __init__(self, *arguments, pipes: Pipes):
        super().__init__(*arguments)
        self.pipes = pipes
        self.leaves_ns = 0  # when what is sent next shall count as gone; 0: when it is
        self.left_ns = 0  # when what was received last had gone
        self.outgoing: dict[int, list[_Slot]] = {}  # per target
        self.incoming: dict[tuple[int, int], _Slot] = {}  # per source and number
        self.arrived: dict[tuple[int, ...], tuple[int, int, int]] = {}  # what was announced: bytes, slot, when it left

    def warm_up(self, channels: Sequence[tuple[int, int]]) -> None:
        """Open every channel."""
        with naming("opening the channels"):
            self.pipes.open(channels)

    def post(self, receive: Action) -> None:
        """Nothing to do: the sender brings the memory."""

    def receive(self, receive: Action) -> tuple[Tensor, ...]:
        """Wait for a message; returns its tensors."""
        source, content = self.peer(receive), (producer(receive), int(receive.kind is RECV_F))
        while (*content, receive.microbatch) not in self.arrived:
            self._read(source, receive)
        nbytes, number, self.left_ns = self.arrived.pop((*content, receive.microbatch))
        slot = self.incoming.get((source, number))
        if slot is None:
            slot = self.incoming[source, number] = _Slot(_map(self._path(source, self.rank, number), nbytes), number)
        tensors = tuple(view.to(self.device, copy=True) for view in slot.views(content, self.expected(receive)))
        slot.memory[0] = 0
        return tensors

    def send(self, send: Action, tensors: tuple[Tensor, ...]) -> None:
        """Copy a message into shared memory and announce it; returns when the tensors are free to change."""
        spec = self.check(send, tensors)
        target, content = self.peer(send), (producer(send), int(send.kind is SEND_F))
        nbytes = _ALIGNMENT + sum(_padded(torch.Size(shape).numel() * dtype.itemsize) for shape, dtype in spec)
        slots = self.outgoing.setdefault(target, [])
        slot = next((s for s in slots if not s.memory[0] and len(s.memory) >= nbytes), None)
        if slot is None:
            slot = _Slot(_make(self._path(self.rank, target, len(slots)), nbytes), len(slots))
            slots.append(slot)
        for view, tensor in zip(slot.views(content, spec), tensors, strict=True):
            view.copy_(tensor)
        slot.memory[0] = 1
        left_ns, self.leaves_ns = self.leaves_ns or time.perf_counter_ns(), 0
        header = _HEADER.pack(*content, send.microbatch, len(slot.memory), slot.number, left_ns)
        with naming(f"{send} to rank {target}"):
            os.write(self.pipes.ends[self.rank, target], header)

    def flush(self) -> None:
        """Nothing is under way once it is announced."""

    def _read(self, source: int, receive: Action) -> None:
        """Take what the pipe from `source` announces; sleeps until there is something."""
        with naming(f"{receive} from rank {source}"):
            headers = os.read(self.pipes.ends[source, self.rank], _HEADER.size * 64)
        if not headers:
            raise LostPeer(f"{receive} from rank {source}: it is gone")
        for *message, nbytes, number, left_ns in _HEADER.iter_unpack(headers):
            self.arrived[tuple(message)] = (nbytes, number, left_ns)

    def _path(self, source: int, target: int, number: int) -> Path:
        return self.pipes.folder / f"{self.key}-{source}-{target}-{number}"


def _make(path: Path, nbytes: int) -> mmap.mmap:
    """New memory under a name. ValueError when there is no room, now rather than a crash at a write."""
    end = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(end, 0, nbytes)
        return mmap.mmap(end, nbytes)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            remedy = 'make it larger (docker run --shm-size), or take transport="gloo"'
            raise ValueError(f"no room for {nbytes} bytes of shared memory in {path.parent}: {remedy}") from None
        raise
    finally:
        os.close(end)


def _map(path: Path, nbytes: int) -> mmap.mmap:
    """The memory under a name, whose name is no longer needed."""
    end = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(end, nbytes)
    finally:
        os.close(end)
        os.unlink(path)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
