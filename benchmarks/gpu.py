"""`make gpu`: on a machine with CUDA devices, run the GPU tests, measure, and write results/<device>.json.

Without a CUDA device it says so and exits with 1. It leaves out nothing without a word: what a machine with fewer GPUs
than ranks can't show is in the notes of each run.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

import pplab as pp
from pplab import models
from pplab.runtime import Pool
from pplab.runtime.report import versions

ROOT = Path(__file__).parents[1]
GPT = {"num_layers": 12, "width": 768, "num_heads": 12, "context": 512, "batch_size": 32}


def main() -> int:
    """Check, measure, write; returns the exit status."""
    if not torch.cuda.is_available():
        print(
            "make gpu needs a CUDA device, and torch finds none here "
            f"(torch {torch.__version__}, built for CUDA {torch.version.cuda})",
            file=sys.stderr,
        )
        return 1
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"== {len(names)} x {names[0]}, torch {torch.__version__}")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/test_gpu.py", "-p", "no:cacheprovider"]
    print(f"== {' '.join(command[1:])}", flush=True)
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    print(done.stdout)
    closing = done.stdout.strip().splitlines()[-1].strip("= ")
    result = {
        "device": names,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {**versions(), "cuda": torch.version.cuda, "nccl": nccl_version()},
        "command": "make gpu",
        "checks": {"command": " ".join(command[1:]), "closing_line": closing, "passed": done.returncode == 0},
        "runs": measure(len(names)),
    }
    (ROOT / "results").mkdir(exist_ok=True)
    path = ROOT / "results" / f"{re.sub('[^A-Za-z0-9]+', '-', names[0]).strip('-').lower()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"== wrote {path.relative_to(ROOT)}")
    return done.returncode


def measure(num_gpus: int) -> list[dict]:
    """Step times, memory and gradients of every schedule, on the ranks that the machine has GPUs for, and on four."""
    runs = []
    workloads = [models.gpt(source="sample", **GPT), models.distilbert(batch_size=64, length=128, source="sample")]
    for num_ranks in sorted({2, 4, min(num_gpus, 6)} - {1}):
        with Pool(num_ranks, device="cuda") as pool:
            print(f"== {pool}", *pool.notes, sep="\n   ", flush=True)
            for workload in workloads:
                for builder in pp.builders.ALL:
                    try:
                        schedule = builder(num_ranks, 8)
                    except ValueError as error:
                        print(f"not run: {error}", flush=True)
                        continue
                    optimizer = partial(torch.optim.AdamW, lr=1e-4)
                    run = pool.train(schedule, workload, steps=10, check_gradients=True, optimizer=optimizer)
                    print(run, flush=True)
                    data = run.to_dict()
                    data["timelines"] = [run.timeline.to_dict()]
                    runs.append(data)
    return runs


def nccl_version() -> str:
    """NCCL's version, or that there is none."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return "none"


if __name__ == "__main__":
    sys.exit(main())
