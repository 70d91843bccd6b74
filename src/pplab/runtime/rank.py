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
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from .comm import LostPeer
from .devices import load_eagerly
from .job import RankContext
from .shared import Pipes

PHASES = (
    "idle",
    "starting",
    "setting up",
    "step",
    "at the barrier",
    "in the optimizer",
    "adding the copies' gradients",
    "reporting",
    "running the model in one process",
    "clipping gradients",
    "decoding",
    "in a step of torch's runtime",
)
FIELDS = 4  # of a rank on the board: phase, position in the row, whether it waits, a count of changes


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
    place: tuple[str, int, bool]  # phase, position in the row, waiting


def rank_main(settings: Settings, jobs: Connection, lifeline: Connection, board, log: Connection) -> None:
    """Serve jobs until told to stop or until the pool's process is gone. `log` takes what the rank prints."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the pool's to handle: it ends its ranks
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)  # what ranks print would mix into the notebook's cell
    threading.Thread(target=_die_with, args=(lifeline, settings.folder), daemon=True).start()
    base = settings.rank * FIELDS

    def watch(phase: str, position: int, waits: bool) -> None:
        board[base : base + FIELDS] = [PHASES.index(phase), position, waits, board[base + 3] + 1]

    def failure(error: Exception) -> Failure:
        phase, position, waits = board[base : base + 3]
        text = "".join(traceback.format_exception(error))
        place = PHASES[phase], position, bool(waits)
        return Failure(settings.rank, type(error).__name__, str(error), text, isinstance(error, LostPeer), place)

    watch("starting", 0, False)
    try:
        context = _join(settings, watch)
    except Exception as error:
        jobs.send_bytes(pack(failure(error)))
        return
    jobs.send_bytes(pack("ready"))
    while True:
        watch("idle", 0, False)
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


def _join(settings: Settings, watch: Callable[[str, int, bool], None]) -> RankContext:
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
