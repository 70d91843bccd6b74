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

import pplab as pp
from pplab import models
from pplab.runtime import Pool
from pplab.runtime.job import Job
from pplab.runtime.report import versions
from pplab.runtime.torch_engine import CLASSES, train_torch

SIZES = {
    "compute-bound": {"num_layers": 8, "width": 256, "context": 128, "batch_size": 32},
    "overhead-bound": {"num_layers": 2, "width": 16, "num_heads": 2, "context": 8, "batch_size": 32},
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
    """Step times of pplab's runtime and of torch's, in turn, on two ranks."""
    rows = []
    print(f"\nruntime, 2 ranks, 8 microbatches: pplab against torch.distributed.pipelining, {rounds} rounds in turn")
    print(f"{'size':15} {'schedule':9} {'pplab ms':>9} {'torch ms':>9} {'ratio':>6}  ratios of rounds")
    for size, options in SIZES.items():
        workload = models.gpt(source="sample", **options)
        steps = 6 if size == "compute-bound" else 30
        with Pool(2) as pool:
            for name in CLASSES:
                schedule = pp.build(name, num_ranks=2, num_microbatches=8)
                ours, theirs, ratios = [], [], []
                for _ in range(rounds):
                    mine = list(pool.train(schedule, workload, steps=steps).step_times_ms)
                    times = pool.run(train_torch, Job(schedule, workload, steps, 1, None, False, None))
                    other = [
                        (max(e for _, e in step) - min(s for s, _ in step)) / 1e6 for step in zip(*times, strict=True)
                    ]
                    ours, theirs = ours + mine, theirs + other
                    ratios.append(statistics.median(mine) / statistics.median(other))
                row = {
                    "size": size,
                    "schedule": name,
                    "workload": workload.name,
                    "device": pool.devices[0],
                    "pplab_ms": statistics.median(ours),
                    "torch_ms": statistics.median(theirs),
                    "ratio": statistics.median(ours) / statistics.median(theirs),
                    "ratios": ratios,
                }
                rows.append(row)
                spread = " ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
                print(
                    f"{size:15} {name:9} {row['pplab_ms']:9.1f} {row['torch_ms']:9.1f} {row['ratio']:6.2f}  {spread}",
                    flush=True,
                )
    return rows


if __name__ == "__main__":
    main()
