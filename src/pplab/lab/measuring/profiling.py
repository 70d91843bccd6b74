"""A rank's steps under `torch.profiler`, with spans that name what the schedule does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from ...actions import Action, F, Kind, Overlap, parts
from ...runtime import Extra, Job, Listener, Rank
from ..extras import settle
from .profiles import ProfileReport, RankProfile, summarise

_NAMES = {Kind.F: "pp.forward", Kind.B: "pp.backward", Kind.I: "pp.backward_input", Kind.W: "pp.backward_weight"}
_EVENTS = {"step": "pp.step", "send": "pp.send", "receive": "pp.receive", "optimizer": "pp.optimizer_step"}


@dataclass(frozen=True)
class Profile(Extra):
    """Record every rank's measured steps with `torch.profiler` in `folder`: rank0.json.gz and so on.

    The Run's `extras["profile"]` sums them up. Recording slows every operation.
    """

    folder: str | Path
    name = "profile"
    flag = {"name": "--profile", "metavar": "DIR", "help": "record torch.profiler traces of all ranks, and sum them up"}
    printed = True  # what it found, by `pplab train`

    def check(self, job: Job) -> Job:
        """Makes the folder. OSError where it can't."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        return job

    def listen(self, rank: Rank) -> Listener:
        """Record this rank."""
        return _Tracing(Path(self.folder).resolve() / f"rank{rank.context.rank}.json.gz", rank)

    def finish(self, job: Job, reports: Sequence[RankProfile]) -> ProfileReport:
        """The summaries of all ranks."""
        by = " by torch" * (job.engine_name == "torch")
        return ProfileReport(f"{job.schedule.name}{by}", tuple(reports))


class _Tracing(Listener):
    """Spans of the measured steps: each of the row's items inside the phase that it belongs to.

    The warm-up ends where the first backward starts, and the drain starts after the last forward.
    """

    events = frozenset(("steps", "item", "call", *_EVENTS))

    def __init__(self, path: Path, rank: Rank):
        self.path, self.rank, self.on = path, rank, False
        row = rank.job.schedule.rows[rank.context.rank]
        if rank.job.engine_name == "torch":  # which runs the halves of an overlap in turn
            row = [action for item in row for action in parts(item)]
        kinds = [{action.kind for action in parts(item)} for item in row]
        self.first_backward = next((i for i, found in enumerate(kinds) if found != {F}), len(row))
        self.last_forward = max((i for i, found in enumerate(kinds) if F in found), default=-1)
        self.position, self.length = 0, len(row)
        self.phase: ExitStack | None = None
        self.open: list[record_function] = []
        on_gpu = rank.context.device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        self.profiler = profile(activities=activities, profile_memory=True)

    def begin(self, event: str, what: Action | Overlap | None) -> None:
        """Open a span."""
        if event == "steps":
            tensors = [t for module in self.rank.modules.values() for t in (*module.parameters(), *module.buffers())]
            self.resident = sum({t.data_ptr(): t.nbytes for t in tensors}.values())
            self.profiler.__enter__()
            self.on = True
        elif self.on:
            if event in ("item", "call"):
                self._advance()
            name = _EVENTS.get(event) or ("pp.overlap" if isinstance(what, Overlap) else _NAMES[what.kind])
            self.open.append(record_function(name))
            self.open[-1].__enter__()

    def end(self, event: str, what: Action | Overlap | None) -> None:
        """Close it; at the end, write the trace."""
        if event == "steps":
            self.on = False
            self.profiler.__exit__(None, None, None)
            self.profiler.export_chrome_trace(str(self.path))
        elif self.on:
            if event == "step":
                settle(self.rank.context.device)
            self.open.pop().__exit__(None, None, None)
            if event in ("item", "call") and self.position % self.length == 0:
                self._enter(None)

    def report(self) -> RankProfile:
        """What the trace says."""
        return summarise(self.path, self.rank.context.rank, resident_bytes=self.resident)

    def _advance(self) -> None:
        at = self.position % self.length
        self.position += 1
        if at in (0, self.first_backward, self.last_forward + 1):
            self._enter("warmup" if at < self.first_backward else "steady" if at <= self.last_forward else "drain")

    def _enter(self, phase: str | None) -> None:
        if self.phase is not None:
            self.phase.close()
        self.phase = None
        if phase is not None:
            self.phase = ExitStack()
            self.phase.enter_context(record_function(f"pp.{phase}"))
