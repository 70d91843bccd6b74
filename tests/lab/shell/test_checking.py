"""What people hold when a run breaks, checked: right, wrong, of something else, cut off, doubled."""

from __future__ import annotations

import json
import re
import time

import pytest

import pplab as pp
from pplab import lab
from pplab.lab.shell.commands import main

LINE = "torchrun --nproc-per-node 8 x.py --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 32 "
CONFIG = {"num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 6144}
CONFIG |= {"vocab_size": 151936, "hidden_act": "silu", "model_type": "llama", "tie_word_embeddings": False}
ROWS = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"
LAYOUT = "Et*3|(tt|)*29,m|L"
TITAN = "torchrun --nproc_per_node 8 -m torchtitan.train --parallelism.pipeline_parallel_degree 4 "
FIELDS = "nproc_per_node=8 pipeline_parallel_degree=4, tensor_parallel_degree=3, module_fqns_per_model_part=parts, "
FIELDS += "disable_cuda_graphs=True"


@pytest.mark.parametrize(("text", "status", "told"), [
    (LINE + "--num-layers 32 --lr 1", 0, "line of Megatron-LM: 8 GPUs, tp 1 cp 1 pp 4 dp 2; 16 microbatches in 1F1B, "
     "1 stage on each rank; bubble 15.8%; rank 0 has at most 4 in flight, and 8 layers\nnot looked at: --lr"),
    ("CUDA_DEVICE_MAX_CONNECTIONS=8 " + LINE + "--num-layers 32 --tensor-model-parallel-size 2", 0, "before Blackwell"),
    ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n" + LINE + "--num-layers 32 --context-parallel-size 2", 0, "8 layers\nn"),
    ((LINE + "--num-layers 32").replace(" --", " \\\r\n  --"), 0, "16 microbatches in 1F1B"),
    (LINE, 2, "doesn't say --num-layers"),
    (LINE + "--num-layers 30", 1, 'give --pipeline-model-parallel-layout "E.*arguments.py:998, since core 0.10: "Num'),
    (LINE + "--num-layers-in-first-pipeline-stage 7", 1, "--num-layers-in-first-pipeline-stage isn't read"),
    (LINE + "--b 1 " * 40_000, 1, "a launch line has up to 4,096 words, got 80,0"),
    (LINE * 2, 2, "several launch lines: give one"),
    ("python -m verl.trainer a.megatron.pipeline_model_parallel_size=4", 1, "write them as .* --pipeline-model-parall"),
    (TITAN.replace("8 ", "$NGPU "), 2, "doesn't say how many GPUs, or layers, there are: give gpus= and num_layers="),
    (TITAN, 1, r"set training.disable_cuda_graphs \(torchtitan 0.3.0, trainer.py:183: .CUDA graphs do not support"),
    (TITAN + "--training.disable_cuda_graphs", 0, "torchtitan: 8 GPUs, .* pp 4 dp 2; 8 microbatches in 1F1B, 1 stage"),
    (TITAN + "--training.disable_cuda_graphs --training.local_batch_size 2", 1, "too few for 1F1B"),
    (FIELDS, 1, "dp 0, cp 1, tp 3 and pp 4 don.t multiply to 8 GPUs: .*Invalid parallel dims"),
    (FIELDS.replace("tensor_parallel_degree=3", ""), 0, "8 microbatches on 4 ranks\nnot looked at: modules"),
    (f'"{LAYOUT}"', 0, "32 stages with 61 layers, for 2 or 4 or 8 or 16 or 32 ranks\nnot looked at: --num-layers and"),
    ("Et||tL", 0, "3 stages with 2 layers, for 3 ranks\nnot looked at: stage 1 has no layer"),
    ("Et|t|tm|mL", 1, "m in several stages, and"),
    ("Et|tm|t|L", 1, "an m before a t"),
    ("Et|t|tmL|", 1, "a bar behind the last stage"),
    ('[["embedding"] + ["decoder"] * 4] + [["decoder"] * 4] * 14 + [["decoder", "mtp", "loss"]]', 0, "16 stages with"),
    ("[[embedding, decoder], [], [decoder], [loss]]", 0, "4 stages with 2 .* 2 or 4 ranks\nnot looked at: stage 1 has"),
    ('[["embedding"] + ["decoder"] * 999999999, ["decoder"] + last_layer]', 1, "a layout repeats up to"),
    ('[["embedding"], ["decoder"] + last_layer]', 1, "a letter that it doesn't know, l in stage"),
    ("0,0F0,0B0\n1,1F0,1B0", 1, "leave out the column that numbers the ranks"),
    ("0f0,0b0\n1f0,1b0", 1, "write 0F0"),
    ('{"version": "2.10", "pg_config": {}, "entries": []}', 2, "a dump of NCCL's flight recorder: .* pplab explain"),
    (LAYOUT[:-2], 1, "no L at its end"),
    (LAYOUT * 2, 1, "a second E"),
    ("Et|m" + "|" * 200_000 + "L", 0, "200002 stages .* stage 2, 3, 4, 5, 6, 7, 8, 9, 10 ... has no layer"),
    (json.dumps(CONFIG), 0, r"config.json: 48 layers \(full.mlp.48\), 3.2.* counted by .* forward\nnot looked at"),
    (json.dumps(CONFIG)[:-9], 2, "begins as JSON does, and isn't"),
    (json.dumps(CONFIG) * 2, 2, "begins as JSON does, and isn't: Extra data"),
    (json.dumps(CONFIG | {"mamba_d_state": 16}), 1, "fields say .* billion parameters, and transformers builds 3.2"),
    ('{"train_micro_batch_size_per_gpu": 4}', 2, "this JSON has no model's fields"),
    (ROWS, 0, "schedule: 1F1B: 2 ranks, 2 stages, 2 microbatches, 8 actions; bubble 33.3% if"),
    (lab.to_csv(pp.build("DualPipeV", num_ranks=2, num_microbatches=4)), 0, "schedule: DualPipeV: 2 ranks"),
    (lab.to_csv(lab.lower_by_torch(pp.build("ZB-H1", num_ranks=2, num_microbatches=4))), 0, "8 messages can arrive"),
    ("        Rank 0 Rank 1\nStep 0: 0F0    1F0\nStep 1: 0B0    1B0\n", 0, "schedule: GPipe: 2 ranks"),
    (ROWS[:-4], 1, "1B1 is missing"),
    (ROWS + "\n" + ROWS, 1, "rank"),
    ("RuntimeError: CUDA out of memory", 2, "its form isn't known here"),
    ("E" * 300_000, 2, "these are 300,000 characters"),
    (TITAN + "a" * 200_000 + " b" * 20_000, 1, "set training.disable_cuda_graphs"),
    (TITAN + "--training.disable_cuda_graphs --parallelism.module_fqns_per_model_part = None", 0, "in 1F1B"),
    ("micro-batch-size " + "-" * 200_000, 1, "required: --micro-batch-size"),
])  # fmt: skip
def test_what_is_said(text, status, told):
    began = time.process_time()
    found = lab.check(text)
    assert found.status == status and re.search(told, str(found), re.S), found
    assert time.process_time() - began < 5


def test_from_a_shell(tmp_path, capsys):
    (tmp_path / "line.sh").write_text(LINE)
    assert main(["check", str(tmp_path / "line.sh"), "--layers", "32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["found"].startswith("8 GPUs")
    (tmp_path / "dump").write_bytes(b"\x80\x04\x95" + bytes(range(256)) * 40_000)
    assert main(["check", str(tmp_path / "dump")]) == 2 and "not read" in capsys.readouterr().out
