"""A pool of ranks: processes that start once, stay up for many runs, and end together."""

from __future__ import annotations

import os
import platform
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import isfinite
from typing import Any, Unpack

import torch

from .. import __version__, progress
from ..errors import positive_int
from ..schedule import Schedule
from .context import Status, pack, unpack
from .devices import choose_transport, notes
from .failures import GONE, Failure, Stillness
from .listener import Extra
from .options import Asked, Job, make_job
from .processes import Ranks
from .rank import RankReport
from .reference import GradientReport, check_gradients
from .report import Machine, Run
from .workload import Workload

POLL_S = 0.1
STILL_S = 1.0  # when nothing has moved for so long, we look why


class Pool:
    """`num_ranks` processes that run schedules on the models you give them.

    `device` is "auto", "cpu" or "cuda". With CUDA, rank r computes on GPU r, or the ranks share the
    GPUs there are. `transport` is "auto", "shared" (memory that the ranks share), "gloo" or "nccl"
    (one GPU per rank). `threads` is the number per rank, by default a fair share of the cores. A
    rank that makes no progress for `timeout_s` seconds ends the run with an error. `beside` is
    something that runs as long as the ranks are up, such as `Mps` in benchmarks/gpu_mps.py (for
    ranks that share a GPU), which shows what it has to do.

    Ranks meet at ports of 127.0.0.1 alone, unencrypted and without a password. Nonsense sent there
    does no harm. But on a machine on which strangers run programs, their program can join, so start
    ranks only where nobody else is logged in.

    The ranks start at the first use, which takes seconds. They stay up until `close`, the end of a
    `with` block, or the end of the program. If anything goes wrong in one of them, all of them end
    and RankError is raised. Threads take turns.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        device: str = "auto",
        transport: str = "auto",
        threads: int | None = None,
        timeout_s: float = 120.0,
        beside: Any = None,
    ):
        self.num_ranks = positive_int("num_ranks", num_ranks)
        self.devices, self.transport = choose_transport(self.num_ranks, device, transport)
        cores = len(os.sched_getaffinity(0))
        share = max(1, cores // self.num_ranks)
        self.threads = share if threads is None else positive_int("threads", threads)
        self.notes = tuple(notes(self.devices, cores, device))
        if beside is not None:
            beside.check(self.devices)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be more than 0, got {timeout_s!r}")
        self.beside, self.timeout_s = beside, timeout_s
        self._ranks: Ranks | None = None
        self._turn = threading.RLock()  # of the threads that use this pool

    def train(
        self, schedule: Schedule, workload: Workload, *extras: Extra, **options: Unpack[Asked]
    ) -> Run:
        """Run measured steps of `workload` under `schedule`, after a few that change no weight.

        `options` are the fields of `pplab.runtime.Options`, such as `steps=5`,
        `check_gradients=True` or `optimizer=...`. `extras` are further things that the run does:
        `lab.Meter()`, `lab.Pace(costs)`, `lab.Recompute([0])`, `lab.Clip(1.0)`,
        `lab.Profile("folder")`, `lab.Save("file")`, `lab.TorchEngine()`, or an `Extra` of your own.
        Each call starts from the workload's own weights. To go on from a run that saved, give
        `lab.Resume(run)`.

        Raises ScheduleError or ValueError before anything starts, and RankError when a rank fails.
        """
        job = make_job(schedule, workload, self.num_ranks, extras, **options)
        with self._turn, ExitStack() as during:
            for status in self.statuses():  # they tell of the last run
                status.steps, status.stop = 0, False
            for extra in job.extras:
                extra.check_devices(job, self.devices, self.transport)
                during.enter_context(extra.during(job, self.statuses))
            look = self._tells(job, during)
            reports, gradients = self.run(job.engine, job, look=look), None
            if job.options.check_gradients:
                on_rank_0 = lambda *call: self.run(*call, look=look)[0]  # noqa: E731
                gradients = check_gradients(on_rank_0, job, reports)
            return make_run(job, reports, gradients, self.devices, self.notes)

    def run(
        self, function: Callable, *arguments: object, look: Callable[[], object] | None = None
    ) -> list:
        """Call `function(context, *arguments)` on every rank, and return the results in the order
        of ranks. Meanwhile `look()` is called several times a second.

        The function must be importable in a different process.
        """
        job = pack((function, arguments))
        with self._turn:
            try:
                ranks = self._ranks
                if ranks is not None and (ranks.closed or ranks.owner != os.getpid()):
                    # What closed it was interrupted; or they are those of a process that forked.
                    self.close(grace_s=0)
                return collect(self._ranks or self._start(look), self.timeout_s, job, look)
            except BaseException:
                self.close(grace_s=0)
                raise

    def _start(self, look: Callable[[], object] | None = None) -> Ranks:
        self._ranks = Ranks()
        self._ranks.start(self)
        collect(self._ranks, self.timeout_s, look=look)  # each says that it is ready
        if self.beside is not None:
            self.notes = self.beside.notes()
        return self._ranks

    def close(self, *, grace_s: float = 2.0) -> None:
        """End the ranks, and a run in a different thread. Ask them first, and after `grace_s`
        seconds kill those that are still there.
        """
        if (ranks := self._ranks) is not None:
            ranks.closed = True
            with self._turn:
                if self._ranks is ranks:
                    ranks.end(grace_s)
                    self._ranks = None

    def statuses(self) -> Sequence[Status]:
        """The status that each rank shares with this process. There is none while the pool is
        down.
        """
        return self._ranks.statuses if self._ranks else ()

    def _tells(self, job: Job, during: ExitStack) -> Callable[[], None]:
        """The function that shows how far the run is once it has taken a while."""
        began = time.monotonic()
        tell: Callable[[], None] | None = None

        def look() -> None:
            nonlocal tell
            if tell is None and time.monotonic() > began + 0.5:
                told = progress.of_run(self.statuses, job.first_step, job.options.steps)
                tell = during.enter_context(told)
            if tell:
                tell()

        return look

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks' process numbers; none while the pool is down."""
        ranks = self._ranks
        return () if ranks is None or ranks.closed else tuple(each.pid for each in ranks.processes)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "up" if self._ranks else "down"
        return f"<Pool of {self.num_ranks} ranks on {self.devices}, {self.transport}, {state}>"


