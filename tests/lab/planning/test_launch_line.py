"""Launch lines, good and bad."""

from __future__ import annotations

import re
import subprocess

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
    ("--num-layers 32 --recompute-granularity selective", (8,) * 4, False),
])  # fmt: skip
def test_cuts_and_recomputation(more, cut, recompute):
    found = lab.read_launch(SHORT + more).arguments
    assert (found["cut"], found["recompute"]) == (cut, recompute)


def test_a_comment_hides_no_flag_but_its_lines():
    said = LINE.replace("  --num-layers-per", "  # stages \\\n  --num-layers-per")
    assert said != LINE and lab.read_launch(said, num_layers=80) == lab.read_launch(LINE, num_layers=80)


def test_pairs_context_and_experts():
    more = "--num-layers 32 --num-virtual-stages-per-pipeline-rank 2 "
    found = lab.read_launch(SHORT + more + "--overlap-moe-expert-parallel-comm --use-tp-pp-dp-mapping").arguments
    assert (found["schedule"], found["layout"].order) == ("paired-1F1B", "tp-pp-dp")
    found = lab.read_launch(SHORT + more + "--context-parallel-size 2 --num-experts 8 --expert-model-parallel-size 2")
    assert (found.arguments["layout"].cp, found.arguments["layout"].dp) == (2, 1)
    assert found.arguments["experts"] == lab.ExpertLayers(8, used=2, gpus=2)  # Megatron-LM's default is two


@pytest.mark.parametrize(("line", "told"), [
    (LINE, "doesn't say --num-layers: give num_layers="),
    (SHORT.replace("--nproc-per-node 8", "") + "--num-layers 32", "doesn't say --nproc-per-node: give gpus="),
    (SHORT + "--num-layers 32 --recompute-granularity full", "--recompute-method"),
    (SHORT.replace("--micro-batch-size 1", "") + "--num-layers 32", "required: --micro-batch-size"),
    (SHORT.replace("size 32", "size 31") + "--num-layers 32", "a batch of 31 isn't whole microbatches of 1 on 2 repl"),
    (SHORT + "--num-layers 32 --num-layers-per-virtual-pipeline-stage 4 --num-virtual-stages-per-pipeline-rank 2",
     "in one way"),
    (SHORT + "--num-layers 33", "33 layers can't be"),
    (LINE + "--num-layers 36", "36 layers can't be"),
    (SHORT + '--num-layers 32 --pipeline-model-parallel-layout "Et|t|t|tL"', "32 layers can't be"),
    (SHORT + '--pipeline-model-parallel-layout "Et|t|tL"', "3 layers can't be .* on 4 ranks"),
    (SHORT + "--num-layers 32 --account-for-loss-in-pipeline-split", "say a cut by --pipeline-model-parallel-layout"),
    (SHORT + "--num-layers 32 --decoder-first-pipeline-num-layers 5", "--decoder-first-pipeline-num-layers isn't read"),
    (SHORT + "--num-layers 32 --use-megatron-fsdp", "--use-megatron-fsdp isn't read"),
    (SHORT + "--num-layers $L", r"argument --num-layers: invalid int value: '\$L'.* in place of a variable; .* prints"),
    (SHORT + "--num-layers", "argument --num-layers: expected one argument"),
    (SHORT + "--num-layers 32 --tensor-model-parallel-size 0", "tp must be an integer of at least 1, got 0"),
    (SHORT + "--num-layers 32 --tensor-model-parallel-size 3", "8 ranks don't divide into replicas of 12"),
    (SHORT + "--num-layers 32 --num-experts 8 --expert-model-parallel-size 8", "8 doesn't divide 1 x 2 = 2 of them"),
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
    more = "--num-layers 32 --eval-micro-batch-size 4 --mtp-num-layers 1 --moe-router-dtype fp32 --seq-length 8192"
    found = lab.read_launch(SHORT + more)
    assert found.ignored == tuple(re.findall(r"--\S+", more)[1:]) and found.arguments["microbatch"] == 1


def test_what_a_script_passes_can_be_read(tmp_path):
    """By the command that the error tells."""
    (tmp_path / "script.sh").write_text('GPUS=8\nARGS=(--nproc_per_node $GPUS)\ntorchrun ${ARGS[@]} x.py "${@:2}"\n')
    with pytest.raises(ValueError, match="what a script passes") as told:
        lab.read_launch((tmp_path / "script.sh").read_text() + "--nproc-per-node $GPUS")
    command = re.search(r"bash -c '(.*)' prints", str(told.value))[1].replace(".sh", ".sh data " + SHORT[32:])
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert lab.read_launch(done.stdout, num_layers=32) == lab.read_launch(SHORT, num_layers=32)
