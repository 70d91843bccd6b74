"""A pool of ranks: processes that start once, stay up for many runs, and end together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from ..errors import positive_int, unknown
from ..schedule import Schedule
from .devices import choose_transport, notes
from .failures import Failure, Stillness, error_of
from .listener import Extra
from .options import make_job
from .rank import pack, unpack
from .report import Run, make_run
from .workload import Workload

if TYPE_CHECKING:
    from .processes import Ranks

POLL_S = 0.1
STILL_S = 1.0  # when nothing has moved for so long, we look why
BLAME_S = 2.0  # after a rank lost its peer, how long to wait for the news of what happened to that peer

_DEAD = object()  # in place of a rank's answer


class Pool:
    """`num_ranks` processes that run schedules on the models you give them.

    `device` is "auto", "cpu" or "cuda": with CUDA, rank r computes on GPU r, or the ranks share the GPUs there are.
    `transport` is "auto", "shared" (memory that the ranks share), "gloo" or "nccl" (one GPU per rank). `threads` per
    rank default to a fair share of the cores. A rank that makes no progress for `timeout_s` seconds ends the run with
    an error. `beside` runs for as long as the ranks are up, such as `pplab.lab.Mps()` for ranks that share a GPU, whose
    public methods say what it is asked to do.

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
        beside: object | None = None,
    ):
        self.num_ranks = positive_int("num_ranks", num_ranks)
        self.devices, self.transport = choose_transport(self.num_ranks, device, transport)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = positive_int("threads", max(1, cores // self.num_ranks) if threads is None else threads)
        self.notes = tuple(notes(self.devices, cores))
        self.beside = beside
        if beside is not None:
            beside.check(self.devices)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be more than 0, got {timeout_s!r}")
        self.timeout_s = timeout_s
        if start_method not in ("forkserver", "spawn"):
            raise unknown("start method", start_method, ("forkserver", "spawn"))
        self._start_method = start_method
        self._ranks: Ranks | None = None

    def train(self, schedule: Schedule, workload: Workload, *extras: Extra, **options: object) -> Run:
        """Run measured steps of `workload` under `schedule`, after some that change no weight.

        `options` are the fields of `pplab.runtime.Options`, such as `steps=5`, `check_gradients=True` or
        `optimizer=...`. `extras` are what else the run does: `lab.Meter()`, `lab.Pace(costs)`, `lab.Recompute([0])`,
        `lab.Clip(1.0)`, `lab.Profile("folder")`, `lab.Save("file")`, `lab.TorchEngine()`, or an `Extra` of your own.

        Raises ScheduleError or ValueError before anything starts, RankError when a rank fails.
        """
        job = make_job(schedule, workload, self.num_ranks, extras, **options)
        for extra in job.extras:
            extra.check_devices(job, self.devices, self.transport)
        reports = self.run(job.engine, job)
        gradients = None
        if job.options.check_gradients:
            from .reference import report_gradients, train_whole

            autocast = job.options.autocast
            whole = self.run(train_whole, job.workload, autocast)[0]
            gradients = report_gradients(reports, whole, autocast)
        device, said = ", ".join(dict.fromkeys(self.devices)), job.notes(self.devices, self.notes)
        return make_run(job, reports, gradients, device=device, transport=self.transport, notes=said)

    def run(self, function: Callable, *arguments: object) -> list:
        """Call `function(context, *arguments)` on every rank; returns their results in the order of ranks.

        The function must be importable in another process.
        """
        payload = pack((function, arguments))
        try:
            ranks = self._ranks or self._start()
            for rank, pipe in enumerate(ranks.pipes):
                try:
                    pipe.send_bytes(payload)
                except OSError:
                    raise error_of(ranks, [], {rank}) from None
            return collect(ranks, self.timeout_s)
        except BaseException:
            self.close(grace_s=0)
            raise

    def _start(self) -> Ranks:
        from .processes import Ranks

        self._ranks = Ranks(self, self._start_method)
        collect(self._ranks, self.timeout_s)  # each says that it is ready
        if self.beside is not None:
            self.notes = self.beside.notes()
        return self._ranks

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
        devices, state = ", ".join(dict.fromkeys(self.devices)), "up" if self._ranks else "down"
        return f"<Pool of {self.num_ranks} ranks on {devices}, {self.transport}, {state}>"


def collect(ranks: Ranks, timeout_s: float) -> list:
    """Every rank's answer; RankError as soon as one fails, dies, is stopped, or none makes progress."""
    answers: dict[int, object] = {}
    failures: list[Failure] = []
    dead: set[int] = set()
    blame_until, stillness = None, None
    moved, moved_at = ranks.board.counts(), time.monotonic()
    while len(answers) < len(ranks.pipes):
        pending = [rank for rank in range(len(ranks.pipes)) if rank not in answers]
        waited = {ranks.pipes[r]: r for r in pending} | {ranks.processes[r].sentinel: r for r in pending}
        for source in wait(list(waited), timeout=POLL_S):
            rank = waited[source]
            if rank not in answers:
                answer = answers[rank] = _receive(ranks, rank)
                if answer is _DEAD:
                    dead.add(rank)
                elif isinstance(answer, Failure):
                    failures.append(answer)
        now, counts = time.monotonic(), ranks.board.counts()
        if failures or dead:
            blame_until = blame_until or now + BLAME_S
            if dead or any(not failure.secondary for failure in failures) or now > blame_until:
                raise error_of(ranks, failures, dead)
        elif counts != moved:
            moved, moved_at, stillness = counts, now, None
        elif now - moved_at > STILL_S and (pending := [rank for rank in pending if rank not in answers]):
            stillness = stillness or Stillness(ranks, timeout_s)
            stillness.look(pending, now - moved_at)
    if failures:
        raise error_of(ranks, failures, dead)
    return [answers[rank] for rank in range(len(ranks.pipes))]


def _receive(ranks: Ranks, rank: int) -> object:
    """A rank's answer, or that it is dead. What it sent before it died still counts."""
    try:
        if ranks.pipes[rank].poll() or ranks.processes[rank].is_alive():
            return unpack(ranks.pipes[rank].recv_bytes())
    except (EOFError, OSError):
        pass
    return _DEAD