def collect(
    ranks: Ranks,
    timeout_s: float,
    job: bytes | None = None,
    look: Callable[[], object] | None = None,
) -> list:
    """Every rank's answer, to `job` if there is one. Raises RankError once a rank fails, dies or is
    stopped, or once none moves. Meanwhile it calls `look`.
    """
    answers: dict[int, object] = {}
    moved, moved_at, stillness = None, 0.0, None
    mails = ranks.mails
    if job is not None:
        for mail in mails:
            mail.send(job)
    while pending := [rank for rank in range(len(mails)) if rank not in answers]:
        ended = _wait(ranks, pending)
        if look:
            look()
        for rank in pending:
            try:
                mails[rank].push()
                answer = mails[rank].receive()
            except (EOFError, OSError):
                answer = None
                ended.add(rank)
            if answer is not None:  # what it sent before it ended still counts
                answers[rank] = unpack(answer)
            elif rank in ended:
                answers[rank] = GONE
        for rank, printed in enumerate(ranks.printed):
            for line in printed:
                print(f"rank {rank}: {line}", end="")
        wrong = ranks.closed or any(a is GONE or isinstance(a, Failure) for a in answers.values())
        now, counts = time.monotonic(), [mail.moved for mail in mails]
        counts += [status.changes for status in ranks.statuses]
        if counts != moved:
            moved, moved_at, stillness = counts, now, stillness if wrong else None
        if wrong or now - moved_at > STILL_S:
            stillness = stillness or Stillness(ranks, timeout_s)
            stillness.look(answers, now - moved_at)
    return [answers[rank] for rank in range(len(mails))]


def _wait(ranks: Ranks, pending: Sequence[int]) -> set[int]:
    """Sleep until one of these ranks needs something done, and return those that have ended."""
    poll, ends = select.poll(), {ranks.processes[rank].sentinel: rank for rank in pending}
    for end, rank in ends.items():
        mail = ranks.mails[rank]
        poll.register(end, select.POLLIN)
        poll.register(mail.pipe, select.POLLIN | (select.POLLOUT if mail.unsent else 0))
    return {ends[at] for at, _ in poll.poll(POLL_S * 1000) if at in ends}


def make_run(
    job: Job,
    reports: Sequence[RankReport],
    gradients: GradientReport | None,
    devices: Sequence[str],
    notes: Sequence[str],
) -> Run:
    """Put the ranks' reports together. `devices` are theirs, and `notes` are what no run can show
    there.
    """
    steps = tuple(zip(*(report.traces for report in reports), strict=True))
    for extra in job.extras:
        notes = extra.notes(devices, notes)
    of_ranks = dict.fromkeys(note for report in reports for note in report.notes)
    notes = [*job.workload.notes, *notes, *of_ranks]
    if unsplit := ", ".join(sorted(set().union(*(report.unsplit for report in reports)))):
        notes.append(
            f"gradients of weights in {unsplit} are computed with the input's, not put off"
        )
    clock_error_ms = max(trace.error_ns for each in steps for trace in each) / 1e6
    if clock_error_ms > 0.1:  # which is worth a note
        notes.append(f"a rank's times can be {clock_error_ms:.1f} ms off the clock of all ranks")
    first_loss, *losses = map(sum, zip(*((r.first_loss, *r.losses) for r in reports), strict=True))
    if wrong := [
        step for step, loss in enumerate(losses, job.first_step + 1) if not isfinite(loss)
    ]:
        notes.append(
            f"the loss is NaN or infinite in {len(wrong)} of {len(losses)} steps, first in step "
            f"{wrong[0]}: lower the learning rate, or look at data and weights"
        )
    if len(losses) < job.options.steps:
        notes.append(
            f"ended after {len(losses)} of {job.options.steps} steps: "
            f"{reports[0].ended or 'an extra ended it'}"
        )
    extras = {}
    for i, extra in enumerate(job.extras):
        found = extra.finish(job, [report.extras[i] for report in reports])
        if found is not None:
            extras[extra.name] = found
    machine = Machine(
        ", ".join(dict.fromkeys(devices)), reports[0].transport, versions(), clock_error_ms
    )
    return Run(job, machine, tuple(notes), tuple(losses), first_loss, steps, gradients, extras)


def versions() -> dict[str, str]:
    """The versions of what a measurement is made with."""
    return {"pplab": __version__, "python": platform.python_version(), "torch": torch.__version__}
