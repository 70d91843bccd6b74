"""A plan as what a framework has to be told.

Flags and fields are those of Megatron-LM d98e8a64, torchtitan 0.3.0 and b5bcd76c, and torch 2.13. Tests read them back
by parsers of their own.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import partial
from math import gcd

from ...builders import build
from ...errors import expect, unknown
from ...schedule import Schedule
from ..forms import CLASSES, check_order_of_losses, to_csv
from ..streams import SENDS, sends_in
from .launch_line import line_of
from .megatron import written
from .planner import Plan
from .torch_program import program
from .torch_rules import torch_refuses
from .ways import planned_again


def flags(plan: Plan, framework: str) -> str:
    """What to paste so that a framework runs a plan: a launch line for "Megatron-LM", fields of its configuration for
    "torchtitan", its release 0.3.0, or "torchtitan-main", for "torch" a program that runs as it stands, on a small
    model in place of yours.

    The data, the optimizer and what a `Transformer` doesn't say, such as norms and positions, are yours to add; for
    torchtitan the whole model. Lines that begin with # MODEL: say what else the model of a config has, and lines that
    begin with # say where the framework does
    something else than was planned, and what a step is predicted to take then. ValueError where it can't run the plan:
    what it has, or who has it instead.
    """
    expect(Plan, plan=plan)
    if framework not in WRITERS:
        raise unknown("framework", framework, WRITERS)
    return "".join(f"# MODEL: {each}\n" for each in plan.model.lacks) + WRITERS[framework](plan)


def _megatron(plan: Plan) -> str:
    layout, rows, experts, again = plan.layout, plan.timeline.schedule, plan.experts, max(plan.recomputed)
    sends, model = _megatron_sends(rows), plan.model
    if layout.axes[:2] != ["tp", "cp"]:
        raise ValueError(
            f'Megatron-LM numbers ranks "tp-dp-pp" or "tp-pp-dp", got {layout.order!r}: plan for one of these'
        )
    mlp, shards = model.mlp_width or 4 * model.width, plan.shard_optimizer or plan.zero
    each, stages = gcd(plan.machine.ranks_per_node, layout.num_ranks), rows.num_stages // layout.pp
    even = len({*plan.layers}) == 1
    sharded, paired, divided = (plan.zero or 0) > 1, rows.name == "paired-1F1B", layout.tp * layout.cp > 1
    # Before Blackwell its arguments.py asserts it for these, and the contrary for FSDP
    one_queue = "CUDA_DEVICE_MAX_CONNECTIONS=1 " * (divided and not sharded and not paired)
    sizes = f"""\
{one_queue}torchrun --nnodes {layout.num_ranks // each} --nproc-per-node {each} pretrain_gpt.py \\
  --num-layers {model.num_layers} --hidden-size {model.width} --ffn-hidden-size {mlp} --bf16 \\
  --num-attention-heads {model.heads} --seq-length {model.sequence} --max-position-embeddings {model.sequence} \\
  --micro-batch-size {plan.microbatch} --global-batch-size {plan.batch} \\
  --tensor-model-parallel-size {layout.tp} --context-parallel-size {layout.cp} \\
  --pipeline-model-parallel-size {layout.pp}"""
    more = {
        f"--group-query-attention --num-query-groups {model.kv_heads}": model.kv_heads,
        f"--kv-channels {model.head_width}": model.head_width,
        "--swiglu": model.gated,
        "--untie-embeddings-and-output-weights": not model.tied,
        f"--num-virtual-stages-per-pipeline-rank {stages}": even and stages > 1,
        f'--pipeline-model-parallel-layout "{written(plan.layers)}"': not even,
        f"--recompute-granularity full --recompute-method block --recompute-num-layers {again}": again,
        "--overlap-moe-expert-parallel-comm": paired,
        "--sequence-parallel": layout.tp > 1,
        "--use-tp-pp-dp-mapping": layout.axes[-1] == "dp",
        "--overlap-grad-reduce": shards or layout.dp > 1,
        "--use-distributed-optimizer --overlap-param-gather": shards,
        f"--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads{'_params' * (plan.zero == 3)}": sharded,
        "--ckpt-format fsdp_dtensor": sharded,
        "--grad-reduce-in-bf16": plan.state.gradients == 2,
    }
    if experts:
        wide = mlp // (experts.used + experts.shared)
        more[f"--moe-shared-expert-intermediate-size {experts.shared * wide}"] = experts.shared
        kind = "flex --moe-flex-dispatcher-backend deepep" if experts.once_per_node else "alltoall"
        sizes += f""" \\
  --num-experts {experts.count} --moe-router-topk {experts.used} --expert-model-parallel-size {experts.gpus} \\
  --moe-ffn-hidden-size {wide} --moe-token-dispatcher-type {kind}"""
        more |= {
            "--moe-grouped-gemm --disable-bias-linear": True,  # else experts run one after another
            "--moe-router-pre-softmax": experts.used == 1,  # asserted
            "--expert-tensor-parallel-size 1": experts.whole and layout.tp > 1,
        }
    remarks = _remarks(plan, sends=sends, recompute=tuple(min(n, again) for n in plan.layers))
    if divided and (sharded or paired):
        remarks += "# before Blackwell, Megatron-LM warns of tp and cp here: they want CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    line = " \\\n  ".join([sizes, *(flag for flag, said in more.items() if said)]) + "\n"
    line_of(re.sub("--use-megatron-fsdp.*", "", line), None, None)  # what Megatron-LM refuses
    return remarks + line


def _megatron_sends(rows: Schedule) -> str:
    """Who waits for sends. ValueError for rows that aren't Megatron-LM's."""
    P, several = rows.num_ranks, rows.num_stages > rows.num_ranks
    names = ("Interleaved1F1B", "paired-1F1B") if several and rows.num_microbatches % P == 0 else ("1F1B",)
    if several if P == 1 else not _own(rows, names):
        raise ValueError(
            "Megatron-LM has 1F1B and, for microbatches that the ranks divide, interleaved 1F1B, also in pairs, and "
            f"not these rows of {rows.name}: torch and torchtitan take rows in a file"
        )
    return sends_in("Megatron-LM", rows.name, P, rows.num_microbatches)


def _torchtitan(plan: Plan, main: bool = False) -> str:
    layout, rows, again = plan.layout, plan.timeline.schedule, any(plan.recomputed)
    sharded, tokens = plan.shard_optimizer or plan.zero, plan.model.sequence
    if layout.axes != ["tp", "cp", "dp", "pp"] or (plan.experts and layout.tp > 1 and not plan.experts.whole):
        raise ValueError(
            f"torchtitan numbers ranks tp-cp-dp-pp, and its experts are whole: plan for that, got {layout!r}"
        )
    name, writes, sends = _torch_schedule(plan)
    unnamed = "PipelineScheduleMulti" if rows.placement[-1] else "ZBVZeroBubble"
    ep = plan.experts.gpus if plan.experts else 1
    zero = 2 if plan.zero == 1 else plan.zero  # its shards are of gradients, too
    remarks = _remarks(plan, sends=sends, recompute=tuple(n * again for n in plan.layers), zero=zero)
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
    pipeline_parallel_degree={layout.pp},
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
activation_checkpoint = {"FullAC.Config()" if again else None}
"""


def _torch(plan: Plan) -> str:
    if plan.layout.tp * plan.layout.cp > 1 or plan.experts or plan.zero is not None:
        raise ValueError(
            f"the program for torch has a pipeline and replicas alone: take torchtitan for {plan.layout!r}"
        )
    name, writes, sends = _torch_schedule(plan)
    return _remarks(plan, sends=sends) + program(plan, name, writes)


def _torch_schedule(plan: Plan) -> tuple[str, str, str]:
    """The class' name, or lines that write the rows to a file, and who waits for sends. The class if it waits as was
    planned, and takes these numbers."""
    rows, P, M = plan.timeline.schedule, plan.layout.pp, plan.timeline.schedule.num_microbatches
    sends = sends_in("torch", rows.name, P, M)
    if P == 1:
        return "1F1B", "", sends
    refused = torch_refuses(rows.name, P, M, rows.num_stages // P)
    if not refused and sends in (SENDS[0], plan.sends) and _own(rows, CLASSES):
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
        return rows == build(name, num_ranks=rows.num_ranks, num_microbatches=rows.num_microbatches, **options)
    except ValueError:
        return False


def _own(rows: Schedule, names: Collection[str]) -> bool:
    """Whether a schedule has one of these names, and its rows."""
    return rows.name in names and has_rows_of(rows.name, rows)


def _remarks(plan: Plan, **here: object) -> str:
    """What becomes of the plan, where it becomes something else, and what a step is predicted to take then."""
    planned = {"recompute": plan.recomputed, "zero": plan.zero}
    planned["sends"] = plan.sends if plan.layout.pp > 1 else here["sends"]  # without a pipeline nobody sends
    changed = {name: value for name, value in here.items() if value != planned[name]}
    if not changed:
        return ""
    lines = [f"# planned with {name}={planned[name]!r}; here it is {name}={value!r}" for name, value in changed.items()]
    step_s = planned_again(plan, **changed).step_s
    return "\n".join([*lines, f"# so a step is predicted to take {step_s:.4g} s, not {plan.step_s:.4g}", ""])


WRITERS = {
    "Megatron-LM": _megatron,
    "torchtitan": _torchtitan,  # 0.3.0, which pip installs
    "torchtitan-main": partial(_torchtitan, main=True),
    "torch": _torch,
}
