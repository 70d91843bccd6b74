"""What torch's schedules and torchtitan refuse, in tables as `megatron.RULES`: `flags` and `check`
go by them, and the page "The same thing in your framework" shows them.

Sources are files of torch 2.13 and of torchtitan 0.3.0, or its repository at b5bcd76c (main), with
their lines, and the first release that has these words, of torch 2.4 to 2.14 and torchtitan 0.1 to
0.3. Tests compare with what torch's classes, and torchtitan's own functions, said of random
numbers.
"""

from __future__ import annotations

import re
from argparse import Namespace

from ...errors import positive_int, unknown
from ..forms import CLASSES
from .launch_line import Parser, count
from .megatron import MOST, Rule, refusal

_SINGLE = ("GPipe", "1F1B")
# torchtitan's fields and torchrun's, and what they are unless said
_FIELDS = """
replicas=data_parallel_replicate_degree=1 shards=data_parallel_shard_degree=-1
tp=tensor_parallel_degree=1 cp=context_parallel_degree=1 pp=pipeline_parallel_degree=1
ep=expert_parallel_degree=1 depth=pipeline_parallel_layers_per_stage=0
first=pipeline_parallel_first_stage_less_layers=1 last=pipeline_parallel_last_stage_less_layers=1
nodes=nnodes=1 per_node=nproc_per_node=-1
"""
_OF_0_3 = """
local=local_batch_size=8 batch=global_batch_size=-1 microbatch=pipeline_parallel_microbatch_size=1
"""
_OF_MAIN = """
microbatch=num_tokens_per_microbatch_per_dp_rank=16384 batch=num_tokens_per_train_step=-1
M=num_pp_microbatches=1
"""

