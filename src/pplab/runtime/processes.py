"""The ranks' processes: started together, asked together, and ended together, whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
import torch.multiprocessing as mp

from ..actions import parts
from ..deps import incoming
from ..lowering import lower
from ..schedule import Schedule
from .rank import Board, Failure, Place, Settings, rank_main, unpack

if TYPE_CHECKING:
    from .pool import Beside, Pool

POLL_S = 0.1
BLAME_S = 2.0  # after a rank lost its peer, how long to wait for the news of what happened to that peer
STOPPED_S = 2.0  # a rank that the system says is stopped is given up after this
ALL_WAIT_S = 10.0  # ranks that all wait for each other are given up after this
_PRELOAD = ["torch", "torch.distributed", "numpy", "pplab.runtime.rank"]

_DEAD = object()  # in place of a rank's answer


class RankError(RuntimeError):
    """Something went wrong in a rank. All ranks are gone when this is raised; the pool starts new ones when used again.

    `rank`, `action` (where in the schedule, or None), `cause` and `remote_traceback` (text) say what.
    """

    def __init__(self, rank: int | None, action: object, cause: str, remote_traceback: str = ""):
        self.rank, self.action, self.cause, self.remote_traceback = rank, action, cause, remote_traceback
        super().__init__(f"{cause}\n\nIn rank {rank}:\n{remote_traceback}" if remote_traceback else cause)


class Ranks:
    """Running processes and all that the system lends them. `end` gives everything back."""

    def __init__(self, pool: Pool):
        context = mp.get_context(pool._start_method)
        if pool._start_method == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
        self.timeout_s = pool.timeout_s
        store = _local_store()
        self.board = Board(context, pool.num_ranks)
        self.logs = [tempfile.TemporaryFile() for _ in range(pool.num_ranks)]
        self.lifeline, far_lifeline = context.Pipe(duplex=False)[::-1]
        self.pipes: list[Connection] = []
        self.processes = []
        self._stores = [store]  # in a list, so that ending the ranks closes its port, whoever still holds this object
        self.folder = tempfile.mkdtemp(prefix=f"pplab-{os.getpid()}-", dir=_shared_memory())
        self._beside: list[Beside] = []
        self._lent = (self.processes, self.pipes, self.logs, self.lifeline, self._stores, self.folder, self._beside)
        self._finalizer = weakref.finalize(self, _end, *self._lent, 0.0)
        environment = {}
        if pool.beside is not None:
            self._beside.append(pool.beside)
            environment = pool.beside.start(Path(self.folder))
        for rank in range(pool.num_ranks):
            near, far = context.Pipe()
            log = Connection(os.dup(self.logs[rank].fileno()), readable=False)
            settings = Settings(
                rank,
                pool.num_ranks,
                pool.devices[rank],
                pool.transport,
                pool.threads,
                store.port,
                self.folder,
                pool.timeout_s,
                environment,
            )
            process = context.Process(
                target=rank_main,
                args=(settings, far, far_lifeline, self.board, log),
                name=f"pplab rank {rank}",
                daemon=True,
            )
            process.start()
            far.close()
            log.close()
            self.pipes.append(near)
            self.processes.append(process)
        far_lifeline.close()
        try:
            self._collect(whereabouts)
            if pool.beside is not None:
                pool.notes = pool.beside.notes()
        except BaseException:
            self.end(0)
            raise

    def ask(self, payload: bytes, where: Callable) -> list:
        """Give every rank a job and collect the answers."""
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send_bytes(payload)
            except OSError:
                raise self._error([], where, {rank}) from None
        return self._collect(where)

    def end(self, grace_s: float) -> None:
        """End the processes and close everything."""
        self._finalizer.detach()
        _end(*self._lent, grace_s)

    def _collect(self, where: Callable) -> list:
        """Every rank's answer; RankError as soon as one fails, dies, is stopped, or none makes progress."""
        answers: dict[int, object] = {}
        failures: list[Failure] = []
        dead: set[int] = set()
        blame_until = None
        progress = _Progress(self.board)
        while len(answers) < len(self.pipes):
            pending = [rank for rank in range(len(self.pipes)) if rank not in answers]
            waited = {self.pipes[r]: r for r in pending} | {self.processes[r].sentinel: r for r in pending}
            for source in wait(list(waited), timeout=POLL_S):
                rank = waited[source]
                if rank in answers:
                    continue
                answer = self._receive(rank)
                answers[rank] = answer
                if answer is _DEAD:
                    dead.add(rank)
                elif isinstance(answer, Failure):
                    failures.append(answer)
            if failures or dead:
                blame_until = blame_until or time.monotonic() + BLAME_S
                told = dead or any(not failure.secondary for failure in failures)
                if told or time.monotonic() > blame_until:
                    raise self._error(failures, where, dead)
            pending = [rank for rank in pending if rank not in answers]
            if pending and not (failures or dead):
                self._check_progress(progress, pending, where)
        if failures:
            raise self._error(failures, where, dead)
        return [answers[rank] for rank in range(len(self.pipes))]

    def _receive(self, rank: int) -> object:
        """A rank's answer, or that it is dead. What it sent before it died still counts."""
        try:
            if self.pipes[rank].poll() or self.processes[rank].is_alive():
                return unpack(self.pipes[rank].recv_bytes())
        except (EOFError, OSError):
            pass
        return _DEAD

    def _check_progress(self, progress: _Progress, pending: Sequence[int], where: Callable) -> None:
        for rank in pending:
            if progress.stopped_for(rank, self.processes[rank].pid) > STOPPED_S:
                action, words = where(rank, self.board.place(rank))
                raise RankError(rank, action, f"rank {rank} was stopped (SIGSTOP) {words}: all ranks were ended")
        still_s = progress.still_for()
        all_wait = all(self.board.place(rank)[2] for rank in pending)
        if still_s > self.timeout_s or (all_wait and still_s > ALL_WAIT_S):
            places = {rank: where(rank, self.board.place(rank)) for rank in pending}
            rank = min(places)
            what = "; ".join(f"rank {r} {words}" for r, (_, words) in places.items())
            raise RankError(
                rank, places[rank][0], f"no rank made progress for {still_s:.0f} s: {what}: all ranks were ended"
            )

    def _error(self, failures: Sequence[Failure], where: Callable, dead: set[int]) -> RankError:
        """One error for all that went wrong: the first cause, not its consequences."""
        for failure in sorted(failures, key=lambda failure: failure.secondary):
            if failure.secondary and dead:
                continue
            action, words = where(failure.rank, failure.place)
            cause = f"rank {failure.rank} failed {words}: {failure.kind}: {failure.message}"
            return RankError(failure.rank, action, cause, failure.traceback + self._printed(failure.rank))
        rank = min(dead)
        self.processes[rank].join(1.0)
        code = self.processes[rank].exitcode
        how = f"was killed ({signal.Signals(-code).name})" if code is not None and code < 0 else f"exited with {code}"
        action, words = where(rank, self.board.place(rank))
        return RankError(rank, action, f"rank {rank} {how} {words}: all ranks were ended", self._printed(rank).strip())

    def _printed(self, rank: int) -> str:
        """The end of what a rank printed, where errors outside Python end up."""
        descriptor = self.logs[rank].fileno()
        size = os.fstat(descriptor).st_size
        text = os.pread(descriptor, 2000, max(0, size - 2000)).decode(errors="replace").strip()
        return f"\nIt printed:\n{text}" if text else ""


