"""`pplab choose`: find out how to divide a model and a batch among the GPUs of a cluster."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping

from ..planning import (
    GPUS,
    WRITERS,
    Choice,
    ExpertLayers,
    Machine,
    Model,
    Transformer,
    choose,
    flags,
    machine_of,
    read_config,
)
from .cli import JSON, Command, Flag, flag, write

_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2**20, "GiB": 2**30}
_SPEEDS = {f"{unit}/s": size for unit, size in _BYTES.items()} | {
    "Mb/s": 1e6 / 8,
    "Gb/s": 1e9 / 8,
    "Tb/s": 1e12 / 8,
}
_FLOPS = {"TFLOP/s": 1e12, "PFLOP/s": 1e15}
# of a model that is given by numbers
_NUMBERS = "layers, width, heads, kv_heads, head_width, mlp, vocabulary"
_BY_NUMBERS = (
    f"numbers with these names: {_NUMBERS}, and true or false for gated and tied, such as "
    "layers=32,width=4096,heads=32,gated=true"
)
_IN_FULL = {"layers": "num_layers", "mlp": "mlp_width"}  # what `Transformer` calls them
_DEGREES = {
    "tp": "degrees of tensor parallelism to try, one or several (default: 1,2,4,8)",
    "cp": "degrees of context parallelism to try, one or several (default: 1, and from 8,192 "
    "tokens on 1,2,4)",
    "ep": "degrees of expert parallelism to try, one or several (default: all that divide the "
    "experts)",
    "dp": "degrees of data parallelism to try, one or several (default: all)",
    "microbatch": "numbers of sequences in a microbatch to try, one or several (default: 1)",
}


def _amount(units: Mapping[str, float], example: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        match = re.fullmatch(r"(?=.*[1-9])(\d+\.?\d*)\s*([A-Za-z/]+)", text)
        if not match or match[2] not in units:
            raise argparse.ArgumentTypeError(
                f"{text!r} has no unit that is known here, or nothing before it: expected a number "
                "above 0 with one of "
                f"{', '.join(units)}, such as {example}"
            )
        return float(match[1]) * units[match[2]]

    return read


def _degrees(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected one number, or several, such as 4,8"
        ) from None


def model_of(text: str, sequence: int) -> tuple[Transformer | Model, ExpertLayers | None]:
    """The model that the words describe, as numbers with names or as `read_config` takes it. Raises
    ValueError for anything else.
    """
    if "=" not in text:
        return read_config(text, sequence)
    shape = {}
    for pair in text.replace(" ", "").split(","):
        if not re.fullmatch(
            rf"({_NUMBERS.replace(', ', '|')})=\d+|(gated|tied)=(true|false|1|0)", pair
        ):
            raise ValueError(f"{pair} isn't a number of a model: expected {_BY_NUMBERS}")
        name, _, value = pair.partition("=")
        if _IN_FULL.get(name, name) in shape:
            raise ValueError(f"{name} is given twice: give it once, got {text}")
        shape[_IN_FULL.get(name, name)] = int({"true": 1, "false": 0}.get(value, value))
    if lacking := {"num_layers", "width"} - shape.keys():
        raise ValueError(
            f"a model by numbers needs {' and '.join(sorted(lacking)).replace('num_', '')}, got "
            f"{text}"
        )
    return Transformer(sequence=sequence, **shape), None


def _choose(given: argparse.Namespace) -> None:
    model, experts = model_of(given.model, given.sequence)
    names = "gpu per_node between inside memory flops ring ports precision".split()
    host = 8.8e-3 if experts and not given.flops else None
    if given.host is not None:
        host = given.host / 1e3
    machine = machine_of(host=host, **{name: getattr(given, name) for name in names})
    asked = {name: value for name in _DEGREES if (value := getattr(given, name)) is not None}
    found = choose(model, machine, given.gpus, given.batch, experts=experts, **asked)
    assumed = _assumed(model.long(experts), machine)
    told = [_told(found, given.flags)] if given.flags and found.equal else []
    write(given, {"assumed": assumed} | found.to_dict(), [assumed, found, *told])


def _assumed(model: Model, machine: Machine) -> str:
    """The source of the table's numbers, which you gave or which a name stands for."""
    slow = machine.flops / machine.slower
    counted = f", {model.counted}\n" if model.counted else "; "
    return (
        f"{model.parameters / 1e9:.4g} billion parameters{counted}a GPU reaches "
        f"{machine.flops / 1e12:.4g} TFLOP/s and has "
        f"{machine.memory / 1e9:.4g} GB for what is counted\n"
        f"a GPU sends {machine.inside.bandwidth / 1e9:.4g} GB/s inside a box of "
        f"{machine.ranks_per_node}, in a ring {machine.ring / 1e9:.4g}, and "
        f"{machine.between.bandwidth / 1e9:.4g} between boxes; ports of a box: {machine.ports}"
        + f"; the host needs {1e3 * machine.host:g} ms a layer" * (machine.host > 0)
        + f"\nattention's products, scans and the head reach {slow / 1e12:.4g} TFLOP/s"
        * (slow < machine.flops)
    )


