"""How much `make gpu` measures, how ranks can share a machine's devices, and what a part is and has measured so far."""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_mps import Mps

import pplab as pp
from pplab.runtime import Pool, RankError
from pplab.runtime.processes import Ranks

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    gpt: dict
    ranks: tuple[int, ...]
    schedules: tuple[str, ...]
    num_microbatches: int = 8
    steps: int = 5
    more_steps: int = 20  # over NCCL, after those that gradients are compared in
    rounds: int = 5
    widths: tuple[int, ...] = (768, 4096)  # of layers in one process
    tokens: tuple[int, ...] = tuple(2**n for n in range(10, 17))
    longest_ms: float = 200.0  # of their forward: with more tokens they aren't measured
    copy_bytes: int = 2**28
    on_one_gpu: tuple[int, ...] = (4, 8)  # ranks that share a GPU and send by NCCL all the same
    tests: tuple[str, ...] = ("2-mps", "4-mps", "4-turns", "2-turns", "1-turns", "not turns and not mps")  # pytest's -k
    chapters: tuple[str, ...] = ()  # the first two take a GPU where there is one
    timeout_s: float = 300.0
    warm_ms: float = 500.0  # of steps before the measured ones: an idle GPU's clock takes so long to rise
    most_warm_up: int = 200  # steps, until two agree
    forward_ms: float = 5.0  # of a stage, in bf16: the batch is doubled until it takes so long


