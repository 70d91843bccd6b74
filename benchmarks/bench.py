"""`make bench`: how fast the simulator is, and the runtime against PyTorch's own on the same stages.

    python benchmarks/bench.py [--quick] [--json FILE]

Runtime figures are ratios of medians of runs that take turns, with the spread of the ratios of neighbouring runs: the
machine's mood is then in both.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import pplab as pp
from pplab import models
from pplab.runtime import Batch, Modules, Pool
from pplab.runtime.probe import multiply_times
from pplab.runtime.report import versions
from pplab.runtime.torch_engine import CLASSES


def transformer(num_stages: int) -> object:
    """Stages whose work outweighs everything else."""
    return models.gpt(source="sample", num_layers=8, width=256, context=128, batch_size=32)


def linears(num_stages: int) -> object:
    """Stages of four Linears of 8 x 8: next to nothing but overhead."""
    torch.manual_seed(0)
    stages = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(num_stages)]
    return Modules(stages, Batch((torch.randn(64, 8),), torch.randn(64, 8)), nn.functional.mse_loss)


SIZES = {  # workload, microbatches, steps of a round
    "compute-bound": (transformer, 8, 6),
    "overhead-bound": (linears, 64, 12),
}


def main() -> None:
    """Print the tables, and write them as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    figures = {
        "versions": versions(),
        "simulator": simulator(),
        "sweep": sweeps(),
        "runtime": runtime(2 if options.quick else 5),
    }
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


def simulator() -> list[dict]:
    """Operations per second of building, of simulating a schedule for the first time, and again."""
    rows = []
    print("simulator, million operations per second on one core (best of 5; first: with the dependency graph)")
    print(f"{'schedule':22} {'ranks x microbatches':>20} {'operations':>11} {'build':>7} {'first':>7} {'again':>7}")
    for builder in pp.builders.ALL:
        searches = "costs" in builder.options  # these simulate hundreds of schedules to build one
        rows.append(_speed(builder, *((8, 64) if searches else (64, 1024))))
    for num_microbatches in (7_800, 78_125):
        rows.append(_speed(pp.builders.find("1F1B"), 64, num_microbatches, rounds=1))
    return rows


def _speed(builder: pp.builders.Builder, num_ranks: int, num_microbatches: int, rounds: int = 5) -> dict:
    found: dict[str, list[float]] = {"build": [], "first": [], "again": []}
    for _ in range(rounds):
        marks = [time.perf_counter()]
        schedule = builder(num_ranks, num_microbatches)
        marks.append(time.perf_counter())
        for _ in range(2):
            pp.simulate(schedule)
            marks.append(time.perf_counter())
        count = len(schedule.columns.kinds)
        for name, start, end in zip(found, marks, marks[1:], strict=False):
            found[name].append(count / (end - start) / 1e6)
    best = {name: max(values) for name, values in found.items()}
    size = f"{num_ranks} x {num_microbatches}"
    numbers = " ".join(f"{value:7.2f}" if value > 0.1 else f"{value:7.4f}" for value in best.values())
    print(f"{builder.name:22} {size:>20} {count:11,} {numbers}", flush=True)
    return {"schedule": builder.name, "size": size, "operations": count, **best}


def sweeps() -> list[dict]:
    """Operation-settings per second of one schedule under many costs at once, beside single runs."""
    rows, rng = [], random.Random(0)
    print(
        "\nsweep, million operation-settings per second on one core (best of 3), and how many times that of single runs"
    )
    print(f"{'schedule':22} {'ranks x microbatches':>20} {'settings':>9} {'sweep':>7} {'times':>7}")
    for name in ("1F1B", "InterleavedZeroBubble", "DualPipeV"):
        schedule = pp.build(name, num_ranks=8, num_microbatches=64)
        for count in (10, 100, 1000, 10_000):
            settings = [pp.Costs(rng.random(), rng.random(), rng.random()) for _ in range(count)]
            swept, single = [], []
            for _ in range(3):
                start = time.perf_counter()
                result = pp.sweep(schedule, settings)
                middle = time.perf_counter()
                for k in range(10):
                    assert pp.simulate(schedule, settings[k]).makespan == result.makespan[k]
                swept.append((middle - start) / count)
                single.append((time.perf_counter() - middle) / 10)
            speed = len(schedule.columns.kinds) / min(swept) / 1e6
            rows.append({"schedule": name, "settings": count, "speed": speed, "times": min(single) / min(swept)})
            print(f"{name:22} {'8 x 64':>20} {count:9,} {speed:7.1f} {rows[-1]['times']:7.1f}", flush=True)
    return rows


def runtime(rounds: int) -> list[dict]:
    """Step times of pplab's runtime and of torch's, in turn, on two ranks, and what limits them."""
    rows = []
    for size, (make, M, steps) in SIZES.items():
        with Pool(2) as pool:
            one, both = (statistics.median(pool.run(multiply_times, ranks)[0]) for ranks in ((0,), (0, 1)))
            capacity = 2 * one / both
            print(
                f"\nruntime, {size}: {make(2).name}, {M} microbatches, {rounds} rounds of {steps} steps in turn with "
                f"torch.distributed.pipelining\n{pool!r}; two ranks at once do {capacity:.2f} times the work of one"
            )
            print(
                f"{'schedule':22} {'pplab ms':>9} {'torch ms':>9} {'ratio':>6} {'of rounds':>13}  "
                f"{'us per action':>15} {'limit ms':>9} {'share':>6}"
            )
            for name in CLASSES:
                schedule = pp.build(name, num_ranks=2, num_microbatches=M)
                row = _paired(pool, schedule, make(schedule.num_stages), rounds, steps)
                rows.append({"size": size, "capacity": capacity, **row})
    return rows


def _paired(pool: Pool, schedule: pp.Schedule, workload: object, rounds: int, steps: int) -> dict:
    """One schedule by both runtimes. The limit is the simulation with the measured durations of its own actions."""
    ours, theirs, ratios, limits = [], [], [], []
    for _ in range(rounds):
        run = pool.train(schedule, workload, steps=steps)
        other = pool.train(schedule, workload, steps=steps, engine="torch")
        ours += run.step_times_ms
        theirs += other.step_times_ms
        limits.append(pp.simulate(schedule, run.costs).makespan)
        ratios.append(run.step_time_ms / other.step_time_ms)
    actions = max(map(len, schedule.rows))  # of one rank: both work at the same time
    row = {
        "schedule": schedule.name,
        "workload": workload.name,
        "device": pool.devices[0],
        "transport": pool.transport,
        "pplab_ms": statistics.median(ours),
        "torch_ms": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "pplab_us_per_action": statistics.median(ours) / actions * 1e3,
        "torch_us_per_action": statistics.median(theirs) / actions * 1e3,
        "limit_ms": statistics.median(limits),
    }
    row["share_of_limit"] = row["limit_ms"] / row["pplab_ms"]
    print(
        f"{schedule.name:22} {row['pplab_ms']:9.1f} {row['torch_ms']:9.1f} {row['ratio']:6.2f} "
        f"{f'{min(ratios):.2f} to {max(ratios):.2f}':>13}  "
        f"{row['pplab_us_per_action']:7.0f} {row['torch_us_per_action']:7.0f} {row['limit_ms']:9.1f} "
        f"{row['share_of_limit']:6.2f}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
