"""What the process of a rank is given: its place among the others, and the board and the mail that
connect it with the pool.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import mmap
import os
import pickle
import signal
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .failures import Failure

if TYPE_CHECKING:
    from .devices import Pipes

_SIZE = struct.Struct("!Q")  # of a message, before it
_PHASE_BYTES = 128  # of the text that says what a rank is doing
_PIECE_BYTES = 2**18  # of a message, at most at once


class Status(ctypes.Structure):
    """What a rank tells the caller's process, and the other way round: what the rank is doing, how
    many measured steps are done, its part of the `loss` of the last one, and whether to `stop`.
    """

    _fields_ = [
        ("phase", ctypes.c_char * _PHASE_BYTES),
        ("waits", ctypes.c_bool),
        ("changes", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("loss", ctypes.c_double),
        ("stop", ctypes.c_bool),
    ]

    def put(self, phase: str, waits: bool = False) -> None:
        """Write down what the rank is doing, and whether it waits for a different rank."""
        self.phase, self.waits = phase.encode()[: _PHASE_BYTES - 1], waits
        self.changes += 1

    @property
    def doing(self) -> str:
        """What the rank is doing, as it last wrote down."""
        return self.phase.decode(errors="replace")


@dataclass
class RankContext:
    """Where a rank runs: its number, its device, and its connections to the others."""

    rank: int
    num_ranks: int
    device: torch.device
    transport: str  # "shared", "gloo" or "nccl"
    timeout: timedelta  # of what ranks do together
    store: dist.Store | Any = None
    status: Status = field(default_factory=Status)  # which the caller's process sees, too
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)
    runs: int = 0
    pipes: Pipes | Any = None  # of the shared transport

    def group(self, purpose: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The process group of some ranks for one purpose. It is kept for later runs, because it
        has threads, sockets and GPU memory.

        All ranks must call this in the same order, even those that aren't in the group.
        """
        key = purpose, tuple(ranks)
        if key not in self.groups:
            options = {"backend": "gloo", "timeout": self.timeout}
            if self.transport == "nccl":
                from .gpu import nccl

                options = nccl(self.timeout)
            self.groups[key] = dist.new_group(list(ranks), **options)
        return self.groups[key]

    def channel(self, source: int, target: int) -> dist.ProcessGroup | None:
        """The process group of a channel. On NCCL each channel has one of its own, because a group
        keeps the order of its messages.
        """
        return self.group("channel", (source, target)) if self.transport == "nccl" else None

    @property
    def wire(self) -> torch.device:
        """The place from which tensors can cross: the device, or the host's memory."""
        return self.device if self.transport == "nccl" else torch.device("cpu")

    def watch(self, phase: str, waits: bool = False) -> None:
        """Write down what the rank does, and whether it waits for others."""
        self.status.put(phase, waits)


def open_board(path: Path, num_ranks: int) -> Any:
    """Open the file that the ranks and the pool share, which has the status of every rank."""
    layout = Status * num_ranks
    size = ctypes.sizeof(layout)
    with open(path, "a+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # no room is an error now, and no crash later
        return layout.from_buffer(mmap.mmap(file.fileno(), size))


class Mail:
    """One end of the pipe between the pool and a rank. The rank's end waits. The pool's end
    (`at_once`) sends and takes only what goes without waiting, so that a rank that stands still
    can't hold it up.
    """

    def __init__(self, pipe: Connection, at_once: bool = False):
        os.set_blocking(pipe.fileno(), not at_once)
        self.pipe, self.unsent = pipe, []
        self.moved = 0  # bytes in both directions
        self._come = bytearray()  # of the message that is coming, its size first

    def send(self, message: bytes = b"") -> None:
        """Send a message, or begin to. An empty one (the default) announces that no other message
        follows.
        """
        self.unsent += [memoryview(_SIZE.pack(len(message))), memoryview(message)]
        self.push()

    def push(self) -> None:
        """Send as much as possible of what is unsent. It does nothing when the other side is gone,
        which `receive` then notices.
        """
        try:
            while self.unsent:
                sent = os.write(self.pipe.fileno(), self.unsent[0])
                self.moved += sent
                self.unsent[0] = self.unsent[0][sent:]
                if not self.unsent[0]:
                    del self.unsent[0]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()

    def receive(self) -> bytearray | None:
        """A message, or None while a part of it hasn't come. Raises EOFError or OSError when the
        other side is gone.
        """
        with suppress(BlockingIOError):
            while missing := self._missing():
                piece = os.read(self.pipe.fileno(), min(missing, _PIECE_BYTES))
                if not piece:
                    raise EOFError
                self._come += piece
                self.moved += len(piece)
            message, self._come = self._come[_SIZE.size :], bytearray()
            return message
        return None

    def _missing(self) -> int:
        """How many bytes are still to come of the message's size, or of the message itself once its
        size is known.
        """
        whole = _SIZE.size
        if len(self._come) >= whole:
            whole += _SIZE.unpack_from(self._come)[0]
        return whole - len(self._come)


def rank_main(
    rank: int,
    join: Callable[[Status], RankContext],
    jobs: Connection,
    board: Callable[[], Sequence[Status]],
    log: Connection,
) -> None:
    """Serve jobs until told to stop or until the pool's process is gone. `log` receives what
    libraries write.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool's to handle: it ends its ranks
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)  # what they write would mix into the notebook's cell
    faulthandler.register(signal.SIGUSR2)  # the pool asks so where the rank stands
    status, mail = board()[rank], Mail(jobs)
    status.put("starting")
    try:
        context = join(status)
    except Exception as error:
        mail.send(pack(Failure.of(error, rank, status.doing)))
        return
    mail.send(pack("ready"))
    while True:
        status.put("idle")
        payload = None
        with suppress(EOFError, OSError):
            payload = mail.receive()
        if not payload:
            return
        try:
            status.put("at work")
            function, arguments = unpack(payload)
            answer = function(context, *arguments)
        except Exception as error:
            answer = Failure.of(error, rank, status.doing)
        status.put("answering")
        mail.send(pack(answer))
        if context.device.type == "cuda":
            from .gpu import release

            del answer
            release()


def pack(value: object) -> bytes:
    """Pickle a value without sharing anything that would have to be cleaned up. Raises ValueError
    for a value that can't be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ValueError(
            f"this can't be sent to another process: {error}: instead of a lambda or a function "
            "defined inside a function, give a module's function or a functools.partial of one"
        ) from error
    return buffer.getvalue()


def unpack(payload: bytes | bytearray) -> Any:
    """The value that `pack` packed. Raises TypeError for something that only the pool's process can
    import.
    """
    try:
        return torch.load(io.BytesIO(payload), "cpu", weights_only=False)
    except (AttributeError, ModuleNotFoundError, pickle.UnpicklingError) as error:
        raise TypeError(
            f"a rank can't import what it was sent ({error}): functions and classes that go to "
            "ranks must live in a module; what a notebook cell defines can't be sent"
        ) from error
