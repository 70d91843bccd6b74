"""A rank of a paced run under torchrun, on a host that was booted hours before rank 0's. Writes what rank 0 gets.

    torchrun ... tests/two_hosts.py FILE

The run is repeated with the hours, without them, and by torch's runtime with them.
"""

from __future__ import annotations

import json
import os
import sys
import time

HOURS = 3
ahead_ns = 0
read = time.perf_counter_ns
time.perf_counter_ns = lambda: read() + ahead_ns  # before pplab is there, which keeps the function

from torch import nn  # noqa: E402

import modules  # noqa: E402
import pplab as pp  # noqa: E402
from pplab import lab  # noqa: E402
from pplab.lab import (  # noqa: E402
    Pace,
    TorchEngine,
    train_here,  # noqa: E402
)


def main(path: str) -> None:
    """Run three times; rank 0 writes every run as a dict into `path`."""
    global ahead_ns
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    pace = pp.Costs(20, 20, 20, unit="ms")
    found = {}
    for name, hours, engine in (("same", 0, ()), ("ahead", HOURS, ()), ("torch", HOURS, (TorchEngine(),))):
        ahead_ns = hours * 3600 * 10**9 if os.environ["RANK"] == "1" else 0
        workload = modules.workload(nn.Linear(6, 6), nn.Linear(6, 6))
        run = train_here(s, workload, *engine, Pace(pace), device="cpu", steps=2, warmup=0)
        found[name] = run and {**lab.run_to_dict(run), "bubble_fraction": run.timeline.bubble_fraction}
    if run:
        with open(path, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
