"""Launch lines, good and bad."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from pplab import lab

LINE = """
torchrun --nnodes 64 --nproc-per-node 8 pretrain_gpt.py \\
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 \\
  --num-layers-per-virtual-pipeline-stage 2 --sequence-parallel \\
  --micro-batch-size 1 --global-batch-size 1024 --use-distributed-optimizer
"""
SHORT = "torchrun --nproc-per-node 8 x.py --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 32 "


def test_a_line_becomes_a_plans_arguments():
    found = lab.read_launch(LINE, num_layers=80)
    assert found.ignored == ("--sequence-parallel",) and found.arguments == {
        "layout": lab.Layout(8, 4, 16),
        "batch": 1024,
        "microbatch": 1,
        "cut": (2,) * 40,
        "recompute": False,
        "state": lab.State(2, 4, 12),
        "shard_optimizer": True,
        "experts": None,
        "schedule": "Interleaved1F1B",
        "stages_per_rank": 10,
        "sends": "forwards wait",
    }


def test_the_same_in_other_words():
    same = LINE.replace("--nproc-per-node 8", "--nproc_per_node=8").replace(
        "--micro-batch-size 1", "--micro-batch-size=1"
    )
    same = same.replace("\\\n", "") + "--num-layers 80 --lr 1e-4 --data-path a b --tensorboard-dir=x  # ours"
    found = lab.read_launch(same)
    assert found.arguments == lab.read_launch(LINE, num_layers=80).arguments
    assert found.ignored == ("--sequence-parallel", "--lr", "--data-path", "--tensorboard-dir")
    no_torchrun = LINE[LINE.index("--tensor") :]
    assert lab.read_launch(no_torchrun, num_layers=80, gpus=512) == lab.read_launch(LINE, num_layers=80)


@pytest.mark.parametrize(("more", "cut", "recompute"), [
    ("--num-layers 32", (8, 8, 8, 8), False),
    ('--pipeline-model-parallel-layout "Et*8|t*9|t*8|t*7L" --recompute-granularity full --recompute-method block '
     "--recompute-num-layers 8", (8, 9, 8, 7), [8, 8, 8, 7]),
    ("--num-layers 32 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
     (8,) * 4, [8] * 4),
    ("--num-layers 32 --recompute-granularity selective", (8,) * 4, ("core_attn",)),
    ("--num-layers 32 --recompute-granularity selective --recompute-modules mlp layernorm", (8,) * 4,
     ("layernorm", "mlp")),
    ("--num-layers 30 --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 5", (7, 9, 9, 5), False),
    ("--num-layers 46 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
     "--num-virtual-stages-per-pipeline-rank 2", (5, 6, 6, 6, 6, 6, 6, 5), False),
])  # fmt: skip
def test_cuts_and_recomputation(more, cut, recompute):
    found = lab.read_launch(SHORT + more).arguments
    assert (found["cut"], found["recompute"]) == (cut, recompute)


def test_a_comment_hides_no_flag_but_its_lines():
    said = LINE.replace("  --num-layers-per", "  # stages \\\n  --num-layers-per")
    assert said != LINE and lab.read_launch(said, num_layers=80) == lab.read_launch(LINE, num_layers=80)


def test_pairs_context_and_experts():
    more = "--num-layers 32 --num-virtual-stages-per-pipeline-rank 2 "
    pairs = "--overlap-moe-expert-parallel-comm --num-experts 8 --expert-model-parallel-size 2 "
    pairs += "--moe-token-dispatcher-type alltoall --recompute-granularity selective"
    with pytest.warns(UserWarning, match="recomputing core_attn isn't counted"):
        found = lab.read_launch(SHORT + more + pairs).arguments
    assert (found["schedule"], found["recompute"]) == ("paired-1F1B", False)
    whole = SHORT.replace("8 x.py", "64 x.py") + "--num-layers 32 --tensor-model-parallel-size 4 --num-experts 128 "
    whole += "--expert-tensor-parallel-size 1 --expert-model-parallel-size 16"
    found = lab.read_launch(whole).arguments["experts"]
    assert found == lab.ExpertLayers(128, 2, 16, whole=True)
    assert [*found.groups(lab.Layout(4, 4, 4))[0][1]] == [*range(16, 32)]
    found = lab.read_launch(SHORT + more + "--context-parallel-size 2 --num-experts 8 --expert-model-parallel-size 2")
    assert (found.arguments["layout"].cp, found.arguments["layout"].dp) == (2, 1)
    assert found.arguments["experts"] == lab.ExpertLayers(8, used=2, gpus=2)  # Megatron-LM's default is two


@pytest.mark.parametrize(("line", "told"), [
    (LINE, "doesn't say --num-layers: give num_layers="),
    (SHORT.replace("--nproc-per-node 8", "") + "--num-layers 32", "doesn't say --nproc-per-node: give gpus="),
    (SHORT + "--num-layers 32 --recompute-granularity full", "--recompute-method"),
    *[(f"{SHORT} --num-layers 32 --recompute-granularity selective --recompute-modules mlp {name}", told)
      for name, told in (("layer_norm", r"among \['mlp', 'layer_norm'\]: .*:1960, .* choices for recompute_modules"),
                         ("moe_act --num-experts 8", "add --moe-grouped-gemm .*:1966, .* only supported with moe_grou"),
                         ("mla_up_proj", "a part of latent attention: .*:1971, .* supported with multi_latent_atten"))],
    (SHORT + "--num-layers 32 --num-virtual-stages-per-pipeline-rank 2 --num-experts 8 --expert-model-parallel-size 2 "
     "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm --recompute-modules moe",
     "take moe_act and shared_experts instead of moe .*:3032, since core 0.17: .disable moe in recompute_modules"),
    (SHORT.replace("--micro-batch-size 1", "") + "--num-layers 32", "required: --micro-batch-size"),
    (SHORT.replace("size 32", "size 31") + "--num-layers 32", "a batch of 31 isn't whole microbatches of 1 on 2 repl"),
    (SHORT + "--num-layers 32 --num-layers-per-virtual-pipeline-stage 4 --num-virtual-stages-per-pipeline-rank 2",
     "in several ways"),
    (SHORT + "--num-layers 45 --account-for-loss-in-pipeline-split",
     r'46 layers don\'t divide among 4 ranks: give .* "Et\*11\|t\*12\|t\*11\|t\*11L" \('),
    (LINE + "--num-layers 36", "the 9 layers of a rank can't be stages of 2"),
    (SHORT + '--num-layers 32 --pipeline-model-parallel-layout "Et|t|t|tL"', "has 4 layers, and --num-layers says 32"),
    (SHORT + '--pipeline-model-parallel-layout "Et|t|tL"', "the layout's 3 stages don't divide among 4 ranks"),
    (SHORT + "--num-layers 32 --decoder-first-pipeline-num-layers 6", "leave 26 for the ranks between"),
    (SHORT.replace("parallel-size 4", "parallel-size 1") + "--num-layers 32 --num-virtual-stages-per-pipeline-rank 2",
     "2 stages on each of 1 ranks don't interleave"),
    (SHORT.replace("size 32", "size 6") + "--num-layers 32 --num-virtual-stages-per-pipeline-rank 2",
     r"3 microbatches are too few .* 8 \(Megatron-LM d98e8a64, schedules.py:1165, since core 0.10: .* range in \[PP"),
    (SHORT.replace("size 32", "size 20") + "--num-layers 32 --num-virtual-stages-per-pipeline-rank 2",
     "10 microbatches leave a last round of fewer than 4: take --global-batch-size 24"),
    (SHORT + '--pipeline-model-parallel-layout "E(t|)*1000000000L"', "a layout repeats up to 1,048,576 letters"),
    (SHORT + "--num-layers 32 --nnodes 1000000", "up to 1,048,576 GPUs and stages"),
    (SHORT.replace("--pipeline-model-parallel-size 4", "model.virtual_pipeline_model_parallel_size=2"),
     "fields of Megatron Bridge or verl: .* --num-virtual-stages-per-pipeline-rank 2"),
    (SHORT + "--num-layers 32 --use-megatron-fsdp", "--use-megatron-fsdp isn't read"),
    (SHORT + "--num-layers $L", r"argument --num-layers: expected a whole .*'\$L'.* in place of a variable; .* prints"),
    (SHORT + "--num-layers", "argument --num-layers: expected one argument"),
    *[(f"{SHORT} --num-layers 32 {nonsense}", f"argument {nonsense.split()[0]}: (expected a whole|invalid choice)")
      for nonsense in ("--tensor-model-parallel-size 0", "--global-batch-size 0", "--micro-batch-size -1",
                       "--moe-router-topk 0", "--num-virtual-stages-per-pipeline-rank 99999999999999999999",
                       "--recompute-granularity bogus", "--moe-token-dispatcher-type bogus")],
    (SHORT + "--num-layers 32 --num-experts 8 --moe-token-dispatcher-type flex", "token_dispatcher.py:1836, since"),
    (SHORT.replace("parallel-size 4", "parallel-size 1") + "--num-layers 32 --defer-embedding-wgrad-compute",
     "one rank has no flush .* since core 0.6"),
    *[(f"{SHORT} --num-layers 32 --overlap-p2p-communication-warmup-flush {more}", "ramps can overlap messages only if")
      for more in ("", "--num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication")],
    (SHORT + "--num-layers 32 --tensor-model-parallel-size 3", "8 ranks don't divide into replicas of 12"),
    (SHORT + "--num-layers 32 --num-experts 8 --expert-model-parallel-size 8", "experts on 8 GPUs, each cut over 1"),
    (SHORT + "--num-layers 32 --tensor-model-paralel-size 2", "did you mean --tensor-model-parallel-size"),
    (SHORT + "--num-layers 32 --tensor-parallel-size 2", "did you mean --tensor-model-parallel-size"),
    (SHORT + "--num-layers 32 --use-dist-optimizer", "did you mean --use-distributed-optimizer"),
    (SHORT + '--num-layers 32 --data "path', "No closing quotation"),
    (7, "text must be a str, got 7"),
])  # fmt: skip
def test_what_a_line_lacks_or_has_wrong_is_told(line, told):
    with pytest.raises(ValueError, match=told):
        lab.read_launch(line)


def test_megatrons_own_flags_that_look_alike_are_none_of_them():
    more = "--num-layers 32 --eval-micro-batch-size 4 --moe-router-dtype fp32 --seq-length 8192"
    found = lab.read_launch(SHORT + more)
    assert found.ignored == tuple(re.findall(r"--\S+", more)[1:]) and found.arguments["microbatch"] == 1


@pytest.mark.filterwarnings("ignore")
def test_megatron_lm_and_the_table_of_its_rules_say_the_same_of_random_lines():
    """Who refuses, and the layers of each stage. The file says how Megatron-LM's own verdicts were recorded."""
    refused = 0
    for flags, gpus, theirs in json.loads((Path(__file__).parent / "megatron_verdicts.json").read_text())["lines"]:
        try:
            ours = [*lab.read_launch(flags, gpus=gpus).arguments["cut"]]
        except ValueError as error:
            told = str(error)  # of a layout's own faults, its reader tells; fewer layers than none Megatron-LM takes
            assert "Megatron-LM d98" in told or "a layout is E" in told, flags
            assert isinstance(theirs, str) or "leave -" in told, flags
            refused += 1
        else:
            assert ours == theirs, flags
    assert 90 < refused < 120


