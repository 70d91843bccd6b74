"""Write a log of a run, one line of JSON per step, while it runs."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...runtime import Extra, Job, Listener, Rank, cuda, naming
from ..checkpoints import check_place
from .numbers import Heard, Hearing, merged


@dataclass(frozen=True)
class Log(Extra):
    """Add a line of JSON to a file after every measured step, so that others can read it at once.

    - `step`: counted from the first run's.
    - `loss`: null if it isn't finite.
    - `learning_rate`: of the optimizer's first group.
    - `tokens_per_second`: includes loading (samples, where inputs aren't whole numbers).
    - `memory_bytes`: of every rank. On a GPU it is the allocator's peak, and on the CPU what the
      process has in memory.
    - what layers of any stage `lab.say`: a list by name, layer by layer.

    If the file has lines, new ones follow them. If a run was killed and went on from a checkpoint,
    a step that was done twice has two lines, and the last one counts. On several hosts, rank 0's
    host has the file.
    """

    path: str | os.PathLike
    name = "log"
    flag = {
        "name": "--log",
        "metavar": "FILE",
        "help": "add a line of JSON to FILE after every step",
    }

    def __post_init__(self) -> None:
        # ranks may be in another folder
        object.__setattr__(self, "path", str(Path(self.path).resolve()))

    def check(self, job: Job) -> Job:
        """Raise ValueError where no file can be written."""
        check_place(self.path)
        return job

    def listen(self, rank: Rank) -> Listener:
        return _Logging(rank, self.path)


class _Logging(Hearing):
    events = Hearing.events | {"row", "optimizer"}

    def __init__(self, rank: Rank, path: str | os.PathLike):
        super().__init__(rank)
        self.path, self.rate = Path(path), 0.0

    def begin(self, event: str, what: Any) -> None:
        """Note when a step begins, what it computes on, and its learning rate."""
        super().begin(event, what)
        if event == "turn":
            self.start = time.perf_counter()
        elif event == "row":
            inputs = [each.inputs[0] for each in what]
            ids = not inputs[0].is_floating_point()
            self.what = "tokens" if ids else "samples"
            self.count = sum(each.numel() if ids else len(each) for each in inputs)
        elif event == "optimizer":
            self.rate = self.rank.optimizer.param_groups[0]["lr"]

    def end(self, event: str, what: Any) -> None:
        """Between two steps: add up the ranks' parts of the loss, and write."""
        super().end(event, what)
        if event != "turn":
            return
        speed, rank, context = (
            self.count / (time.perf_counter() - self.start),
            self.rank,
            self.rank.context,
        )
        # each rank writes its own column
        told = torch.zeros(3, context.num_ranks, dtype=torch.float64)
        told[:, context.rank] = torch.tensor(
            [what[-1], float(self.rate), _memory(context.device)], dtype=told.dtype
        )
        context.watch("adding up the log", True)
        with naming("adding up the log"):
            dist.all_reduce(told)
            heard: list[Heard] = [[] for _ in range(context.num_ranks)]
            # of all ranks, whether they have numbers or none
            dist.all_gather_object(heard, self.steps.pop())
        losses, rates, memory = told.tolist()
        loss = sum(losses) if isfinite(sum(losses)) else None  # JSON has no NaN
        said = {"step": rank.job.first_step + len(what), "loss": loss, "learning_rate": max(rates)}
        said |= {f"{self.what}_per_second": speed, "memory_bytes": [*map(int, memory)]}
        said |= {name: [*values] for name, values in merged(heard).items()}
        if context.rank == 0:
            with self.path.open("a") as file:
                file.write(json.dumps(said) + "\n")


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return cuda.max_memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
