"""Schedules with pairs by real processes beside their simulation, recorded in results/overlap.json.

`python benchmarks/overlap.py` runs them on two and on four ranks, with messages that take no time and messages that
take as long as two pieces of every layer of a rank. All pieces are paced. Some five minutes on a machine that does
nothing else; each setting is written when it is done.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pplab as pp
from pplab import lab
from pplab.runtime import Pool
from pplab.runtime.pool import versions

OUT = Path(__file__).parents[1] / "results" / "overlap.json"
M, PIECE_MS, LAYERS, ROUNDS = 8, 5, 4, 3  # microbatches; a piece of a layer; layers of a rank; steps of each schedule


def schedules(P: int) -> list[pp.Schedule]:
    """On P ranks."""
    found = [pp.build(name, num_ranks=P, num_microbatches=M) for name in ("1F1B", "DualPipe", "DualPipeV")]
    for V in (1, 2, 4):
        s = pp.build("paired-1F1B", num_ranks=P, num_microbatches=M, stages_per_rank=V)
        found.insert(V.bit_length(), pp.Schedule(s.rows, f"in pairs, V = {V}"))
    split = pp.build("paired-1F1B", num_ranks=P, num_microbatches=M, stages_per_rank=2, split=True)
    return [*found, pp.Schedule(split.rows, "half pairs, V = 2")]


def measure(pool: Pool, latency_ms: float) -> list[dict]:
    """A row per schedule."""
    P = pool.num_ranks
    model = lab.models.mixture(
        batch_size=2 * M, num_layers=LAYERS * P, width=16, num_heads=2, context=8, expert_width=16, source="sample"
    )
    pieces = lab.Pieces(*[PIECE_MS] * 4)
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


def main() -> None:
    rows: list[dict] = []
    for P in (2, 4):
        with Pool(P, device="cpu") as pool:
            for latency_ms in (0, 2 * LAYERS * PIECE_MS):
                rows += measure(pool, latency_ms)
                part = {"name": "overlap", "state": "done", "seconds": 0, "rows": rows}
                lab.results.write(
                    OUT,
                    [part],
                    device=f"{os.cpu_count()} cores",
                    command="python benchmarks/overlap.py",
                    versions=versions(),
                    box={"piece_ms": PIECE_MS, "layers_per_rank": LAYERS, "num_microbatches": M},
                    date=datetime.date.today().isoformat(),
                )


if __name__ == "__main__":
    main()
