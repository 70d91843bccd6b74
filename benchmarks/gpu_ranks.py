"""Several ranks, for `make gpu` and `make bench`: how well one schedule's durations predict the others, and pplab's
runtime compared with PyTorch's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import islice

import torch
from gpu_runs import with_room
from gpu_setting import Part, Setting, piece
from versus import HEADINGS, compare

import pplab as pp
from pplab import lab
from pplab.actions import Kind
from pplab.lab import models
from pplab.lab.against_torch import CLASSES
from pplab.runtime import Pool, Workload

_PREDICTED = (
    *("GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "LoopedBFS"),
    *("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
)


@piece(120)
def predicted(setting: Setting, part: Part) -> None:
    """The makespans of schedules, simulated with the durations of one run of one of them, and measured."""
    dtype = torch.bfloat16 if setting.device == "cuda" else None
    workload = models.gpt(source="sample", **setting.size.gpt)
    for num_ranks in reversed(setting.size.ranks):  # schedules differ most on most ranks
        for sharing in islice(setting.sharings(num_ranks, part), 1):
            with setting.pool(num_ranks, sharing) as pool:
                for first, others in _alike(setting.schedules(num_ranks)):
                    run = partial(_predicted, pool, sharing, setting, dtype, first, others)
                    what = f"from {first.name}, {num_ranks} ranks, {sharing}"
                    part.attempt(what, partial(with_room, run, workload, first.num_microbatches))


def _alike(schedules: list[pp.Schedule]) -> Iterator[tuple[pp.Schedule, list[pp.Schedule]]]:
    """The schedules that cut and place the model alike, in a list after one that has all the durations that they need,
    because it splits backwards and does one thing at a time."""
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
    """Measure all of them in turn, so that a slow spell of the machine hits more than one. The fastest steps count,
    also for the run that the costs come from."""
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
def versus(setting: Setting, part: Part) -> None:
    """pplab's runtime and PyTorch's in turn, where every rank has a device."""
    size = setting.size
    workload = models.gpt(source="sample", **size.gpt)
    for num_ranks in size.ranks:
        if setting.device == "cuda" and num_ranks > setting.num_devices:
            part.leave_out(f"{num_ranks} ranks", "PyTorch's runtime can't send between ranks that share a GPU")
            continue
        with setting.pool(num_ranks, "a GPU each") as pool:
            print(HEADINGS, flush=True)
            for schedule in setting.schedules(num_ranks):
                if schedule.name in CLASSES:
                    run = partial(compare, pool, schedule, rounds=size.rounds, steps=size.steps)
                    measure = partial(with_room, run, workload, size.num_microbatches)
                    part.attempt(f"{schedule.name}, {num_ranks} ranks", measure)
