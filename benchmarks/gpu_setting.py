"""How much `make gpu` measures, how ranks can have a machine's devices, and what a part has measured so far."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pplab as pp
from pplab import lab
from pplab.lab import models
from pplab.lab.mps import Mps
from pplab.lab.one_gpu import SWITCH, OneGpuPool
from pplab.runtime import Pool

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    gpt: dict
    ranks: tuple[int, ...]
    schedules: tuple[str, ...]
    num_microbatches: int = 8
    steps: int = 5
    rounds: int = 5
    product: int = 4096  # rows and columns of the matrices that say how far ranks slow each other down
    tests: tuple[str, ...] = ()  # more arguments for pytest
    profile: dict = field(default_factory=dict)  # of the profile's DistilBERT: batch_size, length, checkpoint
    timeout_s: float = 300.0
    warm_ms: float = 500.0  # of steps before the measured ones: an idle GPU's clock takes so long to rise
    most_warm_up: int = 200  # steps, until two agree
    forward_ms: float = 5.0  # of a stage, in bf16: the batch is doubled until it takes so long


SIZES = {
    "full": Size(
        gpt={"num_layers": 12, "width": 768, "num_heads": 12, "context": 512, "batch_size": 32},
        ranks=(2, 4),
        schedules=tuple(builder.name for builder in pp.builders.ALL),
        profile={"batch_size": 32, "length": 128, "checkpoint": "auto", "source": "auto"},
    ),
    "small": Size(
        gpt={"num_layers": 4, "width": 16, "num_heads": 2, "context": 8, "batch_size": 4},
        ranks=(2,),
        schedules=("1F1B", "ZB-H1"),
        num_microbatches=4,
        steps=1,
        rounds=1,
        product=64,
        # What no other test has on the CPU: mixed precision under every schedule, memory that isn't there, and so on.
        tests=("-k", "2-turns and (bf16 or recomputing) or memory_that or test_whether"),
        profile={"batch_size": 8, "length": 16, "checkpoint": "small", "source": "sample"},
        timeout_s=60.0,
        most_warm_up=2,
        forward_ms=0.1,
    ),
}


LATE = "it would not end by the deadline"


class Late(Exception):
    """The deadline is there."""


def for_machine(size: Size, num_devices: int) -> Size:
    """The size with as many ranks as there are GPUs beside its own numbers, and two layers or more for each of them."""
    if num_devices in size.ranks:
        return size
    gpt = {**size.gpt, "num_layers": max(size.gpt["num_layers"], 2 * num_devices)}
    return replace(size, gpt=gpt, ranks=(*size.ranks, num_devices)) if num_devices > max(size.ranks) else size


class Part:
    """What one part has measured so far. It starts nothing that would not end by `deadline`, on the monotonic clock."""

    def __init__(self, name: str, left_out: list[dict], deadline: float | None = None):
        self.name, self.rows, self.errors, self.left_out = name, [], [], left_out
        self.names: list[str] = []  # of the rows that `attempt` has added
        self.deadline, self._longest = deadline, 0.0
        self._begun: dict[str, dict] = {}  # rows that needn't be measured again
        self.more: dict = {}  # of the part as a whole
        self.ran = False
        self.added: Callable[[], None] = lambda: None  # told of every row

    def leave_out(self, what: str, why: str) -> None:
        """Say that something isn't run, on the screen and in the file."""
        print(f"not run: {self.name}: {what}: {why}", flush=True)
        self.left_out.append({"what": f"{self.name}: {what}", "why": why})

    def attempt(self, what: str, measure: Callable[[], dict]) -> dict | None:
        """Add a row; when it fails say so, and let the part go on."""
        if row := self._begun.get(what):
            self._add(what, row)
            return row
        started = time.monotonic()
        if self.deadline is not None and started + self._longest > self.deadline:
            self.leave_out(what, LATE)
            return None
        self.ran = True
        try:
            row = measure()
        except Late as late:
            self.leave_out(what, str(late))
            return None
        except Exception as error:
            print(f"FAILED: {self.name}: {what}: {error}", flush=True)
            self.errors.append(f"{what}: {''.join(traceback.format_exception(error))[-4000:]}")
            return None
        self._longest = max(self._longest, time.monotonic() - started)
        self._add(what, row)
        return row

    def take(self, begun: dict) -> None:
        """Keep what an interrupted run has measured of this part, except for what came out wrong."""
        names, rows = begun.get("names", []), begun.get("rows", [])
        if len(names) == len(rows):  # not those of the tests
            self._begun = {name: row for name, row in zip(names, rows, strict=True) if not row.get("wrong")}

    def _add(self, what: str, row: dict) -> None:
        self.ran = True
        self.names.append(what)
        self.rows.append(row)
        for wrong in row.get("wrong", ()):
            print(f"FAILED: {self.name}: {what}: {wrong}", flush=True)
            self.errors.append(f"{what}: {wrong}")
        self.added()

    def to_dict(self, seconds: float) -> dict:
        """The part as the file has it."""
        state = "failed" if self.errors else "done" if self.ran else "not run"
        data = {"name": self.name, "state": state, "seconds": round(seconds, 1), **self.more}
        data |= {"names": self.names} if self.names else {}
        data["rows"] = self.rows
        return {**data, "error": "\n".join(self.errors)} if self.errors else data


