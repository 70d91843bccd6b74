"""Traces of torch.profiler from real runs of torch's own pipelining classes, on gloo, in `tests/lab/measuring/traces`.

    python tests/record_traces.py [NAME ...]

records all of CASES, or those named, and writes NAME/rank0.json.gz and so on. As torch wrote them, but for what no
reader of `lab.read_traces` looks at: of operators inside others (aten::addmm inside aten::linear) only autograd's are
kept, flows between forwards and backwards go, and of arguments only what joins a kernel to its launch. A rank runs this
file again, alone in its process. Cases on a GPU are recorded where they are named; NCCL takes their ranks, which share
it, for different hosts (benchmarks/one_gpu.py), and an MPS daemon that runs lets them compute at once.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import one_gpu  # noqa: E402

HERE = Path(__file__).parent / "lab" / "measuring" / "traces"
SIZES = {"cpu": (256, 192), "cuda": (4096, 512)}  # the width of a layer, the tokens of a microbatch
GPU = {"device": "cuda:0", "ranks": 2, "watch": True, "steps": 3}

CASES: dict[str, dict] = {
    "gpipe": {"name": "GPipe", "ranks": 2, "layers": [2, 2]},
    "1f1b": {"name": "1F1B", "ranks": 2, "layers": [2, 2], "watch": True},
    "1f1b-four": {"name": "1F1B", "ranks": 4, "layers": [1, 1, 1, 1], "watch": True},
    "slow-stage": {"name": "1F1B", "ranks": 4, "layers": [1, 1, 4, 1], "watch": True},
    "slow-link": {"name": "Interleaved1F1B", "ranks": 2, "layers": [1, 1, 1, 1], "lag": {(0, 1): 0.02}},
    "interleaved": {"name": "Interleaved1F1B", "ranks": 2, "layers": [1, 1, 1, 1], "steps": 3},
    "interleaved-watched": {"name": "Interleaved1F1B", "ranks": 2, "layers": [1, 1, 1, 1], "watch": True},
    "loopedbfs": {"name": "LoopedBFS", "ranks": 2, "layers": [1, 1, 1, 1]},
    "interleaved-zb": {"name": "InterleavedZeroBubble", "ranks": 2, "layers": [1, 1, 1, 1]},
    "zbv": {"name": "ZBVZeroBubble", "ranks": 4, "layers": [1] * 8},
    "dualpipev": {"name": "DualPipeV", "ranks": 2, "layers": [1, 1, 1, 1]},
    "torchtitan": {"name": "Interleaved1F1B", "ranks": 2, "layers": [1, 1, 1, 1], "titan": True},
    "evaluation": {"name": "GPipe", "ranks": 2, "layers": [1, 1], "evaluate": "alone"},
    "validated": {
        **{"name": "Interleaved1F1B", "ranks": 2, "layers": [1, 1, 1, 1], "watch": True},
        **{"steps": 2, "evaluate": "between"},
    },
    "unnamed": {"name": "1F1B", "ranks": 2, "layers": [1, 1]},
    "gpu-1f1b": {**GPU, "name": "1F1B", "layers": [2, 2]},
    "gpu-gpipe": {**GPU, "name": "GPipe", "layers": [2, 2]},
    "gpu-slow-stage": {**GPU, "name": "1F1B", "layers": [1, 2]},
}

JOBS = {  # of measuring/planted.py: the plants, ranks of a pipeline, replicas, steps
    "none-4": ("", 4, 1, 4),
    "none-2x2": ("", 2, 2, 4),
    "slow1-2x2": ("slow@1:1.8", 2, 2, 4),
    "slow3-2x2": ("slow@3:1.8", 2, 2, 4),
    "stage2-4": ("stage@2:1.6", 4, 1, 4),
    "late0-4": ("late@0:250", 4, 1, 4),
    "late2-4": ("late@2:250", 4, 1, 4),
    "late3-4": ("late@3:250", 4, 1, 4),
    "late3-2x2": ("late@3:250", 2, 2, 4),
    "tenth1-2": ("tenth@1:500", 2, 1, 14),
    "data1-4": ("data@1:300", 4, 1, 4),
    "pauses2-4": ("pauses@2:150", 4, 1, 4),
    "nap2-4": ("nap@2:400", 4, 1, 4),
    "link2-4": ("link@2:30", 4, 1, 4),
    "none-interleaved": ("", 4, 1, 4),
    "link2-interleaved": ("link@2:60", 4, 1, 4),
    "optimizer-4": ("optimizer@0:250", 4, 1, 4),
    "checkpoint-4": ("checkpoint@1:900", 4, 1, 4),
    "slow3-late0-2x2": ("slow@3:1.8,late@0:200", 2, 2, 4),
    "late2-pauses1-2x2": ("late@2:200,pauses@1:150", 2, 2, 4),
    "pauses1-link3-4": ("pauses@1:150,link@3:30", 4, 1, 4),
    "link1-slow3-4": ("link@1:30,slow@3:1.6", 4, 1, 4),
}


def record_job(name: str) -> None:
    """Run a job with its plants, by torchrun, and write its ranks' traces into `job`."""
    plants, ranks, replicas, steps = JOBS[name]
    told = {"PLANT": plants, "RANKS": ranks, "REPLICAS": replicas, "STEPS": steps, "FOLDER": HERE / "job" / name}
    told["STAGES"] = 1 + ("interleaved" in name)  # of each rank
    watched = [sys.executable, "-m", "pplab.watch", sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun = [*watched, f"--nproc-per-node={ranks * replicas}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", **{key: str(value) for key, value in told.items()}}
    subprocess.run([*torchrun, str(HERE.with_name("planted.py"))], env=environment, timeout=120, check=True)
    for path in (HERE / "job" / name).iterdir():
        strip(path, of_job=True)


def record(case: dict, folder: Path, microbatches: int = 4) -> None:
    """Run a case in a process for each rank, and write their traces into a folder, and torch's own rows: rows.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {**case, "microbatches": microbatches, "folder": str(folder), "lag": [*case.get("lag", {}).items()]}
    ranks = case["ranks"]
    store = folder / "store"
    store.unlink(missing_ok=True)
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", json.dumps({**told, "rank": rank, "store": str(store)})],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in processes]
        assert not any(process.returncode for process in processes), "\n".join(said)
    finally:
        for process in processes:
            process.kill()
    store.unlink(missing_ok=True)


def run_rank(told: dict) -> None:
    """One rank of a case: torch alone, but for the names of `lab.watch_torch`."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import pipelining
    from torch.profiler import profile

    rank, ranks, layers, M = told["rank"], told["ranks"], told["layers"], told["microbatches"]
    device = torch.device(told.get("device", "cpu"))
    width, tokens = SIZES[device.type]
    if device.type == "cuda":
        os.environ.update(one_gpu.environment(rank, torch.cuda.nccl.version()))
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        f"file://{told['store']}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    if told.get("watch"):
        from pplab import lab

        lab.watch_torch()
        lab.watch_torch()  # which changes nothing
    if told["lag"]:
        lag_messages(rank, told["lag"])
    torch.manual_seed(rank)
    stages, held = len(layers), [stage for stage in range(len(layers)) if stage % ranks == rank]
    if told["name"] in ("ZBVZeroBubble", "DualPipeV"):
        held = [rank, stages - 1 - rank]

    def part(stage: int) -> nn.Module:
        layer = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        return nn.Sequential(*(copy.deepcopy(each) for each in layer * layers[stage])).to(device)

    made = [pipelining.PipelineStage(part(stage), stage, stages, device) for stage in held]
    one = told["name"] in ("GPipe", "1F1B")
    runner = getattr(pipelining, f"Schedule{told['name']}")(
        made[0] if one else made, M, loss_fn=lambda y, target: (y - target).square().mean()
    )
    if rank == 0:
        rows = [[str(a) for a in row if a is not None] for _, row in sorted(runner.pipeline_order.items())]
        Path(told["folder"], "rows.txt").write_text(json.dumps(rows))
    x = torch.randn(tokens * M, width, device=device)
    inputs, target = [x] * (0 in held), {"target": x} if stages - 1 in held else {}

    def run() -> None:
        if told.get("evaluate") != "alone":
            runner.step(*inputs, **target)
        if told.get("evaluate"):
            runner.eval(*inputs, **target)

    for _ in range(2):
        run()
    dist.barrier()
    if told.get("titan"):
        as_torchtitan(run, Path(told["folder"]), rank)
    else:
        with profile() as profiler:
            for _ in range(told.get("steps", 1)):
                run()
        profiler.export_chrome_trace(str(Path(told["folder"], f"rank{rank}.json.gz")))
    dist.barrier()
    dist.destroy_process_group()


def as_torchtitan(run, folder: Path, rank: int) -> None:
    """A cycle of 4 steps of which the last is recorded, twice; files are named as in torchtitan/tools/profiler.py."""
    from torch.profiler import profile, schedule

    def export(profiler) -> None:
        place = folder / f"iteration_{profiler.step_num}"
        place.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(place / f"rank{rank}_trace.json.gz"))

    with profile(schedule=schedule(wait=1, warmup=2, active=1), on_trace_ready=export, record_shapes=True) as profiler:
        for _ in range(8):
            run()
            profiler.step()


