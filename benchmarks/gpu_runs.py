"""The training runs of `make gpu`: a first look, gradients, the batch, and times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from gpu_setting import Part, Setting, Size, out_of_memory, piece

import pplab as pp
from pplab import lab
from pplab.lab import models
from pplab.runtime import Batch, Pool, RankError, Run, Workload

ADAMW = partial(torch.optim.AdamW, lr=1e-4)
_TINY = {"source": "sample", "num_layers": 4, "width": 64, "num_heads": 2, "context": 32, "batch_size": 8}
_MOST = 4096  # sequences of a batch


@piece(30)
def smoke(setting: Setting, part: Part) -> None:
    """Check whether it works at all: 1F1B and ZB-H1 on two ranks, a tiny GPT, and its gradients against one process."""
    with setting.pool(2, setting.plainly(2)) as pool:
        for name in ("1F1B", "ZB-H1"):
            s = pp.build(name, num_ranks=2, num_microbatches=4)
            part.attempt(name, partial(_gradients, pool, s, models.gpt(**_TINY), None))


@piece(60)
def gradients(setting: Setting, part: Part) -> None:
    """Compare the gradients of a tiny GPT with one process, under every schedule and in both precisions."""
    for num_ranks in reversed(setting.size.ranks):
        with setting.pool(num_ranks, setting.plainly(num_ranks)) as pool:
            all_gradients(setting, part, pool)


def all_gradients(setting: Setting, part: Part, pool: Pool, sharing: str = "") -> None:
    """A row for every schedule and precision on the pool's ranks."""
    for dtype in (None, torch.bfloat16):
        for s in setting.schedules(pool.num_ranks, part if dtype is None else None):
            layers = max(s.num_stages, _TINY["num_layers"])
            workload = models.gpt(**{**_TINY, "num_layers": layers, "batch_size": 4 * s.num_microbatches})
            what = f"{s.name}, {pool.num_ranks} ranks, {_dtype(dtype)}{sharing and ', '}{sharing}"
            part.attempt(what, partial(_gradients, pool, s, workload, dtype, setting.size.more_steps))


def _gradients(
    pool: Pool, schedule: pp.Schedule, workload: Workload, dtype: torch.dtype | None, more_steps: int = 0
) -> dict:
    """One step compared with one process, and its bytes with the schedule's. Over NCCL more steps follow, with batches
    of several lengths, to give a rare hang or a late need of memory a chance to show up."""
    run = pool.train(schedule, workload, lab.Meter(), steps=1, check_gradients=True, autocast=dtype)
    if run.machine.transport == "nccl" and more_steps:
        pool.train(schedule, of_several_lengths(workload, schedule.num_stages), steps=more_steps, autocast=dtype)
    row = {"schedule": schedule.name, "num_ranks": schedule.num_ranks, "dtype": _dtype(dtype)}
    row |= {"transport": run.machine.transport, "relative": run.gradients.relative, "wrong": _wrong(run)}
    row["noticed"] = run.gradients.noticed, len(run.gradients.parameters)  # if a fault were planted in each
    said = str(run.gradients).splitlines()[0] if run.gradients.equal else run.gradients
    row["says"] = f"{row['schedule']}, {row['num_ranks']} ranks, {row['dtype']}: gradients {said}"
    print(row["says"], flush=True)
    return row


def of_several_lengths(gpt: Workload, num_stages: int) -> models.Modules:
    """The same GPT, whose sequences grow from step to step, four times, and then are short again."""
    stages = [gpt.build_stage(stage, num_stages) for stage in range(num_stages)]
    return models.Modules(stages, Lengths(gpt.batch(0)), gpt.loss)


@dataclass
class Lengths:
    """Makes batches of several lengths from one batch."""

    whole: Batch

    def __call__(self, step: int) -> Batch:
        """Take a quarter of each sequence, half of it, ..."""
        tokens = self.whole.target.shape[1] * (1 + step % 4) // 4
        return Batch(tuple(x[:, :tokens] for x in self.whole.inputs), self.whole.target[:, :tokens])


@piece(60)
def batch(setting: Setting, part: Part) -> None:
    """Find the batch of the GPT: double it until every stage's forward takes long enough, as far as GPipe has room."""
    if setting.device == "cpu":
        part.leave_out("all of it", "a CPU launches nothing, so any batch will do")
        return
    size, num_ranks = setting.size, max(setting.size.ranks)
    s = pp.build("GPipe", num_ranks=num_ranks, num_microbatches=size.num_microbatches)
    batch_size, row = size.gpt["batch_size"], {"forward_ms": 0.0}
    with setting.pool(num_ranks, setting.plainly(num_ranks)) as pool:
        while row and row["forward_ms"] < size.forward_ms and batch_size <= _MOST:
            if row := part.attempt(f"batch {batch_size}", partial(_shortest_forward, pool, s, size, batch_size)):
                part.more["batch_size"] = batch_size
            batch_size *= 2


