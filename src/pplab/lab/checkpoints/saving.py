"""Checkpoints that a run writes: after its last step, every so many steps, and when it is
interrupted.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ...errors import accept, positive_int
from ...runtime import Extra, Job, Listener, Rank, Status, naming
from ..extras import own_stages
from .checkpoint import (
    Checkpoint,
    CheckpointError,
    Saved,
    check_place,
    check_room,
    collect,
    size_of,
    write,
)
from .interrupts import agree_to_stop, gently


class NotSaved(OSError):
    """A checkpoint couldn't be written after its run. The weights are still in memory, and `save`
    writes them to a different place.

    `cause` tells where it was tried, and why it failed.
    """

    def __init__(self, path: Path, why: Exception, arguments: tuple):
        self.path, self._arguments, self.cause = path, arguments, _failed(path, why)
        super().__init__(
            f"{self.cause}. The weights aren't lost: catch this error as `error`, make room or "
            "choose another place, "
            'and call error.save("another/place.safetensors")'
        )

    def save(self, path: str | os.PathLike) -> str:
        """Write the checkpoint to this place, and return its path. It may be the same place once
        there is room.
        """
        return write(path, *self._arguments)


@dataclass(frozen=True)
class Save(Extra):
    """Write weights and the optimizer's state to a file after the last step. An existing file is
    replaced only as a whole, so it may be the one that the run goes on from. Before the run, a file
    of the same size is made there and removed. If the place can't be written to at the end, the
    file goes into the working folder, the home folder or a temporary one. A warning and
    `run.extras["saved"]` then name it.

    With `every`, `path` is a folder, which is made if it doesn't exist. step-00000100.safetensors
    is written after step 100 and so on, and the last `keep` stay. Steps are counted from the first
    run's, across checkpoints. A checkpoint that fails during the run, for want of room or because
    of a NaN in it, doesn't end the run, which warns about it at its end. With several hosts, all
    must see the place.

    Such a run loses nothing when it is interrupted. The first Ctrl-C or SIGTERM lets the step end
    on all ranks, writes the checkpoint and raises KeyboardInterrupt, which names step and file. The
    second ends everything at once. A pool's ranks don't survive a SIGTERM of their own, so where
    every process of a job gets one, start the ranks by torchrun.

    Save into a folder that is yours alone, because anybody who may write to it may replace the
    file, or put a link in its place that is followed.
    """

    path: str | os.PathLike
    every: int | None = None
    keep: int = 2
    name = "saved"
    flag = {
        "name": "--save",
        "nargs": "+",
        "metavar": ("FILE", "N"),
        "help": "write a checkpoint to FILE after the last step. With a number N, FILE is a "
        "folder, which also gets a checkpoint after every N steps",
    }

    def __post_init__(self) -> None:
        # ranks may be in another folder
        object.__setattr__(self, "path", str(Path(self.path).resolve()))

    @classmethod
    def from_flag(cls, given: Sequence[str]) -> Save:
        """The extra for the flag's values: a place, and perhaps a number of steps. Raises
        ValueError for anything else.
        """
        if len(given) > 2 or not all(each.isdigit() for each in given[1:]):
            raise ValueError(
                f"--save needs a file, or a folder and a number of steps, got {' '.join(given)}"
            )
        return cls(given[0], *map(int, given[1:]))

    def check(self, job: Job) -> Job:
        """Raise ValueError for a place that can't be written to, and for a second one."""
        if sum(isinstance(extra, Save) for extra in job.extras) > 1:
            raise ValueError(
                "a run saves to one place: give one lab.Save, with every=... for a folder of "
                "checkpoints"
            )
        if self.every is not None:
            positive_int("every", self.every)
            positive_int("keep", self.keep)
            with suppress(OSError):  # the next line says where
                Path(self.path).mkdir(exist_ok=True)
        check_place(self.place(0))
        if os.environ.get("RANK", "0") == "0":  # of those that torchrun starts, one tries the place
            files = 1
            if self.every:
                files = (
                    min(self.keep, job.options.steps // self.every) + 1 - len(steps_in(self.path))
                )
            check_room(self.place(0), max(1, files) * size_of(job.workload, job.options.optimizer))
        return job

    def check_devices(self, job: Job, devices: Sequence[str], transport: str) -> None:
        """Raise ValueError for a folder that has checkpoints of later steps than the one at which
        this run begins, because they belong to a different run.
        """
        if self.every is None or max(steps_in(self.path), default=0) <= job.first_step:
            return
        with suppress(CheckpointError):  # those that are damaged will be replaced
            found, _ = newest(self.path)
            if found.step > job.first_step:
                raise ValueError(
                    f"{self.path} has a checkpoint of step {found.step}, and this run begins "
                    f"after step {job.first_step}: go on from it with lab.Resume({self.path!r}), "
                    "or save into a different folder"
                )

    @contextmanager
    def during(self, job: Job, statuses: Callable[[], Sequence[Status]]) -> Iterator[None]:
        """Let an interrupt wait until the checkpoint is written."""
        with gently(statuses) as came:
            yield
            if came:
                step = job.first_step + max(status.steps for status in statuses())
                place = vars(self).get("found_at", self.place(step))
                raise KeyboardInterrupt(
                    f"{came[0].name} after step {step}: saved in {place}; lab.Resume goes on from "
                    "there"
                )

    def listen(self, rank: Rank) -> Listener:
        return _Saving(rank, self)

    def finish(self, job: Job, reports: Sequence[_Report]) -> str:
        """Write the file, and return its path. If its place can't be written to, the file goes into
        the working folder, the home folder or a temporary one, and a warning names it. Raises
        NotSaved if it can't be written anywhere.
        """
        step = job.first_step + reports[0].steps
        arguments = [report.saved for report in reports], step, job.workload.name
        try:
            path = self.write(*arguments, job.first_step)
        except FloatingPointError as error:
            raise NotSaved(self.place(step), error, arguments) from error
        except (OSError, ValueError) as error:  # a disk is full, or a folder has gone
            if not (path := _elsewhere(self.place(step), arguments)):
                raise NotSaved(self.place(step), error, arguments) from error
            said = _failed(self.place(step), error)
            warnings.warn(
                f"{said}. The checkpoint after step {step} is in {path} instead", stacklevel=2
            )
        accept(self, found_at=path)  # no field: what a run was asked for stays the same
        if failed := reports[0].failed:
            warnings.warn(f"not saved on the way: {'; '.join(failed)}", stacklevel=2)
        return path

    def place(self, step: int) -> Path:
        """The path for the checkpoint of a step."""
        return Path(self.path, f"step-{step:08}.safetensors") if self.every else Path(self.path)

    def write(self, saved: Sequence[Saved], step: int, model: str, began: int) -> str:
        """Write a checkpoint, remove those older than the last `keep`, and return its path. The one
        that the run began from stays, because a comparison with one process reads it again. Raises
        FloatingPointError if training went wrong, so that no such checkpoint replaces a good one.
        """
        if any(tensor.isnan().any() for each in saved for tensor in each.parts.values()):
            raise FloatingPointError(
                "after this step there are NaNs among weights or the optimizer's state"
            )
        path, found = (
            write(self.place(step), saved, step, model),
            steps_in(self.path) if self.every else {},
        )
        for old in sorted(number for number in found if number <= step)[: -self.keep]:
            if old != began:
                found[old].unlink(missing_ok=True)
        return path


def _failed(path: Path, why: Exception) -> str:
    said = getattr(why, "strerror", None) or str(why)
    return said if str(path) in said else f"can't save to {path} ({said})"


def _elsewhere(place: Path, arguments: tuple) -> str | None:
    """Write a checkpoint to the first other place that takes it. Returns its path, or None if none
    does.
    """
    for folder in (os.getcwd, Path.home, tempfile.mkdtemp):
        with suppress(OSError, RuntimeError, ValueError):  # ValueError: nobody may write there
            path = Path(folder(), place.name)
            if not os.path.lexists(path):  # which belongs to somebody
                return write(path, *arguments)
    return None


@dataclass(frozen=True)
class _Report:
    saved: Saved
    steps: int  # of this run
    failed: tuple[str, ...]  # checkpoints on the way


class _Saving(Listener):
    events = frozenset(("turn",))

    def __init__(self, rank: Rank, save: Save):
        self.rank, self.save, self.steps, self.failed = rank, save, 0, []

    def end(self, event: str, losses: Sequence[float]) -> None:
        """Between two steps, stop if that was asked for, or save if it is time. After the last
        step, `report` saves.
        """
        context, job, self.steps = self.rank.context, self.rank.job, len(losses)
        if self.steps == job.options.steps:
            return
        self.rank.last = agree_to_stop(context)
        step = job.first_step + self.steps
        if self.rank.last or not self.save.every or step % self.save.every:
            return
        found = [None] * context.num_ranks if context.rank == 0 else None
        context.watch("collecting a checkpoint", True)
        with naming("collecting a checkpoint"):
            dist.gather_object(self.collect(), found)
        if found is not None:
            context.watch("writing a checkpoint")
            try:
                self.save.write(found, step, job.workload.name, job.first_step)
            except (OSError, ValueError, FloatingPointError) as error:
                self.failed.append(f"step {step} ({error})")

    def collect(self) -> Saved:
        """What this rank saves of the stages that it counts."""
        rank = self.rank
        own = own_stages(rank.context.rank, rank.job.schedule)
        return collect((rank.modules[stage] for stage in own), rank.optimizer, rank.names)

    def report(self) -> _Report:
        return _Report(self.collect(), self.steps, tuple(self.failed))


def steps_in(folder: str | os.PathLike) -> dict[int, Path]:
    """The checkpoints in a folder, by the steps in their names."""
    named = (
        (re.fullmatch(r"step-(\d+)\.safetensors", path.name), path)
        for path in Path(folder).glob("step-*")
    )
    return {int(match[1]): path for match, path in named if match and path.is_file()}


def newest(folder: str | os.PathLike) -> tuple[Checkpoint, list[str]]:
    """The last whole checkpoint in a folder, and what is wrong with those after it.

    Raises FileNotFoundError when there is none, and CheckpointError when all are damaged.
    """
    wrong: list[str] = []
    for _, path in sorted(steps_in(folder).items(), reverse=True):
        try:
            found = Checkpoint.open(path)
            found.check()
            return found, wrong
        except CheckpointError as error:
            wrong.append(str(error))
    if wrong:
        raise CheckpointError(f"no checkpoint in {folder} is whole: {'; '.join(wrong)}")
    how = f"save some with lab.Save({str(folder)!r}, every=100), or pplab train --save {folder} 100"
    raise FileNotFoundError(f"there is no checkpoint in {folder}: {how}")
