"""The training runs of `make gpu`: a first look, gradients, the batch, times, and runs at a given pace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from gpu_batch import MOST, USABLE, gpu_bytes, long_enough, on_card, out_of_memory
from gpu_launches import Launches
from gpu_profiles import summarise
from gpu_setting import Part, Setting, Size, piece, shared_memory
from in_microbatches import InMicrobatches

import pplab as pp
from pplab import lab
from pplab.lab import models
from pplab.runtime import Extra, Pool, RankError, Run, Workload
from pplab.runtime import gpu as door

ADAMW = partial(torch.optim.AdamW, lr=1e-4)
_TINY = {"source": "sample", "num_layers": 4, "width": 64, "num_heads": 2, "context": 32, "batch_size": 8}


@piece(30)
def smoke(setting: Setting, part: Part) -> None:
    """Whether it works at all: 1F1B and ZB-H1 on two ranks, a tiny GPT, its gradients against one process."""
    with setting.pool(2, setting.plainly(2)) as pool:
        for name in ("1F1B", "ZB-H1"):
            s = pp.build(name, num_ranks=2, num_microbatches=4)
            part.attempt(name, partial(_gradients, pool, s, models.gpt(**_TINY), None))


@piece(60)
def gradients(setting: Setting, part: Part) -> None:
    """Every schedule in both precisions, a tiny GPT: its gradients against one process."""
    for num_ranks in setting.size.ranks:
        with setting.pool(num_ranks, setting.plainly(num_ranks)) as pool:
            for dtype in (None, torch.bfloat16):
                for s in setting.schedules(num_ranks, part if dtype is None else None):
                    layers = max(s.num_stages, _TINY["num_layers"])
                    workload = models.gpt(**{**_TINY, "num_layers": layers, "batch_size": 4 * s.num_microbatches})
                    what = f"{s.name}, {num_ranks} ranks, {_dtype(dtype)}"
                    part.attempt(what, partial(_gradients, pool, s, workload, dtype))


def _gradients(pool: Pool, schedule: pp.Schedule, workload: Workload, dtype: torch.dtype | None) -> dict:
    """One step, compared with one process, and its bytes with what the schedule says."""
    run = pool.train(schedule, workload, lab.Meter(), steps=1, check_gradients=True, autocast=dtype)
    row = {"schedule": schedule.name, "num_ranks": schedule.num_ranks, "dtype": _dtype(dtype)}
    row |= {"transport": run.machine.transport, "relative": run.gradients.relative, "wrong": _wrong(run)}
    row["noticed"] = run.gradients.noticed, len(run.gradients.parameters)  # if a fault were planted in each
    said = str(run.gradients).splitlines()[0] if run.gradients.equal else run.gradients
    row["says"] = f"{row['schedule']}, {row['num_ranks']} ranks, {row['dtype']}: gradients {said}"
    print(row["says"], flush=True)
    return row


@piece(60)
def batch(setting: Setting, part: Part) -> None:
    """The batch of the GPT: as large as has room in all that runs, and as keeps every stage's forward busy enough."""
    part.attempt("batch", partial(_batch, setting, part))
    for row in part.rows:
        part.more["batch_size"] = row["batch_size"]


def _batch(setting: Setting, part: Part) -> dict:
    size, num_ranks = setting.size, max(setting.size.ranks)
    sizes = {**size.gpt, "source": "sample"}
    first, most, row = sizes.pop("batch_size"), MOST, {}
    if setting.device == "cuda":
        config = models.GPTConfig(**{name: value for name, value in sizes.items() if name != "source"})
        schedules = [s for count in size.ranks for s in setting.schedules(count)]
        card, (folder, host) = door.cuda.get_device_properties(0).total_memory, shared_memory()
        most, bytes_of = most_that_fits(
            schedules,
            config,
            batch_size=first,
            card_bytes=card,
            num_gpus=setting.num_devices,
            host_bytes=host,
        )
        row = {"most": most, "card_bytes": card, "shared_bytes": host, "bytes": bytes_of, "needed": on_card(bytes_of)}
        told = ", ".join(f"{name} {count / 1e9:.2f}" for name, count in bytes_of.items())
        print(f"there is room for {most} sequences: at most {on_card(bytes_of) / 1e9:.2f} GB ({told}), {folder}")
    part.more["batch_size"] = min(first, most)  # for others, if there is no time to look for a larger one
    schedule = pp.build("1F1B", num_ranks=num_ranks, num_microbatches=size.num_microbatches)
    with setting.pool(num_ranks, setting.plainly(num_ranks)) as pool:
        make = partial(models.gpt, **sizes)
        options = {"batch_size": min(first, most), "least_ms": size.forward_ms, "most": most, "widest": 1}
        found = long_enough(pool, schedule, make, **options)
    print(f"a GPT for what follows: {found}", flush=True)
    return {"batch_size": found.batch_size, "forward_ms": found.forward_ms, **row}


