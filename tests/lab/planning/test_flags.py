"""Flags out, read back by parsers that are written from the frameworks' documentation and source, not from ours."""

from __future__ import annotations

import argparse
import random
import re
import shlex
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules
from torch.torch_version import TorchVersion

import pplab as pp
from pplab import lab
from pplab_course import spine

NODE = lab.Machine(8, inside=pp.Link(5e-6, 400e9), between=pp.Link(15e-6, 50e9), flops=400e12, memory=80e9)
MODEL = lab.Transformer(num_layers=32, width=4096, sequence=4096, vocabulary=128000, heads=32, kv_heads=8)
VPP = {"schedule": "Interleaved1F1B", "stages_per_rank": 2}


def plan(layout=None, batch=32, microbatch=1, **how):
    return lab.plan(MODEL, NODE, layout or lab.Layout(tp=2, pp=4, dp=2), batch, microbatch, **how)


def megatron(line):
    """torchrun's part and Megatron-LM's, as its arguments.py takes them: no abbreviations, nothing unknown."""
    words = shlex.split(line.replace("\\\n", " "), comments=True)
    queues = words.pop(0).partition("CUDA_DEVICE_MAX_CONNECTIONS=")[2] if words[0] != "torchrun" else None
    assert words[0] == "torchrun" and words[5] == "pretrain_gpt.py"
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, default in (
        *(("nnodes", None), ("nproc-per-node", None), ("num-layers", None), ("seq-length", None)),
        *(("micro-batch-size", None), ("global-batch-size", None), ("tensor-model-parallel-size", 1)),
        *(("pipeline-model-parallel-size", 1), ("context-parallel-size", 1), ("expert-model-parallel-size", 1)),
        *(("num-virtual-stages-per-pipeline-rank", None), ("recompute-num-layers", None), ("num-experts", None)),
        *(("moe-router-topk", 2), ("hidden-size", None), ("ffn-hidden-size", None), ("num-attention-heads", None)),
        *(("kv-channels", None), ("num-query-groups", 1), ("max-position-embeddings", None)),
        *(("moe-ffn-hidden-size", None), ("moe-shared-expert-intermediate-size", None)),
        ("expert-tensor-parallel-size", None),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("recompute-granularity", "recompute-method", "pipeline-model-parallel-layout"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--recompute-modules", nargs="*")
    parser.add_argument("--moe-token-dispatcher-type", choices=["allgather", "alltoall", "flex"], default="allgather")
    parser.add_argument("--moe-flex-dispatcher-backend", choices=["deepep", "hybridep"])
    for name in (
        *("bf16", "sequence-parallel", "use-distributed-optimizer", "use-tp-pp-dp-mapping", "grad-reduce-in-bf16"),
        *("overlap-moe-expert-parallel-comm", "use-megatron-fsdp", "disable-bias-linear", "moe-router-pre-softmax"),
        *("overlap-grad-reduce", "overlap-param-gather", "group-query-attention", "swiglu"),
        *("untie-embeddings-and-output-weights", "moe-grouped-gemm"),
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--data-parallel-sharding-strategy", default="no_shard")
    parser.add_argument("--ckpt-format", default="torch_dist")
    said = parser.parse_args(words[1:5] + words[6:])
    asserted(said, queues)
    return said


def asserted(said, queues):
    """What Megatron-LM asserts of these flags on a Hopper GPU beside what its table of rules has, which a test compares
    with its own parser's verdicts."""
    divided, paired = (
        said.tensor_model_parallel_size * said.context_parallel_size > 1,
        said.overlap_moe_expert_parallel_comm,
    )
    if said.use_megatron_fsdp:
        assert queues != "1" and said.ckpt_format == "fsdp_dtensor"
    else:
        assert said.ckpt_format == "torch_dist" and (not divided or paired or queues == "1")
    if said.overlap_param_gather:
        assert (said.use_distributed_optimizer or said.use_megatron_fsdp) and said.overlap_grad_reduce
    assert said.kv_channels or said.hidden_size % said.num_attention_heads == 0
    assert said.max_position_embeddings >= said.seq_length
    assert said.sequence_parallel == (said.tensor_model_parallel_size > 1)
    if said.num_experts:  # without grouped GEMMs, which aren't asserted, experts run one after another
        assert said.moe_grouped_gemm and said.disable_bias_linear
        assert said.moe_router_topk > 1 or said.moe_router_pre_softmax


def weights(said, vocabulary):
    """Parameters by Megatron-LM's theoretical_memory_usage.py, without its norms and its router."""
    width, heads, gate = said.hidden_size, said.num_attention_heads, 1.5 if said.swiglu else 1
    queries = (said.kv_channels or width // heads) * heads
    groups = said.num_query_groups if said.group_query_attention else heads
    wide = said.ffn_hidden_size
    if said.num_experts:
        wide = said.moe_ffn_hidden_size * said.num_experts + (said.moe_shared_expert_intermediate_size or 0)
    layer = 2 * width * queries * (1 + groups / heads) + 2 * width * wide * gate
    return said.num_layers * layer + (1 + said.untie_embeddings_and_output_weights) * width * vocabulary


@pytest.mark.parametrize("experts", [None, lab.ExpertLayers(16, 4, 2, shared=1)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", [
    {}, {"gated": True, "kv_heads": 2, "mlp_width": 2560}, {"gated": True, "head_width": 96}, {"kv_heads": 1}
])  # fmt: skip
def test_megatrons_line_has_as_many_parameters_as_the_plan(shape, tied, experts):
    model = lab.Transformer(4, 512, 128, heads=8, vocabulary=1000, tied=tied, **{"mlp_width": 1280} | shape)
    line = lab.flags(lab.plan(model, NODE, lab.Layout(pp=2, dp=4), 32, experts=experts), "Megatron-LM")
    assert weights(megatron(line), 1000) == (experts.parameters(model) if experts else model.parameters)


@pytest.mark.parametrize("how", [
    {"sends": "both wait"},
    {"sends": "both wait", "cut": [8, 9, 8, 7], "shard_optimizer": True},
    {"sends": "forwards wait", **VPP},
    {"sends": "forwards wait", **VPP, "cut": [3, 4, 4, 4, 5, 5, 4, 3], "recompute": [2] * 8},
    {"sends": "both wait", "recompute": True, "layout": lab.Layout(tp=2, pp=4, dp=2, order="tp-pp-dp")},
    {"sends": "both wait", "recompute": True, "layout": lab.Layout(tp=2, cp=2, pp=4)},
    {"sends": "both wait", "recompute": ("core_attn", "mlp")},
    {"sends": "both wait", "recompute": ("moe_act",), "layout": lab.Layout(pp=4, dp=4),
     "experts": lab.ExpertLayers(8, 2, 2)},
    {"sends": "both wait", "layout": lab.Layout(dp=8), "state": lab.State(2, 2, 12), "microbatch": 2},
    {"schedule": "paired-1F1B", "stages_per_rank": 2, "layout": lab.Layout(pp=4, dp=4),
     "experts": lab.ExpertLayers(16, 4, 4, once_per_node=True)},
    {"sends": "both wait", "layout": lab.Layout(pp=4, dp=4), "experts": lab.ExpertLayers(8, 2, 2)},
    {"sends": "both wait", "layout": lab.Layout(tp=2, pp=2, dp=4), "experts": lab.ExpertLayers(8, 1, 2)},
    {"sends": "both wait", "layout": lab.Layout(tp=4, pp=2, dp=2), "experts": lab.ExpertLayers(8, 2, 8, whole=True)},
])  # fmt: skip
def test_megatrons_line_is_the_plan_and_comes_back_as_it(how):
    asked = plan(**how)
    line = lab.flags(asked, "Megatron-LM")
    assert "#" not in line
    said, layout, stages = megatron(line), asked.layout, len(asked.layers)
    assert said.nnodes * said.nproc_per_node == layout.num_ranks and said.nproc_per_node == 8
    assert (said.num_layers, said.seq_length, said.bf16) == (32, 4096, True)
    sizes = (said.tensor_model_parallel_size, said.context_parallel_size, said.pipeline_model_parallel_size)
    assert sizes == (layout.tp, layout.cp, layout.pp) and said.sequence_parallel == (layout.tp > 1)
    assert (said.micro_batch_size, said.global_batch_size) == (asked.microbatch, 32)
    if text := said.pipeline_model_parallel_layout:
        assert lab.read_layout(text) == asked.layers and said.num_virtual_stages_per_pipeline_rank is None
    else:
        assert (said.num_virtual_stages_per_pipeline_rank or 1) * layout.pp == stages and len({*asked.layers}) == 1
    again = said.recompute_num_layers or 0
    assert tuple(min(n, again) for n in asked.layers) == asked.recomputed
    how = ("full", "block") if again else ("selective" if asked.modules else None, None)
    assert (said.recompute_granularity, said.recompute_method) == how and tuple(
        said.recompute_modules or ()
    ) == asked.modules
    assert said.use_distributed_optimizer == asked.shard_optimizer
    assert said.use_tp_pp_dp_mapping == (layout.order == "tp-pp-dp")
    assert said.grad_reduce_in_bf16 == (asked.state.gradients == 2)
    if asked.experts:
        experts = (said.num_experts, said.moe_router_topk, said.expert_model_parallel_size)
        assert experts == (asked.experts.count, asked.experts.used, asked.experts.gpus)
        assert said.moe_token_dispatcher_type == ("flex" if asked.experts.once_per_node else "alltoall")
    back = lab.read_launch(line)
    again = lab.plan(MODEL, NODE, **back.arguments)
    assert again == asked and again.step_s == asked.step_s
    assert weights(said, 128000) == (asked.experts.parameters(MODEL) if asked.experts else MODEL.parameters)
    assert said.overlap_grad_reduce == (layout.dp > 1 or asked.shard_optimizer)
    assert said.overlap_param_gather == asked.shard_optimizer
    shape = (
        "--hidden --ffn --moe- --num-attention --num-query --group-query --seq --max-position --untie --bf16".split()
    )
    others = ("--sequence-parallel", "--disable-bias-linear", "--overlap-grad-reduce", "--overlap-param-gather")
    assert all(flag.startswith((*shape, *others)) for flag in back.ignored)


def test_any_cut_comes_back_from_its_layout_string():
    rng = random.Random(0)
    for _ in range(60):
        P, V = rng.choice([2, 4]), rng.choice([1, 2, 5])
        cut = [0, *rng.choices([0, 1, 2, 2, 2, 2, 3, 12], k=P * V - 2), 1]
        model = lab.Transformer(sum(cut), width=512, sequence=128, heads=8, vocabulary=1000)
        how = {"schedule": "Interleaved1F1B", "stages_per_rank": V} if V > 1 else {}
        line = lab.flags(lab.plan(model, NODE, lab.Layout(pp=P), 2 * P, cut=cut, **how), "Megatron-LM")
        text = megatron(line).pipeline_model_parallel_layout
        assert lab.read_layout(text) == tuple(cut)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_without_a_pipeline_replicas_share_what_they_shared_in_the_plan(zero):
    given = MODEL, NODE, lab.Layout(tp=2, dp=8), 32, 2
    asked, two = (lab.fsdp_plan(*given, zero=each, recompute=True) for each in (zero, 2))
    line = lab.flags(asked, "Megatron-LM")
    strategy = re.findall(r"--data-parallel-sharding-strategy (\w+)", line)
    assert strategy == {2: ["optim_grads"], 3: ["optim_grads_params"]}.get(zero, [])  # its user guide on Megatron-FSDP
    assert ("--use-megatron-fsdp" in line) == (zero > 1) and ("--use-distributed-optimizer" in line) == (zero > 0)
    assert "sends" not in line and "--micro-batch-size 2 --global-batch-size 32" in line
    assert megatron(line).tensor_model_parallel_size == 2
    assert ("# before Blackwell" in line) == (zero > 1) == ("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun" not in line)
    found = {"ParallelismConfig": ParallelismConfig, "TrainingConfig": TrainingConfig, "FullAC": FullAC}
    exec(text := lab.flags(asked, "torchtitan"), found)
    said = found["parallelism"]
    shards = said.data_parallel_shard_degree, said.data_parallel_replicate_degree
    assert shards == ((8, 1) if zero else (1, 8)) and not said.pipeline_parallel_schedule_csv
    assert said.fsdp_reshard_after_forward == ("always" if zero == 3 else "never")
    assert not found["training"].disable_cuda_graphs
    remark = f"# planned with zero=1; here it is zero=2\n# so a step is predicted to take {two.step_s:.4g} s"
    assert (remark in text) == (zero == 1)
    assert "a step is predicted" not in lab.flags(lab.fsdp_plan(*given, zero=zero, recompute=["mlp"]), "torchtitan")
    with pytest.raises(ValueError, match="a pipeline and replicas alone"):
        lab.flags(asked, "torch")


def test_what_megatron_does_otherwise_stands_above_the_line_with_its_time():
    asked = plan(recompute=[3, 0, 0, 0])
    line = lab.flags(asked, "Megatron-LM")
    first, second, third, *_ = line.splitlines()
    assert first == "# planned with sends='nobody waits'; here it is sends='both wait'"
    assert second == "# planned with recompute=(3, 0, 0, 0); here it is recompute=(3, 3, 3, 3)"
    runs = lab.plan(MODEL, NODE, **lab.read_launch(line).arguments)
    assert runs.recomputed == (3, 3, 3, 3) and runs.sends == "both wait" and runs.step_s > 1.05 * asked.step_s
    assert third == f"# so a step is predicted to take {runs.step_s:.4g} s, not {asked.step_s:.4g}"


@pytest.mark.parametrize(
    ("zero", "memory", "how"), [(3, 30e9, {}), (0, 80e9, {"recompute": [5]}), (3, 9e9, {"recompute": [5]})]
)
def test_torchtitan_computes_all_layers_again_and_the_remark_says_how_long_that_takes(zero, memory, how):
    """Where work hides all that is sent, so many forwards of a layer longer, whether they must be or were asked for."""
    machine = lab.Machine(8, NODE.inside, NODE.inside, NODE.flops, memory)
    asked = lab.fsdp_plan(MODEL, machine, lab.Layout(dp=16), 64, 2, zero=zero, **how)
    (again,) = asked.recomputed
    assert again == 5 if how else 0 < again < 32
    first, second, *_ = lab.flags(asked, "torchtitan").splitlines()
    assert first == f"# planned with recompute=({again},); here it is recompute=(32,)"
    longer = asked.step_s + 2 * (32 - again) * MODEL.layer_flops(2) / NODE.flops  # of two microbatches
    assert second == f"# so a step is predicted to take {longer:.4g} s, not {asked.step_s:.4g}"


@dataclass(kw_only=True)
class ParallelismConfig:
    """Fields of torchtitan's, with its defaults."""

    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    module_fqns_per_model_part: list[list[str]] | None = None
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_schedule_csv: str | None = ""
    pipeline_parallel_microbatch_size: int = 1  # in 0.3.0
    num_pp_microbatches: int = 1  # on main
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1
    fsdp_reshard_after_forward: str = "default"


@dataclass(kw_only=True)
class TrainingConfig:
    """The same, of 0.3.0 and of main."""

    local_batch_size: int = 8
    global_batch_size: int = -1
    seq_len: int = 2048
    num_tokens_per_microbatch_per_dp_rank: int = 16384
    num_tokens_per_train_step: int = -1
    max_context_length: int = 2048
    disable_cuda_graphs: bool = False


FullAC = SimpleNamespace(Config=lambda: "full")


class Recorded(schedules.PipelineScheduleMulti):
    """torch's reader of such a file, without stages."""

    def __init__(self):
        self._num_stages, self.pipeline_order = 0, {}

    def _validate_and_set_stage_mapping(self, actions):
        self.pipeline_order = actions

    def _step_microbatches(self, *args, **kwargs): ...


@pytest.mark.parametrize("how", [
    {"sends": "both wait", "cut": [8, 9, 8, 7], "shard_optimizer": True},
    {"cut": [8, 9, 8, 7]},
    VPP,
    {"schedule": "ZBVZeroBubble", "recompute": True},
    {"schedule": "ZB-H1"},
    {"schedule": "V-Half", "layout": lab.Layout(tp=2, cp=2, pp=4, dp=1)},
    {"layout": lab.Layout(pp=4, dp=4), "sends": "both wait", "shard_optimizer": True,
     "experts": lab.ExpertLayers(8, 2, 2)},
])  # fmt: skip
def test_torchtitans_fields_are_the_plan(how, tmp_path, monkeypatch):
    asked = plan(**how)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "3")
    found = {"ParallelismConfig": ParallelismConfig, "TrainingConfig": TrainingConfig, "FullAC": FullAC}
    exec(lab.flags(asked, "torchtitan"), found)
    said, layout, rows = found["parallelism"], asked.layout, asked.timeline.schedule
    degrees = (said.tensor_parallel_degree, said.context_parallel_degree, said.pipeline_parallel_degree)
    assert degrees == (layout.tp, layout.cp, layout.pp)
    shards = said.data_parallel_shard_degree, said.data_parallel_replicate_degree
    assert shards == ((layout.dp, 1) if asked.shard_optimizer else (1, layout.dp))
    ep = said.expert_parallel_degree  # torchtitan: dp_shard * cp * tp == efsdp * ep
    assert ep == (asked.experts.gpus if asked.experts else 1) and shards[0] * layout.cp * layout.tp % ep == 0
    modules = said.module_fqns_per_model_part
    assert sum(modules, []) == ["tok_embeddings", *(f"layers.{n}" for n in range(32)), "norm", "lm_head"]
    assert tuple(sum(name[:7] == "layers." for name in part) for part in modules) == asked.layers
    tokens = found["training"]
    assert (tokens.global_batch_size, tokens.seq_len, tokens.local_batch_size * layout.dp) == (32, 4096, 32)
    assert said.pipeline_parallel_microbatch_size == asked.microbatch == 1
    main = {"ParallelismConfig": ParallelismConfig, "TrainingConfig": TrainingConfig, "FullAC": FullAC}
    exec(lab.flags(asked, "torchtitan-main"), main)
    sizes, cut = main["training"], main["parallelism"].num_pp_microbatches
    assert sizes.num_tokens_per_microbatch_per_dp_rank == asked.microbatch * 4096 == sizes.max_context_length
    per_step = sizes.num_tokens_per_microbatch_per_dp_rank * cut * layout.dp
    assert sizes.num_tokens_per_train_step == per_step == 32 * 4096
    assert tokens.disable_cuda_graphs  # trainer.py, _validate_cuda_graphs: "do not support pipeline parallelism yet"
    assert found["activation_checkpoint"] == ("full" if any(asked.recomputed) else None)
    in_a_v = schedules.get_schedule_class(said.pipeline_parallel_schedule) in (
        schedules.ScheduleZBVZeroBubble,
        schedules.ScheduleDualPipeV,
    )
    P = layout.pp
    places = {"v": [min(s, 2 * P - 1 - s) for s in range(2 * P)], "loop": [s % P for s in range(len(asked.layers))]}
    assert list(rows.placement) == places["v" if in_a_v else "loop"]  # where torchtitan puts stages, by this name
    if path := said.pipeline_parallel_schedule_csv:
        reader = Recorded()
        schedules.PipelineScheduleMulti._load_csv(reader, path)
        assert [[*map(str, reader.pipeline_order[r])] for r in range(P)] == [[*map(str, row)] for row in rows.rows]
    else:
        assert said.pipeline_parallel_schedule == rows.name


SMALL = lab.Transformer(num_layers=5, width=64, sequence=16, vocabulary=256, heads=4)


@pytest.mark.slow
def test_torch_2_15_is_told_to_keep_a_queue_for_each_pair_of_ranks():
    text = lab.flags(lab.plan(SMALL, NODE, lab.Layout(pp=2), 8, 2, cut=[3, 2]), "torch")
    lines = text[text.index("if device.type ==") : text.index("sizes =")]
    asked: list[str] = []
    for version, kind in (("2.14.1+cu130", "cuda"), ("2.15.0", "cpu"), ("2.15.0+cu132", "cuda")):
        on = SimpleNamespace(type=kind), SimpleNamespace(__version__=TorchVersion(version))
        exec(lines, {"device": on[0], "torch": on[1], "dist": SimpleNamespace(init_process_group=asked.append)})
    assert asked == ["nccl-lazy"]
    per_edge = "TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P=1"
    for layout, cut in ((lab.Layout(pp=2), [3, 2]), (lab.Layout(dp=2), None)):
        titan = lab.flags(lab.plan(SMALL, NODE, layout, 16, 2, cut=cut), "torchtitan")
        assert (per_edge in titan) == (layout.pp > 1)


@pytest.mark.parametrize(("layout", "how"), [
    (lab.Layout(pp=2), {"sends": "both wait", "cut": [3, 2], "recompute": [2, 0]}),
    (lab.Layout(pp=2, dp=2, order="tp-pp-dp"), {"schedule": "ZB-H1", "cut": [2, 3], "shard_optimizer": True}),
    (lab.Layout(pp=2), {"schedule": "ZBVZeroBubble", "cut": [1, 2, 2, 0], "recompute": [0, 1, 0, 0]}),
])  # fmt: skip
def test_torchs_program_runs_and_trains_as_one_process_does(layout, how, tmp_path):
    """Losses of three steps, so two updates, against the same model in one process."""
    import torch

    asked = lab.plan(SMALL, NODE, layout, 8 * layout.dp, 2, **how)
    text = lab.flags(asked, "torch")
    assert "#" not in text.splitlines()[0]
    (tmp_path / "train.py").write_text(text)
    start = f"import os, runpy\nos.chdir({str(tmp_path)!r})\nrunpy.run_path('train.py', run_name='__main__')\n"
    (tmp_path / "start.py").write_text(start)  # in its folder, where it writes its rows
    ran = spine.run(tmp_path / "start.py", layout.num_ranks, limit_s=120)
    assert ran.failure is None, ran
    found = {}
    for line in "".join(report.printed for report in ran.reports).splitlines():
        step, replica, loss = line.replace("step ", "").replace(" replica ", "").replace(": loss ", ",").split(",")
        found[int(step), int(replica)] = float(loss)
    yours = text[text.index("# Yours") : text.index("class Stage")]
    names = {"torch": torch, "nn": torch.nn, "LAYERS": asked.layers}
    exec(yours, names)
    model = torch.nn.Sequential(names["embedding"], *names["layers"], names["head"])
    adam, expected = torch.optim.AdamW(model.parameters(), lr=1e-3), {}
    for step in range(3):
        for replica in range(layout.dp):
            tokens, target = names["batch"](step, replica)
            loss = names["loss"](model(tokens), target)
            (loss / layout.dp).backward()
            expected[step, replica] = loss.item()
        adam.step()
        adam.zero_grad()
    assert found == pytest.approx(expected, abs=2e-5)
    assert len({round(loss, 4) for loss in expected.values()}) == len(expected)


@pytest.mark.parametrize(("framework", "how", "told"), [
    ("Megatron-LM", {"schedule": "ZB-H1"}, "Megatron-LM has 1F1B .* rows of ZB-H1: torch and torchtitan"),
    ("Megatron-LM", {**VPP, "batch": 36}, "for microbatches that the ranks divide"),
    ("Megatron-LM", {"layout": lab.Layout(pp=4, dp=2, order="dp-pp-tp")}, "numbers ranks .* got 'dp-pp-tp'"),
    ("Megatron-LM", {"layout": lab.Layout(pp=2, dp=2, order="tp-pp-dp", cp=2)}, "got 1 GPUs of experts and cp 2"),
    ("Megatron-LM", {**VPP, "layout": lab.Layout(dp=8)}, "not these rows of Interleaved1F1B"),
    ("Megatron-LM", {"schedule": "paired-1F1B", "stages_per_rank": 2}, "pairs only for experts on several GPUs"),
    ("Megatron-LM", {"schedule": "paired-1F1B", "stages_per_rank": 2, "layout": lab.Layout(pp=4, dp=2),
                     "experts": lab.ExpertLayers(8, 2, 2), "recompute": True}, "recomputes no whole layers in pairs"),
    ("Megatron-LM", {"layout": lab.Layout(dp=2), "experts": lab.ExpertLayers(8, 2, 1, once_per_node=True)},
     "can.t send copies once per node"),
    ("torchtitan", {"layout": lab.Layout(pp=4, dp=2, order="tp-pp-dp")}, "torchtitan numbers ranks"),
    ("torchtitan", {"experts": lab.ExpertLayers(8, 2, 2)}, "its experts are whole"),
    ("torchtitan", {"schedule": "DualPipe"}, "torch's CSV has one rank for each"),
    ("torch", {}, "take torchtitan for Layout"),
    ("DeepSpeed", {}, "unknown framework 'DeepSpeed'"),
])  # fmt: skip
def test_what_a_framework_cannot_run_is_refused(framework, how, told):
    with pytest.raises(ValueError, match=told):
        lab.flags(plan(**how), framework)


def test_one_microbatchs_loss_is_not_taken_for_anothers():
    rows = [["0F1", "0F0", "0B1", "0B0"], ["1F1", "1F0", "1B1", "1B0"]]
    asked = plan(lab.Layout(pp=2), 2, schedule=pp.Schedule(rows))
    with pytest.raises(ValueError, match="last stage in the order 1, 0"):
        lab.flags(asked, "torch")


# Megatron Bridge 067f987d, Megatron-LM d98e8a64: recipes and documents, with the layers of the models' configs
PUBLISHED = {
    "Et*3|(tt|)*29m|L": (61, 32),  # DeepSeek-V3, docs/training/moe-optimization.md
    "Et*3|(tt|)*29,m|L": (61, 32),
    "Et*4|(tttt|)*14tmL": (61, 16),
    "Et*4|(t*4|)*14tmL": (61, 16),
    "Et|(tt|)*30mL": (61, 32),
    "Et|(tt|)*30L": (61, 32),  # Kimi K2
    "Et*15|t*15|t*16|t*15L": (61, 4),
    "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL": (80, 40),  # Llama 3 70B
    "Et*4|(t*7|)*5t*8|tmL": (48, 8),  # Qwen3 Next 80B-A3B
    "Etttttt|tttttttttttttttttttttttt|tttttttttttttttttttttttt|ttttttttttttttttttttttttL": (78, 4),  # GLM-5
    "E|t|t*2|t||(t|)*2,t*2,L": (8, 8),  # tests/unit_tests/transformer/test_transformer_block.py
}


@pytest.mark.parametrize("text", PUBLISHED)
def test_published_layouts_have_their_models_layers(text):
    cut = lab.read_layout(text)
    assert (sum(cut), len(cut)) == PUBLISHED[text]


def test_a_layout_is_told_stage_by_stage():
    assert lab.read_layout("E|t|t*2|t||(t|)*2,t*2,L") == (0, 1, 2, 1, 0, 1, 1, 2)
    assert lab.read_layout("Et*2 | (t*2|)*2 , t L") == (2, 2, 2, 1)


@pytest.mark.parametrize("text", ["", "t*4", "Et|tt", "E(t|(t|)*2)*2L", "Etx|tL", "Et|tL|t", "Em|tL", "Et**2L", "Et*L"])
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(ValueError, match="a layout is E, layers t"):
        lab.read_layout(text)
