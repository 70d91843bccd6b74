"""Everything that waits for a GPU, or chooses a stream, a device or a group, on four played GPUs, in one short program.

`PYTHONPATH=tests/fake_gpus:src:tests FAKE_GPUS=4 python tests/fake_gpus/drill.py` ends with "the drill is done".
"""

import os
import subprocess
import sys
import time
from functools import partial
from tempfile import TemporaryDirectory

import kernels
import streams
from torch import nn, optim

import modules
import pplab as pp
from pplab import lab
from pplab.lab import models
from pplab.runtime import Pool, RankError, failures
from to_host import ToHost

TINY = {"num_layers": 4, "width": 16, "num_heads": 2, "context": 8, "source": "sample"}


def train(pool: Pool, schedule: pp.Schedule, model: object, *extras: object) -> object:
    """A run whose gradients and memory are right."""
    sgd = partial(optim.SGD, lr=0.1)
    run = pool.train(schedule, model, *extras, steps=2, check_gradients=True, optimizer=sgd)
    assert run.gradients.equal, run
    assert run.machine.transport == pool.transport and run.machine.device.startswith("cuda:0, cuda:1")
    return run


def drill(pool: Pool) -> None:
    """All of it, on two ranks."""
    gpt = models.gpt(batch_size=8, **TINY)
    build = partial(pp.build, num_ranks=2, num_microbatches=4)
    train(pool, build("1F1B"), gpt, ToHost(), lab.Budget(1e9))
    assert all(len(found) == 3 and found[1] < 1 == found[2] for found in pool.run(streams.fractions))
    # Of eight microbatches, more than four messages are under way at once.
    run = train(pool, pp.build("GPipe", num_ranks=2, num_microbatches=8), gpt, lab.Meter())
    held = run.held
    assert held.peak_bytes == run.predicted_peak_bytes
    for before, kept, most in zip(held.resident_bytes, held.peak_bytes, held.allocated_bytes, strict=True):
        assert 2 * kernels.WORKSPACE < before < most - kept
    train(pool, build("ZB-H1"), gpt, lab.Evaluate(every=1, batches=[gpt.batch(7)]), lab.Clip(0.5))
    with TemporaryDirectory() as folder:
        train(pool, build("GPipe"), gpt, lab.Profile(folder))
    train(pool, build("DualPipeV"), gpt, lab.Beside())
    pace = lab.Pace(pp.Costs(2, 2, 2, unit="ms"))
    train(pool, build("Interleaved1F1B"), gpt, lab.TorchEngine(), pace)
    assert all(pool.run(modules.has_group, ("torch's own", (0, 1))))  # with NCCL's blocks as torch would have them
    paced = train(pool, build("1F1B"), gpt, pace)
    assert all(span.end - span.start > 1.9 for span in paced.timeline.spans)
    print(lab.measure_link(pool, sizes=(64, 4096), count=3), pool.notes)
    assert all(each > 0 for found in pool.run(lab.multiply_times, [0, 1], 16, 3) for each in found)
    assert lab.reference(pool, gpt, 4, steps=1).step_times_ms


def drill_of_four(pool: Pool) -> None:
    """Where stages lie on several ranks, and not on all: groups of some."""
    gpt = models.gpt(batch_size=16, **TINY)
    train(pool, lab.replicate(pp.build("1F1B", num_ranks=2, num_microbatches=4), 2), gpt)
    dual = lab.replicate(pp.build("DualPipe", num_ranks=2, num_microbatches=4), 2)
    train(pool, dual, models.mixture(batch_size=16, num_experts=4, **TINY), lab.Experts(), lab.Recompute())


def drill_through_the_host(pool: Pool) -> None:
    """Where messages go through slots of pinned memory, which come free and are taken again."""
    gpt = models.gpt(batch_size=8, **TINY)
    train(pool, pp.build("1F1B", num_ranks=2, num_microbatches=8), gpt)


def under_torchrun() -> None:
    """Two ranks that torchrun starts."""
    model = ["--layers", "4", "--width", "16", "--context", "8", "--batch-size", "8", "--source", "sample"]
    run = ["pplab", "train", "--schedule", "1F1B", "--ranks", "2", "--microbatches", "4", "--check-gradients", *model]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *run]
    done = subprocess.run(start, text=True, capture_output=True, timeout=100)
    assert not done.returncode and "(nccl)" in done.stdout and "equal to one process" in done.stdout, done.stderr[
        -2000:
    ]


def hang(event: int) -> str:
    """Who says what where the GPU of rank 1 doesn't get to its event of that number."""
    os.environ["CUDA_FAKE_HANG"] = f"1 {event}"
    pool = Pool(2, timeout_s=15)
    try:
        pool.train(pp.build("1F1B", num_ranks=2, num_microbatches=4), modules.workload(*map(nn.Linear, (6, 6), (6, 6))))
    except RankError as error:
        assert not pool.pids
        return str(error)
    raise AssertionError("it comes to its end")


if __name__ == "__main__":
    began = time.monotonic()
    for num_ranks, transport, drills in (
        (2, "nccl", drill),
        (4, "nccl", drill_of_four),
        (2, "shared", drill_through_the_host),
    ):
        with Pool(num_ranks, transport=transport, timeout_s=30) as pool:
            drills(pool)
    under_torchrun()
    failures.ALL_WAIT_S = 3.0  # in place of ten
    for event, said in ((21, "rank 1 waits at 1F2"), (22, "rank 1 at 1F2"), (29, "rank 1 waits at 1B3")):
        assert said in (found := hang(event)), found
    print(f"the drill is done after {time.monotonic() - began:.1f} s")