@pytest.mark.filterwarnings("always")
def test_what_changes_the_step_and_is_not_counted_is_said():
    more = "--mtp-num-layers 1 --num-experts 8 --moe-layer-freq [0]*4 --pipeline-model-parallel-layout "
    with pytest.warns(UserWarning) as told:
        found = lab.read_launch(f'{SHORT} {more} "Et||tttm|L" --defer-embedding-wgrad-compute')
    assert tuple(str(each.message) for each in told) == found.uncounted
    told = ["MTP", "m before the last rank", "weight gradients", "stage 1 has no layer", "--moe-layer-freq"]
    assert [re.search("|".join(told), each)[0] for each in found.uncounted] == told
    with pytest.warns(UserWarning) as told:
        lab.read_launch(f'{SHORT} {more} "Et|t|t|tmL"')
    assert not any("last rank" in str(each.message) for each in told)


def test_a_childs_line_with_underscores_is_read_as_megatron_lms():
    line = "megatron sft --pipeline_model_parallel_size 4 --micro_batch_size 1 --use_distributed_optimizer false"
    found = lab.read_launch(line + " --sequence_parallel true", num_layers=32, gpus=8).arguments
    assert (found["layout"].pp, found["shard_optimizer"]) == (4, False)
    line += " --tensor_model_parallel_size 2 --num_experts 8 --expert_model_parallel_size 2 --recompute_granularity "
    line += "selective --recompute_modules moe_act mla_up_proj"
    found = lab.read_launch(line, num_layers=32, gpus=8).arguments
    assert found["experts"].whole and found["recompute"] == ("moe_act", "mla_up_proj")  # its defaults, and its model's
    for off in ("moe_grouped_gemm", "multi_latent_attention"):
        with pytest.raises(ValueError, match=off.replace("_", "-")):
            lab.read_launch(f"{line} --{off} false", gpus=8, num_layers=32)


def test_what_a_script_passes_can_be_read(tmp_path):
    """By the command that the error tells."""
    (tmp_path / "script.sh").write_text('GPUS=8\nARGS=(--nproc_per_node $GPUS)\ntorchrun ${ARGS[@]} x.py "${@:2}"\n')
    with pytest.raises(ValueError, match="what a script passes") as told:
        lab.read_launch((tmp_path / "script.sh").read_text() + "--nproc-per-node $GPUS")
    command = re.search(r"bash -c '(.*)' prints", str(told.value))[1].replace(".sh", ".sh data " + SHORT[32:])
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert lab.read_launch(done.stdout, num_layers=32) == lab.read_launch(SHORT, num_layers=32)
