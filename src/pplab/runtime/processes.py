"""The processes of the ranks: how they start together and end together, whatever happens."""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver, util
from multiprocessing import process as multiprocess
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from . import guard
from .context import Mail, RankContext, Status, open_board, rank_main
from .devices import join
from .failures import STOPPED_S, UNGUARDED, RankError, oom_kills, remedy, state

if TYPE_CHECKING:
    from .pool import Pool

# What ranks take from the environment of now.
_SAID = ("CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_")
# What a fork server may need, whatever the pool's own patience: it imports torch when it starts,
# whose wheel for CUDA takes more than a minute from a cold disk.
_IMPORT_S = 300.0
_PEERS_S = (
    10.0  # so much more time than the pool, which knows who is late, has what ranks do together
)

_server = vars(forkserver)["_forkserver"]

# A fork of the pool's process would otherwise end the ranks when it exits, as if they were its own.
os.register_at_fork(after_in_child=vars(multiprocess)["_children"].clear)

_stores: weakref.WeakSet[dist.TCPStore] = weakref.WeakSet()


def _keep_stores() -> None:
    """In a fork of the pool's process, keep stores alive. A store that is deleted waits there for
    its thread, which a fork doesn't have.
    """
    for store in _stores:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))


os.register_at_fork(after_in_child=_keep_stores)


class Ranks:
    """Running processes, and everything that the system lends them. `end` gives it all back, the
    last thing first.
    """

    def __init__(self) -> None:
        self.closed = False
        self.oom_kills = oom_kills()
        self.processes: list[mp.Process] = []
        self.mails: list[Mail] = []
        self.statuses: Sequence[Status] = ()
        self._lent = ExitStack()
        self.owner = os.getpid()
        shared = "/dev/shm"
        if not os.access(shared, os.W_OK) or shutil.disk_usage(shared).free < 2**28:
            shared = tempfile.gettempdir()  # docker's has 64 MiB: a message of a GPU may not fit
        self.folder = Path(shared, f"pplab-{self.owner}-{secrets.token_hex(8)}")
        self._finalizer = weakref.finalize(self, _give_back, self._lent, self.owner, self.folder)

    def start(self, pool: Pool) -> None:
        """Start the processes. Raises RankError when that takes too long, or when the system lacks
        what they need.
        """
        here = multiprocess.current_process()
        if getattr(here, "_inheriting", False) and here.name.startswith("pplab rank"):
            os._exit(UNGUARDED)  # a rank imports the script: the pool's process says what is wrong
        _forget_stdin()
        try:
            self._start(pool)
        except (OSError, dist.DistError) as error:
            cause = f"the ranks could not start: {error}{remedy(str(error))}"
            raise RankError(None, None, cause) from error

    def _start(self, pool: Pool) -> None:
        server, lent, folder = mp.get_context("forkserver"), self._lent, self.folder
        server.set_forkserver_preload(["pplab.preload"])
        _sweep(folder.parent)
        folder.mkdir(mode=0o700)
        line = _guard(lent, folder, util.get_temp_dir())
        patience = timedelta(seconds=pool.timeout_s)
        stores = [local_store(patience)]
        lent.callback(stores.clear)  # closes its port, whoever still holds this object
        environment = {name: value for name, value in os.environ.items() if name.startswith(_SAID)}
        if pool.beside is not None:
            lent.callback(pool.beside.close)
            environment |= pool.beside.start(folder)
        board = partial(open_board, folder / "board", pool.num_ranks)
        self.statuses = board()
        self.logs = [lent.enter_context(tempfile.TemporaryFile()) for _ in pool.devices]
        self.printed = [
            lent.enter_context(open(folder / f"printed{rank}", "w+"))
            for rank in range(pool.num_ranks)
        ]
        lent.callback(_kill, self.processes)
        made, theirs, patience = [], [], patience + timedelta(seconds=_PEERS_S)
        for rank, device in enumerate(pool.devices):
            near, far = server.Pipe()
            self.mails.append(Mail(lent.enter_context(near), at_once=True))
            log = Connection(os.dup(self.logs[rank].fileno()), readable=False)
            theirs += [far, log]
            place = torch.device(device)
            context = RankContext(rank, pool.num_ranks, place, pool.transport, patience)
            joining = partial(join, context, pool.threads, stores[0].port, str(folder), environment)
            process = server.Process(target=rank_main, args=(rank, joining, far, board, log))
            process.name, process.daemon = f"pplab rank {rank}", True
            made.append(process)
        self._launch(made, theirs, line)

    def _launch(
        self, made: list[mp.Process], theirs: list[Connection], line: socket.socket
    ) -> None:
        """Start the processes in a thread, so that no interrupt comes between the start of a rank
        and the moment when the guard knows about it. A fork server that stands still is killed, and
        the next pool starts a new one.
        """
        failed: list[Exception] = []

        def start() -> None:
            try:
                for process in made:
                    process.start()
                    self.processes.append(process)
                    line.sendall(guard.PID.pack(process.pid))  # fails once the pool has given up
                line.sendall(guard.PID.pack(-_server._forkserver_pid))
            except Exception as error:
                failed.append(error)
                _kill(self.processes)
            for each in theirs:
                each.close()

        thread, began = threading.Thread(target=start, daemon=True), time.monotonic()
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            server, took = _server._forkserver_pid, time.monotonic() - began
            stopped = took > STOPPED_S and server and state(server) == "T"
            if stopped or took > _IMPORT_S:
                with suppress(OSError, TypeError):
                    os.kill(server, signal.SIGKILL)
                    # Once it has ended the next pool sees that it needs one.
                    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
                raise OSError(
                    f"the fork server did nothing for {took:.0f} s and was killed: try again"
                )
        if failed and type(failed[0]) is EOFError:
            raise OSError("the fork server has ended: try again")
        for error in failed:
            raise error

    def end(self, grace_s: float) -> None:
        """End the processes, after some time for those that are asked to end, and close
        everything.
        """
        try:
            if grace_s and os.getpid() == self.owner:
                for mail in self.mails:
                    mail.send()
                until = time.monotonic() + grace_s
                for process in self.processes:
                    with suppress(ValueError):  # an end that was interrupted has closed it
                        process.join(max(0.0, until - time.monotonic()))
        finally:
            _give_back(self._lent, self.owner, self.folder)
            self._finalizer.detach()  # not before: an interrupt may leave something for it


