"""A pool of ranks: processes that start once, stay up for many runs, and end together."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from ..actions import parts
from ..costs import Costs
from ..deps import incoming
from ..errors import positive_int, unknown
from ..lab.checkpoint import write
from ..lab.mps import Mps, choose_share
from ..lowering import LoweredRow, lower
from ..schedule import Schedule
from .checks import ENGINES, check_job, check_transport
from .devices import choose_transport, mps_notes, notes, paced_notes
from .job import Job, RankReport, train_whole
from .rank import FIELDS, PHASES, Failure, Settings, pack, rank_main, unpack
from .report import Reference, Run, make_run, report_gradients
from .workload import Workload, check_divides

POLL_S = 0.1
BLAME_S = 2.0  # after a rank lost its peer, how long to wait for the news of what happened to that peer
STOPPED_S = 2.0  # a rank that the system says is stopped is given up after this
ALL_WAIT_S = 10.0  # ranks that all wait for each other are given up after this
_PRELOAD = ["torch", "torch.distributed", "numpy", "pplab.runtime.rank"]

_DEAD = object()  # in place of a rank's answer

Place = tuple[str, int, bool]  # phase, position in the row, waiting


class RankError(RuntimeError):
    """Something went wrong in a rank. All ranks are gone when this is raised; the pool starts new ones when used again.

    `rank`, `action` (where in the schedule, or None), `cause` and `remote_traceback` (text) say what.
    """

    def __init__(self, rank: int | None, action: object, cause: str, remote_traceback: str = ""):
        self.rank, self.action, self.cause, self.remote_traceback = rank, action, cause, remote_traceback
        super().__init__(f"{cause}\n\nIn rank {rank}:\n{remote_traceback}" if remote_traceback else cause)


class Pool:
    """`num_ranks` processes that run schedules on the models you give them.

    `device` is "auto", "cpu" or "cuda": with CUDA, rank r computes on GPU r, or the ranks share the GPUs there are.
    `transport` is "auto", "shared" (memory that the ranks share), "gloo" or "nccl" (one GPU per rank). `threads` per
    rank default to a fair share of the cores. A rank that makes no progress for `timeout_s` seconds ends the run with
    an error. `share` says how ranks share a GPU: "turns", or "mps" (NVIDIA's MPS, started and ended with the ranks:
    kernels of all ranks run side by side, each rank's on its part of the multiprocessors; see `pplab.lab.mps`).

    The ranks start at the first use, which takes seconds, and stay up until `close`, the end of a `with` block, or the
    end of the program. Whatever goes wrong in one of them ends them all and raises RankError.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        device: str = "auto",
        transport: str = "auto",
        threads: int | None = None,
        timeout_s: float = 120.0,
        start_method: str = "forkserver",
        share: str = "turns",
    ):
        self.num_ranks = positive_int("num_ranks", num_ranks)
        self.devices, self.transport = choose_transport(self.num_ranks, device, transport)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = positive_int("threads", max(1, cores // self.num_ranks) if threads is None else threads)
        self.share, self._percentage = share, choose_share(share, self.devices)
        self.notes = tuple(notes(self.devices, cores, self._percentage))
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be more than 0, got {timeout_s!r}")
        self.timeout_s = timeout_s
        if start_method not in ("forkserver", "spawn"):
            raise unknown("start method", start_method, ("forkserver", "spawn"))
        self._start_method = start_method
        self._ranks: _Ranks | None = None

    def train(
        self,
        schedule: Schedule,
        workload: Workload,
        *,
        steps: int = 3,
        warmup: int = 1,
        check_gradients: bool = False,
        optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None = None,
        pace: Costs | None = None,
        autocast: torch.dtype | None = None,
        engine: str = "pplab",
        profile: str | Path | None = None,
        replicas: int = 1,
        reduction: str = "end",
        recompute: bool | Iterable[int] = False,
        clip_norm: float | None = None,
        resume: str | os.PathLike | None = None,
        save: str | os.PathLike | None = None,
    ) -> Run:
        """Run `steps` measured steps of `workload` under `schedule`, after `warmup` steps that change no weight.

        `check_gradients` compares the first step's gradients with those of one process. `optimizer` makes an optimizer
        from a rank's parameters (`functools.partial(torch.optim.SGD, lr=0.1)`); without one the weights stay.
        `pace` stretches every action to the given durations (with a unit of time) and delays messages as its links
        would, so that many ranks show their schedule in real time on few cores. `autocast` is the dtype of mixed
        precision, such as `torch.bfloat16`.
        `engine="torch"` runs the same stages with PyTorch's own runtime, to compare; its pace can't delay messages.
        `profile` is a folder: every rank records its measured steps there with `torch.profiler` (rank0.json.gz and so
        on), and the Run's `profile` sums them up. Recording slows every operation.
        `replicas` runs `lab.replicate(schedule, replicas)`: data parallelism. The gradients of weights that several
        ranks keep are added up once a rank has run its row (`reduction="end"`), or stage by stage as soon as it has run
        a stage's last backward (`"drain"`).
        `recompute` names the stages that keep only what they receive and run their forward again in the backward; all,
        if True.
        `clip_norm` scales the gradients of a step so that their norm, over all ranks, is at most that; the norms before
        it are the Run's `gradient_norms`.
        `save` names a file for weights and the optimizer's state after the last step; `resume` goes on from such a
        file, with the next batch, under this or another schedule and number of ranks. Both may be the same file: it is
        replaced as a whole. On several hosts all must see it.

        Raises ScheduleError or ValueError before anything starts, RankError when a rank fails.
        """
        job = check_job(
            schedule,
            workload,
            self.num_ranks,
            steps=steps,
            warmup=warmup,
            check_gradients=check_gradients,
            optimizer=optimizer,
            pace=pace,
            autocast=autocast,
            engine=engine,
            profile=profile,
            replicas=replicas,
            reduction=reduction,
            recompute=recompute,
            clip_norm=clip_norm,
            resume=resume,
            save=save,
        )
        return self.carry_out(job, save=save)

    def carry_out(self, job: Job, *arguments: object, save: str | os.PathLike | None = None) -> Run:
        """Run a job that `check_job` made; `save` as in `train`, `arguments` for its engine. Raises as `train` does."""
        check_transport(job, self.devices, self.transport)
        rows = lower(job.schedule, ahead=1)
        where = lambda rank, place: _where(job.schedule, rows[rank], place)  # noqa: E731
        reports = self.run(ENGINES[job.engine], job, *arguments, where=where)
        gradients = None
        if job.collect_gradients:
            whole = self.run(train_whole, job.workload, job.schedule.num_microbatches, 0, job.autocast)[0]
            gradients = report_gradients(reports, whole, job.autocast)
        if save is not None:  # last: it may replace the file that the run, and its reference, went on from
            save_reports(save, reports, job)
        return make_run(
            job,
            reports,
            gradients,
            device=", ".join(dict.fromkeys(self.devices)),
            transport=self.transport,
            notes=paced_notes(self.devices, self.notes, job.pace_s is not None),
        )

    def reference(self, workload: Workload, num_microbatches: int = 1, *, steps: int = 3) -> Reference:
        """Train `workload` in one process: loss and gradients of the whole batch, then `steps` timed steps in which the
        microbatches run one after the other, with a rank's threads."""
        check_divides(workload.batch_size, num_microbatches)
        whole = self.run(train_whole, workload, num_microbatches, steps)[0]
        return Reference(whole.loss, whole.gradients, tuple(whole.step_times_ms))

    def run(
        self,
        function: Callable,
        *arguments: object,
        where: Callable[[int, Place], tuple[object, str]] | None = None,
    ) -> list:
        """Call `function(context, *arguments)` on every rank; returns their results in the order of ranks.

        The function must be importable in another process. `where` translates a rank's place into an action and words.
        """
        payload = pack((function, arguments))
        if self._ranks is None:
            self._ranks = _Ranks(self)
        try:
            return self._ranks.ask(payload, where or _whereabouts)
        except BaseException:
            self.close(grace_s=0)
            raise

    def close(self, *, grace_s: float = 2.0) -> None:
        """End the ranks: ask them, and after `grace_s` seconds kill those that are still there."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.end(grace_s)

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks' process numbers; none while the pool is down."""
        return tuple(process.pid for process in self._ranks.processes) if self._ranks else ()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "up" if self._ranks else "down"
        return (
            f"<Pool of {self.num_ranks} ranks on {', '.join(dict.fromkeys(self.devices))}, {self.transport}, {state}>"
        )


class _Ranks:
    """Running processes and all that the system lends them. `end` gives everything back."""

    def __init__(self, pool: Pool):
        context = mp.get_context(pool._start_method)
        if pool._start_method == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
        self.timeout_s = pool.timeout_s
        store = _local_store()
        self.board = context.RawArray("q", pool.num_ranks * FIELDS)
        self.logs = [tempfile.TemporaryFile() for _ in range(pool.num_ranks)]
        self.lifeline, far_lifeline = context.Pipe(duplex=False)[::-1]
        self.pipes: list[Connection] = []
        self.processes = []
        self._stores = [store]  # in a list, so that ending the ranks closes its port, whoever still holds this object
        self.folder = tempfile.mkdtemp(prefix=f"pplab-{os.getpid()}-", dir=_shared_memory())
        self._mps: list[Mps] = []
        self._lent = (self.processes, self.pipes, self.logs, self.lifeline, self._stores, self.folder, self._mps)
        self._finalizer = weakref.finalize(self, _end, *self._lent, 0.0)
        if pool._percentage is not None:
            self._mps.append(Mps(Path(self.folder), pool._percentage))
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
                self._mps[0].environment if self._mps else {},
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
            self._collect(_whereabouts)
            if self._mps:
                pool.notes = (*pool.notes[:1], *mps_notes(self._mps[0].num_clients(), pool.num_ranks))
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
        progress = _Progress(self.board, len(self.pipes))
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
                action, words = where(rank, self._place(rank))
                raise RankError(rank, action, f"rank {rank} was stopped (SIGSTOP) {words}: all ranks were ended")
        still_s = progress.still_for()
        all_wait = all(self._place(rank)[2] for rank in pending)
        if still_s > self.timeout_s or (all_wait and still_s > ALL_WAIT_S):
            places = {rank: where(rank, self._place(rank)) for rank in pending}
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
        action, words = where(rank, self._place(rank))
        return RankError(rank, action, f"rank {rank} {how} {words}: all ranks were ended", self._printed(rank).strip())

    def _place(self, rank: int) -> Place:
        phase, position, waits = self.board[rank * FIELDS : rank * FIELDS + 3]
        return PHASES[phase], position, bool(waits)

    def _printed(self, rank: int) -> str:
        """The end of what a rank printed, where errors outside Python end up."""
        descriptor = self.logs[rank].fileno()
        size = os.fstat(descriptor).st_size
        text = os.pread(descriptor, 2000, max(0, size - 2000)).decode(errors="replace").strip()
        return f"\nIt printed:\n{text}" if text else ""


class _Progress:
    """Since when nothing moves."""

    def __init__(self, board: Sequence[int], num_ranks: int):
        self._board, self._num_ranks = board, num_ranks
        self._counts: list[int] = []
        self._since = time.monotonic()
        self._stopped_since: dict[int, float] = {}

    def still_for(self) -> float:
        """Seconds in which no rank changed its place."""
        counts = self._board[FIELDS - 1 :: FIELDS]
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
    processes: list, pipes: list, logs: list, lifeline: Connection, stores: list, folder: str, mps: list, grace_s: float
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
    for each in mps:  # after its clients
        each.close()
    stores.clear()
    shutil.rmtree(folder, ignore_errors=True)


def save_reports(path: str | os.PathLike, reports: Sequence[RankReport], job: Job) -> None:
    """Write what all ranks collected as one checkpoint."""
    write(path, [report.saved for report in reports], job.first_step + job.steps, job.workload.name)


def _where(schedule: Schedule, row: LoweredRow, place: Place) -> tuple[object, str]:
    """The action of a rank's place, and the place in words."""
    phase, position, waits = place
    if phase != "step":
        return _whereabouts(0, place)
    item = row[position]
    if waits:
        awaited = [r for action in parts(item) if (r := incoming(action, schedule.num_stages))]
        return item, f"waits at {item} for {' and '.join(map(str, awaited))}"
    return item, f"at {item}"


def _whereabouts(rank: int, place: Place) -> tuple[None, str]:
    """A place in words, for a job without a schedule."""
    phase = place[0]
    return None, phase if phase.startswith(("at ", "in ")) else f"while {phase}"
