"""Let a run go on from a checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ...runtime import Batch, Extra, Job, Listener, Run, Workload
from .checkpoint import Checkpoint, rates
from .saving import Save, newest


@dataclass(frozen=True)
class Resume(Extra):
    """Go on from a checkpoint on any number of ranks: with its weights, its optimizer's state, and
    the next batch.

    `path` is a file, a folder of checkpoints (its last whole one is used), or a Run that saved. The
    Run's `extras["resumed"]` lists what has changed: damaged files that were skipped, and learning
    rates that differ.
    """

    path: str | os.PathLike | Run
    name = "resumed"
    flag = {
        "name": "--resume",
        "metavar": "PLACE",
        "help": "go on from a checkpoint, or from the last one in a folder, with any number of "
        "ranks",
    }

    def __post_init__(self) -> None:
        if isinstance(self.path, Run):
            if "saved" not in self.path.extras:
                raise ValueError(
                    "that run didn't save: give it lab.Save(path), then lab.Resume(run) goes on "
                    "from it"
                )
            object.__setattr__(self, "path", self.path.extras["saved"])

    def check(self, job: Job) -> Job:
        """Raise FileNotFoundError or CheckpointError if there is no checkpoint to go on from, and
        ValueError if this run would save without the optimizer's state.
        """
        checkpoint, wrong = (
            newest(self.path) if Path(self.path).is_dir() else (Checkpoint.open(self.path), [])
        )
        checkpoint.check_fits(job.workload)
        saves = [extra.path for extra in job.extras if isinstance(extra, Save)]
        if saves and job.options.optimizer is None and checkpoint.optimizer is not None:
            raise ValueError(
                f"{checkpoint.path} holds the state of {checkpoint.optimizer}, which would be lost "
                f"in {saves[0]}, since this run has no optimizer: resume with "
                f"{checkpoint.optimizer}, or don't save"
            )
        passed = tuple(f"passed over: {each}" for each in wrong)
        if passed:
            warnings.warn(f"going on from {checkpoint.path}; {'; '.join(passed)}", stacklevel=2)
        resumed: Any = Resumed(job.workload, checkpoint, passed)
        return replace(job, workload=resumed, first_step=checkpoint.step)

    def listen(self, rank: Any) -> Listener | None:
        """Give this rank's optimizer its state. The stages already have their weights."""
        if rank.optimizer is None:
            return None
        rank.job.workload.checkpoint.load_optimizer(rank.optimizer, rank.names)
        return _Comparing(rank)

    def finish(self, job: Any, reports: Sequence[str | None]) -> tuple[str, ...] | None:
        return (*job.workload.passed, *sorted({report for report in reports if report})) or None

    def lines(self, found: tuple[str, ...]) -> list[str]:
        return [f"resumed          {each}" for each in found]


class _Comparing(Listener):
    """Compares learning rates with the saved ones, once everything that sets them is there."""

    events = frozenset(("steps",))

    def __init__(self, rank: Any):
        self.rank, self.said = rank, None

    def begin(self, event: str, what: object) -> None:
        saved, ours = self.rank.job.workload.checkpoint.rates, rates(self.rank.optimizer)
        if saved and not set(ours) <= set(saved):
            step, both = (
                self.rank.job.first_step,
                [", ".join(f"{rate:g}" for rate in each) for each in (ours, saved)],
            )
            self.said = (
                f"learning rate after step {step}: {both[0]} here, {both[1]} in the run that was "
                "saved"
            )

    def report(self) -> str | None:
        return self.said


@Workload.register
class Resumed:
    """A workload that goes on from a checkpoint, with its weights and its next batch. Everything
    else is the original workload's.
    """

    def __init__(self, workload: Workload, checkpoint: Checkpoint, passed: tuple[str, ...] = ()):
        self.workload, self.checkpoint, self.passed = workload, checkpoint, passed

    def __getattr__(self, name: str) -> Any:
        # not there yet: an instance is being unpickled
        if name == "workload" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.workload, name)

    def build_stage(self, stage: int, num_stages: int) -> nn.Module:
        """Build one stage with its weights from the checkpoint."""
        return self.checkpoint.load(self.workload.build_stage(stage, num_stages))

    def skeleton(self) -> nn.Module:
        """Build the whole model without the weights of the checkpoint."""
        return getattr(self.workload, "skeleton", self.workload.build_whole)()

    def build_whole(self) -> nn.Module:
        """Build the whole model with the weights of the checkpoint."""
        return self.checkpoint.load(self.workload.build_whole())

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from the checkpoint's."""
        return self.workload.batch(self.checkpoint.step + step)