def _shortest_forward(pool: Pool, schedule: pp.Schedule, size: Size, batch_size: int) -> dict:
    """The shortest forward of a microbatch on a stage, in bfloat16, with the others' turns if ranks share a GPU."""
    gpt = models.gpt(source="sample", **{**size.gpt, "batch_size": batch_size})
    costs = pool.train(schedule, gpt, steps=2, optimizer=ADAMW, autocast=torch.bfloat16).costs
    turns = math.ceil(pool.num_ranks / len(set(pool.devices)))
    shortest = min(costs.of("F", stage) for stage in range(schedule.num_stages)) / turns
    print(f"a batch of {batch_size}: the shortest forward takes {shortest:.1f} ms", flush=True)
    return {"batch_size": batch_size, "forward_ms": shortest}


def with_room(measure: Callable[[Workload], dict], workload: Workload, least: int) -> dict:
    """A row measured with this workload, or, where a rank has too little memory, with half its batch, a quarter, ...
    down to `least`. The row notes it."""
    halved: list[str] = []
    while True:
        try:
            row = measure(workload)
        except RankError as error:
            half = workload.batch_size // 2
            if not out_of_memory(error) or half < least:
                raise
            halved.append(f"no room for a batch of {workload.batch_size}: {error.cause.splitlines()[0][:300]}")
            print(f"{halved[-1]}: on with {half}", flush=True)
            workload = replace(workload, batch_size=half)
        else:
            return {**row, "batch_size": workload.batch_size, "halved": halved}


@piece(120)
def runs(setting: Setting, part: Part) -> None:
    """Run every schedule on a GPT for its memory and times, in both precisions and with every sharing of devices."""
    size = setting.size
    workload = models.gpt(source="sample", **size.gpt)
    first, *other = (torch.bfloat16, None) if setting.device == "cuda" else (None,)
    for dtype in (first, *other):  # every schedule once before any is measured again
        for num_ranks in size.ranks:
            for sharing in setting.sharings(num_ranks, part if dtype is first else Part(part.name, [])):
                with setting.pool(num_ranks, sharing) as pool:
                    print(f"== {pool}", *pool.notes, sep="\n   ", flush=True)
                    for schedule in setting.schedules(num_ranks, part if dtype is first else None):
                        run = partial(training_run, pool, schedule, sharing, size, dtype)
                        measure = partial(with_room, run, workload, schedule.num_microbatches)
                        part.attempt(f"{schedule.name}, {num_ranks} ranks, {sharing}, {_dtype(dtype)}", measure)


def training_run(
    pool: Pool, schedule: pp.Schedule, sharing: str, size: Size, dtype: torch.dtype | None, workload: Workload
) -> dict:
    """One training run as a row: what it measured, its median timeline, and its prediction from its own durations.

    On a GPU, trial runs come first until their steps agree. `settled` tells whether the last two of the measured ones
    do.
    """
    train = partial(pool.train, schedule, workload, lab.Meter(), optimizer=ADAMW, autocast=dtype)
    warmup = warm_up_steps(train, size, pool.devices[0])
    run = train(steps=size.steps, warmup=warmup)
    print(run, flush=True)
    row = {**lab.run_to_dict(run), "dtype": _dtype(dtype), "sharing": sharing, "wrong": _wrong(run)}
    del row["versions"]  # the file's
    row["warmup"], row["settled"] = warmup, settled(row["step_times_ms"])
    row["timelines"] = [lab.timeline_to_dict(run.timeline)]
    row["measured"] = {"makespan_ms": run.timeline.makespan, "bubble_fraction": run.timeline.bubble_fraction}
    row["compute_share"] = sum(run.timeline.busy) / (schedule.num_ranks * run.step_time_ms)
    predicted = pp.simulate(schedule, run.costs)
    row["predicted"] = {"makespan_ms": predicted.makespan, "bubble_fraction": predicted.bubble_fraction}
    row["where"] = lab.where(run.timeline).mean
    return row


def warm_up_steps(train: Callable[..., Run], size: Size, device: str) -> int:
    """How many steps it takes, for `warm_ms` or longer, until a GPU's last two agree. Each trial is twice as long as
    the one before. On the CPU it is one."""
    if device == "cpu":
        return 1
    steps = max(2, math.ceil(size.warm_ms / train(steps=1).step_time_ms))
    while steps < size.most_warm_up and not settled(train(steps=steps).step_times_ms):
        steps *= 2
    return min(steps, size.most_warm_up)


def settled(times_ms: Sequence[float]) -> bool | None:
    """Whether the last two of these steps agree within a twentieth, or None where there are fewer."""
    if len(times_ms) < 2:
        return None
    return abs(times_ms[-1] - times_ms[-2]) <= 0.05 * max(times_ms[-2:])


def _wrong(run: Run) -> list[str]:
    """What counts as a failure of a run."""
    found = [note for note in run.notes if note.startswith("MPS lists")]
    if run.gradients is not None and not run.gradients.equal:
        found.append(f"gradients differ from one process: {run.gradients}")
    if run.held.peak_bytes != run.predicted_peak_bytes:
        found.append(f"held {run.held.peak_bytes} bytes, predicted {run.predicted_peak_bytes}")
    return found


def _dtype(dtype: torch.dtype | None) -> str:
    return "fp32" if dtype is None else "bf16"
