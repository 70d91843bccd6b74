"""Where ranks run: on which devices, how tensors cross, how a rank joins the others, and what that can't show."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import unknown
from ..schedule import plural

_PIPE_BYTES = 2**20
_PHASE_BYTES = 128  # of the text that says what a rank is doing


def choose_transport(num_ranks: int, device: str, transport: str, one_host: bool = True) -> tuple[list[str], str]:
    """Every rank's device, and how tensors cross: memory that ranks of one host share, gloo, or NCCL."""
    if device not in ("auto", "cpu", "cuda"):
        raise unknown("device", device, ("auto", "cpu", "cuda"))
    if transport not in ("auto", "shared", "gloo", "nccl"):
        raise unknown("transport", transport, ("auto", "shared", "gloo", "nccl"))
    by_host = "shared" if one_host and sys.platform == "linux" else "gloo"
    if transport == "shared" and by_host != "shared":
        raise ValueError('transport="shared" needs Linux, and all ranks on one host: use "auto" or "gloo"')
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        raise ValueError('device="cuda" was asked for and this machine has no CUDA device: use "cpu" or "auto"')
    if transport == "nccl" and gpus < num_ranks:
        raise ValueError(
            f'transport="nccl" needs a GPU for each of {num_ranks} ranks and found {gpus}: '
            'use "auto", by which ranks share what there is'
        )
    if transport == "auto":
        transport = "nccl" if gpus >= num_ranks and dist.is_nccl_available() else by_host
    return [f"cuda:{rank % gpus}" if gpus else "cpu" for rank in range(num_ranks)], transport


def load_eagerly(transport: str) -> None:
    """Before CUDA starts: with NCCL, load all kernels at once.

    A kernel that is loaded at its first launch may have to wait for the ones that run, and a receive that was posted
    early runs until its message comes.
    """
    if transport == "nccl":
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def notes(devices: Sequence[str], cores: int) -> list[str]:
    """What this machine can't show, in so many words."""
    num_ranks, gpus = len(devices), len(set(devices))
    shared = f"{cores} cores, so they wait for a core as well as for each other"
    if devices[0] != "cpu":
        cores, shared = gpus, f"{plural(gpus, 'GPU')}, where processes take turns"
    valid = "losses, gradients and memory are valid, the times and the bubble are not the schedule's"
    return [f"{num_ranks} ranks share {shared}: {valid}"] if num_ranks > cores else []


class Pipes:
    """A rank's ends of the pipes of a pool, opened as runs need them. Their names vanish once both ends are open."""

    def __init__(self, rank: int, folder: Path, barrier: Callable[[], None]):
        self.rank, self.folder, self.barrier = rank, folder, barrier
        self.ends: dict[tuple[int, int], int] = {}

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Open the pipes of these (source, target) pairs. All ranks must call, with the same pairs."""
        new = [pair for pair in pairs if pair not in self.ends]
        self.ends.update(dict.fromkeys(new, -1))  # also those of others, so that every rank finds the same ones new
        for source, target in new:
            if target == self.rank:
                os.mkfifo(path := self._path(source, target))
                self.ends[source, target] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # before there is a writer
                os.set_blocking(self.ends[source, target], True)
        self.barrier()
        for source, target in new:
            if source == self.rank:
                end = self.ends[source, target] = os.open(self._path(source, target), os.O_WRONLY)
                fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.barrier()
        for source, target in new:
            if target == self.rank:
                os.unlink(self._path(source, target))

    def _path(self, source: int, target: int) -> Path:
        return self.folder / f"{source}-{target}"


class Place(ctypes.Structure):
    """What a rank is doing, and what it and the caller's process tell each other about its measured steps."""

    _fields_ = (
        *(("phase", ctypes.c_char * _PHASE_BYTES), ("waits", ctypes.c_bool), ("changes", ctypes.c_int64)),
        *(("steps", ctypes.c_int64), ("loss", ctypes.c_double), ("seconds", ctypes.c_double)),
        *(("units", ctypes.c_int64), ("stop", ctypes.c_bool)),
    )

    def put(self, phase: str, waits: bool = False) -> None:
        """The rank says what it is doing."""
        self.phase, self.waits = phase.encode()[: _PHASE_BYTES - 1], waits
        self.changes += 1


@dataclass
class RankContext:
    """Where a rank runs: its number, its device, its ways to the others."""

    rank: int
    num_ranks: int
    device: torch.device
    transport: str  # "shared", "gloo" or "nccl"
    timeout: timedelta  # of what ranks do together
    store: dist.Store | None = None
    place: Place = field(default_factory=Place)  # which the caller's process sees, too
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)
    runs: int = 0
    pipes: Pipes | None = None  # of the shared transport
    ahead: Callable[[], tuple[int, int]] | None = None  # of rank 0's clock, where ranks may be on several hosts

    def group(self, purpose: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The process group of some ranks for one purpose. Kept for later runs: it has threads, sockets, GPU memory.

        All ranks must call, also those that aren't in it, and in one order.
        """
        key = purpose, tuple(ranks)
        if key not in self.groups:
            backend = "nccl" if self.transport == "nccl" else "gloo"
            self.groups[key] = dist.new_group(list(ranks), timeout=self.timeout, backend=backend)
        return self.groups[key]

    def channel(self, source: int, target: int) -> dist.ProcessGroup | None:
        """The process group of a channel. Only NCCL needs one each: its groups keep order."""
        return self.group("channel", (source, target)) if self.transport == "nccl" else None

    @property
    def wire(self) -> torch.device:
        """Where tensors must be to cross: the device, or the host's memory."""
        return self.device if self.transport == "nccl" else torch.device("cpu")

    def watch(self, phase: str, waits: bool = False) -> None:
        """Told what the rank does, and whether it waits for others."""
        self.place.put(phase, waits)

    def join(self, threads: int, port: int, folder: str, environment: Mapping[str, str], place: Place) -> RankContext:
        """In its own process: join the others of the pool, which hosts a store at `port`, and lends a `folder` for what
        its ranks share. `environment` is set before CUDA starts."""
        os.environ.update(environment)
        load_eagerly(self.transport)
        torch.set_num_threads(threads)
        if sys.platform == "linux":  # a pool's ranks are all on this host
            named = os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            known = [name for _, name in socket.if_nameindex()]
            if not set(named.split(",")) <= set(known):
                raise ValueError(f"GLOO_SOCKET_IFNAME is {named!r}, and there is {', '.join(known)}: unset it")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.empty(1, device=self.device)  # a GPU that can't be used fails now, not in the first run
        self.store, self.place = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=self.timeout), place
        self.watch("joining the others", True)
        ends = {"store": dist.PrefixStore("pplab", self.store), "rank": self.rank, "world_size": self.num_ranks}
        dist.init_process_group("gloo", timeout=self.timeout, **ends)
        if self.transport == "shared":
            self.pipes = Pipes(self.rank, Path(folder), dist.barrier)
        return self
