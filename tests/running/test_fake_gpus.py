"""The runtime's CUDA branches on GPUs that tests/fake_gpus plays: what a GPU would refuse shows at every commit."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import modules
from conftest import ROOT, on_fake_gpus
from pplab.runtime import Pool, devices

FAKE = ROOT / "tests" / "fake_gpus"
FILES = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]


def names_asked(path: Path) -> set[str]:
    """What a file asks of `cuda`, the module."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if "cuda" in (getattr(node.value, "id", ""), getattr(node.value, "attr", ""))}


def test_what_is_asked_of_cuda_is_played():
    asked = set().union(*map(names_asked, FILES))
    assert {"synchronize", "Event", "device_count"} <= asked
    played = (FAKE / "sitecustomize.py").read_text()
    asked -= {"matmul", "cuda", "_sleep"}  # of torch.backends and torch.version; and without it nothing is assumed
    assert {name for name in asked if not re.search(rf'"{name}":|class {name}\b|cuda\.{name}\b', played)} == set()


def test_one_file_knows_cuda_and_nccl():
    door = ROOT / "src" / "pplab" / "runtime" / "gpu.py"
    assert "from torch import cuda" in door.read_text()
    known = re.compile(r"torch\.cuda\b|ProcessGroupNCCL|from torch import (.*, )?cuda\b|import torch\.cuda")
    assert [path.name for path in FILES if path != door and known.search(path.read_text())] == []


@pytest.mark.slow
def test_the_tests_for_gpus_pass():
    """Some of those that `make gpu` runs, by NCCL. On one GPU, shared, tests/lab/test_gpu_box.py runs all of it, and
    tests/course/test_notebooks_on_gpus.py what chapters train on one, two and four."""
    some = "2-turns and (equals_one and (1F1B-b or DualPipe-f) or profile)"
    done = on_fake_gpus(["-m", "pytest", "-q", "tests/running/test_gpu.py", "-k", some], 2)
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout[-4000:]


PROGRAM = """
import sys
import pplab as pp
import modules
import torch
from functools import partial
from torch import nn, optim
from pplab import lab
from pplab.lab import models
from pplab.runtime import Pool

if __name__ == "__main__":
    gpt = models.gpt(batch_size=8, num_layers=4, width=16, num_heads=2, context=8, source="sample")
    sgd = partial(optim.SGD, lr=0.1)
    with Pool(2, timeout_s=60) as pool:
        extras = {
            "1F1B": [lab.ToHost()],
            "GPipe": [lab.Budget("1 GB"), lab.Launches()],
            "ZB-H1": [lab.Evaluate(every=1, batches=[gpt.batch(7)])],
            "DualPipeV": [lab.Beside()],
            "Interleaved1F1B": [lab.TorchEngine()],
        }
        for name, asked in extras.items():
            s = pp.build(name, num_ranks=2, num_microbatches=4)
            run = pool.train(s, gpt, *asked, steps=2, check_gradients=True, optimizer=sgd)
            assert run.gradients.equal, run
            if name == "GPipe":
                assert all(0.3 < share < 1.1 for share in run.extras["launches"])  # the CPU is both
            assert run.machine.transport == "nccl" and run.machine.device == "cuda:0, cuda:1"
            own = ("torch's own", (0, 1))  # with NCCL's blocks as torch would have them, in no group of pplab's
            assert pool.run(modules.has_group, own) == [name == "Interleaved1F1B"] * 2
        print(lab.measure_link(pool, count=3), pool.notes)
        forward_ms = run.costs.of("F", 0)
        make = partial(models.gpt, num_layers=4, width=16, num_heads=2, context=8, source="sample")
        few = lab.long_enough(pool, s, make, batch_size=8, least_ms=0)
        enough = lab.long_enough(pool, s, make, batch_size=8, least_ms=2 * forward_ms)
        assert few.batch_size == 8 and enough.batch_size in 8 * 2 ** torch.arange(1, 10), enough
        assert "tokens a microbatch, the shortest forward takes" in str(enough), enough
"""


@pytest.mark.slow
def test_extras_and_probes_run_on_gpus_of_their_own(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = on_fake_gpus([str(program)], 2)
    assert done.returncode == 0 and "Link(" in done.stdout, done.stdout + done.stderr[-4000:]


SHARED = """
import pplab as pp
import modules
import torch
from pplab import lab
from pplab.lab import models
from pplab.runtime import Pool

if __name__ == "__main__":
    gpt = models.gpt(batch_size=8, num_layers=4, width=16, num_heads=2, context=8, source="sample")
    with Pool(2, timeout_s=60) as pool:
        for name in ("1F1B", "ZBVZeroBubble"):
            s = pp.build(name, num_ranks=2, num_microbatches=4)
            run = pool.train(s, gpt, lab.Meter(), check_gradients=True, autocast=torch.bfloat16)
            assert run.machine.transport == "shared" and run.gradients.equal, run
            assert run.held.peak_bytes == run.predicted_peak_bytes
        for made, left, late in pool.run(modules.pinned):
            assert made >= 4 and left == late == 0, (made, left, late)
"""


@pytest.mark.slow
def test_messages_between_ranks_of_one_gpu_are_in_pinned_memory_for_as_long_as_it_is_mapped(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SHARED)
    done = on_fake_gpus([str(program)], 1)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


HANGS = """
import pplab as pp
import modules
from torch import nn
from pplab.runtime import Pool, RankError, failures

failures.ALL_WAIT_S = 3.0  # in place of ten

if __name__ == "__main__":
    pool = Pool(2, timeout_s=60)
    try:
        s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
        pool.train(s, modules.workload(nn.Linear(6, 6), nn.Linear(6, 6)))
    except RankError as error:
        print(error.rank, error.action, pool.pids, error)
"""


@pytest.mark.slow
def test_a_receive_that_never_ends_on_a_gpu_is_named_at_its_action(tmp_path):
    """The GPU of rank 1 doesn't get to the start of an action: after ten seconds, here three, that is known."""
    program = tmp_path / "program.py"
    program.write_text(HANGS)
    done = on_fake_gpus([str(program)], 2, FAKE_HANG="1 21")
    found = re.match(r"[01] [01][FB]\d \(\) no rank made progress for 3 s: .*rank 1 waits at 1F2\b", done.stdout)
    assert found, done.stdout + done.stderr[-3000:]


@pytest.mark.slow
def test_ranks_have_the_settings_of_now(monkeypatch):
    """And not those with which the fork server was started."""
    with Pool(2, device="cpu") as pool:
        assert pool.run(modules.setting, "NCCL_DEBUG") == [None, None]
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    with Pool(2, device="cpu") as pool:
        assert pool.run(modules.setting, "NCCL_DEBUG") == ["INFO", "INFO"]


@pytest.mark.parametrize("built, why", [("13.0", "built for CUDA 13.0"), (None, "built for the CPU alone")])
def test_a_gpu_that_torch_cannot_use_is_told_of(monkeypatch, tmp_path, built, why):
    (tmp_path / "version").write_text("535.104.05\n")
    monkeypatch.setattr(devices, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert any(why in note and "driver 535.104.05" in note and "README" in note for note in Pool(2).notes)
    with pytest.raises(ValueError, match=rf"{why}, can't use the GPU that is there with driver 535.104.05"):
        Pool(2, device="cuda")
    assert not any("driver" in note for note in Pool(2, device="cpu").notes)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # whoever hides GPUs knows
    assert not any("driver" in note for note in Pool(2).notes)