def with_room(measure: Callable[[Workload], dict], workload: Workload, least: int) -> dict:
    """A row measured with this workload, or where a rank finds no memory with half its batch, a quarter, ... as far as
    `least`; the row says so."""
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


def most_that_fits(
    schedules: Sequence[pp.Schedule],
    config: models.GPTConfig,
    *,
    batch_size: int,
    card_bytes: float,
    num_gpus: int,
    host_bytes: float = math.inf,
) -> tuple[int, dict[str, float]]:
    """The largest of batch_size times or by 2, 4, ... (at most 4,096) with which every schedule has room on cards of so
    many bytes, and what the one that needs most has there. It is never less than a sequence a microbatch."""

    def needed(n: int) -> tuple[bool, dict[str, float]]:
        found = [gpu_bytes(schedule, config, n, num_gpus) for schedule in schedules]
        fits = all(on_card(each) <= USABLE * card_bytes and each["host"] <= host_bytes for each in found)
        return fits, max(found, key=on_card)

    n, least = batch_size, max(s.num_microbatches for s in schedules)
    while n // 2 >= least and not needed(n)[0]:
        n //= 2
    while 2 * n <= MOST and needed(2 * n)[0]:
        n *= 2
    return n, needed(n)[1]


@piece(120)
def runs(setting: Setting, part: Part) -> None:
    """Every schedule on a GPT: gradients, memory and times, in both precisions and every way to share the devices."""
    size = setting.size
    workload = models.gpt(source="sample", **size.gpt)
    for dtype in (torch.bfloat16, None):  # every schedule once before any is measured again
        for num_ranks in size.ranks:
            for sharing in setting.sharings(num_ranks, part if dtype else Part(part.name, [])):
                with setting.pool(num_ranks, sharing) as pool:
                    print(f"== {pool}", *pool.notes, sep="\n   ", flush=True)
                    for schedule in setting.schedules(num_ranks, part if dtype else None):
                        options = {"check_gradients": True, "optimizer": ADAMW, "autocast": dtype, "steps": size.steps}
                        extras = (InMicrobatches(),)
                        run = partial(training_run, pool, schedule, sharing, size, extras, options)
                        measure = partial(with_room, run, workload, schedule.num_microbatches)
                        part.attempt(f"{schedule.name}, {num_ranks} ranks, {sharing}, {_dtype(dtype)}", measure)


def warm_up_steps(train: Callable[..., pp.Run], size: Size, device: str) -> int:
    """How many steps it takes, `warm_ms` or more, until a GPU's last two agree; each trial is twice as long as the one
    before. On the CPU it is one."""
    if device == "cpu":
        return 1
    steps = max(2, math.ceil(size.warm_ms / train(steps=1).step_time_ms))
    while steps < size.most_warm_up and not settled(train(steps=steps).step_times_ms):
        steps *= 2
    return min(steps, size.most_warm_up)


