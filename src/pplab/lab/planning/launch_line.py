"""A launch line of Megatron-LM, read as what a plan is asked."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

from ...builders import build
from ...errors import expect
from ..streams import sends_in
from .expert_layers import ExpertLayers
from .layout import Layout
from .state import State
from .to_paste import read_layout

_ONE_UNLESS_SAID = """
nnodes tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size
"""
_NUMBERS = """
nproc-per-node num-layers micro-batch-size global-batch-size num-experts moe-router-topk recompute-num-layers
num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
"""
_WORDS = "pipeline-model-parallel-layout recompute-granularity recompute-method moe-token-dispatcher-type"
_SWITCHES = "use-distributed-optimizer use-tp-pp-dp-mapping overlap-moe-expert-parallel-comm grad-reduce-in-bf16"
# Flags of Megatron-LM that only look like those, and those that change a plan and aren't read
_ALIKE = """
--eval-global-batch-size --eval-micro-batch-size --moe-router-dtype --moe-router-group-topk --mtp-num-layers
--expert-tensor-parallel-size --sequence-parallel
"""
_UNREAD = ("--account-for", "--decoder-first", "--decoder-last", "--microbatch-group", "--use-megatron-fsdp")


class Launch(NamedTuple):
    """What a launch line asks for: `plan(model, machine, **launch.arguments)` predicts its step."""

    arguments: dict[str, Any]
    ignored: tuple[str, ...]  # the flags that a plan has nothing for


def read_launch(text: str, *, num_layers: int | None = None, gpus: int | None = None) -> Launch:
    """Read a launch line of Megatron-LM, torchrun's part included, as arguments of `plan`.

    `num_layers` and `gpus` are for a line that doesn't say them. What a plan has nothing for is ignored, whether it
    changes nothing, as a learning rate, or the step, as selective recomputation; and a plan has bfloat16 and sequence
    parallelism whether or not the line has. Flags are those of Megatron-LM d98e8a64. Raises ValueError for a flag that
    is nearly one of those that are read, for a value that is missing or isn't one, and for layers, GPUs, experts or a
    batch that don't divide.

    >>> line = "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --lr 1e-4"
    >>> line += " --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 32"
    >>> found = read_launch(line, num_layers=32)
    >>> found.arguments["layout"].dp, found.arguments["cut"], found.arguments["sends"], found.ignored
    (2, (8, 8, 8, 8), 'both wait', ('--lr',))
    """
    expect(str, text=text)
    said, ignored = _parsed(text)
    cut, layout, microbatch = _cut(said, num_layers), _layout(said, gpus), said.micro_batch_size
    batch = said.global_batch_size or microbatch * layout.dp
    if batch % (microbatch * layout.dp):
        raise ValueError(f"a batch of {batch} isn't whole microbatches of {microbatch} on {layout.dp} replicas")
    used, once = said.moe_router_topk or 2, said.moe_token_dispatcher_type == "flex"
    experts = said.num_experts and ExpertLayers(
        said.num_experts, used, said.expert_model_parallel_size, once_per_node=once
    )
    if experts:
        experts.groups(layout)  # refuses what Megatron-LM's parallel_state.py refuses
    arguments = {
        "layout": layout,
        "batch": batch,
        "microbatch": microbatch,
        "cut": cut,
        "recompute": _recomputed(said, cut),
        "state": State(2, 2 if said.grad_reduce_in_bf16 else 4),
        "shard_optimizer": said.use_distributed_optimizer,
        "experts": experts,
    }
    return Launch(arguments | _schedule(said, len(cut) // layout.pp, batch // (microbatch * layout.dp)), ignored)


class _Line(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(
            f"{message}: write what Megatron-LM is to get, in place of a variable; what a script passes, "
            """bash -c 'torchrun() { echo torchrun "$@"; }; . ./script.sh' prints"""
        )


def _parsed(text: str) -> tuple[Namespace, tuple[str, ...]]:
    """What is read, and the other flags."""
    parser = _Line(allow_abbrev=False, add_help=False)
    kinds = {"type": int, "default": 1}, {"type": int}, {}, {"action": "store_true"}
    for names, kind in zip((_ONE_UNLESS_SAID, _NUMBERS, _WORDS, _SWITCHES), kinds, strict=True):
        for name in names.split():
            parser.add_argument(f"--{name}", required=name == "micro-batch-size", **kind)
    lines = text.replace("\\\n", "\n").replace("--nproc_per_node", "--nproc-per-node")  # a comment ends with its line
    said, rest = parser.parse_known_args(shlex.split(lines, comments=True))
    others = tuple(word.partition("=")[0] for word in rest if word.startswith("--"))
    for flag in {*others} - {*_ALIKE.split()}:
        if flag.startswith(_UNREAD):
            raise ValueError(
                f"{flag} isn't read: say a cut by --pipeline-model-parallel-layout, the rest to lab.plan or fsdp_plan"
            )
        if near := get_close_matches(flag[2:].replace("-", "_"), vars(said), 1, 0.83):
            raise ValueError(f"unknown flag {flag}: did you mean --{near[0].replace('_', '-')}?")
    return said, others


def _layout(said: Namespace, gpus: int | None) -> Layout:
    """The layout, of as many replicas as there are GPUs for."""
    if gpus is None and said.nproc_per_node is None:
        raise ValueError("the line doesn't say --nproc-per-node: give gpus=")
    gpus = gpus or said.nnodes * said.nproc_per_node
    order = "tp-pp-dp" if said.use_tp_pp_dp_mapping else "tp-dp-pp"
    degrees = said.tensor_model_parallel_size, said.pipeline_model_parallel_size
    replica = Layout(*degrees, cp=said.context_parallel_size).num_ranks
    if gpus % replica:
        raise ValueError(f"{gpus} ranks don't divide into replicas of {replica}: change one of them")
    return Layout(*degrees, gpus // replica, order, said.context_parallel_size)


def _cut(said: Namespace, num_layers: int | None) -> tuple[int, ...]:
    """How many layers each stage has: by a layout string, or as many as any other."""
    text, pp, each = (
        said.pipeline_model_parallel_layout,
        said.pipeline_model_parallel_size,
        said.num_layers_per_virtual_pipeline_stage,
    )
    if bool(text) + bool(each) + bool(said.num_virtual_stages_per_pipeline_rank) > 1:
        raise ValueError("a line says its stages in one way: by a layout, by their layers, or by their number per rank")
    cut = read_layout(text) if text else ()
    layers = said.num_layers or num_layers or sum(cut)
    if not layers:
        raise ValueError("the line doesn't say --num-layers: give num_layers=")
    if not text:
        stages = layers // each if each else pp * (said.num_virtual_stages_per_pipeline_rank or 1)
        cut = (each or layers // stages,) * stages
    if sum(cut) != layers or len(cut) % pp:
        raise ValueError(f"{layers} layers can't be {cut} on {pp} ranks with as many stages each: change one of them")
    return cut


def _recomputed(said: Namespace, cut: tuple[int, ...]) -> bool | list[int]:
    """Of how many layers of each stage the forward runs again."""
    if said.recompute_granularity != "full":
        return False
    if said.recompute_method == "uniform":
        return [*cut]
    if said.recompute_method != "block" or said.recompute_num_layers is None:
        raise ValueError(
            "full recomputation is --recompute-method uniform, or block and --recompute-num-layers: add what lacks"
        )
    return [min(layers, said.recompute_num_layers) for layers in cut]


def _schedule(said: Namespace, stages: int, num_microbatches: int) -> dict[str, Any]:
    """The schedule, its options, and who waits for sends."""
    options = {"stages_per_rank": stages} if stages > 1 else {}
    paired = "paired-1F1B" if said.overlap_moe_expert_parallel_comm else "Interleaved1F1B"
    name, P = paired if options else "1F1B", said.pipeline_model_parallel_size
    rows = build(name, num_ranks=P, num_microbatches=num_microbatches, **options)
    return {"schedule": name, **options, "sends": sends_in("Megatron-LM", rows)}
