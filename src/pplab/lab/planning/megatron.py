"""What Megatron-LM refuses, in one table: lines are read, written and checked by it, and the page
"The same thing in your framework" shows it.

Sources are files of Megatron-LM d98e8a64 with their lines, and the first release of its core, of 26
from 0.4 to 0.19, that has these words: some say in other words what an older release said. Tests
compare with what its own parser and classes said of random lines.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ...errors import expect, shown

MOST = 2**20  # of anything that a line or a layout counts
# what `plan` knows of --recompute-modules, from what takes least for the bytes that it saves on
MODULES = "layernorm moe_act core_attn mla_up_proj moe shared_experts mlp".split()
_OTHERS = "gdn_norm_out gdp_in_proj gdp_qkv mhc".split()  # that Megatron-LM has, too


class Line(Namespace):
    """A launch line's numbers, by the course's letters where it has them, and what follows from
    them.
    """

    @property
    def replica(self) -> int:
        """Ranks that have the model once."""
        return self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.gpus // self.replica

    @property
    def each(self) -> int:
        """Samples of a microbatch on every replica."""
        return self.microbatch * self.dp

    @property
    def M(self) -> int:  # noqa: N802
        """Microbatches of a step."""
        return self.batch // self.each

    @property
    def next_batch(self) -> int:
        """The least batch from this one on that is whole microbatches, and where stages interleave
        whole rounds.
        """
        unit = self.each * (self.pp if self.V > 1 else 1)
        return -(-self.batch // unit) * unit

    @cached_property
    def drawn(self) -> list[str]:
        """The stages that a layout draws."""
        return stages_of(self.layout) if self.layout else []

    @property
    def counted(self) -> int:
        """Layers, with the ends that count as one each."""
        return self.layers + self.embedding_counts + self.loss_counts

    @property
    def ends(self) -> list[int]:
        """The layers of a first and a last rank that have a number of their own."""
        return [n for n in (self.first, self.last) if n]

    @property
    def middle(self) -> int:
        """The layers of all other ranks."""
        return self.counted - sum(self.ends)

    @property
    def per_rank(self) -> list[int]:
        """Of every rank, its layers."""
        usual = self.middle // max(self.pp - len(self.ends), 1)
        found = [usual] * self.pp
        found[-1] = self.last or usual
        found[0] = self.first or found[0]
        return found

    @property
    def V(self) -> int:  # noqa: N802
        """Stages of each rank."""
        if self.depth:
            return max(self.counted // self.pp // self.depth, 1)
        return len(self.drawn) // self.pp or self.virtual or 1

    @property
    def cut(self) -> tuple[int, ...]:
        """The layers of each stage."""
        if self.drawn:
            return tuple(stage.count("t") for stage in self.drawn)
        cut = [layers // self.V for layers in self.per_rank] * self.V
        cut[0] -= self.embedding_counts
        cut[-1] -= self.loss_counts
        return tuple(cut)

    @property
    def predictors(self) -> list[int]:
        """The stage of every layer that predicts further tokens."""
        return [at for at, stage in enumerate(self.drawn) for _ in range(stage.count("m"))]

    @property
    def works(self) -> str:
        """A layout for these layers."""
        stages = self.pp * max(min(self.V, self.layers // self.pp), 1)
        each, rest = divmod(self.layers, stages)
        # the shorter stages stand at the ends, with the embedding and the loss
        first = (stages - rest) // 2
        return written([each + (first <= stage < first + rest) for stage in range(stages)])


class Rule(NamedTuple):
    """What a line breaks, as its `x` says it; what is told of it and what works; the framework's
    own words, and where they are, since when.
    """

    broken: Callable[[Any], object]
    told: str
    error: str
    source: str


RULES = (
    Rule(
        lambda x: x.gpus % x.replica,
        "{x.gpus} ranks don't divide into replicas of {x.replica}: change one of them",
        "world size ({}) is not divisible by total_model_size",
        "arguments.py:432, since core 0.9",
    ),
    Rule(
        lambda x: x.batch % x.each,
        "a batch of {x.batch} isn't whole microbatches of {x.microbatch} on {x.dp} replicas: take "
        "--global-batch-size "
        "{x.next_batch}",
        "must be divisible by eval_micro_batch_size ({}) * data_parallel_size ({})",
        "arguments.py:715, since core 0.18",
    ),
    Rule(
        lambda x: bool(x.layout) + bool(x.depth) + bool(x.virtual) > 1,
        "the line gives the stages in several ways, by a layout, by their layers, or by their "
        "number per rank: keep one",
        "No more than one of the following arguments can be set at the same time",
        "arguments.py:933, since core 0.13",
    ),
    Rule(
        lambda x: len(x.drawn) % x.pp,
        "the layout's {stages} stages don't divide among {x.pp} ranks: take a multiple of {x.pp}, "
        "or other ranks",
        "The length of pipeline_model_parallel_layout must be divisible by "
        "pipeline_model_parallel_size",
        "arguments.py:946, since core 0.13",
    ),
    Rule(
        lambda x: x.depth and x.ends,
        "the layers of a first or last rank can't be combined with "
        "--num-layers-per-virtual-pipeline-stage: give --num-virtual-stages-per-pipeline-rank",
        "please use --num-virtual-stages-per-pipeline-rank to specify virtual pipeline parallel "
        "degree",
        "arguments.py:956, since core 0.11",
    ),
    Rule(
        lambda x: not x.drawn and not x.ends and x.counted % x.pp,
        "{x.counted} layers don't divide among {x.pp} ranks: give --pipeline-model-parallel-layout "
        '"{x.works}"',
        "Number of layers should be divisible by the pipeline-model-parallel size",
        "arguments.py:998, since core 0.10",
    ),
    Rule(
        lambda x: x.depth and x.counted // x.pp % x.depth,
        "the {x.per_rank[0]} layers of a rank can't be stages of {x.depth}: take a depth that "
        "divides them",
        "number of layers per pipeline stage must be divisible number of layers per virtual "
        "pipeline stage",
        "arguments.py:973, since core 0.4",
    ),
    Rule(
        lambda x: x.V > 1 and x.pp < 2 + x.waits_for_messages,
        "{x.V} stages on each of {x.pp} ranks don't interleave: leave the virtual stages out, or "
        "take more ranks",
        "When interleaved schedule is used, pipeline-model-parallel size should be greater than",
        "arguments.py:1003, since core 0.10",
    ),
    Rule(
        lambda x: (x.ends or x.drawn) and x.counted > x.layers or (x.ends and x.drawn),
        "the cut is given in several ways, by ends that count as layers, by the layers of a first "
        "or last rank, or by a layout: keep one of them",
        "cannot be set with other pipeline layout arguments",
        "transformer_config.py:2253, since core 0.13",
    ),
    Rule(
        lambda x: x.drawn and sum(x.cut) != x.layers,
        "the layout has {letters[t]} layers, and --num-layers says {x.layers}: write {x.works}",
        "Number of decoder layers {}must match num_layers {}",
        "pipeline_parallel_layer_layout.py:108, since core 0.13",
    ),
    Rule(
        lambda x: x.drawn and len(x.predictors) != (x.predicting or 0),
        "the layout has {letters[m]} m, and --mtp-num-layers says {x.predicting}: make them equal",
        "Number of mtp layers in layout must match mtp_num_layers",
        "pipeline_parallel_layer_layout.py:114, since core 0.14",
    ),
    Rule(
        lambda x: x.predictors and x.predictors[0] < len(x.drawn) - x.pp,
        "the m of a layout must be in the last stage of their rank: move them",
        "Currently we restrict that the MTP should be always in the last ",
        "pipeline_parallel_layer_layout.py:125, since core 0.14",
    ),
    Rule(
        lambda x: x.ends and bool(x.middle) != bool(x.pp - len(x.ends)) or x.middle < 0,
        "{x.layers} layers leave {x.middle} for the ranks between the first and the last: change "
        "--num-layers, or a first or last rank's",
        "Mismatch: {} middle layers remaining but {} middle PP stages available",
        "transformer_config.py:2343, since core 0.16",
    ),
    Rule(
        lambda x: x.ends and x.middle % max(x.pp - len(x.ends), 1),
        "{x.layers} layers leave {x.middle} for the ranks between, and don't divide among them: "
        'give --pipeline-model-parallel-layout "{x.works}"',
        "number of layers at middle stage: {} must be divisible bythe middle pipeline model "
        "parallel size {}",
        "transformer_config.py:2351, since core 0.11",
    ),
    Rule(
        lambda x: not x.drawn and any(layers % x.V for layers in x.per_rank),
        "ranks with {x.per_rank} layers can't each have {x.V} equal stages: give "
        "--pipeline-model-parallel-layout "
        '"{x.works}"',
        "should be divisible by vp_size",
        "transformer_block.py:177, since core 0.11",
    ),
    Rule(
        lambda x: x.ep > 1 and (x.experts or 1) % x.ep,
        "{x.experts} experts don't divide among {x.ep} GPUs: change --num-experts or "
        "--expert-model-parallel-size",
        "Number of experts should be a multiple of expert model parallel_size",
        "arguments.py:1657, since core 0.4",
    ),
    Rule(
        lambda x: x.gpus % (x.etp * x.ep * x.pp),
        "experts on {x.ep} GPUs, each cut over {x.etp}, on {x.pp} ranks of a pipeline don't divide "
        "{x.gpus} GPUs: take fewer, or --expert-tensor-parallel-size 1",
        "world_size ({}) is not divisible by expert_tensor_model_pipeline_parallel size",
        "parallel_state.py:883, since core 0.10",
    ),
    Rule(
        lambda x: x.pp_before_dp and x.pp > 1 and x.etp * x.ep != x.tp * x.cp,
        "with --use-tp-pp-dp-mapping Megatron-LM numbers ranks only if experts have as many "
        "replicas as the rest, got "
        "{x.ep} GPUs of experts and cp {x.cp}: leave that flag out",
        "When not using pp-last rank ordering, the data parallel size of the attention and moe "
        "layers must be the same",
        "parallel_state.py:902, since core 0.11",
    ),
    Rule(
        lambda x: x.granularity == "full" and not (x.method and x.again),
        "full recomputation needs --recompute-method (uniform or block) and "
        "--recompute-num-layers: add what is missing",
        'recompute_method must be "block" or "uniform"',
        "transformer_config.py:1913, since core 0.4",
    ),
    Rule(
        lambda x: x.granularity == "selective" and (x.method or x.again),
        "selective recomputation takes neither --recompute-method nor --recompute-num-layers: "
        "leave them out",
        "recompute method is not yet supported for selective recomputing granularity",
        "arguments.py:1426, since core 0.4",
    ),
    Rule(
        lambda x: x.granularity == "selective" and {*x.modules} - {*MODULES, *_OTHERS},
        "Megatron-LM has no such module to recompute among {x.modules}: take, for example, "
        "core_attn, layernorm, mlp, moe, moe_act, shared_experts or mla_up_proj",
        "Invalid choices for recompute_modules: {}",
        "transformer_config.py:1960, since core 0.12",
    ),
    Rule(
        lambda x: x.granularity == "selective" and "moe_act" in x.modules and not x.one_product,
        "Megatron-LM recomputes moe_act only where one call multiplies all experts' matrices: add "
        "--moe-grouped-gemm",
        "moe_act in recompute_modules is only supported with moe_grouped_gemm.",
        "transformer_config.py:1966, since core 0.12",
    ),
    Rule(
        lambda x: x.granularity == "selective" and "mla_up_proj" in x.modules and not x.latent,
        "mla_up_proj is a part of latent attention: leave it out, or add --multi-latent-attention",
        "mla_up_proj in recompute_modules is only supported with multi_latent_attention.",
        "transformer_config.py:1971, since core 0.12",
    ),
    Rule(
        lambda x: (
            x.paired
            and (x.ep == 1 or (x.pp > 1 and x.V == 1) or x.dispatcher not in ("alltoall", "flex"))
        ),
        "Megatron-LM has pairs only for experts on several GPUs, by alltoall or flex, and in a "
        "pipeline only with several stages on a rank: leave --overlap-moe-expert-parallel-comm "
        "out, or take Interleaved1F1B",
        "overlap_moe_expert_parallel_comm is only supported with expert model parallelism",
        "transformer_config.py:3015, since core 0.14",
    ),
    Rule(
        lambda x: x.paired and (x.granularity == "full" or x.method or x.again),
        "Megatron-LM recomputes no whole layers in pairs: plan without recompute, or take "
        "Interleaved1F1B",
        "disable full recomputation when enabling overlap_moe_expert_parallel_comm",
        "transformer_config.py:3023, since core 0.14",
    ),
    Rule(
        lambda x: x.paired and "moe" in x.modules,
        "Megatron-LM recomputes no whole mixture in pairs: take moe_act and shared_experts instead "
        "of moe",
        "disable moe in recompute_modules when enabling overlap_moe_expert_parallel_comm",
        "transformer_config.py:3032, since core 0.17",
    ),
    Rule(
        lambda x: (
            x.experts and x.dispatcher == "flex" and x.backend != "hybridep" and x.etp * x.ep == 1
        ),
        "Megatron-LM can't send copies once per node (flex) if tp times ep is 1: take a different "
        "dispatcher",
        "DeepEP dispatcher requires TPxEP > 1",
        "token_dispatcher.py:1836, since core 0.17.1",
    ),
    Rule(
        lambda x: x.kv_heads and x.kv_heads % x.tp and x.tp % x.kv_heads,
        "{x.kv_heads} heads of keys and values can't be shared out to tp {x.tp}: take a tp that "
        "divides them",
        "num_query_groups ({}) must be a multiple or divisor of tensor_model_parallel_size",
        "transformer_config.py:1466, since core 0.16",
    ),
    Rule(
        lambda x: x.deferred and x.pp == 1,
        "one rank has no flush to compute the head's weight gradients in: leave "
        "--defer-embedding-wgrad-compute out",
        "Cannot defer embedding wgrad compute when pipeline model parallel is not used",
        "model_parallel_config.py:547, since core 0.6",
    ),
    Rule(
        lambda x: x.early_ramps and (x.V == 1 or x.waits_for_messages),
        "the ramps can overlap messages only if the steady state does, which takes interleaving "
        "without --no-overlap-p2p-communication: leave --overlap-p2p-communication-warmup-flush "
        "out",
        "Pipeline parallel communication overlapping in warmup and flush is only compatible with "
        "overlap_p2p_comm but not batch_p2p_comm.",
        "model_parallel_config.py:573, since core 0.10",
    ),
    Rule(
        lambda x: x.V > 1 and x.M < x.pp,
        "{x.M} microbatches are too few to interleave on {x.pp} ranks: take --global-batch-size "
        "{x.next_batch}",
        "The number of contiguous micro-batches in a virtual pipeline stageshould range in [PP={} "
        ", M={}]",
        "schedules.py:1165, since core 0.10",
    ),
    Rule(
        lambda x: x.V > 1 and x.M % x.pp,
        "{x.M} microbatches leave a last round of fewer than {x.pp}: take --global-batch-size "
        "{x.next_batch}",
        "The remainder of M (the total micro-batches) divided by N (number of contiguous "
        "micro-batches in a virtual pipeline stage) should be 0, or larger than or equal to the "
        "pipeline-parallel size",
        "schedules.py:1174, since core 0.10",
    ),
)


def refusal(x: Namespace, rules: Sequence[Rule], where: str = "", **more: object) -> str:
    """What to say of the first rule that `x` breaks: what works, the framework's own words, and
    where they are.
    """
    broken = (rule for rule in rules if rule.broken(x))
    return next(
        (f'{r.told.format(x=x, **more)} ({where}{r.source}: "{r.error}")' for r in broken), ""
    )


def check_line(x: Line) -> None:
    """ValueError for the first rule that a line breaks: what works, Megatron-LM's words for it, and
    where they are.
    """
    letters = Counter("".join(x.drawn))
    if told := refusal(x, RULES, "Megatron-LM d98e8a64, ", stages=len(x.drawn), letters=letters):
        raise ValueError(told)


def uncounted(x: Line) -> Iterator[str]:
    """What of a line changes its step, and no plan counts."""
    if x.predicting:
        yield (
            "a predictor (MTP) is counted in a lab.Model that has it; else its rank takes a layer "
            "and a head more"
        )
    if any((stage + 1) % x.pp for stage in x.predictors):
        yield (
            "an m before the last rank makes every message wait for an exchange of shapes and for "
            "torch.cuda.synchronize (p2p_communication.py:327, since core 0.16)"
        )
    if x.deferred:
        yield "the head's weight gradients that are put off into the flush are counted as if not"
    yield from empty_stages(x.drawn)
    if x.frequency:
        yield (
            f"--moe-layer-freq {x.frequency} is for a lab.Model to say: a Transformer has experts "
            "in every layer"
        )
    others = ", ".join(name for name in x.modules if x.paired or name not in MODULES)
    if others and x.granularity == "selective":
        yield f"recomputing {others} isn't counted: less is held, and a little more computed"


def empty_stages(stages: Sequence[str]) -> Iterator[str]:
    """What to say of a layout's stages that have nothing."""
    if empty := [str(at) for at, stage in enumerate(stages) if not stage]:
        told = f"{', '.join(empty[:9])}{' ...' * (len(empty) > 9)}"
        yield (
            f"stage {told} has no layer and only passes tensors on: hangs are reported (its #1852)"
        )