def training_run(
    pool: Pool,
    schedule: pp.Schedule,
    sharing: str,
    size: Size,
    extras: Sequence[Extra],
    options: dict,
    workload: Workload,
) -> dict:
    """One training run as a row: what it measured, its median timeline, and its prediction from its own durations.

    On a GPU, others come first until their steps agree; `settled` says whether the last two of the measured ones do.
    """
    usual = {"optimizer": options["optimizer"], "autocast": options.get("autocast")}
    warmup = warm_up_steps(partial(pool.train, schedule, workload, **usual), size, pool.devices[0])
    run = pool.train(schedule, workload, lab.Meter(), Launches(), *extras, warmup=warmup, **options)
    print(run, flush=True)
    row = {**lab.run_to_dict(run), "dtype": _dtype(options.get("autocast")), "sharing": sharing, "wrong": _wrong(run)}
    del row["versions"]  # the file's
    row["hosts_share"] = run.extras["launches"]
    if traces := row.get("profile"):
        row["profile"] = [summarise(Path(trace), rank).to_dict() for rank, trace in enumerate(traces)]
    row["warmup"], row["settled"] = warmup, settled(row["step_times_ms"])
    row["timelines"] = [lab.timeline_to_dict(run.timeline)]
    row["measured"] = {"makespan_ms": run.timeline.makespan, "bubble_fraction": run.timeline.bubble_fraction}
    row["compute_share"] = sum(run.timeline.busy) / (schedule.num_ranks * run.step_time_ms)
    if run.job.engine_name == "pplab":
        predicted = pp.simulate(schedule, run.costs)
        row["predicted"] = {"makespan_ms": predicted.makespan, "bubble_fraction": predicted.bubble_fraction}
        row["where"] = lab.where(run.timeline).mean
    return row


def _wrong(run: Run) -> list[str]:
    """What about a run is a failure."""
    found = [note for note in run.notes if note.startswith("MPS lists")]
    if run.gradients is not None and not run.gradients.equal:
        found.append(f"gradients differ from one process: {run.gradients}")
    if run.job.engine_name == "pplab" and run.held.peak_bytes != run.predicted_peak_bytes:
        found.append(f"held {run.held.peak_bytes} bytes, predicted {run.predicted_peak_bytes}")
    return found


def settled(times_ms: Sequence[float]) -> bool | None:
    """Whether the last two of these steps agree within a twentieth; None where there are fewer."""
    if len(times_ms) < 2:
        return None
    return abs(times_ms[-1] - times_ms[-2]) <= 0.05 * max(times_ms[-2:])


@piece(40)
def paced(setting: Setting, part: Part) -> None:
    """On a shared device: every action computes there and is stretched to a time that all can keep, so that the
    schedule is seen in real time."""
    size = setting.size
    workload = models.gpt(source="sample", **size.gpt)
    for num_ranks in size.ranks:
        if setting.device == "cuda" and num_ranks <= setting.num_devices:
            part.leave_out(f"{num_ranks} ranks", "every rank has a GPU: its own times are the schedule's")
            continue
        with setting.pool(num_ranks, "turns") as pool:
            for schedule in sorted(setting.schedules(num_ranks, part), key=lambda s: s.name not in ("1F1B", "ZB-H1")):
                run = partial(paced_run, pool, schedule, size)
                measure = partial(with_room, run, workload, schedule.num_microbatches)
                part.attempt(f"{schedule.name}, {num_ranks} ranks", measure)


def paced_run(pool: Pool, schedule: pp.Schedule, size: Size, workload: Workload) -> dict:
    """A run at a pace that all ranks can keep, beside the one without (`free`) that tells this pace."""
    free = pool.train(schedule, workload, steps=size.steps)
    longest = max(span.end - span.start for span in free.timeline.spans)
    pace = pp.Costs(*[1.5 * longest] * 3, unit="ms")  # with the others taking turns, and some room
    run = pool.train(schedule, workload, lab.Pace(pace), lab.Meter(), steps=size.steps)
    predicted, own = pp.simulate(schedule, pace), pp.simulate(schedule, free.costs)
    print(run, flush=True)
    return {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "workload": run.job.workload.name,
        "pace_ms": 1.5 * longest,
        "makespan_ms": run.timeline.makespan,
        "predicted_makespan_ms": predicted.makespan,
        "bubble_fraction": run.timeline.bubble_fraction,
        "predicted_bubble_fraction": predicted.bubble_fraction,
        "free": {
            "makespan_ms": free.timeline.makespan,
            "bubble_fraction": free.timeline.bubble_fraction,
            "predicted_makespan_ms": own.makespan,  # with this run's own durations
            "predicted_bubble_fraction": own.bubble_fraction,
        },
        "timelines": [lab.timeline_to_dict(each.timeline) for each in (run, free)],
        "notes": list(run.notes),
    }


def _dtype(dtype: torch.dtype | None) -> str:
    return "fp32" if dtype is None else "bf16"
