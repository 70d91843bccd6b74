"""The zero-bubble paper's table of bubble rates, all twelve rows, recorded in results/zero_bubble_table.json.

`python benchmarks/zero_bubble_table.py` simulates 1F1B, ZB-H1 and ZB-H2 at the profiled times, and searches in 1F1B's
memory and in twice that: once as ZB-1P and ZB-2P do, once with `lab.search`, which goes on from there. Some minutes on
one core; each row is written when it is done. Numbers of rows, from 0, do some of them again.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import records

import pplab as pp
from pplab import lab
from pplab.runtime.pool import versions

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "zero_bubble_table.json"
TOKENS = 1024

# Qi et al. 2023, arXiv:2401.10241, tables 5 and 9; as megatron/core/pipeline_parallel/efficiency.py has them at
# f68d387 of github.com/sail-sg/zero-bubble-pipeline-parallelism. A row: model, ranks, microbatches; F, I, W and
# latency in ms; width, heads; the published rates of these:
NAMES = ("1F1B", "ZB-H1", "ZB-H2", "ZB-1P", "ZB-2P")
PUBLISHED = (
    ("1.5B", 8, 24, (18.522, 18.086, 9.337, 0.601), 2304, 24, (0.2431, 0.1585, 0.1083, 0.1585, 0.0433)),
    ("1.5B", 8, 32, (18.513, 18.086, 9.331, 0.626), 2304, 24, (0.1985, 0.1242, 0.0837, 0.1242, 0.0039)),
    ("1.5B", 8, 64, (18.546, 18.097, 9.321, 0.762), 2304, 24, (0.1240, 0.0674, 0.0444, 0.0674, 0.0026)),
    ("6.2B", 8, 24, (29.718, 29.444, 19.927, 0.527), 4096, 32, (0.2347, 0.1323, 0.0698, 0.1323, 0.0029)),
    ("6.2B", 8, 32, (29.802, 29.428, 19.530, 0.577), 4096, 32, (0.1898, 0.1045, 0.0559, 0.1045, 0.0022)),
    ("6.2B", 8, 64, (29.935, 29.621, 19.388, 0.535), 4096, 32, (0.1091, 0.0554, 0.0294, 0.0554, 0.0010)),
    ("14.6B", 16, 48, (11.347, 11.248, 8.132, 0.377), 5120, 40, (0.2552, 0.1397, 0.0672, 0.1397, 0.0066)),
    ("14.6B", 16, 64, (11.307, 11.254, 8.101, 0.379), 5120, 40, (0.2082, 0.1088, 0.0516, 0.1088, 0.0054)),
    ("14.6B", 16, 128, (11.325, 11.308, 8.109, 0.378), 5120, 40, (0.1251, 0.0576, 0.0266, 0.0576, 0.0028)),
    ("28.3B", 32, 96, (10.419, 10.207, 7.715, 0.408), 6144, 48, (0.2646, 0.1421, 0.0641, 0.1421, 0.0038)),
    ("28.3B", 32, 128, (10.408, 10.204, 7.703, 0.408), 6144, 48, (0.2168, 0.1106, 0.0490, 0.1106, 0.0029)),
    ("28.3B", 32, 256, (10.402, 10.248, 7.698, 0.460), 6144, 48, (0.1352, 0.0594, 0.0257, 0.0594, 0.0018)),
)


def row(model: str, P: int, M: int, times: tuple, width: int, heads: int, published: tuple) -> dict:
    """What one row of the table comes to."""
    F, I, W, latency = times  # noqa: E741
    costs = pp.Costs(F, I, W, latency=latency, unit="ms")
    # bytes per element: with attention's scores stored an input gradient frees all but 32, as the paper counts it
    memory = pp.Memory(activation=34 + 5 * heads * TOKENS / width, weight_input=32)
    searched = {"costs": costs, "memory": memory}
    rates, seconds = {}, {}
    for name in NAMES:
        started = time.process_time()
        options = searched if name in ("ZB-1P", "ZB-2P") else {}
        s = pp.build(name, num_ranks=P, num_microbatches=M, **options)
        rates[name] = pp.simulate(s, costs).span_bubble_fraction
        seconds[name] = time.process_time() - started
    for name, limit in (("found in 1F1B's memory", P), ("found in twice that", 2 * P)):
        started = time.process_time()
        found = lab.search(P, M, **searched, limit=limit * memory.activation, goal="span")
        rates[name] = found.timeline.span_bubble_fraction
        seconds[name] = time.process_time() - started
    return {
        "model": model,
        "num_ranks": P,
        "num_microbatches": M,
        "times_ms": dict(zip(("forward", "backward_input", "backward_weight", "latency"), times, strict=True)),
        "activation_bytes": round(memory.activation, 4),
        "published": dict(zip(NAMES, published, strict=True)),
        "span_bubble": {name: round(rate, 6) for name, rate in rates.items()},
        "seconds": {name: round(took, 1) for name, took in seconds.items()},
    }


def main(numbers: list[int]) -> None:
    old = json.loads(OUT.read_text())["parts"][0]["rows"] if OUT.exists() else []
    rows = {(each["model"], each["num_microbatches"]): each for each in old}
    for number in numbers or range(len(PUBLISHED)):
        made = row(*PUBLISHED[number])
        rows[made["model"], made["num_microbatches"]] = made
        print(made["model"], made["num_microbatches"], made["span_bubble"], made["seconds"], flush=True)
        kept = [rows[key] for each in PUBLISHED if (key := (each[0], each[2])) in rows]
        took = round(sum(sum(each["seconds"].values()) for each in kept), 1)
        part = {"name": "zero_bubble_table", "state": "done", "seconds": took, "rows": kept}
        command = "python benchmarks/zero_bubble_table.py"
        records.write(OUT, [part], device="simulated", command=command, versions=versions())


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