class _Progress:
    """Since when nothing moves."""

    def __init__(self, board: Board):
        self._board = board
        self._counts: list[int] = []
        self._since = time.monotonic()
        self._stopped_since: dict[int, float] = {}

    def still_for(self) -> float:
        """Seconds in which no rank changed its place."""
        counts = self._board.counts()
        if counts != self._counts:
            self._counts, self._since = counts, time.monotonic()
        return time.monotonic() - self._since

    def stopped_for(self, rank: int, pid: int) -> float:
        """Seconds for which the system has said that a process is stopped (0 where it can't say)."""
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            state = ""
        if state != "T":
            self._stopped_since.pop(rank, None)
            return 0.0
        return time.monotonic() - self._stopped_since.setdefault(rank, time.monotonic())


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


def _end(
    processes: list,
    pipes: list,
    logs: list,
    lifeline: Connection,
    stores: list,
    folder: str,
    beside: list,
    grace_s: float,
) -> None:
    if grace_s:
        for pipe in pipes:
            try:
                pipe.send_bytes(b"")
            except OSError:
                pass
        until = time.monotonic() + grace_s
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
        process.close()
    for resource in (*pipes, *logs, lifeline):
        resource.close()
    for each in beside:  # after the ranks, which are its clients
        each.close()
    stores.clear()
    shutil.rmtree(folder, ignore_errors=True)


def whereabouts_in(schedule: Schedule) -> Callable[[int, Place], tuple[object, str]]:
    """How to say where in a schedule a rank is: the action, and the place in words."""

    def where(rank: int, place: Place) -> tuple[object, str]:
        phase, position, waits = place
        if phase != "step":
            return whereabouts(rank, place)
        item = lower(schedule, ahead=1)[rank][position]
        if waits:
            awaited = [r for action in parts(item) if (r := incoming(action, schedule.num_stages))]
            return item, f"waits at {item} for {' and '.join(map(str, awaited))}"
        return item, f"at {item}"

    return where


def whereabouts(rank: int, place: Place) -> tuple[None, str]:
    """A place in words, for a job without a schedule."""
    phase = place[0]
    return None, phase if phase.startswith(("at ", "in ")) else f"while {phase}"
