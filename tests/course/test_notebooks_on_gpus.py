"""What the notebooks train on a machine's GPUs is trained there: those cells, executed on GPUs that are played."""

from __future__ import annotations

import pytest
from cells_on_gpus import on_devices, parsed

from conftest import ROOT, on_fake_gpus


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("gpus, third", [(4, 0), (1, 1), (2, 2)])
def test_cells_run_on_gpus(gpus, third):
    """A third of the notebooks on each: on one GPU, ranks take turns; where each has its own, they send by NCCL."""
    training = [str(path) for path in sorted(ROOT.glob("notebooks/*.ipynb")) if on_devices(parsed(path))]
    assert len(training) > 3
    done = on_fake_gpus(["tests/course/cells_on_gpus.py", *training[third::3]], gpus)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
