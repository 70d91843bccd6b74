"""`pplab choose`: a model, a cluster, a batch; out comes how to divide them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from contextlib import suppress

from ..planning import (
    GPUS,
    WRITERS,
    Choice,
    ExpertLayers,
    Transformer,
    choose,
    flags,
    machine_of,
    read_config,
)
from .cli import JSON, Command, Flag, write

_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2**20, "GiB": 2**30}
_SPEEDS = {f"{unit}/s": size for unit, size in _BYTES.items()} | {"Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8, "Tb/s": 1e12 / 8}
_FLOPS = {"TFLOP/s": 1e12, "PFLOP/s": 1e15}
_NUMBERS = {  # of a model that is given by numbers, and what they are called in `Transformer`
    "layers": "num_layers",
    "width": "width",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "head_width": "head_width",
    "mlp": "mlp_width",
    "gated": "gated",
    "vocabulary": "vocabulary",
}


def _amount(units: Mapping[str, float], example: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        match = re.fullmatch(r"(\d+\.?\d*)\s*([A-Za-z/]+)", text)
        if not match or match[2] not in units:
            raise argparse.ArgumentTypeError(
                f"{text!r} has no unit that is known here: expected a number with one of {', '.join(units)}, "
                f"such as {example}"
            )
        return float(match[1]) * units[match[2]]

    return read


def _degrees(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one number, or several, such as 4,8") from None


def model_of(text: str, sequence: int) -> tuple[Transformer, ExpertLayers | None]:
    """The model that the words describe: numbers with names, or what `read_config` reads. ValueError for others."""
    if "=" not in text:
        return read_config(text, sequence)
    given = dict(pair.partition("=")[::2] for pair in text.split(","))
    if strange := [name for name, value in given.items() if name not in _NUMBERS or not value.strip().isdigit()]:
        raise ValueError(
            f"{strange[0]}={given[strange[0]]} isn't a number of a model: expected whole numbers of "
            f"{', '.join(_NUMBERS)}, such as layers=32,width=4096,heads=32"
        )
    if lacking := {"layers", "width"} - given.keys():
        raise ValueError(f"a model by numbers needs {' and '.join(sorted(lacking))}, got {text}")
    return Transformer(sequence=sequence, **{_NUMBERS[name]: int(value) for name, value in given.items()}), None


def _choose(given: argparse.Namespace) -> None:
    model, experts = model_of(given.model, given.sequence)
    machine = machine_of(given.gpu, given.per_node, given.between, given.inside, given.memory, given.flops)
    names = ("tp", "cp", "ep", "dp", "microbatch")
    asked = {name: value for name in names if (value := getattr(given, name)) is not None}
    found = choose(model, machine, given.gpus, given.batch, experts=experts, **asked)
    write(given, found.to_dict(), [found, *([_told(found, given.flags)] if given.flags else [])])


def _told(found: Choice, framework: str) -> str:
    """What to paste for the first row that can't be told apart from the fastest and that the framework can run."""
    for row in found.equal:
        with suppress(ValueError):
            return f"\n# {', '.join(row.cells[:2])}\n{flags(row.plan, framework)}"
    return f"{framework} can run none of those that can't be told apart"


def _flags() -> tuple[Flag, ...]:
    numbers = f"layers=32,width=4096,heads=32 (also {', '.join([*_NUMBERS][3:])})"
    speed = dict(type=_amount(_SPEEDS, "450GB/s; 400Gb/s are bits"), metavar="SPEED")
    several = dict(type=_degrees, metavar="N,N")
    return (
        dict(name="model", metavar="MODEL", help=f"a Hugging Face config.json, its folder or its name; or {numbers}"),
        dict(name="--gpus", type=int, required=True, metavar="N", help="of the cluster"),
        dict(name="--gpu", required=True, metavar="NAME", help=", ".join(GPUS)),
        dict(name="--per-node", type=int, default=8, metavar="N", help="GPUs in a box"),
        dict(name="--between", required=True, help="of each GPU between boxes, one way, such as 50GB/s", **speed),
        dict(name="--inside", help="of each GPU in its box, one way, such as 450GB/s", **speed),
        dict(name="--memory", type=_amount(_BYTES, "80GB"), metavar="SIZE", help="of a GPU, for what is counted"),
        dict(name="--flops", type=_amount(_FLOPS, "400TFLOP/s"), metavar="SPEED", help="that a GPU reaches"),
        dict(name="--batch", type=int, required=True, metavar="N", help="sequences of a step"),
        dict(name="--sequence", type=int, required=True, metavar="N", help="tokens of a sequence"),
        dict(name="--tp", help="tensor parallelism, one degree or several (default 1,2,4,8)", **several),
        dict(name="--cp", help="context parallelism, likewise (default 1)", **several),
        dict(name="--ep", help="expert parallelism, likewise (default 1)", **several),
        dict(name="--dp", help="data parallelism, likewise (default: any)", **several),
        dict(name="--microbatch", help="sequences of a microbatch, likewise (default 1)", **several),
        dict(
            name="--flags",
            choices=tuple(WRITERS),
            help="what to tell it for the first that it can run",
        ),
        JSON,
    )


COMMAND = Command("choose", "which layout, cut and schedule for a model on a cluster", _choose, _flags)