def _forget_stdin() -> None:
    """Keep ranks from importing a program that Python reads from stdin (`python - < program.py`).
    Its `__main__` claims to be the file "<stdin>", and they would look for a file of that name.
    """
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) == "<stdin>":
        del main.__file__


def _give_back(lent: ExitStack, owner: int, folder: Path) -> None:
    if os.getpid() == owner:  # a fork of the owner's has only borrowed it
        lent.close()
        shutil.rmtree(folder, ignore_errors=True)  # again, if an interrupt has undone that


def _guard(lent: ExitStack, folder: Path, temporary: str) -> socket.socket:
    """Start a guard and return the line to it. The folder is locked as long as the pool or the
    guard lives.
    """
    lock = os.open(folder, os.O_RDONLY)
    lent.callback(os.close, lock)
    with suppress(OSError):  # where a file system knows no locks, nothing is swept
        fcntl.flock(lock, fcntl.LOCK_EX)
    line, far = socket.socketpair()
    lent.enter_context(line)
    command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(folder), temporary]
    made = Future()

    def keep() -> None:
        try:
            with far:
                process = subprocess.Popen(
                    command,
                    stdin=far.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                    pass_fds=[lock],
                )
            made.set_result(process)
            process.wait()  # no zombie, whatever interrupts the end
        except Exception as error:
            made.set_exception(error)

    # In a thread no interrupt comes between the start and the wait.
    threading.Thread(target=keep, daemon=True).start()
    made.result()
    lent.callback(_dismiss, line, made)
    return line


def _dismiss(line: socket.socket, made: Future) -> None:
    with suppress(OSError):
        line.sendall(guard.PID.pack(0))
        line.shutdown(socket.SHUT_WR)
        line.settimeout(guard.END_S)
        line.recv(1)  # comes to nothing when it has ended
    made.result().kill()
    made.result().wait()


def _kill(processes: Sequence[mp.Process]) -> None:
    until = time.monotonic() + guard.END_S
    for process in list(processes):
        with suppress(ValueError):  # it is closed
            process.kill()
    for process in list(processes):
        with suppress(ValueError):  # it is closed, or can't be, for it hasn't ended
            process.join(max(0.0, until - time.monotonic()))
            process.close()


def _sweep(shared: Path) -> None:
    """Remove what pools left behind when both their process and their guard were killed. Such a
    folder is ours, unlocked, and its owner is gone.
    """
    for folder in shared.glob("pplab-*-*"):
        with suppress(OSError, ValueError):
            end = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(end, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ours, owner = os.fstat(end).st_uid == os.geteuid(), int(folder.name.split("-")[1])
                if ours and state(owner) == "Z":
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(end)


def local_store(patience: timedelta) -> dist.TCPStore:
    """The store at which ranks find each other, on a port that only this host reaches. torch by
    itself would listen to every host.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    # A socket for datagrams sends nothing to connect, and knows whether there is a way.
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(listener.getsockname())
        except OSError as error:
            raise OSError(
                f"127.0.0.1 can't be reached ({error}): turn the loopback on (ip link set lo up)"
            ) from None
    host, port = listener.getsockname()
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=patience,
        wait_for_workers=False,
        use_libuv=True,
        master_listen_fd=listener.detach(),
    )
    _stores.add(store)
    return store
