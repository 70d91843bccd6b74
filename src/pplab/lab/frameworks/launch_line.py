"""A launch line of Megatron-LM, and its layout string, read as what a plan is asked."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, Namespace
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

from ...errors import expect, shown
from ..planning import ExpertLayers, Layout, State, dp_degree
from .to_paste import sends_interleaved

_ONE_UNLESS_SAID = """
nnodes tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size
num-virtual-stages-per-pipeline-rank
"""
_NUMBERS = """
nproc-per-node num-layers micro-batch-size global-batch-size num-experts moe-router-topk recompute-num-layers
num-layers-per-virtual-pipeline-stage
"""
_WORDS = "pipeline-model-parallel-layout recompute-granularity recompute-method moe-token-dispatcher-type"
_SWITCHES = """
use-distributed-optimizer use-tp-pp-dp-mapping overlap-moe-expert-parallel-comm grad-reduce-in-bf16 sequence-parallel
"""
# Flags of Megatron-LM that only look like those, and those that say a cut or groups in words that aren't read
_ALIKE = """
--eval-global-batch-size --eval-micro-batch-size --moe-router-dtype --moe-router-group-topk --mtp-num-layers
--expert-tensor-parallel-size
"""
_UNREAD = ("--account-for", "--decoder-first", "--decoder-last", "--microbatch-group")


def read_layout(text: str) -> tuple[int, ...]:
    """How many layers each stage has, in the order of stages: what `plan` takes as `cut`.

    In the text of `--pipeline-model-parallel-layout`, `E` is the embedding, `t` a layer, `m` a layer that predicts
    further tokens, which isn't counted, and `L` the loss. A bar ends a stage, `*` repeats a letter or a group in
    parentheses, and commas mean nothing. ValueError for what Megatron-LM's parser refuses, a group in a group among it.

    >>> read_layout("Et*3|(tt|)*2,m|L")
    (3, 2, 2, 0, 0)
    """
    expect(str, text=text)
    plain = re.sub(r"[,\s]", "", text)
    for repeated in (r"\(([^()]+)\)\*(\d+)", r"([EtmL|])\*(\d+)"):
        plain = re.sub(repeated, lambda found: found[1] * int(found[2]), plain)
    if not re.fullmatch(r"E[t|]*[m|]*L", plain):
        raise ValueError(
            "a layout is E, layers t, perhaps m, and L, with bars between stages, such as Et*3|(tt|)*29,m|L, and no "
            f"group stands in another: got {shown(text)}"
        )
    return tuple(stage.count("t") for stage in plain.split("|"))


class Launch(NamedTuple):
    """What a launch line asks for: `plan(model, machine, **launch.arguments)` predicts its step."""

    arguments: dict[str, Any]
    ignored: tuple[str, ...]  # the flags that a plan has nothing for


def read_launch(text: str, *, num_layers: int | None = None, gpus: int | None = None) -> Launch:
    """Read a launch line of Megatron-LM, torchrun's part included, as arguments of `plan`.

    `num_layers` and `gpus` are for a line that doesn't say them. What a plan has nothing for is ignored, whether it
    changes nothing, as a learning rate, or the step, as `--no-overlap-p2p-communication` or selective recomputation;
    and a plan has bfloat16 and sequence parallelism whether or not the line has. Raises ValueError for a flag that is
    nearly one of those that are read, for a value that is missing or isn't one, and for layers or GPUs that don't
    divide.

    >>> line = "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --lr 1e-4"
    >>> line += " --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 32"
    >>> found = read_launch(line, num_layers=32)
    >>> found.arguments["layout"].dp, found.arguments["cut"], found.arguments["sends"], found.ignored
    (2, (8, 8, 8, 8), 'both wait', ('--lr',))
    """
    expect(str, text=text)
    said, ignored = _parsed(text)
    cut = _cut(said, num_layers)
    if gpus is None and said.nproc_per_node:
        gpus = said.nnodes * said.nproc_per_node
    full = said.recompute_granularity == "full"
    needed = [gpus, said.micro_batch_size, *[said.recompute_method, said.recompute_num_layers] * full]
    if None in needed:
        raise ValueError(
            "a launch line says --nnodes and --nproc-per-node, or give gpus=; --micro-batch-size; and with full "
            "recomputation --recompute-method and --recompute-num-layers. This one lacks one of them"
        )
    tp, pp, cp = said.tensor_model_parallel_size, said.pipeline_model_parallel_size, said.context_parallel_size
    layout = Layout(tp, pp, dp_degree(gpus, tp * cp, pp), "tp-pp-dp" if said.use_tp_pp_dp_mapping else "tp-dp-pp", cp)
    batch = said.global_batch_size or said.micro_batch_size * layout.dp
    again = (
        [n if said.recompute_method == "uniform" else min(n, said.recompute_num_layers) for n in cut] if full else False
    )
    arguments = {
        "layout": layout,
        "batch": batch,
        "microbatch": said.micro_batch_size,
        "cut": cut,
        "recompute": again,
        "state": State(2, 2 if said.grad_reduce_in_bf16 else 4),
        "shard_optimizer": said.use_distributed_optimizer,
        "experts": said.num_experts
        and ExpertLayers(
            said.num_experts,
            said.moe_router_topk or 2,
            said.expert_model_parallel_size,
            once_per_node=said.moe_token_dispatcher_type == "flex",
        ),
    }
    return Launch(arguments | _schedule(said, len(cut) // pp, batch // (said.micro_batch_size * layout.dp)), ignored)


class _Line(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: write what Megatron-LM is to get, in place of a variable")


def _parsed(text: str) -> tuple[Namespace, tuple[str, ...]]:
    """What is read, and the other flags."""
    parser = _Line(allow_abbrev=False, add_help=False)
    kinds = {"type": int, "default": 1}, {"type": int}, {}, {"action": "store_true"}
    for names, kind in zip((_ONE_UNLESS_SAID, _NUMBERS, _WORDS, _SWITCHES), kinds, strict=True):
        for name in names.split():
            parser.add_argument(f"--{name}", **kind)
    one_line = text.replace("\\\n", " ").replace("--nproc_per_node", "--nproc-per-node")
    said, rest = parser.parse_known_args(shlex.split(one_line, comments=True))
    others = tuple(word.partition("=")[0] for word in rest if word.startswith("--"))
    for flag in {*others} - {*_ALIKE.split()}:
        if flag.startswith(_UNREAD):
            raise ValueError(f"{flag} isn't read: say a cut by --pipeline-model-parallel-layout, groups to lab.plan")
        if near := get_close_matches(flag[2:].replace("-", "_"), vars(said), 1, 0.83):
            raise ValueError(f"unknown flag {flag}: did you mean --{near[0].replace('_', '-')}?")
    return said, others


def _cut(said: Namespace, num_layers: int | None) -> tuple[int, ...]:
    """How many layers each stage has: by a layout string, or as many as any other."""
    layout, pp = said.pipeline_model_parallel_layout, said.pipeline_model_parallel_size
    cut, each = read_layout(layout) if layout else (), said.num_layers_per_virtual_pipeline_stage
    layers = said.num_layers or num_layers or sum(cut)
    if not layers:
        raise ValueError("the line doesn't say --num-layers: give num_layers=")
    if not layout:
        stages = pp * said.num_virtual_stages_per_pipeline_rank
        cut = (each,) * (layers // each) if each else (layers // stages,) * stages
    if sum(cut) != layers or len(cut) % pp:
        raise ValueError(f"{layers} layers can't be {cut} on {pp} ranks with as many stages each: change one of them")
    return cut


def _schedule(said: Namespace, stages: int, num_microbatches: int) -> dict[str, Any]:
    """The schedule, its options, and who waits for sends."""
    if stages == 1:
        return {"schedule": "1F1B", "sends": "both wait"}
    if said.overlap_moe_expert_parallel_comm:
        return {"schedule": "paired-1F1B", "stages_per_rank": stages}
    sends = sends_interleaved(said.pipeline_model_parallel_size, num_microbatches)
    return {"schedule": "Interleaved1F1B", "stages_per_rank": stages, "sends": sends}
