"""A launch line of Megatron-LM, read as what a plan is asked."""

from __future__ import annotations

import re
import shlex
import warnings
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

from ...errors import expect, positive_int, shown
from ..streams import sends_in
from .expert_layers import ExpertLayers
from .layout import Layout
from .megatron import MODULES, MOST, Line, check_line, uncounted
from .recomputing import Recompute
from .state import State

# What is read: the flag of each of a Line's numbers, words and switches
_ONE_UNLESS_SAID = """
nodes=nnodes tp=tensor-model-parallel-size pp=pipeline-model-parallel-size cp=context-parallel-size
ep=expert-model-parallel-size
"""
_NUMBERS = """
per_node=nproc-per-node layers=num-layers microbatch=micro-batch-size batch=global-batch-size
used=moe-router-topk again=recompute-num-layers depth=num-layers-per-virtual-pipeline-stage
heads=num-attention-heads virtual=num-virtual-stages-per-pipeline-rank
etp=expert-tensor-parallel-size kv_heads=num-query-groups first=decoder-first-pipeline-num-layers
last=decoder-last-pipeline-num-layers
"""
_FROM_ZERO = "experts=num-experts predicting=mtp-num-layers"
_WORDS = "layout=pipeline-model-parallel-layout frequency=moe-layer-freq"
_CHOICES = {
    "granularity=recompute-granularity": ("full", "selective"),
    "method=recompute-method": ("uniform", "block"),
    "dispatcher=moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "backend=moe-flex-dispatcher-backend": ("deepep", "hybridep", "ncclep"),
}
_SWITCHES = """
sharded=use-distributed-optimizer pp_before_dp=use-tp-pp-dp-mapping
paired=overlap-moe-expert-parallel-comm bf16_gradients=grad-reduce-in-bf16
embedding_counts=account-for-embedding-in-pipeline-split
loss_counts=account-for-loss-in-pipeline-split grouped=group-query-attention
waits_for_messages=no-overlap-p2p-communication deferred=defer-embedding-wgrad-compute
early_ramps=overlap-p2p-communication-warmup-flush one_product=moe-grouped-gemm
latent=multi-latent-attention
"""
# Flags of Megatron-LM that only look like those, and those that change a plan and aren't read
_ALIKE = """
--eval-global-batch-size --eval-micro-batch-size --moe-router-dtype --moe-router-group-topk
--sequence-parallel
"""
# a switch that a child of Megatron-LM's turns off
_OFF = re.compile(r"(?<!\S)--(\S+)\s+false\b", re.IGNORECASE)
_UNREAD = (
    "--microbatch-group",
    "--use-megatron-fsdp",
    "--use-torch-fsdp2",
    "--hybrid-",
    "--global-batch-size-",
    "--num-layers-in-",
)


class Launch(NamedTuple):
    """What a launch line asks for: `plan(model, machine, **launch.arguments)` predicts its step."""

    arguments: dict[str, Any]
    ignored: tuple[str, ...]  # the flags that a plan has nothing for
    uncounted: tuple[str, ...]  # what changes the step, and isn't in the plan


def read_launch(text: str, *, num_layers: int | None = None, gpus: int | None = None) -> Launch:
    """Read a launch line of Megatron-LM, torchrun's part included, as arguments of `plan`.

    `num_layers` and `gpus` are for a line that doesn't say them. Flags with underscores, as
    ms-swift has them, are read as Megatron-LM's, with ms-swift's defaults, such as whole experts.
    What a plan has nothing for is `ignored`. What changes the step and isn't counted, such as a
    predictor (MTP) or an empty stage, is `uncounted`, and a warning says it; a plan has bfloat16
    and sequence parallelism whether or not the line has. Flags are those of Megatron-LM d98e8a64.

    Raises ValueError for what Megatron-LM refuses, in its words and with what works; for a flag
    that is nearly one of those that are read, and for a value that is missing or isn't one.

    >>> line = "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --lr 1e-4"
    >>> line += " --tensor-model-parallel-size 2"
    >>> line += " --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 32"
    >>> found = read_launch(line, num_layers=32)
    >>> found.arguments["layout"].dp, found.arguments["cut"], found.arguments["sends"]
    (2, (8, 8, 8, 8), 'both wait')
    >>> found.ignored
    ('--lr',)
    """
    expect(str, text=text)
    said, ignored = line_of(text, num_layers, gpus)
    layout = Layout(
        said.tp, said.pp, said.dp, "tp-pp-dp" if said.pp_before_dp else "tp-dp-pp", said.cp
    )
    once, whole = said.dispatcher == "flex", said.tp > 1 and said.etp == 1
    name, options = "1F1B", {}
    if said.V > 1:
        name, options = (
            "paired-1F1B" if said.paired else "Interleaved1F1B",
            {"stages_per_rank": said.V},
        )
    arguments = {
        "layout": layout,
        "batch": said.batch,
        "microbatch": said.microbatch,
        "cut": said.cut,
        "recompute": _recomputed(said),
        "state": State(2, 2 if said.bf16_gradients else 4),
        "shard_optimizer": said.sharded,
        "experts": ExpertLayers(said.experts, said.used, said.ep, 0, once, whole)
        if said.experts
        else None,
        "schedule": name,
        **options,
        "sends": sends_in("Megatron-LM", name, said.pp, said.M),
    }
    for each in (found := tuple(uncounted(said))):
        warnings.warn(each, stacklevel=2)
    return Launch(arguments, ignored, found)


