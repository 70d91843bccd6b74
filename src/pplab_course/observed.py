"""Run a file that torchrun could start in several processes, and observe what it does instead of
what it prints.

Each process is a rank with the variables that torchrun would set. While the file runs, two calls
are watched: of the module that it names `stage` (a forward), and of autograd through that module's
output (a backward). So the order of forwards and backwards, how many forwards are held, and the
times are seen from outside. Afterwards the gradients of `stage` are compared with those of its
`model` on its `inputs` and `targets`, in one process.
"""

from __future__ import annotations

import faulthandler
import linecache
import math
import os
import pickle
import re
import runpy
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pplab.errors import positive_int
from pplab.schedule import Schedule
from pplab.timeline import Timeline

from .microbatches import Microbatches, seen
from .neighbours import neighbours_are_there

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch import Tensor, nn

UNGUARDED = 86  # what a rank exits with when it imports the script that starts ranks
NAMES = ("model", "stage", "inputs", "targets")  # that a file must have
GRACE_S = 2.0  # after a rank failed, for the others
WHY = "; and why, as simulated ranks tell it: "
START_S = 30.0  # for processes to start on a busy machine: only then does their own limit begin


@dataclass(frozen=True)
class Gradients:
    """A rank's gradients after the last step, against one process's."""

    of: int  # parameters that the model has
    trained: tuple[int, ...]  # which of them the rank has
    missing: int  # how many of them have no gradient
    error: float  # the largest difference, relative to the parameter's largest gradient
    scale: float  # by how much they are too large, if that is all that is wrong with them
    # sums of its inputs and targets: those of another rank, unless its batch isn't theirs
    batch: tuple[float, ...]
    # sums of the model's parameters: another rank's sums, but for the stages of the two
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """What one rank did."""

    # "F" or "B", the how manieth forward, start, end
    actions: tuple[tuple[str, int, float, float], ...] = ()
    gradients: Gradients | Any = None
    microbatches: Microbatches | None = None
    lacks: tuple[str, ...] = ()  # of NAMES
    # forwards whose input lies where that of another one is still held
    shared: tuple[tuple[int, int], ...] = ()
    error: str = ""  # the exception that ended it
    failed_at: float = 0.0
    place: str = ""  # where that was, or where the rank stood when its time was up
    ended: bool = False  # the file came to its end, or to an exception
    stuck: bool = False  # its time was up
    exitcode: int | None = None  # of the process, if it ended by itself
    printed: str = ""


@dataclass(frozen=True)
class Ran:
    """A run of a file on some ranks."""

    file: str
    num_microbatches: int
    limit_s: float  # infinite where time is simulated
    reports: tuple[Report, ...] = field(repr=False)
    why: str = ""  # why it hangs, as simulated ranks tell it

    @property
    def failure(self) -> str | Any:
        """What went wrong first, in words, or None."""
        silent = all(report.exitcode is None for report in self.reports)
        if silent or any(report.stuck for report in self.reports):
            stand = (
                f"rank {n} stands {r.place or 'somewhere else'}" for n, r in enumerate(self.reports)
            )
            limit = ", and never will" if self.limit_s == math.inf else f" after {self.limit_s:g} s"
            return f"it hasn't ended{limit}: {'; '.join(stand)}{WHY * bool(self.why)}{self.why}"
        for rank, report in enumerate(self.reports):
            if not report.ended and report.exitcode is not None:
                killed = report.exitcode < 0
                if report.exitcode == UNGUARDED:
                    return (
                        "the ranks import your script, which starts them: do that under `if "
                        '__name__ == "__main__":`'
                    )
                how = (
                    f"dies of {signal.Signals(-report.exitcode).name}"
                    if killed
                    else f"exits with {report.exitcode}"
                )
                return f"rank {rank} {how}\n{report.printed[-500:]}".strip()
        if failed := [(r.failed_at, n) for n, r in enumerate(self.reports) if r.error]:
            _, rank = min(failed)  # the others lost it
            return f"rank {rank} fails {self.reports[rank].place}: {self.reports[rank].error}"
        return None

    @property
    def num_steps(self) -> int:
        """How often all microbatches went forward."""
        return sum(kind == "F" for kind, *_ in self.reports[0].actions) // self.num_microbatches

    def timeline(self, step: int | None = None) -> Timeline:
        """The forwards and backwards of a step, in ms, by default of the fastest. Raises ValueError
        if the run failed.
        """
        if self.failure:
            raise ValueError(f"a run that failed has no timeline: {self.failure}")
        if step is None:
            return min(
                map(self.timeline, range(self.num_steps)), key=lambda timeline: timeline.makespan
            )
        each = 2 * self.num_microbatches
        rows = [report.actions[step * each : (step + 1) * each] for report in self.reports]
        begin = min(start for row in rows for _, _, start, _ in row)
        starts, ends = ([(a[at] - begin) * 1e3 for row in rows for a in row] for at in (2, 3))
        names = [
            [f"{rank}{kind}{m % self.num_microbatches}" for kind, m, *_ in row]
            for rank, row in enumerate(rows)
        ]
        return Timeline(Schedule(names, Path(self.file).stem), starts, ends, "ms", "measured")

    def __repr__(self) -> str:
        said = "".join(report.printed for report in self.reports)
        failure = re.sub(r"([:;.]) (?=rank|and why|Deadlock)", r"\1\n", self.failure or "").replace(
            ";\n", "\n"
        )
        return f"{said}{failure.replace(' > in', chr(10) + '  > in')}".rstrip()


