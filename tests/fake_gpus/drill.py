"""Everything that waits for a GPU, or chooses a stream, a device or a group, on two played GPUs, in one short program.

`PYTHONPATH=tests/fake_gpus:src:tests FAKE_GPUS=2 python tests/fake_gpus/drill.py` ends with "the drill is done".
"""

import time
from functools import partial

from torch import optim

import modules
import pplab as pp
from pplab import lab
from pplab.lab import models
from pplab.runtime import Pool, failures

TINY = {"num_layers": 4, "width": 16, "num_heads": 2, "context": 8, "source": "sample"}


def train(pool: Pool, schedule: pp.Schedule, model: object, *extras: object) -> object:
    """A run whose gradients and memory are right."""
    sgd = partial(optim.SGD, lr=0.1)
    run = pool.train(schedule, model, *extras, steps=2, check_gradients=True, optimizer=sgd)
    assert run.gradients.equal, run
    assert run.machine.transport == "nccl" and run.machine.device == "cuda:0, cuda:1"
    return run


def drill(pool: Pool) -> None:
    """All of it, on two ranks."""
    gpt = models.gpt(batch_size=8, **TINY)
    build = partial(pp.build, num_ranks=2, num_microbatches=4)
    train(pool, build("1F1B"), gpt, lab.ToHost(), lab.Budget("1 GB"))
    run = train(pool, build("GPipe"), gpt, lab.Launches(), lab.Meter())
    assert run.held.peak_bytes == run.predicted_peak_bytes
    assert all(0.3 < share < 1.1 for share in run.extras["launches"])  # the CPU is both
    train(pool, build("ZB-H1"), gpt, lab.Evaluate(every=1, batches=[gpt.batch(7)]), lab.Clip(0.5))
    train(pool, build("DualPipeV"), gpt, lab.Beside())
    train(pool, build("Interleaved1F1B"), gpt, lab.TorchEngine())
    assert all(pool.run(modules.has_group, ("torch's own", (0, 1))))  # with NCCL's blocks as torch would have them
    paced = train(pool, build("1F1B"), gpt, lab.Pace(pp.Costs(2, 2, 2, unit="ms")))
    assert all(span.end - span.start > 1.9 for span in paced.timeline.spans)
    train(pool, build("DualPipe"), gpt)  # stages on both ranks: gradients are added up
    copies = lab.replicate(pp.build("1F1B", num_ranks=1, num_microbatches=4), 2)
    train(pool, copies, models.mixture(batch_size=16, num_experts=4, **TINY), lab.Experts(), lab.Recompute())
    print(lab.measure_link(pool, sizes=(64, 4096), count=3), pool.notes)
    for times in (pool.run(lab.multiply_times, [0, 1], 16, 3), pool.run(lab.all_reduce_times, 64, 3)):
        assert all(each > 0 for found in times for each in found)
    assert lab.reference(pool, gpt, 4, steps=1).step_times_ms
    few = lab.long_enough(pool, build("1F1B"), partial(models.gpt, **TINY), batch_size=8, least_ms=0)
    assert few.batch_size == 8


if __name__ == "__main__":
    failures.ALL_WAIT_S = 3.0  # in place of ten: who hangs, hangs
    began = time.monotonic()
    with Pool(2, timeout_s=30) as pool:
        drill(pool)
    print(f"the drill is done after {time.monotonic() - began:.1f} s")
