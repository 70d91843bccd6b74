"""The ranks' processes: how they start together and end together, whatever happens."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
import weakref
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .devices import RankContext
from .rank import Board, rank_main

if TYPE_CHECKING:
    from .pool import Pool

# What a rank imports in its first backward at the latest, symbolic_shapes among it, is imported once for all pools.
_PRELOAD = ["torch.fx.experimental.symbolic_shapes", "numpy", "pplab.runtime.rank", "pplab.runtime.training"]


class Ranks:
    """Running processes and all that the system lends them. `end` gives everything back, the last thing first."""

    def __init__(self, pool: Pool, start_method: str):
        context = mp.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
        lent = ExitStack()
        self._give_back = weakref.finalize(self, lent.close)
        folder = tempfile.mkdtemp(prefix=f"pplab-{os.getpid()}-", dir=_shared_memory())
        lent.callback(shutil.rmtree, folder, ignore_errors=True)
        stores = [_local_store()]
        lent.callback(stores.clear)  # closes its port, whoever still holds this object
        environment = {}
        if pool.beside is not None:
            lent.callback(pool.beside.close)
            environment = pool.beside.start(Path(folder))
        self.board = Board(context, pool.num_ranks)
        self.logs = [lent.enter_context(tempfile.TemporaryFile()) for _ in pool.devices]
        far_lifeline, lifeline = context.Pipe(duplex=False)
        lent.enter_context(lifeline)
        self.pipes: list[Connection] = []
        self.processes = []
        lent.callback(_kill, self.processes)
        for rank, device in enumerate(pool.devices):
            near, far = context.Pipe()
            self.pipes.append(lent.enter_context(near))
            log = Connection(os.dup(self.logs[rank].fileno()), readable=False)
            timeout = timedelta(seconds=pool.timeout_s)
            place = RankContext(rank, pool.num_ranks, torch.device(device), pool.transport, timeout)
            process = context.Process(
                target=rank_main,
                args=(rank, partial(place.join, pool.threads, stores[0].port, folder, environment)),
                kwargs={"folder": folder, "jobs": far, "lifeline": far_lifeline, "board": self.board, "log": log},
                name=f"pplab rank {rank}",
                daemon=True,
            )
            process.start()
            self.processes.append(process)
            far.close()
            log.close()
        far_lifeline.close()

    def end(self, grace_s: float) -> None:
        """End the processes, after some time for those that are asked to, and close everything."""
        if grace_s:
            for pipe in self.pipes:
                with suppress(OSError):
                    pipe.send_bytes(b"")
            until = time.monotonic() + grace_s
            for process in self.processes:
                process.join(max(0.0, until - time.monotonic()))
        self._give_back()


def _kill(processes: list[mp.Process]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
        process.close()


def _local_store() -> dist.TCPStore:
    """Where ranks find each other: a port that only this host reaches (torch by itself would listen to all)."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )


def _shared_memory() -> str | None:
    """Where a file is memory that processes share; None for the usual place of temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
