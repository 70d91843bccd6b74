"""What the notebooks train on a machine's GPUs is trained there: those cells, executed on GPUs that are played."""

from __future__ import annotations

import pytest
from cells_on_gpus import on_devices, parsed

from conftest import ROOT, on_fake_gpus

TRAINING = [path for path in sorted(ROOT.glob("notebooks/*.ipynb")) if on_devices(parsed(path))]


@pytest.mark.slow
@pytest.mark.parametrize("gpus, notebooks", [(4, TRAINING[0::3]), (1, TRAINING[1::3]), (2, TRAINING[2::3])])
def test_cells_run_on_gpus(gpus, notebooks):
    """A third of the notebooks on each: on one GPU, ranks take turns; where each has its own, they send by NCCL."""
    assert notebooks
    done = on_fake_gpus(["tests/course/cells_on_gpus.py", *map(str, notebooks)], gpus)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