_WRONG = {  # of a layout whose repetitions are written out, in this order
    "[^EtmL|]": "a letter that it doesn't know",
    "^(?!E)": "no E at its beginning",
    r"\|$": "a bar behind the last stage",
    "(?<!L)$": "no L at its end",
    "(?<=.)E": "a second E",
    "L(?=.)": "an L before its end, and Megatron-LM d98e8a64 takes one",
    "^[^m]*m(?=.*t)": "an m before a t",
    r"^[^m]*m[^|]*\|[^m]*m": "m in several stages, and Megatron-LM d98e8a64 takes one",
}


_LISTS = {  # of names, with + and *, as a layout
    "embedding": "E",
    "decoder": "t",
    "mtp": "m",
    "loss": "L",
    r"\[(\w)\](\*\d+)": r"[\1\2]",  # [t]*8 is [t*8]
    r"(?<!\])\]\+\[(?!\[)": "",  # [E]+[t*8] is [Et*8]
    r"\[\[([\w*]+)\]\](\*\d+)": r"(\1|)\2",  # [[t*8]]*6 is (t*8|)*6
    r"\[([\w*]*)\]": r"\1|",
    r"[\[\]+]": "",
}


def stages_of(text: str) -> list[str]:
    """A layout's letters, stage by stage, of its text or of lists of names, as Megatron Bridge's
    recipes have them; ValueError that says where it is wrong.
    """
    expect(str, text=text)
    plain = re.sub(r"[,\s\"']", "", text)
    if plain.startswith("["):
        for pattern, written_as in _LISTS.items():
            plain = re.sub(pattern, written_as, plain)
        plain = plain.rstrip("|")
    for repeated in (r"\(([^()]+)\)\*(\d{1,9})", r"([EtmL|])\*(\d{1,9})"):
        if sum(len(unit) * int(times) for unit, times in re.findall(repeated, plain)) > MOST:
            raise ValueError(f"a layout repeats up to {MOST:,} letters, got {shown(text)}")
        plain = re.sub(repeated, lambda found: found[1] * int(found[2]), plain)
    for pattern, fault in _WRONG.items():
        if found := re.search(pattern, plain):
            here = found[0][-1:]
            at = plain[: found.end() - len(here)].count("|")
            raise ValueError(
                "a layout is E, layers t, perhaps m, and L, with bars between stages, such as "
                "Et*3|(tt|)*29,m|L, and no group stands in another: "
                f"{fault}, {here or 'nothing'} in stage {at}, got "
                f"{shown(text)}"
            )
    return plain.split("|")


def read_layout(text: str) -> tuple[int, ...]:
    """How many layers each stage has, in the order of stages: what `plan` takes as `cut`.

    In the text of `--pipeline-model-parallel-layout`, `E` is the embedding, `t` a layer, `m` a
    layer that predicts further tokens, which isn't counted, and `L` the loss. A bar ends a stage,
    `*` repeats a letter or a group in parentheses, and commas mean nothing. ValueError for what
    Megatron-LM's parser refuses, a group in a group among it.

    >>> read_layout("Et*3|(tt|)*2,m|L")
    (3, 2, 2, 0, 0)
    """
    return tuple(stage.count("t") for stage in stages_of(text))


def written(cut: list[int] | tuple[int, ...]) -> str:
    """The layout with these layers of each stage."""
    text = "|".join("t" * n if n < 3 else f"t*{n}" for n in cut)
    text = re.sub(r"(t[t*\d]*\|)\1+", lambda run: f"({run[1]})*{len(run[0]) // len(run[1])}", text)
    return f"E{text}L"