def lag_messages(rank: int, lags: list) -> None:
    """Messages count as there some seconds after they came, by the ranks from which and to which they go."""
    from concurrent.futures import ThreadPoolExecutor

    from torch.distributed.pipelining import schedules

    watchers, exchange = ThreadPoolExecutor(64), schedules._batch_p2p
    to_me = {source: seconds for (source, target), seconds in lags if target == rank}

    class Late:
        def __init__(self, work, lag: float):
            self.when = watchers.submit(lambda: (work.wait(), time.perf_counter() + lag)[1])

        def wait(self) -> None:
            time.sleep(max(0, self.when.result() - time.perf_counter()))

    def late(operations, *given, **named):
        works = exchange(operations, *given, **named)
        lag = max((to_me.get(each.peer, 0) for each in operations if each.op.__name__ == "irecv"), default=0)
        return [Late(work, lag) for work in works]

    schedules._batch_p2p = late


def strip(path: Path, of_job: bool = False) -> None:
    """Leave out what no reader looks at, as the module's text says; of a job, also what is inside an annotation."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    kept, until = [], -1.0
    for event in sorted((e for e in trace["traceEvents"] if e.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"])):
        kept_inside = "c10d::" if of_job else "autograd::engine"
        annotation = of_job and event.get("cat") == "user_annotation" and not event["name"].startswith("gloo:")
        if event.get("cat") == "cpu_op" or annotation:
            outermost = event["ts"] >= until
            until = max(until, event["ts"] + event["dur"])
            if not outermost and not annotation and not event["name"].startswith(kept_inside):
                continue
        kept.append(
            {key: event[key] for key in ("ph", "cat", "name", "tid", "ts", "dur") if key in event}
            | {"args": {key: event["args"][key] for key in ("correlation",) if key in event.get("args", {})}}
        )
    trace["traceEvents"] = kept
    path.write_bytes(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(json.loads(sys.argv[2]))
    else:
        for name in sys.argv[1:] or [*JOBS, *(name for name, case in CASES.items() if "device" not in case)]:
            if name in JOBS:
                record_job(name)
                continue
            record(CASES[name], HERE / name)
            for path in (HERE / name).rglob("*.json.gz"):
                strip(path)
            print(name, sum(path.stat().st_size for path in (HERE / name).rglob("*.json.gz")))
