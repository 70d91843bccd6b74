"""Compare pplab's runtime with PyTorch's, with the same stages, batch, ranks and threads, in turn in one run."""

from __future__ import annotations

import statistics

from pplab.lab import TorchEngine
from pplab.runtime import Pool, Workload
from pplab.schedule import Schedule
from pplab.simulator import simulate

HEADINGS = (
    f"{'schedule':22} {'pplab ms':>9} {'torch ms':>9} {'ratio':>6} {'of rounds':>13}  {'us per action':>15} "
    f"{'limit ms':>9} {'share':>6}"
)


def compare(pool: Pool, schedule: Schedule, workload: Workload, *, rounds: int = 5, steps: int = 6) -> dict:
    """Run `steps` steps by pplab and `steps` by torch, `rounds` times, so that slow spells of the machine are in both.
    Returns, and prints under HEADINGS, plain JSON values:

    - the medians of all steps; the rounds' ratios, below 1 where pplab is faster, and their median;
    - a step's time over the actions of its longest row, in microseconds;
    - the step simulated with the durations that pplab's own actions had, and how much of pplab's step that is.
    """
    ours, theirs, ratios, limits = [], [], [], []
    for _ in range(rounds):
        run = pool.train(schedule, workload, steps=steps)
        other = pool.train(schedule, workload, TorchEngine(), steps=steps)
        ours += run.step_times_ms
        theirs += other.step_times_ms
        ratios.append(run.step_time_ms / other.step_time_ms)
        limits.append(simulate(schedule, run.costs).makespan)
    pplab_ms, torch_ms, ratio, limit_ms = map(statistics.median, (ours, theirs, ratios, limits))
    pplab_us, torch_us = (ms / max(map(len, schedule.rows)) * 1e3 for ms in (pplab_ms, torch_ms))
    share = limit_ms / pplab_ms
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(
        f"{schedule.name:22} {pplab_ms:9.1f} {torch_ms:9.1f} {ratio:6.2f} {spread:>13}  "
        f"{pplab_us:7.0f} {torch_us:7.0f} {limit_ms:9.1f} {share:6.2f}",
        flush=True,
    )
    return {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "workload": workload.name,
        "device": pool.devices[0],
        "transport": pool.transport,  # of pplab's; torch takes gloo, or NCCL on GPUs
        "pplab_ms": pplab_ms,
        "torch_ms": torch_ms,
        "ratio": ratio,
        "ratios": ratios,
        "pplab_us_per_action": pplab_us,
        "torch_us_per_action": torch_us,
        "limit_ms": limit_ms,
        "share_of_limit": share,
    }
