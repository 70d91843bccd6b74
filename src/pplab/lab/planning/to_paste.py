"""A plan as what a framework has to be told.

Flags and fields are those of Megatron-LM d98e8a64, torchtitan 0.3.0 and b5bcd76c, and torch 2.10 to
2.15. Tests read them back by parsers of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import groupby
from math import gcd
from typing import Any

from ...builders import build
from ...errors import expect, unknown
from ...schedule import Schedule
from ..forms import CLASSES, check_order_of_losses, to_csv
from ..streams import SENDS, sends_in
from .kinds import Part
from .launch_line import line_of
from .layers import Model
from .megatron import written
from .planner import Plan
from .torch_program import program
from .torch_rules import torch_refuses
from .ways import planned_again

PER_EDGE = (
    "  # with torch 2.15, set TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P=1, or messages share one "
    "queue"
)


def flags(plan: Plan, framework: str) -> str:
    """What to paste so that a framework runs a plan: a launch line for "Megatron-LM", fields of its
    configuration for "torchtitan", its release 0.3.0, or "torchtitan-main", for "torch" a program
    that runs as it stands, on a small model in place of yours.

    The data, the optimizer and what a `Model` doesn't say, such as norms and positions, are yours
    to add; for torchtitan the whole model. Lines that begin with # MODEL: say what else the model
    of a config has, and lines that begin with # say where the framework does something else than
    was planned, and what a step is predicted to take then. ValueError where it can't run the plan:
    what it has, or who has it instead.
    """
    expect(Plan, plan=plan)
    if framework not in WRITERS:
        raise unknown("framework", framework, WRITERS)
    lacks = [] if framework == "torch" else _lacks(plan.long, framework)
    return "".join(f"# MODEL: {each}\n" for each in lacks) + WRITERS[framework](plan)


def _said(model: Model) -> dict[str, Mapping[str, Any]]:
    """What its parts were made from, by their makers' names."""
    return {part.name: part.said for kind in model.kinds for part in kind.parts}


def _lacks(model: Model, framework: str) -> Iterator[str]:
    """What its config says besides, and the framework's lines don't."""
    for said in _said(model).values():
        act, gated = said.get("act", ""), said.get("gated")
        if act and ("gelu" in act if gated else "gelu" not in act and act != "relu2"):
            yield f"its MLP's function is {act}, which is another than the line's"
            break
    if model.predictors and framework != "Megatron-LM":
        yield (
            f"{len(model.predictors)} of its layers predict further tokens (MTP), and none of "
            "these does"
        )


