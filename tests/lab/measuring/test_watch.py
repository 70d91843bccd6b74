"""`python -m pplab.watch COMMAND`: names in traces of programs that know nothing of pplab; `test_job` runs torch's."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCHEDULES = """
def forward_step(
    forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, config, cp_group_size,
    collect_non_loss_data=False, checkpoint_activations_microbatch=None, is_first_microbatch=False,
    current_microbatch=None, vp_stage=None, is_last_stage=True,
):
    output = model(input_tensor)
    return output if current_microbatch % 2 else [output], 1


def backward_step(input_tensor, output_tensor, output_tensor_grad, config):
    (output_tensor[0] if isinstance(output_tensor, list) else output_tensor).sum().backward()


def schedule(model, x):
    for m in range(3):  # two forwards ahead, and virtual stages
        before, now = m and now, dict(current_microbatch=m, vp_stage=m and 1)
        output = forward_step(None, None, model, 3, x, [], None, 1, **now)[0]
        if m: backward_step(x, before, None, None)
        now = output
"""
STATE = """
def get_pipeline_model_parallel_rank(): return 1
def get_pipeline_model_parallel_world_size(): return 2
"""
PROGRAM = """
import os, sys
import hidden
import torch
from megatron.core.pipeline_parallel import schedules
assert hidden.found and len(sys.argv) == 2

with torch.profiler.profile() as profiler:
    schedules.schedule(torch.nn.Linear(2, 2), torch.ones(2, 2))
profiler.export_chrome_trace(sys.argv[1])
"""


@pytest.mark.slow
def test_megatrons_functions_are_watched(tmp_path):
    """A stand-in with the names and arguments of Megatron-LM's `megatron/core` at d98e8a64; of microbatch 2 no backward
    ran. A `sitecustomize` that there is runs, too."""
    files = {
        "megatron/core/pipeline_parallel/schedules.py": SCHEDULES,
        "megatron/core/parallel_state.py": STATE,
        "sitecustomize.py": "import hidden\nhidden.found = True\n",
        "hidden.py": "found = False\n",
        "program.py": PROGRAM,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    trace = tmp_path / "trace.json"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-m", "pplab.watch", sys.executable, tmp_path / "program.py", trace],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "user_annotation"]
    named = [event["name"] for event in sorted(spans, key=lambda event: event["ts"])]
    assert named == ["pplab:1F0", "pplab:3F1", "pplab:1B0", "pplab:3F2", "pplab:3B1"]


@pytest.mark.parametrize(
    "given, said", [([], "torchrun"), (["--help"], "torchrun"), (["nothing"], "nothing doesn't start")]
)
def test_without_a_command_it_says_how_one_is_given(given, said):
    done = subprocess.run([sys.executable, "-m", "pplab.watch", *given], capture_output=True, text=True)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
