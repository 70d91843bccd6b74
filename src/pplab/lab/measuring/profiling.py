"""Record a rank's steps with `torch.profiler`, with spans that name what the schedule does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from ...actions import Action, Overlap
from ...runtime import Extra, Job, Listener, Rank
from ..extras import settle

TRACE = "rank{}.json.gz"


@dataclass(frozen=True)
class Profile(Extra):
    """Record every rank's measured steps with `torch.profiler` in `folder`: rank0.json.gz and so
    on.

    `lab.read_traces(folder)` reads them, and the Run's `extras["profile"]` has their paths. A span
    is named by its action, pplab:0F1, and a step as torch.profiler names it. Recording slows every
    operation down. Raises OSError where the folder can't be made.
    """

    folder: str | Path
    name = "profile"
    flag = {
        "name": "--profile",
        "metavar": "DIR",
        "help": "record a torch.profiler trace of each rank in the folder DIR",
    }

    def check(self, job: Job) -> Job:
        """Make the folder."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        return job

    def listen(self, rank: Rank) -> Listener:
        return _Tracing(Path(self.folder).resolve() / TRACE.format(rank.context.rank), rank)

    def finish(self, job: Job, reports: Sequence[str]) -> tuple[str, ...]:
        return tuple(reports)

    def lines(self, found: Sequence[str]) -> Sequence[str]:
        return [f"traces          {Path(found[0]).parent}: pplab explain reads them"]


class _Tracing(Listener):
    events = frozenset(("steps", "step", "item", "call"))

    def __init__(self, path: Path, rank: Rank):
        self.path, self.rank, self.on, self.steps = path, rank, False, 0
        self.open: list[record_function] = []
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (
            rank.context.device.type == "cuda"
        )
        self.profiler = profile(activities=activities, profile_memory=True)

    def begin(self, event: str, what: Action | Overlap | None) -> None:
        if event == "steps":
            self.profiler.__enter__()
            self.on = True
        elif self.on:
            self.steps += event == "step"
            name = f"ProfilerStep#{self.steps}" if event == "step" else f"pplab:{what}"
            self.open.append(record_function(name))
            self.open[-1].__enter__()

    def end(self, event: str, what: Action | Overlap | None) -> None:
        if event == "steps":
            self.on = False
            self.profiler.__exit__(None, None, None)
            self.profiler.export_chrome_trace(str(self.path))
        elif self.on:
            if event == "step":
                settle(self.rank.context.device)
            self.open.pop().__exit__(None, None, None)

    def report(self) -> str:
        return str(self.path)