@dataclass(frozen=True)
class Setting:
    """Where the parts run: the kind of device, how many there are, and how much to measure."""

    device: str
    num_devices: int  # GPUs, or on the CPU as many as ranks
    size: Size
    deadline: float | None = None  # on the monotonic clock

    def sharings(self, num_ranks: int, part: Part) -> Iterator[str]:
        """How `num_ranks` ranks can have the devices: the ways that this machine lacks are left out with a reason."""
        what = f"{num_ranks} ranks"
        if self.device == "cpu":
            part.leave_out(f"{what} on GPUs", "this is a trial of the command on the CPU")
            yield "cores"
        elif num_ranks <= self.num_devices:
            part.leave_out(f"{what} on a shared GPU", "every rank has a GPU; CUDA_VISIBLE_DEVICES=0 leaves one to all")
            yield "a GPU each"
        else:
            part.leave_out(f"{what} with a GPU each", f"the machine has {self.num_devices}")
            yield "turns"
            if os.environ.get(SWITCH) == "1":
                yield "nccl on one GPU"
            try:
                Mps().check([f"cuda:{rank % self.num_devices}" for rank in range(num_ranks)])
                yield "mps"
            except ValueError as error:
                part.leave_out(f"{what} sharing by MPS", str(error))

    def batch_size(self) -> int:
        """Sequences a step with which every stage's forward takes the size's time, on the most ranks."""
        num_ranks = max(self.size.ranks)
        schedule = pp.build("1F1B", num_ranks=num_ranks, num_microbatches=self.size.num_microbatches)
        sizes = {**self.size.gpt, "source": "sample"}
        first = sizes.pop("batch_size")
        with self.pool(num_ranks, "turns") as pool:  # or a GPU each
            make = partial(models.gpt, **sizes)
            found = lab.long_enough(pool, schedule, make, batch_size=first, least_ms=self.size.forward_ms)
        return found.batch_size

    def with_batch(self, batch_size: int | None) -> Setting:
        """The setting with this batch in its GPT, where there is one."""
        if batch_size is None:
            return self
        return replace(self, size=replace(self.size, gpt={**self.size.gpt, "batch_size": batch_size}))

    def pool(self, num_ranks: int, sharing: str) -> Pool:
        """A pool whose ranks have the devices in this way."""
        if sharing == "nccl on one GPU":
            return OneGpuPool(num_ranks, device=self.device, timeout_s=self.size.timeout_s)
        beside = Mps() if sharing == "mps" else None
        return Pool(num_ranks, device=self.device, beside=beside, timeout_s=self.size.timeout_s)