def _runs(model: Model, has: Callable[[Part], object]) -> str:
    """Which layers have such a part, as Megatron-LM reads it: runs, and how often these repeat."""
    found = [any(map(has, kind.parts)) for kind in model.layers]
    length = next(n for n in range(1, len(found) + 1) if found == found[:n] * (len(found) // n))
    runs = "+".join(f"[{int(each)}]*{len([*run])}" for each, run in groupby(found[:length]))
    whole = f"({runs})*{len(found) // length}" if length < len(found) else runs
    return f'"{whole}"'


_LATENT = """
--multi-latent-attention --qk-layernorm --kv-lora-rank {kv_rank} --qk-head-dim {nope}
--qk-pos-emb-head-dim {rope} --v-head-dim {value}
"""
_SPARSE = "--dsa-indexer-n-heads {} --dsa-indexer-head-dim {} --dsa-indexer-topk {}"
_DELTA = """
--experimental-attention-variant gdn --linear-num-key-heads {key_heads} --linear-num-value-heads
{value_heads} --linear-key-head-dim {key} --linear-value-head-dim {value} --linear-conv-kernel-dim
{conv}
"""


def _of_layers(model: Model) -> dict[str, object]:
    """Megatron-LM's flags for what its layers are made of, and whether to give them."""
    said = _said(model)
    parts = [part for kind in model.kinds for part in kind.parts]
    windows = {part.window for part in parts if part.name == "attention"} - {None}
    if any((part.chunked or model.sequence) < model.sequence for part in parts):
        raise ValueError(
            "Megatron-LM has no attention in chunks, which this model's layers have: torchtitan's "
            "fields leave the model to you"
        )
    if unlike := [part.name for part in parts if part.said != said[part.name]]:
        raise ValueError(
            f"a line for Megatron-LM has one size of {unlike[0]}, and this model's layers have "
            "several: torchtitan's fields leave the model to you"
        )
    if len(windows) > 1:
        raise ValueError(
            f"a line for Megatron-LM has one window, and this model's layers have {windows}: "
            "torchtitan's fields leave the model to you"
        )
    if other := [name for name, sizes in said.items() if not sizes and name != "joins"]:
        raise ValueError(
            f"Megatron-LM's flags for {', '.join(other)} aren't known here: hybrids have layers "
            "and cut in --hybrid-layer-pattern, and others need a spec; torchtitan's fields leave "
            "the model to you"
        )
    found: dict[str, object] = {}
    if attends := said.get("attention"):
        heads, kv_heads, each = (attends[name] for name in ("heads", "kv_heads", "head_width"))
        found[f"--group-query-attention --num-query-groups {kv_heads}"] = kv_heads != heads
        found[f"--kv-channels {each}"] = each * heads != model.width
        found["--attention-output-gate"] = attends.get("gate")
    if latent := said.get("latent"):
        found[f"--q-lora-rank {latent['q_rank']}"] = latent["q_rank"]
        found[_LATENT.format(**latent)] = True
        found[
            "--experimental-attention-variant dsa " + _SPARSE.format(*latent["index"] or "000")
        ] = latent["index"]
    if delta := said.get("delta"):
        runs = _runs(model, lambda part: part.name == "delta")
        found[f"{_DELTA.format(**delta)} --linear-attention-freq {runs}"] = True
    for window in windows:
        if window < model.sequence:
            runs = _runs(model, lambda part, window=window: part.window == window)
            found[f'--window-size "({window - 1},0)" --window-attn-skip-freq {runs}'] = True
    found["--swiglu"] = any(each.get("gated") for each in said.values())
    found["--squared-relu"] = any(each.get("act") == "relu2" for each in said.values())
    if routed := said.get("experts"):
        found[f"--moe-layer-freq {_runs(model, lambda part: part.routed)}"] = "mlp" in said
        found[f"--moe-shared-expert-intermediate-size {routed['shared']}"] = routed["shared"]
    found[f"--mtp-num-layers {len(model.predictors)}"] = model.predictors
    return found


def _megatron(plan: Plan) -> str:
    layout, rows, experts, again = (
        plan.layout,
        plan.timeline.schedule,
        plan.experts,
        max(plan.recomputed),
    )
    sends, model = _megatron_sends(rows), plan.long
    if layout.axes[:2] != ["tp", "cp"]:
        raise ValueError(
            f'Megatron-LM numbers ranks "tp-dp-pp" or "tp-pp-dp", got {layout.order!r}: plan for '
            "one of these"
        )
    said, of_layers, shards = _said(model), _of_layers(model), plan.shard_optimizer or plan.zero
    routed = said.get("experts", {"wide": 0, "shared": 0})
    heads = next((sizes["heads"] for sizes in said.values() if "heads" in sizes), 1)
    mlp = said["mlp"]["wide"] if "mlp" in said else experts.used * routed["wide"] + routed["shared"]
    drawn = f"{written(plan.layers)[:-1]}{'m' * len(model.predictors)}L"
    each, stages = gcd(plan.machine.ranks_per_node, layout.num_ranks), rows.num_stages // layout.pp
    even = len({*plan.layers}) == 1
    sharded, paired, divided = (
        (plan.zero or 0) > 1,
        rows.name == "paired-1F1B",
        layout.tp * layout.cp > 1,
    )
    # Before Blackwell its arguments.py asserts it for these, and the contrary for FSDP
    one_queue = "CUDA_DEVICE_MAX_CONNECTIONS=1 " * (divided and not sharded and not paired)
    sizes = f"""\
{one_queue}torchrun --nnodes {layout.num_ranks // each} --nproc-per-node {each} pretrain_gpt.py \\
  --num-layers {model.num_layers} --hidden-size {model.width} --ffn-hidden-size {mlp} --bf16 \\
  --num-attention-heads {heads} --seq-length {model.sequence} --max-position-embeddings {model.sequence} \\
  --micro-batch-size {plan.microbatch} --global-batch-size {plan.batch} \\
  --tensor-model-parallel-size {layout.tp} --context-parallel-size {layout.cp} \\
  --pipeline-model-parallel-size {layout.pp}"""
    more = {
        **of_layers,
        "--untie-embeddings-and-output-weights": not model.tied,
        f"--num-virtual-stages-per-pipeline-rank {stages}": even and stages > 1,
        f'--pipeline-model-parallel-layout "{drawn}"': not even,
        f"--recompute-granularity full --recompute-method block --recompute-num-layers {again}": again,
        "--recompute-granularity selective --recompute-modules "
        + " ".join(plan.modules): plan.modules,
        "--overlap-moe-expert-parallel-comm": paired,
        "--sequence-parallel": layout.tp > 1,
        "--use-tp-pp-dp-mapping": layout.axes[-1] == "dp",
        "--overlap-grad-reduce": shards or layout.dp > 1,
        "--use-distributed-optimizer --overlap-param-gather": shards,
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"
        f"{'_params' * (plan.zero == 3)}": sharded,
        "--ckpt-format fsdp_dtensor": sharded,
        "--grad-reduce-in-bf16": plan.state.gradients == 2,
    }
    if experts:
        kind = "flex --moe-flex-dispatcher-backend deepep" if experts.once_per_node else "alltoall"
        sizes += f""" \\
  --num-experts {experts.count} --moe-router-topk {experts.used} --expert-model-parallel-size {experts.gpus} \\
  --moe-ffn-hidden-size {routed["wide"]} --moe-token-dispatcher-type {kind}"""
        more |= {
            "--moe-grouped-gemm --disable-bias-linear": True,  # else experts run one after another
            "--moe-router-pre-softmax": experts.used == 1,  # asserted
            "--expert-tensor-parallel-size 1": experts.whole and layout.tp > 1,
        }
    runs = plan.modules or tuple(min(n, again) for n in plan.layers)
    remarks = _remarks(plan, sends=sends, recompute=runs)
    if divided and (sharded or paired):
        remarks += (
            "# before Blackwell, Megatron-LM warns of tp and cp here: they want "
            "CUDA_DEVICE_MAX_CONNECTIONS=1\n"
        )
    line = (
        " \\\n  ".join([sizes, *(" ".join(flag.split()) for flag, is_so in more.items() if is_so)])
        + "\n"
    )
    line_of(re.sub("--use-megatron-fsdp.*", "", line), None, None)  # what Megatron-LM refuses
    return remarks + line


def _megatron_sends(rows: Schedule) -> str:
    """Who waits for sends. ValueError for rows that aren't Megatron-LM's."""
    P, several = rows.num_ranks, rows.num_stages > rows.num_ranks
    names = (
        ("Interleaved1F1B", "paired-1F1B")
        if several and rows.num_microbatches % P == 0
        else ("1F1B",)
    )
    if several if P == 1 else not _own(rows, names):
        raise ValueError(
            "Megatron-LM has 1F1B and, for microbatches that the ranks divide, interleaved 1F1B, "
            "also in pairs, and not these rows of "
            f"{rows.name}: torch and torchtitan take rows in a file"
        )
    return sends_in("Megatron-LM", rows.name, P, rows.num_microbatches)


def _torchtitan(plan: Plan, main: bool = False) -> str:
    layout, rows, again = plan.layout, plan.timeline.schedule, any(plan.recomputed)
    sharded, tokens = plan.shard_optimizer or plan.zero, plan.model.sequence
    if layout.axes != ["tp", "cp", "dp", "pp"] or (
        plan.experts and layout.tp > 1 and not plan.experts.whole
    ):
        raise ValueError(
            "torchtitan numbers ranks tp-cp-dp-pp, and its experts are whole: plan for that, got "
            f"{layout!r}"
        )
    name, writes, sends = _torch_schedule(plan)
    unnamed = "PipelineScheduleMulti" if rows.placement[-1] else "ZBVZeroBubble"
    ep = plan.experts.gpus if plan.experts else 1
    zero = 2 if plan.zero == 1 else plan.zero  # its shards are of gradients, too
    runs = plan.modules or tuple(n * again for n in plan.layers)
    remarks = _remarks(plan, not plan.modules, sends=sends, recompute=runs, zero=zero)
    if plan.modules:
        remarks += (
            f"# planned with recompute={plan.modules!r}; here it is every second matrix and what "
            "lies between matrices, and no prediction is made of that\n"
        )
    checkpoint = "FullAC.Config()" if again else "SelectiveAC.Config()" if plan.modules else None
    M = rows.num_microbatches
    cut = f"pipeline_parallel_microbatch_size={plan.microbatch}"
    training = f"""\
    local_batch_size={plan.microbatch * (M if layout.pp > 1 else 1)},
    global_batch_size={plan.batch},
    seq_len={tokens},
"""
    if main:
        cut = f"num_pp_microbatches={M}"
        training = f"""\
    num_tokens_per_microbatch_per_dp_rank={plan.microbatch * tokens},
    num_tokens_per_train_step={plan.batch * tokens},
    max_context_length={tokens},
"""
    return f"""{remarks}{writes}layers = iter(range({plan.model.num_layers}))
parts = [[f"layers.{{next(layers)}}" for _ in range(n)] for n in {plan.layers}]
parts[0].insert(0, "tok_embeddings")
parts[-1] += ["norm", "lm_head"]
parallelism = ParallelismConfig(
    pipeline_parallel_degree={layout.pp},{PER_EDGE * (layout.pp > 1)}
    {cut},
    pipeline_parallel_schedule="{name or unnamed}",  # says also which rank has a stage
    pipeline_parallel_schedule_csv={"rows" if writes else None},
    module_fqns_per_model_part=parts,
    tensor_parallel_degree={layout.tp},
    context_parallel_degree={layout.cp},
    data_parallel_shard_degree={layout.dp if sharded else 1},
    data_parallel_replicate_degree={1 if sharded else layout.dp},
    fsdp_reshard_after_forward="{"always" if plan.zero == 3 else "never"}",
    expert_parallel_degree={ep},
)
training = TrainingConfig(
{training}    disable_cuda_graphs={max(layout.pp, ep) > 1},
)
activation_checkpoint = {checkpoint}
"""


def _torch(plan: Plan) -> str:
    if plan.layout.tp * plan.layout.cp > 1 or plan.experts or plan.zero is not None or plan.modules:
        raise ValueError(
            "the program for torch has a pipeline and replicas alone, and runs whole layers again: "
            f"take torchtitan for {plan.layout!r}"
        )
    name, writes, sends = _torch_schedule(plan)
    return _remarks(plan, sends=sends) + program(plan, name, writes)


def _torch_schedule(plan: Plan) -> tuple[str, str, str]:
    """The class' name, or lines that write the rows to a file, and who waits for sends. The class
    if it waits as was planned, and takes these numbers.
    """
    rows, P, M = plan.timeline.schedule, plan.layout.pp, plan.timeline.schedule.num_microbatches
    sends = sends_in("torch", rows.name, P, M)
    if P == 1:
        return "1F1B", "", sends
    own = sends in (SENDS[0], plan.sends) and _own(rows, CLASSES)
    if own and not torch_refuses(rows.name, P, M, rows.num_stages // P):
        return rows.name, "", sends
    cells = to_csv(rows, for_torch=True)
    check_order_of_losses(rows)
    writes = f"""\
import os

rows = f"rows-of-{{os.environ['RANK']}}.csv"
with open(rows, "w") as file:
    file.write('''{cells}''')

"""
    return "", writes, SENDS[0]


def has_rows_of(name: str, rows: Schedule) -> bool:
    """Whether these are the rows that a schedule of that name has for their sizes."""
    V = rows.num_stages // rows.num_ranks
    options = {"stages_per_rank": V} if V > 1 and rows.placement[-1] else {}  # not in a V
    try:
        return rows == build(
            name, num_ranks=rows.num_ranks, num_microbatches=rows.num_microbatches, **options
        )
    except ValueError:
        return False


def _own(rows: Schedule, names: Collection[str]) -> bool:
    """Whether a schedule has one of these names, and its rows."""
    return rows.name in names and has_rows_of(rows.name, rows)


def _remarks(plan: Plan, predicted: bool = True, **here: object) -> str:
    """What becomes of the plan, where it becomes something else, and what a step is `predicted` to
    take then.
    """
    planned = {
        "recompute": plan.recompute,
        "zero": plan.zero,
        # without a pipeline nobody sends
        "sends": plan.sends if plan.layout.pp > 1 else here["sends"],
    }
    changed = {name: value for name, value in here.items() if value != planned[name]}
    if not changed:
        return ""
    lines = [
        f"# planned with {name}={planned[name]!r}; here it is {name}={value!r}\n"
        for name, value in changed.items()
    ]
    if predicted:
        step_s = planned_again(plan, **changed).step_s
        lines.append(f"# so a step is predicted to take {step_s:.4g} s, not {plan.step_s:.4g}\n")
    return "".join(lines)


WRITERS = {
    "Megatron-LM": _megatron,
    "torchtitan": _torchtitan,  # 0.3.0, which pip installs
    "torchtitan-main": partial(_torchtitan, main=True),
    "torch": _torch,
}
