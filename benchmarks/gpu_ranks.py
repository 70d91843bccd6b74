"""Several ranks, for `make gpu` and `make bench`: how well one schedule's durations predict the others, and the
course's runs without pace, which take a core for every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from gpu_box import cores
from gpu_runs import paced_run, with_room
from gpu_setting import SIZES, Part, Setting, piece

import pplab as pp
from pplab import lab
from pplab.actions import Kind
from pplab.lab import models
from pplab.runtime import Pool, Workload

_PREDICTED = (
    *("GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "LoopedBFS"),
    *("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
)


@piece(120)
def predicted(setting: Setting, part: Part) -> None:
    """Schedules' makespans, simulated with the durations of one run of one of them, and measured."""
    dtype = torch.bfloat16 if setting.device == "cuda" else None
    workload = models.gpt(source="sample", **setting.size.gpt)
    for num_ranks in reversed([*_ranks(setting, part)]):  # schedules differ most on most ranks
        sharing = next(iter(("cores",) if setting.device == "cpu" else setting.sharings(num_ranks, part)))
        with setting.pool(num_ranks, sharing) as pool:
            for first, others in _alike(setting.schedules(num_ranks)):
                run = partial(_predicted, pool, sharing, setting, dtype, first, others)
                what = f"from {first.name}, {num_ranks} ranks, {sharing}"
                part.attempt(what, partial(with_room, run, workload, first.num_microbatches))


def _ranks(setting: Setting, part: Part) -> Iterator[int]:
    """How many there can be without taking turns on cores."""
    for num_ranks in setting.size.ranks:
        if setting.device == "cpu" and num_ranks > setting.num_devices:
            part.leave_out(f"{num_ranks} ranks without pace", f"there are {setting.num_devices} cores")
        else:
            yield num_ranks


def _alike(schedules: list[pp.Schedule]) -> Iterator[tuple[pp.Schedule, list[pp.Schedule]]]:
    """The schedules that cut and place the model alike: one that splits backwards, and does one thing at a time, which
    tells all that the others need, and these."""
    groups = defaultdict(list)
    for schedule in schedules:
        if schedule.name in _PREDICTED:
            groups[schedule.placement].append(schedule)
    for group in groups.values():
        group.sort(key=lambda s: (Kind.I not in s.columns.kinds, any(isinstance(x, pp.Overlap) for x in s.rows[0])))
        if len(group) > 1:
            yield group[0], group[1:]


def _predicted(
    pool: Pool,
    sharing: str,
    setting: Setting,
    dtype: torch.dtype | None,
    first: pp.Schedule,
    others: list[pp.Schedule],
    workload: Workload,
) -> dict:
    """Measure them all in turn, so that a slow spell of the machine hits more than one. The fastest steps count, of
    the run that the costs come from."""
    runs, times = [], {schedule.name: [] for schedule in (first, *others)}
    train = partial(pool.train, workload=workload, steps=setting.size.steps, autocast=dtype)
    for _ in range(min(3, setting.size.rounds)):
        runs += train(lab.calibrating(first)).timelines  # it has the name of the first
        for schedule in (first, *others):
            times[schedule.name] += [step.makespan for step in train(schedule).timelines]
    costs = lab.calibrate(min(runs, key=lambda step: step.makespan))
    rows = []
    for schedule in (first, *others):
        told, found = pp.simulate(schedule, costs).makespan, times[schedule.name]
        row = {"schedule": schedule.name, "predicted_ms": told, "measured_ms": min(found), "steps_ms": found}
        rows.append({**row, "error": told / min(found) - 1})
        print(f"{schedule.name:22} predicted {told:.1f} ms, measured {min(found):.1f} ms", flush=True)
    return {
        "measured": first.name,
        "num_ranks": first.num_ranks,
        "num_stages": first.num_stages,
        "num_microbatches": first.num_microbatches,
        "sharing": sharing,
        "workload": workload.name,
        "dtype": "bf16" if dtype else "fp32",
        "schedules": rows,
        "notes": [*workload.notes, *pool.notes],
    }


@piece(60)
def without_pace(setting: Setting, part: Part) -> None:
    """The course's runs on the processor's cores, without pace, and beside each the same at a given pace."""
    if setting.device == "cuda":
        setting = replace(setting, device="cpu", num_devices=cores(), size=SIZES[setting.size.on_cores])
    workload = models.gpt(source="sample", **setting.size.gpt)
    for num_ranks in _ranks(setting, part):
        with setting.pool(num_ranks, "cores") as pool:
            for schedule in setting.schedules(num_ranks, part):
                run = partial(paced_run, pool, schedule, setting.size, workload)
                part.attempt(f"{schedule.name}, {num_ranks} ranks", run)
