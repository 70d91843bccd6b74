"""`make bench`: how fast the simulator is, and the runtime against PyTorch's own on the same stages.

    python benchmarks/bench.py [--quick] [--json FILE]

Runtime figures are ratios of medians of runs that take turns, with the spread of the ratios of neighbouring runs: the
machine's mood is then in both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import pplab as pp
from pplab.lab import models
from pplab.lab.against_torch import HEADINGS, versus
from pplab.lab.models import Modules
from pplab.lab.probe import multiply_times
from pplab.lab.torch_engine import CLASSES
from pplab.runtime import Batch, Pool
from pplab.runtime.pool import versions
from pplab.runtime.stage import Stage


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
    rounds = 2 if options.quick else 5
    figures = {
        "versions": versions(),
        "simulator": simulator(),
        "split": split_backward(rounds),
        "runtime": runtime(rounds),
    }
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


def simulator() -> list[dict]:
    """Operations per second of building, simulating for the first time, again, with narrow links, and validating."""
    rows = []
    print("simulator, million operations per second on one core (best of 5; first: with the dependency graph)")
    heads = " ".join(f"{name:>8}" for name in ("build", *_TIMED))
    print(f"{'schedule':22} {'ranks x microbatches':>20} {'operations':>11} {heads}")
    for builder in pp.builders.ALL:
        searches = "costs" in builder.options  # these simulate hundreds of schedules to build one
        rows.append(_speed(builder, *((8, 64) if searches else (64, 1024))))
    for num_microbatches in (7_800, 78_125):
        rows.append(_speed(pp.builders.find("1F1B"), 64, num_microbatches, rounds=1))
    return rows


_TIMED = {
    "first": pp.simulate,
    "again": pp.simulate,
    "narrow": lambda schedule: pp.simulate(schedule, pp.Costs(latency=1, bandwidth=2)),
    "validate": pp.validate,
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


def split_backward(rounds: int) -> list[dict]:
    """Time of I and W against the full backward of a middle stage of two transformer blocks, in turn in one process."""
    rows = []
    print(f"\nsplit backward, one process: (I + W) / B, median of {4 * rounds} pairs, and their quartiles")
    for width in (128, 256, 512):
        workload = models.gpt(source="sample", num_layers=6, width=width, context=128, batch_size=4)
        x = torch.randn(4, 128, width)
        stages = {split: Stage(workload.build_stage(1, 3), 1, 3, workload.loss, [1.0], split) for split in ((), (0,))}
        times: dict[tuple, list[float]] = {split: [] for split in stages}
        for _ in range(4 * rounds + 1):
            for split, stage in stages.items():
                (out,) = stage.forward(0, (x,), workload.batch(0))
                gradient = torch.ones_like(out)
                start = time.perf_counter()
                if split:
                    stage.backward_input(0, (gradient,))
                    stage.backward_weight(0)
                else:
                    stage.backward(0, (gradient,))
                times[split].append(time.perf_counter() - start)
        ratios = sorted(halves / whole for whole, halves in zip(times[()][1:], times[0,][1:], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append({"width": width, "ratio": middle, "quartiles": [low, high]})
        print(f"width {width:4}: {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
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
            print(HEADINGS)
            for name in CLASSES:
                schedule = pp.build(name, num_ranks=2, num_microbatches=M)
                found = versus(pool, schedule, make(schedule.num_stages), rounds=rounds, steps=steps)
                print(found, flush=True)
                rows.append({"size": size, "capacity": capacity, **found.to_dict()})
    return rows


if __name__ == "__main__":
    main()
