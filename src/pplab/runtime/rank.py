"""The process of one rank: it joins the others, then runs what the pool sends until the pool says stop."""

from __future__ import annotations

import gc
import io
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path

import torch
import torch.distributed as dist

from .comm import LostPeer
from .devices import load_eagerly
from .shared import Pipes
from .training import RankContext

Place = tuple[str, int, bool]  # phase, position in the row, waiting

PHASE_BYTES = 64  # of the text that says what a rank is doing


class Board:
    """Where every rank is, in memory that the ranks and the pool share: a phase, and in a step the place in its row."""

    def __init__(self, context: BaseContext, num_ranks: int):
        self._phases = context.RawArray("c", num_ranks * PHASE_BYTES)
        self._numbers = context.RawArray("q", num_ranks * 3)  # the place, whether it waits, a count of changes
        self._said = ""  # by this process's rank: a step says the same phase at every item

    def put(self, rank: int, phase: str, position: int = 0, waits: bool = False) -> None:
        """A rank says where it is."""
        if phase != self._said:
            text = phase.encode()[: PHASE_BYTES - 1].ljust(PHASE_BYTES, b"\0")
            self._phases[rank * PHASE_BYTES : (rank + 1) * PHASE_BYTES] = text
            self._said = phase
        self._numbers[rank * 3 : rank * 3 + 3] = [position, waits, self._numbers[rank * 3 + 2] + 1]

    def place(self, rank: int) -> Place:
        """Where a rank is: phase, position in its row, whether it waits."""
        text = self._phases[rank * PHASE_BYTES : (rank + 1) * PHASE_BYTES]
        position, waits, _ = self._numbers[rank * 3 : rank * 3 + 3]
        return text.split(b"\0", 1)[0].decode(), position, bool(waits)

    def counts(self) -> list[int]:
        """How often each rank has said where it is."""
        return self._numbers[2::3]


@dataclass(frozen=True)
class Settings:
    """What a rank must know to start."""

    rank: int
    num_ranks: int
    device: str
    transport: str
    threads: int
    port: int  # of the store that the pool hosts
    folder: str  # for what the ranks share
    timeout_s: float
    environment: Mapping[str, str] = field(default_factory=dict)  # set before CUDA starts


@dataclass(frozen=True)
class Failure:
    """An exception in a rank, as text."""

    rank: int
    kind: str
    message: str
    traceback: str
    secondary: bool  # the rank failed because another one did
    place: Place


def rank_main(settings: Settings, jobs: Connection, lifeline: Connection, board: Board, log: Connection) -> None:
    """Serve jobs until told to stop or until the pool's process is gone. `log` takes what the rank prints."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the pool's to handle: it ends its ranks
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)  # what ranks print would mix into the notebook's cell
    threading.Thread(target=_die_with, args=(lifeline, settings.folder), daemon=True).start()
    watch = partial(board.put, settings.rank)

    def failure(error: Exception) -> Failure:
        text, place = "".join(traceback.format_exception(error)), board.place(settings.rank)
        return Failure(settings.rank, type(error).__name__, str(error), text, isinstance(error, LostPeer), place)

    watch("starting")
    try:
        context = _join(settings, watch)
    except Exception as error:
        jobs.send_bytes(pack(failure(error)))
        return
    jobs.send_bytes(pack("ready"))
    while True:
        watch("idle")
        try:
            payload = jobs.recv_bytes()
        except EOFError:
            return
        if not payload:
            return
        try:
            function, arguments = unpack(payload)
            answer = function(context, *arguments)
        except Exception as error:
            answer = failure(error)
        jobs.send_bytes(pack(answer))
        if context.device.type == "cuda":  # ranks may share a GPU, and none can use what another one caches
            del answer
            gc.collect()
            torch.cuda.empty_cache()


def pack(value: object) -> bytes:
    """Pickle by value: tensors travel in the message, so nothing is shared that would have to be cleaned up."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(payload: bytes) -> object:
    """The value that `pack` packed. Raises TypeError for something that only the pool's process can import."""
    try:
        return torch.load(io.BytesIO(payload), weights_only=False)
    except (AttributeError, ModuleNotFoundError, pickle.UnpicklingError) as error:
        raise TypeError(
            f"a rank can't import what it was sent ({error}): functions and classes that go to ranks must live in a "
            "module; what a notebook cell defines can't be sent"
        ) from error


def _join(settings: Settings, watch: Callable[..., None]) -> RankContext:
    os.environ.update(settings.environment)
    load_eagerly(settings.transport)
    torch.set_num_threads(settings.threads)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a pool's ranks are all on this host
    device = torch.device(settings.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.empty(1, device=device)  # a GPU that can't be used fails now, not in the first run
    timeout = timedelta(seconds=settings.timeout_s)
    store = dist.TCPStore("127.0.0.1", settings.port, is_master=False, timeout=timeout)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("pplab", store),
        rank=settings.rank,
        world_size=settings.num_ranks,
        timeout=timeout,
    )
    pipes = Pipes(settings.rank, Path(settings.folder), dist.barrier) if settings.transport == "shared" else None
    ends = (settings.rank, settings.num_ranks, device, settings.transport, store, watch)
    return RankContext(*ends, pipes=pipes, timeout=timeout)


def _die_with(lifeline: Connection, folder: str) -> None:
    """End this process, and what the ranks share, when the pool's process ends: its end of the pipe closes."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
