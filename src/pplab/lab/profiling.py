"""A rank's steps under `torch.profiler`, with spans that name what the schedule does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from ..actions import Action, F, Kind, Overlap, parts
from .profiles import RankProfile, summarise

NAMES = {Kind.F: "pp.forward", Kind.B: "pp.backward", Kind.I: "pp.backward_input", Kind.W: "pp.backward_weight"}


class NoSpans:
    """Nothing is recorded."""

    def action(self, item: Action | Overlap) -> AbstractContextManager:
        """Around an action of the schedule."""
        return nullcontext()

    def named(self, name: str) -> AbstractContextManager:
        """Around something else."""
        return nullcontext()


class Spans(NoSpans):
    """The spans of one rank: each of its row's actions inside the phase that it belongs to.

    The warm-up ends where the first backward starts, and the drain starts after the last forward.
    """

    def __init__(self, row: Sequence[Action | Overlap]):
        kinds = [{action.kind for action in parts(item)} for item in row]
        self.first_backward = next((i for i, found in enumerate(kinds) if found != {F}), len(row))
        self.last_forward = max((i for i, found in enumerate(kinds) if F in found), default=-1)
        self.position, self.length = 0, len(row)
        self.phase: ExitStack | None = None

    @contextmanager
    def action(self, item: Action | Overlap) -> Iterator[None]:
        """Around an action; actions come in the order of the row."""
        at = self.position % self.length
        self.position += 1
        if at in (0, self.first_backward, self.last_forward + 1):
            self._enter("warmup" if at < self.first_backward else "steady" if at <= self.last_forward else "drain")
        with record_function("pp.overlap" if isinstance(item, Overlap) else NAMES[item.kind]):
            yield
        if at == self.length - 1:
            self._enter(None)

    def named(self, name: str) -> AbstractContextManager:
        """A span of that name."""
        return record_function(name)

    def _enter(self, phase: str | None) -> None:
        if self.phase is not None:
            self.phase.close()
        self.phase = None
        if phase is not None:
            self.phase = ExitStack()
            self.phase.enter_context(record_function(f"pp.{phase}"))


class Recording:
    """Records what runs inside it into rank<r>.json.gz in `folder`, then knows its summary. Without one: nothing."""

    def __init__(
        self,
        folder: str | None,
        rank: int,
        row: Sequence[Action | Overlap],
        device: torch.device,
        modules: Iterable[nn.Module],
    ):
        self.path = None if folder is None else Path(folder) / f"rank{rank}.json.gz"
        self.rank, self.device, self.modules = rank, device, list(modules)
        self.spans = NoSpans()
        self.summary: RankProfile | None = None
        if self.path is not None:
            self.spans = Spans(row)
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
            self.profiler = profile(activities=activities, profile_memory=True)

    def __enter__(self) -> Recording:
        if self.path is not None:
            tensors = [t for module in self.modules for t in (*module.parameters(), *module.buffers())]
            self.resident = sum({t.data_ptr(): t.nbytes for t in tensors}.values())
            self.profiler.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.path is None:
            return
        self.profiler.__exit__(*error)
        if error[0] is None:
            self.profiler.export_chrome_trace(str(self.path))
            self.summary = summarise(self.path, self.rank, resident_bytes=self.resident)