def _told(found: Choice, framework: str) -> str:
    """What to paste for the first row that can't be told apart from the fastest and that the
    framework runs, and why it doesn't run the first.
    """
    why = ""
    for row in found.equal:
        try:
            return f"\n# {', '.join(row.cells[:2])}{why}\n{flags(row.plan, framework)}"
        except ValueError as error:
            why = why or f"; the first row isn't run: {error}"
    return f"{framework} can run none of the listed rows that can't be told apart{why}"


def _flags() -> tuple[Flag, ...]:
    speed = dict(type=_amount(_SPEEDS, "450GB/s; 400Gb/s are bits"), metavar="SPEED")
    needed = dict(type=int, required=True)
    return (
        flag(
            "model",
            "a Hugging Face config.json, the folder with it, OWNER/NAME on the hub, or "
            f"{_BY_NUMBERS}",
        ),
        flag("--gpus", "number of GPUs in the cluster", **needed),
        flag("--gpu", f"kind of GPU: {', '.join(GPUS)}", required=True, metavar="NAME"),
        flag("--per-node", "number of GPUs in a box", type=int, default=8),
        flag(
            "--between",
            "speed at which each GPU sends to another box, in one direction, such as 50GB/s",
            required=True,
            **speed,
        ),
        flag(
            "--inside",
            "speed at which each GPU sends to a different one in its box, in one direction, such "
            "as 450GB/s (default: from the GPU's data sheet)",
            **speed,
        ),
        flag(
            "--ring",
            "speed that each GPU of a box reaches when data goes around among all of them, such as "
            "367GB/s (default: as measured on H200)",
            **speed,
        ),
        flag("--ports", "number of a box's network ports (default: one for each GPU)", type=int),
        flag(
            "--memory",
            "memory that training may use on each GPU, such as 75GB (default: 0.9 of the GPU's)",
            type=_amount(_BYTES, "80GB"),
            metavar="SIZE",
        ),
        flag(
            "--flops",
            "speed at which each GPU computes in training, such as 400TFLOP/s (default: 0.4 of its "
            "peak)",
            type=_amount(_FLOPS, "400TFLOP/s"),
            metavar="SPEED",
        ),
        flag("--precision", "precision of matrix products: bf16 or fp8", default="bf16"),
        flag(
            "--host",
            "ms that the framework needs to launch a layer's forward and backward, such as 4.5 "
            "(default: not counted, but 8.8 for a mixture of experts without --flops, as in "
            "Megatron-LM without CUDA graphs)",
            type=float,
            metavar="MS",
        ),
        flag("--batch", "number of sequences in a step", **needed),
        flag("--sequence", "number of tokens in a sequence", **needed),
        *(flag(f"--{name}", says, type=_degrees, metavar="N,N") for name, says in _DEGREES.items()),
        flag(
            "--flags",
            f"also print what to paste for {', '.join(WRITERS)}: for the first layout that it runs",
            choices=tuple(WRITERS),
        ),
        JSON,
    )


_CLUSTER = "--gpus 64 --gpu h100 --between 50GB/s --batch 256 --sequence 4096"
COMMAND = Command(
    "choose",
    "choose a layout and a schedule for a cluster",
    _choose,
    _flags,
    "pplab choose MODEL --gpus N --gpu NAME --between SPEED --batch N --sequence N [options]",
    "Plan every way to divide a model and a batch among the GPUs of a cluster, and list the "
    "fastest ones, those that can't be told apart first. In the table V is the number of stages "
    "on each rank, M is the number of microbatches, and x is the number of sequences in each. "
    "For example, 2*4+5 means stages of 4, 4 and 5 layers, and '9 again' means that 9 of these "
    "run their forward twice. 'modules again' means modules of every layer, which --json and "
    "--flags name. You also see how many seconds a step takes, with the least and the most "
    "that it may take, and how many GB the fullest GPU holds. This needs neither PyTorch nor a "
    "GPU.",
    {
        "How do I divide a model with the shape of Llama 3 70B?": (
            f"pplab choose {_CLUSTER} \\\n"
            "      layers=80,width=8192,heads=64,kv_heads=8,mlp=28672,vocabulary=128256,gated=true"
        ),
        "And what do I type for Megatron-LM, if I have the model's config.json?": (
            f"pplab choose config.json --flags Megatron-LM \\\n      {_CLUSTER}"
        ),
    },
)