def run(file: str | Path, ranks: int = 2, *, limit_s: float = 30.0, **settings: object) -> Ran:
    """Run the file on so many ranks, with settings such as `M=8` in its environment, for at most
    `limit_s` seconds.

    It is like `M=8 torchrun --standalone --nproc-per-node 2 FILE`, without the seconds in which
    every process imports torch. No process is left when this returns.
    """
    import multiprocessing as mp

    from pplab.runtime.processes import local_store

    if getattr(mp.current_process(), "_inheriting", False):
        # a rank that imports the script: the process that started it says what is wrong with it
        os._exit(UNGUARDED)
    path = located(file)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["pplab.preload", __name__])
    environment = {name: str(value) for name, value in settings.items()}
    codes: list[int | None] = []
    with tempfile.TemporaryDirectory() as folder:
        # its port closes with the last who holds it
        store = local_store(timedelta(seconds=START_S + limit_s))
        processes = []
        try:
            for rank in range(positive_int("ranks", ranks)):
                variables = _variables(rank, ranks, store.port) | environment
                arguments = str(path), Path(folder), rank, limit_s, variables
                process = context.Process(target=_be_rank, args=arguments, daemon=True)
                process.start()
                processes.append(process)
            codes = _wait_for(processes, limit_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
        reports = tuple(
            _collected(Path(folder), rank, str(path), code) for rank, code in enumerate(codes)
        )
    return Ran(path.name, int(settings.get("M", 1)), limit_s, reports)


def located(file: str | Path) -> Path:
    """The path of a file: here, or among the course's notebooks."""
    beside = Path(__file__).parents[2] / "notebooks" / file
    return Path(file).resolve() if Path(file).exists() or not beside.exists() else beside


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables that torchrun gives a rank, and one that hides GPUs, because the file's pace is
    slept and no GPU could make it faster.
    """
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # the store is there already
    agent = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    return {name: str(value) for name, value in (numbers | store | agent).items()} | {
        "CUDA_VISIBLE_DEVICES": ""
    }


def _wait_for(processes: list[BaseProcess], limit_s: float) -> list[int | None]:
    """The exit codes when all have ended. Once one has failed, the others have little time left."""
    until = time.monotonic() + START_S + limit_s
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        if any(process.exitcode for process in processes):
            until = min(until, time.monotonic() + GRACE_S)
        time.sleep(0.02)
    return [process.exitcode for process in processes]


def _collected(folder: Path, rank: int, path: str, exitcode: int | None) -> Report:
    """What a rank has left: a report, or where it stood when its time was up."""
    if exitcode == UNGUARDED:
        return Report(exitcode=exitcode)  # it didn't come to the file
    report, found = Report(), folder / f"{rank}.report"
    if found.exists():
        report = pickle.loads(found.read_bytes())
    stood = re.findall(
        rf'File "{re.escape(path)}", line (\d+) in (.*)', (folder / f"{rank}.stuck").read_text()
    )
    if stood and not report.ended:
        linecache.checkcache(path)  # since the last hang it may have been edited
        frames = [
            (name, int(line), linecache.getline(path, int(line))) for line, name in reversed(stood)
        ]
        report = replace(report, stuck=True, place=place(frames))
    printed = (folder / f"{rank}.log").read_text(errors="replace")
    return replace(report, printed=printed, exitcode=exitcode)


def place(frames: list[tuple[str, int, str]]) -> str:
    """Where in the file something happens: the last two calls, outer one first."""
    called = [frame for frame in frames if frame[0] != "<module>"] or frames
    places = (
        "in " + f"{name}, line {line}".removeprefix("<module>, ") for name, line, _ in called[-2:]
    )
    codes = (code.split("  #")[0].strip() for *_, code in called[-2:])
    return " > ".join(map("{}: {}".format, places, codes))


def _be_rank(
    path: str, folder: Path, rank: int, limit_s: float, environment: Mapping[str, str]
) -> None:
    """In its own process: run the file, and leave a report."""
    import torch

    # an interrupt is for the notebook, which ends its ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.dump_traceback_later(limit_s, exit=True, file=open(folder / f"{rank}.stuck", "w"))
    os.environ.update(environment)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    sys.argv = [path]
    actions: list[tuple[str, int, float, float]] = []
    shared: list[tuple[int, int]] = []
    report = Report(ended=True)
    try:
        with _watched(actions, shared), neighbours_are_there():
            names = runpy.run_path(path, run_name="__main__")
        report = replace(report, lacks=tuple(name for name in NAMES if name not in names))
        if not report.lacks:
            report = replace(report, gradients=compare(torch, *(names[name] for name in NAMES)))
            error, M = report.gradients.error, int(environment.get("M", 1))
            report = replace(report, microbatches=seen(torch, names, M, error))
    except BaseException as error:
        faulthandler.cancel_dump_traceback_later()
        frames = [
            (f.name, f.lineno, f.line)
            for f in traceback.extract_tb(error.__traceback__)
            if f.filename == path
        ]
        report = replace(
            report, error=said_of(error), place=place(frames), failed_at=time.monotonic()
        )
    (folder / f"{rank}.report").write_bytes(
        pickle.dumps(replace(report, actions=tuple(actions), shared=tuple(shared)))
    )
    sys.stdout.flush()
    os._exit(bool(report.error))


def said_of(error: BaseException) -> str:
    """An exception's name and the beginning of its message."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200, placeholder=' ...')}"


@contextmanager
def _watched(
    actions: list[tuple[str, int, float, float]], shared: list[tuple[int, int]]
) -> Iterator[None]:
    """Note the forwards of the module that the file names `stage`, and the backwards through their
    outputs.
    """
    import torch
    from torch import nn

    call, backward = nn.Module.__call__, torch.autograd.backward
    reached: list[int] = []
    lies: dict[int, int] = {}  # where the input of a forward is whose backward is to come

    def noted_call(module: nn.Module, *inputs: object, **options: object) -> object:
        if module is not vars(sys.modules["__main__"]).get("stage"):
            return call(module, *inputs, **options)
        start = time.perf_counter()
        output = call(module, *inputs, **options)
        number = sum(kind == "F" for kind, *_ in actions)
        actions.append(("F", number, start, time.perf_counter()))
        shared.extend(
            (other, number) for other, place in lies.items() if place == inputs[0].data_ptr()
        )
        lies[number] = inputs[0].data_ptr()
        if output.requires_grad:
            output.register_hook(lambda gradient: reached.append(number))
        return output

    def noted_backward(*tensors: object, **options: object) -> None:
        reached.clear()
        start = time.perf_counter()
        backward(*tensors, **options)
        end = time.perf_counter()
        for number in reached:
            lies.pop(number, None)
            actions.append(("B", number, start, end))

    nn.Module.__call__, torch.autograd.backward = noted_call, noted_backward
    try:
        yield
    finally:
        nn.Module.__call__, torch.autograd.backward = call, backward


def changed(found: list[Gradients]) -> list[int]:
    """The ranks whose weights differ from the copies that other ranks have of them."""
    others = [
        (rank, n, other) for rank, each in enumerate(found) for n in each.trained for other in found
    ]
    return sorted({rank for rank, n, other in others if found[rank].weights[n] != other.weights[n]})


def compare(
    torch: ModuleType, model: nn.Module, stage: nn.Module, inputs: Tensor, targets: Tensor
) -> Gradients:
    """Put the stage's gradients next to those of the whole model on the whole batch. `torch` may be
    the stand-in.
    """
    batch, weights = (
        tuple(tensor.double().sum().item() for tensor in some)
        for some in ((inputs, targets), model.parameters())
    )
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    truth = torch.autograd.grad(loss, list(model.parameters()))
    own = {id(parameter) for parameter in stage.parameters()}
    mine = [
        (n, p, g)
        for n, (p, g) in enumerate(zip(model.parameters(), truth, strict=True))
        if id(p) in own
    ]
    there = [(p.grad, g) for _, p, g in mine if p.grad is not None]
    error = max((((a - b).abs().max() / b.abs().max()).item() for a, b in there), default=0.0)
    scale = (
        sum((a * b).sum() for a, b in there) / sum((b * b).sum() for _, b in there)
        if there
        else torch.ones(())
    )
    rest = max(
        (((a - scale * b).abs().max() / a.abs().max()).item() for a, b in there), default=0.0
    )
    scale = scale.item() if rest < 1e-4 else 1.0
    return Gradients(
        len(truth), tuple(n for n, *_ in mine), len(mine) - len(there), error, scale, batch, weights
    )
