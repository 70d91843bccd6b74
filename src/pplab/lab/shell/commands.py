"""The commands that need torch or a trace: `pplab train` and `pplab explain`.

Loading this module doesn't load torch, because torch is imported where it is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from ...errors import number
from ...optional import bring
from ..forms import run_to_dict
from . import checking, choice, cli
from .cli import JSON, OUTPUT, SCHEDULE, Command, Flag, draw, flag, schedule_of, write

if TYPE_CHECKING:
    from ...runtime import Extra, Workload

# What has a flag of `pplab train`: a class whose `flag` has words of argparse's `add_argument`. Its
# object is made from the flag's value, by `from_flag` where it has that.
EXTRAS = [
    "pplab.lab.extras.clip:Clip",
    "pplab.lab.extras.log:Log",
    "pplab.lab.extras.learning_rate:LearningRate",
    "pplab.lab.checkpoints.saving:Save",
    "pplab.lab.checkpoints.resuming:Resume",
    "pplab.lab.measuring.profiling:Profile",
    "pplab.lab.against_torch.torch_engine:TorchEngine",
    "pplab.lab.extras.recompute:Recompute",
]


def option_flags() -> Iterator[Flag]:
    """A flag of `pplab train` for every option of a run, made from its name, its default and its
    help.
    """
    torch = bring("torch")
    from ...runtime import Options

    other = {  # where a shell has other words than Python
        "steps": {"default": 5, "help": "number of steps that train and are measured"},
        "warmup": {"help": "number of steps before the measured ones, which change no weight"},
        "check_gradients": {
            "help": "compare the first step's gradients with those of one process, and exit with 1 "
            "if they differ"
        },
        "optimizer": flag(
            "--learning-rate",
            "learning rate of the optimizer, AdamW",
            type=_adamw,
            metavar="R",
            default="0.001",
        ),
        "autocast": flag(
            "--bf16",
            "compute in bfloat16 where that is safe",
            action="store_const",
            const=torch.bfloat16,
        ),
    }
    for each in fields(Options):
        name, kind = f"--{each.name.replace('_', '-')}", type(each.default)
        usual = {"dest": each.name, "name": name, "default": each.default}
        taken = {"action": "store_true"} if kind is bool else {"type": kind}
        yield {**usual, **(taken if each.default is not None else {}), **other.get(each.name, {})}


def _adamw(rate: str) -> partial:
    """The function that makes AdamW, from a learning rate as text."""
    from torch.optim import AdamW

    try:
        return partial(AdamW, lr=number("a learning rate", float(rate)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{rate} is not a learning rate: expected a number from 0 on"
        ) from error


def _train_flags() -> Iterator[Flag]:
    yield from (*SCHEDULE, *WORKLOAD)  # which need no torch
    yield from option_flags()
    yield flag(
        "--replicas",
        "number of pipelines that train together, each with its own ranks",
        type=int,
        default=1,
        metavar="D",
    )
    yield flag("--explain", "print where the median step's time went", action="store_true")
    for path in EXTRAS:
        yield {"dest": path, **resolve_name(path).flag}
    yield from OUTPUT


def _train(given: argparse.Namespace) -> int:
    from ...runtime import Options, Pool
    from ..checkpoints import NotSaved, Save
    from ..schedules import replicate
    from .torchrun import is_torchrun, train_here

    options = {each.name: getattr(given, each.name) for each in fields(Options)}
    what = replicate(schedule_of(given), given.replicas), workload_of(given)
    extras = _extras(given)
    try:
        if not is_torchrun():
            with Pool(what[0].num_ranks, device=given.device) as pool:
                run = pool.train(*what, *extras, **options)
        elif (run := train_here(*what, *extras, device=given.device, **options)) is None:
            return 0  # another rank has the run
    except NotSaved as error:
        raise OSError(
            f"{error.cause}. This program ends now, and the weights are lost with it"
        ) from None
    found = None
    if (given.explain or given.json) and run.job.engine_name == "pplab":
        from ..measuring import where

        found = where(run.timeline)
    data = {**run_to_dict(run), "where": found and found.to_dict()}
    write(given, data, (run, *([found] if given.explain else [])))
    draw(given, run.timeline)
    wanted = (extra.path for extra in extras if isinstance(extra, Save))
    saved = all(Path(run.extras["saved"]).is_relative_to(place) for place in wanted)
    return 0 if saved and (run.gradients is None or run.gradients.equal) else 1


def _extras(given: argparse.Namespace) -> list[Extra]:
    """The extras that the flags EXTRAS ask for. Raises ValueError for extras that can't be
    combined.
    """
    from ..against_torch import TorchEngine
    from ..extras import Causes, Meter

    extras: list[Extra] = [Meter(), *([Causes()] if given.check_gradients else [])]
    for path in EXTRAS:
        kind, value = resolve_name(path), getattr(given, path)
        if value is None or value is False:
            continue
        make = getattr(kind, "from_flag", kind)
        asked = make() if value is True else make(value)
        if asked is not None:
            extras.append(asked)
    if given.explain and any(isinstance(extra, TorchEngine) for extra in extras):
        raise ValueError(
            "--explain needs --engine pplab: torch's runtime doesn't tell when a message was there"
        )
    return extras


def workload_of(given: argparse.Namespace) -> Workload:
    """The workload that the flags WORKLOAD ask for."""
    from .. import models

    sizes = {name: getattr(given, name) for name in SIZES if getattr(given, name) is not None}
    if sizes and given.model not in ("gpt", "mixture"):
        asked = ", ".join(SIZES[name] for name in sizes)
        raise ValueError(
            f"{asked}: gpt and mixture have these sizes to choose, {given.model} has its own"
        )
    if (width := sizes.get("width", 0)) > 4 * _HEAD and width % _HEAD == 0:
        sizes["num_heads"] = width // _HEAD
    return models.workload(given.model, batch_size=given.batch_size, source=given.source, **sizes)


def _explain(given: argparse.Namespace) -> None:
    from ..measuring import explain, explain_hang

    if given.schedule or given.csv:
        said = explain_hang(schedule_of(given), *given.traces)
        return write(given, {"hang": said.splitlines()}, [said])
    found = explain(*given.traces)
    if given.html:
        found.to_html(given.html)
    write(given, found.to_dict(), [found])


def _explain_flags() -> Iterator[Flag]:
    yield flag(
        "traces",
        "folder with the traces or dumps of all ranks, or the files",
        nargs="+",
        metavar="JOB",
    )
    yield from SCHEDULE
    yield flag(
        "--html",
        "write everything with charts to FILE, a page that needs no other file",
        metavar="FILE",
    )
    yield JSON


_HEAD = 64  # the width of an attention head of a wide model, which GPUs have fast kernels for
# of a model that is made here
SIZES = {"num_layers": "--layers", "width": "--width", "context": "--context"}
WORKLOAD = (
    flag(
        "--model",
        "model to train: gpt, mixture, distilbert, or a transformers checkpoint, as a folder or "
        "OWNER/NAME on the hub",
        default="gpt",
    ),
    flag(
        "--source",
        "reviews to train on: auto, hub, sample, or a folder of reviews with text and label",
        default="auto",
    ),
    flag("--data", "the same as --source", dest="source", default="auto", metavar="SOURCE"),
    flag("--device", "device that ranks compute on: auto, cpu or cuda", default="auto"),
    flag("--batch-size", "number of samples in a step", type=int, default=32),
    flag("--layers", "number of layers of gpt or mixture", dest="num_layers", type=int),
    flag("--width", "width of gpt or mixture. Above 256, attention heads are 64 wide", type=int),
    flag("--context", "number of bytes in a sequence of gpt or mixture", type=int),
)
COMMANDS = (
    choice.COMMAND,
    checking.COMMAND,
    Command(
        "train",
        "train a real model under a schedule",
        _train,
        _train_flags,
        "pplab train --schedule NAME --ranks P --microbatches M [options]\n       pplab train "
        "--csv FILE [options]",
        "Train a real model under a schedule, with one process per rank, and measure each step. It "
        "needs pip install 'pplab[run]', and runs on CPUs, too.",
        {
            "Train a small GPT, and compare its gradients with those of one process:": (
                "pplab train --schedule 1F1B --ranks 2 --microbatches 8 --check-gradients"
            ),
            "Where does a step's time go?": "pplab train --schedule 1F1B --ranks 2 --microbatches "
            "8 --explain",
            "Train overnight, with a checkpoint after every 100 steps:": (
                "pplab train --schedule 1F1B --ranks 2 --microbatches 8 --steps 10000 --save night "
                "100"
            ),
        },
    ),
    Command(
        "explain",
        "explain why the iterations of a recorded job take so long",
        _explain,
        _explain_flags,
        "pplab explain JOB [JOB ...] [options]",
        "Explain why the iterations of a recorded job take so long: which rank, stage or link is "
        "slow, which rank is late or pauses, and how long an iteration takes without each. It "
        "reads the traces that torch.profiler writes of PyTorch's pipelining, of all ranks and "
        "replicas. If a job hangs, give the dumps of NCCL's flight recorder and the schedule "
        "that ran.",
        {
            "What makes this job slow?": "pplab explain traces",
            "For what does each rank wait in a job that hangs?": (
                "pplab explain dumps --schedule 1F1B --ranks 4 --microbatches 8"
            ),
            "The same with a chart, as a page for a browser:": "pplab explain traces --html "
            "job.html",
        },
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with all its commands, and return the exit status."""
    return cli.main(arguments, more=COMMANDS)
