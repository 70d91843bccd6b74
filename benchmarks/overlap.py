"""Schedules with pairs by real processes beside their simulation, recorded in results/overlap.json.

`python benchmarks/overlap.py` runs them on two and on four ranks, with messages that take no time and messages that
take as long as two pieces of every layer of a rank; `python benchmarks/overlap.py unequal` with pieces as unequal as
the running case's, without latency. All pieces are paced: what is measured is a program with sleeps, no hardware. Some
five minutes, and three, on a machine that does nothing else; each setting is written when it is done.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import records

import pplab as pp
from pplab import lab
from pplab.runtime import Pool
from pplab.runtime.pool import versions

OUT = Path(__file__).parents[1] / "results" / "overlap.json"
M, LAYERS, ROUNDS = 8, 4, 3  # microbatches; layers of a rank; steps of each schedule
PIECES = {"overlap": lab.Pieces(5, 5, 5, 5), "unequal": lab.Pieces(3, 5, 7, 5)}  # of a layer, in ms, by parts
LATENCIES_MS = {"overlap": (0, 40), "unequal": (0,)}


def schedules(P: int) -> list[pp.Schedule]:
    """On P ranks."""
    found = [pp.build(name, num_ranks=P, num_microbatches=M) for name in ("1F1B", "DualPipe", "DualPipeV")]
    for V in (1, 2, 4):
        s = pp.build("paired-1F1B", num_ranks=P, num_microbatches=M, stages_per_rank=V)
        found.insert(V.bit_length(), pp.Schedule(s.rows, f"in pairs, V = {V}"))
    split = pp.build("paired-1F1B", num_ranks=P, num_microbatches=M, stages_per_rank=2, split=True)
    return [*found, pp.Schedule(split.rows, "half pairs, V = 2")]


def measure(pool: Pool, pieces: lab.Pieces, latency_ms: float) -> list[dict]:
    """A row per schedule."""
    P = pool.num_ranks
    model = lab.models.mixture(
        batch_size=2 * M, num_layers=LAYERS * P, width=16, num_heads=2, context=8, expert_width=16, source="sample"
    )
    options = {"latency_ms": latency_ms, "steps": 1, "rounds": ROUNDS, "check_gradients": True}
    found = lab.measure_under(pool, schedules(P), model, pieces, **options)
    print(found, flush=True)
    return [
        {
            "schedule": row.schedule.name,
            "num_ranks": P,
            "latency_ms": latency_ms,
            "simulated_ms": row.simulated.makespan,
            "steps_ms": [round(step, 1) for step in row.steps_ms],
            "ratio": round(row.ratio, 4),
            "load": round(found.load, 1),
        }
        for row in found.rows
    ]


def main(part: str = "overlap") -> None:
    if part not in PIECES:
        sys.exit(f"expected one of {', '.join(PIECES)}, got {part}")
    recorded = [found.data for found in lab.results.load(OUT.parent) if found.path == OUT]
    kept = [{"date": data["date"]} | each for data in recorded for each in data["parts"] if each["name"] != part]
    rows: list[dict] = []
    for P in (2, 4):
        with Pool(P, device="cpu") as pool:
            for latency_ms in LATENCIES_MS[part]:
                rows += measure(pool, PIECES[part], latency_ms)
                made = {
                    "name": part,
                    "state": "done",
                    "seconds": 0,
                    "date": datetime.date.today().isoformat(),
                    "pieces_ms": list(vars(PIECES[part]).values()),
                    "rows": rows,
                }
                records.write(
                    OUT,
                    [*kept, made],
                    device=f"{os.cpu_count()} cores",
                    command="python benchmarks/overlap.py, and with `unequal`",
                    versions=versions(),
                    box={"layers_per_rank": LAYERS, "num_microbatches": M},
                    date=datetime.date.today().isoformat(),
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