SIZES = {
    "full": Size(
        gpt={"num_layers": 12, "width": 768, "num_heads": 12, "context": 512, "batch_size": 32},
        ranks=(2, 4),
        schedules=tuple(builder.name for builder in pp.builders.known()),
        chapters=("08_zero_bubble", "14_profile", "11_balance", "13_own_model"),
    ),
    "small": Size(
        gpt={"num_layers": 4, "width": 16, "num_heads": 2, "context": 8, "batch_size": 4},
        ranks=(2,),
        schedules=("1F1B", "ZB-H1"),
        num_microbatches=4,
        steps=1,
        more_steps=0,
        rounds=1,
        widths=(16,),
        tokens=(16, 32),
        copy_bytes=2**16,
        on_one_gpu=(2,),
        # What no other test has on the CPU: mixed precision under every schedule, memory that isn't there, and so on.
        tests=("2-turns and (bf16 or recomputing)", "memory_that or test_whether"),
        timeout_s=60.0,
        warm_ms=1.0,
        most_warm_up=2,
        forward_ms=0.1,
    ),
    "cores": Size(  # of a machine's processor, for `make bench`
        gpt={"num_layers": 16, "width": 128, "num_heads": 4, "context": 128, "batch_size": 32},
        ranks=(2, 4, 8),
        schedules=("GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
        steps=3,
        rounds=3,
        widths=(128, 256, 512),
        tokens=tuple(2**k for k in range(7, 12)),
        longest_ms=1000.0,
        copy_bytes=2**26,
    ),
}


LATE = "it would not end by the deadline"


class Late(BaseException):
    """The time is up. Code that catches Exception, to go on, doesn't catch this."""


def for_machine(size: Size, num_devices: int) -> Size:
    """The size, with as many ranks as there are GPUs in addition to its own numbers, and two layers or more for each of
    them."""
    if num_devices <= max(size.ranks):
        return size
    gpt = {**size.gpt, "num_layers": max(size.gpt["num_layers"], 2 * num_devices)}
    tests = (f"{num_devices}-turns", *size.tests)  # of whom none has to wait
    return replace(size, gpt=gpt, ranks=(*size.ranks, num_devices), tests=tests)


@dataclass(frozen=True)
class Piece:
    """A part of `make gpu`: what it runs, how many seconds it may take at first if there is a deadline (the rest gets
    its turn once every part had one), and the packages that it needs."""

    run: Callable[[Setting, Part], None]
    seconds: float
    needs: tuple[str, ...] = ()

    @property
    def says(self) -> str:
        """The subject of the part, in a line."""
        return self.run.__doc__.splitlines()[0]


def out_of_memory(error: Exception) -> bool:
    """Whether a rank failed because a GPU, or the host's shared memory, had no room."""
    said = ("OutOfMemory", "out of memory", "ALLOC_FAILED", "No space left")
    return isinstance(error, RankError) and any(words in error.cause for words in said)


def piece(seconds: float, *needs: str) -> Callable[[Callable], Piece]:
    """Make a Piece from a function, which takes the setting, and adds what it measured to its `Part`."""
    return lambda run: Piece(run, seconds, needs)


class Part:
    """What one part has measured so far. It starts nothing that wouldn't end by `deadline`, on the monotonic clock."""

    def __init__(self, name: str, left_out: list[dict], deadline: float | None = None):
        self.name, self.rows, self.errors, self.left_out = name, [], [], left_out
        self.names: list[str] = []  # of the rows
        self.deadline, self._longest = deadline, 0.0
        self.begun: dict[str, dict] = {}  # rows that needn't be measured again
        self.more: dict = {}  # of the part as a whole
        self.ran = False
        self.added: Callable[[], None] = lambda: None  # told of every row
        self.beside: Callable[[], dict] = dict  # what goes into every row that is measured: clocks, say

    def leave_out(self, what: str, why: str) -> None:
        """Note that something isn't run, on the screen and in the file."""
        print(f"not run: {self.name}: {what}: {why}", flush=True)
        self.left_out.append({"what": f"{self.name}: {what}", "why": why})

    def attempt(self, what: str, measure: Callable[[], dict]) -> dict | None:
        """Add a row. If it fails or finds no memory, note that and let the part go on. Raises Late if it wouldn't end
        in time."""
        if row := self.begun.get(what):
            self.add(what, row)
            return row
        started = time.monotonic()
        if self.deadline is not None and started + self._longest > self.deadline:
            raise Late(LATE)
        self.ran = True
        try:
            row = {**measure(), **self.beside()}
        except Exception as error:
            if out_of_memory(error):
                self.leave_out(what, f"no room: {str(error).splitlines()[0][:300]}")
                return None
            print(f"FAILED: {self.name}: {what}: {error}", flush=True)
            self.errors.append(f"{what}: {''.join(traceback.format_exception(error))[-4000:]}")
            return None
        self._longest = max(self._longest, time.monotonic() - started)
        self.add(what, row)
        return row

    def take(self, begun: dict) -> None:
        """Keep what was measured of this part before, except for what came out wrong."""
        rows = zip(begun.get("names", []), begun.get("rows", []), strict=False)
        self.begun = {name: row for name, row in rows if not row.get("wrong")}

    def add(self, what: str, row: dict) -> None:
        """Add a finished row."""
        self.ran = True
        self.names.append(what)
        self.rows.append(row)
        for wrong in row.get("wrong", ()):
            print(f"FAILED: {self.name}: {what}: {wrong}", flush=True)
            self.errors.append(f"{what}: {wrong}")
        self.added()

    def to_dict(self, seconds: float) -> dict:
        """The part as it is in the file, with the earlier rows that it hasn't come to."""
        rest = {name: row for name, row in self.begun.items() if name not in self.names}
        state = "failed" if self.errors else "done" if self.ran or rest else "not run"
        data = {"name": self.name, "state": state, "seconds": round(seconds, 1), **self.more}
        data |= {"names": [*self.names, *rest], "rows": [*self.rows, *rest.values()]}
        return {**data, "error": "\n".join(self.errors)} if self.errors else data


@dataclass(frozen=True)
class Setting:
    """Where the parts run: the kind of device, how many there are, and how much to measure."""

    device: str
    num_devices: int  # GPUs, or on the CPU cores, or in a trial as many as ranks
    size: Size
    deadline: float | None = None  # on the monotonic clock: nothing is measured any more
    end: float | None = None  # a little later: whatever still runs is ended

    def sharings(self, num_ranks: int, part: Part) -> Iterator[str]:
        """How `num_ranks` ranks can share the devices, with the most informative way first. Ways that this machine
        lacks are left out with a reason."""
        what = f"{num_ranks} ranks"
        if self.device == "cpu" and num_ranks > self.num_devices:
            part.leave_out(what, f"there are {self.num_devices} cores")
        elif self.device == "cpu":
            yield "cores"
        elif num_ranks <= self.num_devices:
            part.leave_out(f"{what} on a shared GPU", "every rank has a GPU; CUDA_VISIBLE_DEVICES=0 leaves one to all")
            yield "a GPU each"
        else:
            part.leave_out(f"{what} with a GPU each", f"the machine has {self.num_devices}")
            try:
                Mps().check([f"cuda:{rank % self.num_devices}" for rank in range(num_ranks)])
                yield "mps"
            except ValueError as error:
                part.leave_out(f"{what} sharing by MPS", str(error))
            yield "turns"

    def plainly(self, num_ranks: int) -> str:
        """The default way in which that many ranks share the devices."""
        return "cores" if self.device == "cpu" else "a GPU each" if num_ranks <= self.num_devices else "turns"

    def schedules(self, num_ranks: int, part: Part | None = None) -> list[pp.Schedule]:
        """The size's schedules on so many ranks. Those that can't be built are left out of the part with the reason."""
        found = []
        for name in self.size.schedules:
            try:
                found.append(pp.build(name, num_ranks=num_ranks, num_microbatches=self.size.num_microbatches))
            except ValueError as error:
                if part:
                    part.leave_out(f"{name} on {num_ranks} ranks", str(error))
        return found

    def with_batch(self, batch_size: int | None) -> Setting:
        """The setting with this batch in its GPT, where there is one."""
        if batch_size is None:
            return self
        return replace(self, size=replace(self.size, gpt={**self.size.gpt, "batch_size": batch_size}))

    def pool(self, num_ranks: int, sharing: str) -> Pool:
        """A pool whose ranks share the devices in this way."""
        beside = Mps() if sharing == "mps" else None
        threads = 1 if self.device == "cpu" else None  # a core each, however many there are
        return Pool(num_ranks, device=self.device, beside=beside, threads=threads, timeout_s=self.size.timeout_s)


def shared_memory() -> tuple[str, int]:
    """Where ranks share memory, and how many bytes are free there."""
    folder = str(Ranks().folder.parent)
    return folder, shutil.disk_usage(folder).free
