"""The process of one rank: it joins the others, then runs what the pool sends until the pool says stop."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext

import torch

from .devices import RankContext
from .failures import Failure

_PHASE_BYTES = 128  # of the text that says what a rank is doing


class Board:
    """Where every rank is, in memory that the ranks and the pool share."""

    def __init__(self, context: BaseContext, num_ranks: int):
        self._places = context.RawArray(_Place, num_ranks)

    def put(self, rank: int, phase: str, waits: bool = False) -> None:
        """A rank says what it is doing."""
        place = self._places[rank]
        place.phase, place.waits = phase.encode()[: _PHASE_BYTES - 1], waits
        place.changes += 1

    def place(self, rank: int) -> tuple[str, bool]:
        """What a rank is doing, and whether it waits for another one."""
        place = self._places[rank]
        return place.phase.decode(errors="replace"), place.waits

    def counts(self) -> list[int]:
        """How often each rank has said what it is doing."""
        return [place.changes for place in self._places]


class _Place(ctypes.Structure):
    _fields_ = (("phase", ctypes.c_char * _PHASE_BYTES), ("waits", ctypes.c_bool), ("changes", ctypes.c_int64))


def rank_main(
    rank: int,
    join: Callable[[Callable[..., None]], RankContext],
    folder: str,
    jobs: Connection,
    lifeline: Connection,
    board: Board,
    log: Connection,
) -> None:
    """Serve jobs until told to stop or until the pool's process is gone. `log` takes what the rank prints."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the pool's to handle: it ends its ranks
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)  # what ranks print would mix into the notebook's cell
    threading.Thread(target=_die_with, args=(lifeline, folder), daemon=True).start()
    watch = partial(board.put, rank)
    watch("starting")
    try:
        context = join(watch)
    except Exception as error:
        jobs.send_bytes(pack(Failure.of(error, rank, board)))
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
            answer = Failure.of(error, rank, board)
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


def _die_with(lifeline: Connection, folder: str) -> None:
    """End this process, and what the ranks share, when the pool's process ends: its end of the pipe closes."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
