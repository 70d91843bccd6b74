"""The first half of `make bench`: how fast the simulator is, and the runtime compared with PyTorch's.

    python benchmarks/bench.py [--quick] [--json FILE] [--only simulator|runtime]

Runtime figures are ratios of medians of runs on the same stages that take turns, with the spread of the ratios of
neighbouring runs, so that slow spells of the machine are in both. The second half measures the cores: `gpu.py --device
cpu --size cores`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from versus import HEADINGS, compare

import pplab as pp
from pplab.lab import models, multiply_times
from pplab.lab.against_torch import CLASSES
from pplab.lab.models import Modules
from pplab.runtime import Batch, Pool
from pplab.runtime.pool import versions


def transformer(num_stages: int) -> object:
    """Stages whose work outweighs everything else."""
    return models.gpt(source="sample", num_layers=8, width=256, context=128, batch_size=32)


def linears(num_stages: int) -> object:
    """Stages of four Linears of 8 x 8, which are almost only overhead."""
    torch.manual_seed(0)
    stages = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(num_stages)]
    return Modules(stages, Batch((torch.randn(64, 8),), torch.randn(64, 8)), nn.functional.mse_loss)


SIZES = {  # workload, microbatches, steps of a round
    "compute-bound": (transformer, 8, 6),
    "overhead-bound": (linears, 64, 12),
}


def main(arguments: list[str] | None = None) -> None:
    """Print the tables, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.add_argument("--only", choices=("simulator", "runtime"), help="not both")
    options = parser.parse_args(arguments)
    figures = {"versions": versions()}
    if options.only != "runtime":
        figures["simulator"] = simulator()
    if options.only != "simulator":
        figures["runtime"] = runtime(2 if options.quick else 5)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


def simulator() -> list[dict]:
    """Operations per second of building, simulating for the first time, again, with narrow links, validating, and
    simulating once more, with figures."""
    rows = []
    print("simulator, million operations per second on one core (best of 5; first: with the dependency graph;")
    print("figures: again, and then the bubble and every idle interval)")
    heads = " ".join(f"{name:>8}" for name in ("build", *_TIMED))
    print(f"{'schedule':22} {'ranks x microbatches':>20} {'operations':>11} {heads}")
    for builder in pp.builders.known():
        searches = "costs" in builder.options  # these simulate hundreds of schedules to build one
        rows.append(_speed(builder, *((8, 64) if searches else (64, 1024))))
    for num_ranks, num_microbatches in ((256, 1024), (64, 7_800), (64, 78_125)):
        rows.append(_speed(pp.builders.find("1F1B"), num_ranks, num_microbatches, rounds=1))
    return rows


def with_figures(schedule: pp.Schedule) -> tuple:
    """A simulation's bubble, and when each rank is idle."""
    timeline = pp.simulate(schedule)
    return timeline.bubble_fraction, pp.idle_intervals(timeline)


_TIMED = {
    "first": pp.simulate,
    "again": pp.simulate,
    "narrow": lambda schedule: pp.simulate(schedule, pp.Costs(latency=1, bandwidth=2)),
    "validate": pp.validate,
    "figures": with_figures,
}


def _speed(builder: pp.builders.Builder, num_ranks: int, num_microbatches: int, rounds: int = 5) -> dict:
    found: dict[str, list[float]] = {"build": [], **{name: [] for name in _TIMED}}
    for _ in range(rounds):
        marks = [time.perf_counter()]
        schedule = builder(num_ranks, num_microbatches)
        marks.append(time.perf_counter())
        for work in _TIMED.values():
            work(schedule)
            marks.append(time.perf_counter())
        count = len(schedule.columns.kinds)
        for name, start, end in zip(found, marks, marks[1:], strict=False):
            found[name].append(count / (end - start) / 1e6)
    best = {name: max(values) for name, values in found.items()}
    size = f"{num_ranks} x {num_microbatches}"
    numbers = " ".join(f"{value:8.2f}" if value > 0.1 else f"{value:8.4f}" for value in best.values())
    print(f"{builder.name:22} {size:>20} {count:11,} {numbers}", flush=True)
    return {"schedule": builder.name, "size": size, "operations": count, **best}


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
            print(HEADINGS)
            for name in CLASSES:
                schedule = pp.build(name, num_ranks=2, num_microbatches=M)
                found = compare(pool, schedule, make(schedule.num_stages), rounds=rounds, steps=steps)
                rows.append({"size": size, "capacity": capacity, **found})
    return rows


if __name__ == "__main__":
    main()
