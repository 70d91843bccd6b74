"""torch's and torchtitan's rules, against what their own classes and functions said."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from pplab.lab.planning import TORCH_RULES, read_titan, refusal

THEIRS = json.loads((Path(__file__).parent / "torch_verdicts.json").read_text())


def test_torchs_classes_and_the_table_refuse_the_same_numbers_of_microbatches():
    for asked, refused in THEIRS["classes"].items():
        name, P, V = asked.split()
        jobs = [Namespace(name=name, pp=int(P), V=int(V), M=M) for M in range(1, 15)]
        assert [job.M for job in jobs if refusal(job, TORCH_RULES)] == refused, asked


def test_torchtitan_and_the_table_refuse_the_same_random_jobs():
    for text, layers, gpus, theirs in THEIRS["jobs"]:
        try:
            read_titan(text, layers, gpus)
            assert not theirs, text
        except ValueError as error:
            assert theirs and "(torch" in str(error), (text, error)


@pytest.mark.parametrize("text", [
    "NGPU=8 ./run_train.sh --parallelism.pipeline-parallel-degree 4 --training.disable_cuda_graphs",
    'ParallelismConfig(\n    pipeline_parallel_degree=4,\n), TrainingConfig(disable_cuda_graphs=True)  # "1F1B"',
    "[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_schedule = \"1f1b\"",
])  # fmt: skip
def test_flags_python_and_toml_say_the_same(text):
    x = read_titan(text, None, 8)
    assert (x.pp, x.dp, x.M, x.V, x.name, x.batch) == (4, 2, 8, 1, "1F1B", 16)
