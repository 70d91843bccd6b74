"""pplab's runtime beside PyTorch's, for `make gpu`: step times, and traces by torch.profiler."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import versus as against_torch
from gpu_runs import training_run, with_room
from gpu_setting import Part, Setting, Size, piece

import pplab as pp
from pplab import lab
from pplab.lab import models
from pplab.lab.against_torch import CLASSES
from pplab.runtime import Pool, Workload


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
            print(against_torch.HEADINGS, flush=True)
            for name in CLASSES:
                if name not in size.schedules:
                    part.leave_out(f"{name} on {num_ranks} ranks", "not among this size's schedules")
                    continue
                schedule = pp.build(name, num_ranks=num_ranks, num_microbatches=size.num_microbatches)
                measure = partial(with_room, partial(_versus, pool, schedule, size), workload, size.num_microbatches)
                part.attempt(f"{name}, {num_ranks} ranks", measure)


def _versus(pool: Pool, schedule: pp.Schedule, size: Size, workload: Workload) -> dict:
    found = against_torch.versus(pool, schedule, workload, rounds=size.rounds, steps=size.steps)
    print(found, flush=True)
    return found.to_dict()


@piece(60, "transformers", "datasets")
def profile(setting: Setting, part: Part) -> None:
    """Three ranks, eight microbatches, DistilBERT at its real size: naive, GPipe and 1F1B, by pplab and by PyTorch."""
    size = setting.size
    num_ranks = 3
    for sharing in setting.sharings(num_ranks, part):
        with tempfile.TemporaryDirectory() as folder, setting.pool(num_ranks, sharing) as pool:
            workload = real_distilbert(Path(folder), **size.profile)
            for name, engine in (
                ("naive", "pplab"),
                ("GPipe", "pplab"),
                ("1F1B", "pplab"),
                ("GPipe", "torch"),
                ("1F1B", "torch"),
            ):
                if engine == "torch" and sharing in ("turns", "mps"):
                    part.leave_out(
                        f"{name} by torch, {sharing}", "PyTorch's runtime can't send between ranks that share a GPU"
                    )
                    continue
                schedule = pp.build(name, num_ranks=num_ranks, num_microbatches=8)
                extras = [lab.Profile(Path(folder, f"{name}-{engine}"))]
                if engine == "torch":
                    extras.append(lab.TorchEngine())
                options = {"steps": size.steps, "optimizer": partial(torch.optim.AdamW, lr=5e-5)}
                run = partial(training_run, pool, schedule, sharing, size, extras, options, workload)
                part.attempt(f"{name} by {engine}, {sharing}", run)


def real_distilbert(folder: Path, *, checkpoint: str, **options: object) -> object:
    """The hub's DistilBERT where it can be reached; otherwise one of the same size with random weights, in `folder`."""
    workload = models.distilbert(checkpoint=checkpoint, **options)
    if checkpoint != "auto" or workload.checkpoint is not None:
        return workload
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    torch.manual_seed(0)
    DistilBertForSequenceClassification(DistilBertConfig(num_labels=5)).save_pretrained(folder)
    workload = models.from_transformers(str(folder), tokenizer="bytes", **options)
    return replace(workload, notes=(workload.notes[0], "model: DistilBERT's real size with random weights"))