TORCH_RULES = (
    Rule(
        lambda x: x.name == "1F1B" and x.M < x.pp,
        "{x.M} microbatches are too few for 1F1B on {x.pp} ranks: take {x.pp}, or GPipe",
        "Number of microbatches ({}) must be greater than or equal to the number of stages ({}).",
        "torch 2.13, schedules.py:1021, since 2.7; up to 2.10 for GPipe, too",
    ),
    Rule(
        lambda x: x.name.startswith("Interleaved") and x.M % max(1, x.M // x.pp),
        "{x.M} microbatches don't make equal rounds of {x.pp} or more: take a multiple of {x.pp}",
        "requires the number of microbatches to be a multiple of the number of rounds ({}), but "
        "got {}.",
        "torch 2.13, schedules.py:2938, since 2.6",
    ),
    Rule(
        lambda x: x.name in ("ZBVZeroBubble", "DualPipeV") and x.V != 2,
        "{x.name} has two stages on each rank, not {x.V}: take two, or Interleaved1F1B",
        "ZBV requires exactly 2 stages per rank, but got {}.",
        "torch 2.13, schedules.py:3249, since 2.6",
    ),
    Rule(
        lambda x: x.name == "DualPipeV" and x.M < x.pp * x.V,
        "{x.M} microbatches are too few for DualPipeV on {x.pp} ranks: take two for each, or "
        "ZBVZeroBubble",
        "DualPipeV requires at least as many microbatches as stages, but got {} microbatches and "
        "{} stages.",
        "torch 2.13, schedules.py:3440, since 2.9",
    ),
)
_OF_JOBS = (
    Rule(
        lambda x: x.dp * x.each != x.gpus or x.dp % x.replicas,
        "dp {x.dp}, cp {x.cp}, tp {x.tp} and pp {x.pp} don't multiply to {x.gpus} GPUs: change one "
        "of them",
        "Invalid parallel dims: dp_replicate({}) * dp_shard({}) * cp({}) * tp({}) * pp({}) != "
        "WORLD_SIZE({})",
        "torchtitan 0.3.0, parallel_dims.py:186, since 0.1",
    ),
    Rule(
        lambda x: x.dp // x.replicas * x.cp * x.tp % x.ep,
        "shards, cp and tp don't divide into {x.ep} ranks of experts: change "
        "expert_parallel_degree",
        "expert_parallel_degree ({}) must divide dp_shard * cp * tp ({})",
        "torchtitan main, parallel_dims.py:189",
    ),
    Rule(
        lambda x: x.pp > 1 and x.local % x.microbatch,
        "a local_batch_size of {x.local} isn't whole microbatches of {x.microbatch}: change one of "
        "them",
        "training.local_batch_size ({}) must be evenly divisible by "
        "parallelism.pipeline_parallel_microbatch_size ({})",
        "torchtitan 0.3.0, trainer.py:134; since 0.2 in other words",
    ),
    Rule(
        lambda x: x.batch % (x.local * x.dp),
        "a step's batch of {x.batch} isn't whole passes of {x.local} on each of {x.dp} replicas: "
        "change it",
        "global batch size must be multiple of local batch size times data-parallel degree ({} % ("
        "{} * {}) != 0)",
        'torchtitan 0.3.0, trainer.py:421, since 0.1; main says "must be divisible by the number '
        'of tokens processed"',
    ),
    Rule(
        lambda x: x.pp > 1 and x.graphs,
        "a pipeline runs without CUDA graphs: set training.disable_cuda_graphs",
        "CUDA graphs do not support pipeline parallelism yet. Set --training.disable_cuda_graphs.",
        "torchtitan 0.3.0, trainer.py:183",
    ),
)
_OF_PIPELINES = (
    Rule(
        lambda x: x.name not in CLASSES,
        f"torch has no schedule {{x.name}}: take one of {', '.join(CLASSES)}",
        "Unknown schedule name '{}'. The valid options are {}",
        "torch 2.13, schedules.py:3641, since 2.6",
    ),
    Rule(
        lambda x: x.stages % x.pp,
        "{x.depth} layers per stage make {x.stages} stages, which don't divide among {x.pp} "
        "ranks: change their number",
        "Number of virtual stages ({}) must be divisible by pipeline parallel size ({}).",
        "torchtitan 0.3.0, pipeline_parallel.py:235, since 0.2",
    ),
    Rule(
        lambda x: (x.name in _SINGLE) != (x.V == 1),
        "{x.name} can't have {x.V} stages on each rank: change the layers per stage, or the "
        "schedule",
        "Single stage schedule requires exactly 1 stage per rank, but got {} stages per rank.",
        'torchtitan 0.3.0, pipeline_parallel.py:246, since 0.2; also "Multi-stage schedule '
        'requires at least 2 stages"',
    ),
    Rule(
        lambda x: x.stages > x.layers,
        "{x.layers} layers, with the ends, are too few for {x.stages} stages: take fewer ranks, or "
        "stages",
        "Number of stages ({}) cannot be greater than effective layers ({})",
        "torchtitan 0.3.0, pipeline_parallel.py:403, since 0.2",
    ),
    Rule(
        lambda x: max(x.first, x.last) > x.layers // x.stages,
        "the ends count as {x.first} and {x.last} layers, more than a stage has: lower "
        "pipeline_parallel_first_stage_less_layers and pipeline_parallel_last_stage_less_layers",
        "input_weight ({}) exceeds minimum layers per stage ({}).",
        "torchtitan 0.3.0, pipeline_parallel.py:423, since 0.2",
    ),
)
TITAN_RULES = (*_OF_JOBS, *_OF_PIPELINES)


def torch_refuses(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> str:
    """What is wrong for torch's class of that name, in its words and with what works; "" where it
    takes these numbers.

    Each rank has one stage of GPipe and 1F1B, and otherwise two unless `stages_per_rank` says how
    many.

    >>> torch_refuses("1F1B", num_ranks=4, num_microbatches=4)
    ''
    """
    if name not in CLASSES:
        raise unknown("schedule of torch", name, CLASSES)
    positive_int("num_ranks", num_ranks)
    V = stages_per_rank or 2 - (name in _SINGLE)
    return refusal(Namespace(name=name, pp=num_ranks, M=num_microbatches, V=V), TORCH_RULES)


def read_titan(text: str, num_layers: int | None, gpus: int | None) -> Namespace:
    """What a text says in torchtitan's fields: flags, or a configuration in Python or TOML.
    `num_layers` and `gpus` are for a text that doesn't say them.

    Raises ValueError for what torchtitan or torch refuses, in their words and with what works.
    """
    for what, given in (("num_layers", num_layers), ("gpus", gpus)):
        if given is not None:
            positive_int(what, given)
    plain = re.sub(r"(?<=\w)-(?=\w)", "_", text).replace("NGPU", "nproc_per_node")
    main = re.search("num_pp_micro|num_tokens_per", plain)
    said = dict(re.findall(r"\b(\w+)[\"']?[\s=:]+(?=[\"']?(\w+))", plain))
    parser, words = Parser(allow_abbrev=False, add_help=False), []
    for pair in (_FIELDS + (_OF_MAIN if main else _OF_0_3)).split():
        name, field, usual = pair.split("=")
        parser.add_argument(
            f"--{field}", dest=name, type=count(int("layers" not in field)), default=int(usual)
        )
        if field in said:
            words.append(f"--{field}={said[field]}")
    x = parser.parse_args(words, Namespace())
    x.gpus = gpus or x.nodes * x.per_node
    if x.gpus < 0 or (x.depth and not num_layers):
        raise ValueError(
            "the text doesn't say how many GPUs, or layers, there are: give gpus= and num_layers="
        )
    if main:
        x.local = x.microbatch * (x.M if x.pp > 1 else 1)
    x.M = x.local // x.microbatch
    x.each = x.cp * x.tp * x.pp
    x.dp = x.replicas * x.shards if x.shards > 0 else x.gpus // x.each
    x.batch = x.batch if x.batch > 0 else x.local * x.dp
    name = said.get("pipeline_parallel_schedule", "1F1B")
    x.name = {known.lower(): known for known in CLASSES}.get(name.lower(), name)
    x.layers = (num_layers or MOST) + x.first + x.last
    x.stages = -(-x.layers // x.depth) if x.depth else x.pp * (2 - (x.name in _SINGLE))
    x.V = x.stages // x.pp
    # what a file or a list of modules says, isn't read; until 0.2 nobody asked for CUDA graphs
    x.whole = not re.search(
        r"(schedule_csv|fqns_per_model_part)[\"']?[\s=:]+(?!None)[^\s=:]", plain
    )
    x.graphs = not re.search(
        r"disable_cuda_graphs\b(?![\s=:]+F)|config_file|\[parallelism\]", plain
    )
    if told := refusal(x, (*TITAN_RULES, *TORCH_RULES) if x.pp > 1 and x.whole else _OF_JOBS):
        raise ValueError(told)
    return x