class Parser(ArgumentParser):
    """One that raises ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(
            f"{message}: write what is to be run, in place of a variable; what a script passes, "
            """bash -c 'torchrun() { echo torchrun "$@"; }; . ./script.sh' prints"""
        )


def count(least: int) -> Callable[[str], int]:
    """What reads a whole number from `least` on."""

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > 9 or not least <= int(text) <= MOST:
            raise ArgumentTypeError(
                f"expected a whole number from {least} to {MOST:,}, got {shown(text)}"
            )
        return int(text)

    return read


def line_of(text: str, num_layers: int | None, gpus: int | None) -> tuple[Line, tuple[str, ...]]:
    """What a line says, as Megatron-LM takes it, and the flags that aren't read."""
    if dotted := re.findall(
        r"(?:^|\s)[\w.]+\.(?:ppo_)?(\w+_(?:parallel|batch)_size)\w*=(\S+)", text
    ):
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in dotted)
        flags = flags.replace(
            "virtual-pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank"
        )
        raise ValueError(
            "these are fields of Megatron Bridge or verl: write them as Megatron-LM's flags, "
            f"{flags}"
        )
    parser = Parser(allow_abbrev=False, add_help=False)
    kinds = {
        _ONE_UNLESS_SAID: {"type": count(1), "default": 1},
        _NUMBERS: {"type": count(1)},
        _FROM_ZERO: {"type": count(0)},
        _WORDS: {},
        "modules=recompute-modules": {"nargs": "+", "default": ["core_attn"]},
        _SWITCHES: {"action": "store_true"},
    }
    kinds |= {names: {"choices": words} for names, words in _CHOICES.items()}
    known = {}
    for names, kind in kinds.items():
        for pair in names.split():
            dest, _, name = pair.partition("=")
            known[name] = parser.add_argument(
                f"--{name}", dest=dest, required=dest == "microbatch", **kind
            )
    # a comment ends with its line
    lines = _OFF.sub("", text.replace("\\\n", "\n"))
    words = [
        re.sub("_", "-", each) if each.startswith("--") else each
        for each in shlex.split(lines, comments=True)
    ]
    if len(words) > 4096:
        raise ValueError(f"a launch line has up to 4,096 words, got {len(words):,}")
    said, rest = parser.parse_known_args(words, Line())
    others = tuple(word.partition("=")[0] for word in rest if word.startswith("--"))
    for flag in {*others} - {*_ALIKE.split()}:
        if flag.startswith(_UNREAD):
            raise ValueError(
                f"{flag} isn't read: say to lab.plan or lab.fsdp_plan what it asks for"
            )
        if near := get_close_matches(flag[2:], known, 1, 0.83):
            raise ValueError(f"unknown flag {flag}: did you mean --{near[0]}?")
    if gpus is None and said.per_node is None:
        raise ValueError("the line doesn't say --nproc-per-node: give gpus=")
    said.gpus = positive_int("gpus", gpus or said.nodes * said.per_node)
    said.layers = said.layers or num_layers or sum(layers.count("t") for layers in said.drawn)
    if not said.layers:
        raise ValueError("the line doesn't say --num-layers: give num_layers=")
    said.layers = positive_int("num_layers", said.layers)
    if max(said.gpus, said.pp * said.V) > MOST:
        raise ValueError(f"up to {MOST:,} GPUs and stages are read: give fewer")
    said.batch = said.batch or said.each
    swift = "_model_parallel_size" in text  # its defaults
    said.etp, said.used = said.etp or (1 if swift else said.tp), said.used or 2
    off = _OFF.findall(text)
    said.one_product |= swift and "moe_grouped_gemm" not in off
    said.latent |= swift and "multi_latent_attention" not in off
    said.kv_heads = said.kv_heads if said.grouped else said.heads
    check_line(said)
    if said.experts and said.etp not in (1, said.tp):
        raise ValueError(
            f"experts over {said.etp} of {said.tp} tensor ranks aren't planned: take 1, or "
            f"{said.tp}"
        )
    return said, others


def _recomputed(said: Line) -> Recompute:
    """Of how many layers of each stage the forward runs again, or which modules of all."""
    if said.granularity != "full":
        asked = said.modules if said.granularity and not said.paired else ()
        return tuple(name for name in MODULES if name in asked) or False
    return [layers if said.method == "uniform" else min(layers, said.again) for layers in said.cut]
