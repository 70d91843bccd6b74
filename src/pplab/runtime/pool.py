"""A pool of ranks: processes that start once, stay up for many runs, and end together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..errors import positive_int, unknown
from ..schedule import Schedule
from .devices import choose_transport, notes, paced_notes
from .listener import Extra
from .options import make_job
from .processes import Ranks, whereabouts, whereabouts_in
from .rank import Place, pack
from .report import Run, make_run
from .workload import Workload, check_divides

if TYPE_CHECKING:
    from .reference import Reference


class Beside(Protocol):
    """What runs beside a pool's ranks for as long as they are up: NVIDIA's MPS, say (`pplab.lab.mps`)."""

    def check(self, devices: Sequence[str]) -> None:
        """Raise ValueError where it is of no use on these devices."""

    def start(self, folder: Path) -> Mapping[str, str]:
        """Start, with files in `folder`; returns what ranks have in their environment before CUDA starts."""

    def notes(self) -> tuple[str, ...]:
        """What the machine can't show with it, once the ranks are up."""

    def close(self) -> None:
        """End it, and wait until it is gone. Called after the ranks have ended, also if it never started."""


class Pool:
    """`num_ranks` processes that run schedules on the models you give them.

    `device` is "auto", "cpu" or "cuda": with CUDA, rank r computes on GPU r, or the ranks share the GPUs there are.
    `transport` is "auto", "shared" (memory that the ranks share), "gloo" or "nccl" (one GPU per rank). `threads` per
    rank default to a fair share of the cores. A rank that makes no progress for `timeout_s` seconds ends the run with
    an error. `beside` runs for as long as the ranks are up, such as `pplab.lab.Mps()` for ranks that share a GPU.

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
        beside: Beside | None = None,
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

        `options` are the fields of `pplab.runtime.Options`, such as `steps=5`, `check_gradients=True`, `optimizer=...`
        or `pace=...`. `extras` are what else the run shall do: `lab.Clip(1.0)`, `lab.Profile("folder")`,
        `lab.Save("file")`, `lab.Resume("file")`, `lab.TorchEngine()`, or an `Extra` of your own.

        Raises ScheduleError or ValueError before anything starts, RankError when a rank fails.
        """
        job = make_job(schedule, workload, self.num_ranks, extras, **options)
        for extra in job.extras:
            extra.check_devices(job, self.devices, self.transport)
        reports = self.run(job.engine, job, where=whereabouts_in(schedule))
        gradients = None
        if job.options.check_gradients:
            from .reference import report_gradients, train_whole

            autocast = job.options.autocast
            whole = self.run(train_whole, job.workload, schedule.num_microbatches, 0, autocast)[0]
            gradients = report_gradients(reports, whole, autocast)
        return make_run(
            job,
            reports,
            gradients,
            device=", ".join(dict.fromkeys(self.devices)),
            transport=self.transport,
            notes=self.notes if job.options.pace is None else paced_notes(self.devices, self.notes),
        )

    def reference(self, workload: Workload, num_microbatches: int = 1, *, steps: int = 3) -> Reference:
        """Train `workload` in one process: loss and gradients of the whole batch, then `steps` timed steps in which the
        microbatches run one after the other, with a rank's threads."""
        from .reference import Reference, train_whole

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
            self._ranks = Ranks(self)
        try:
            return self._ranks.ask(payload, where or whereabouts)
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
