"""The parts of `make gpu`: each takes the setting, and adds what it measured, and what it left out, to its `Part`."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import gpu_box
import torch
from gpu_assumptions import assumptions
from gpu_setting import ROOT, Part, Setting, Size

import pplab as pp
from pplab import lab
from pplab.lab import models
from pplab.lab.against_torch import HEADINGS, versus
from pplab.lab.probe import multiply_times
from pplab.lab.torch_engine import CLASSES
from pplab.runtime import Extra, Pool

_TESTS_TIMEOUT_S = 3600


def check(setting: Setting, part: Part) -> None:
    """What kind of machine this is, and which batch keeps it busy. Its facts are the file's `box`."""
    part.ran = True
    part.more["problems"] = gpu_box.problems(gpu_box.facts(setting.device))
    for problem in part.more["problems"]:
        print(f"note: {problem}", flush=True)
    part.more["batch_size"] = setting.batch_size()
    print(f"a GPT's batch: {part.more['batch_size']}; every stage's forward is to take {setting.size.forward_ms} ms")


def run_tests(setting: Setting, part: Part) -> None:
    """The tests that need a GPU, each one's outcome, with the skipped ones among what wasn't run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # Only the files that have such tests: others may import what a machine with a GPU lacks.
        marked = sorted(path for path in ROOT.glob("tests/*/test_*.py") if "mark.gpu" in path.read_text())
        files = [str(path.relative_to(ROOT)) for path in marked]
        command = ["-m", "pytest", *files, "-m", "gpu", "-q", "-p", "no:cacheprovider", *setting.size.tests]
        part.more["command"] = f"PPLAB_TEST_DEVICE={setting.device} python {' '.join(command)}"
        print(f"== {part.more['command']}", flush=True)
        try:
            done = subprocess.run(
                [sys.executable, *command, "--junitxml", str(report)],
                cwd=ROOT,
                env={**os.environ, "PPLAB_TEST_DEVICE": setting.device},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_TESTS_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            part.errors.append(f"pytest took more than {_TESTS_TIMEOUT_S} s: {(error.stdout or b'')[-2000:]!r}")
            return
        print(done.stdout, flush=True)
        part.ran = True
        part.more["closing_line"] = (done.stdout.strip().splitlines() or [""])[-1].strip("= ")
        if not report.exists():
            part.errors.append(f"pytest made no report (exit status {done.returncode}): {done.stdout[-2000:]}")
            return
        for case in ElementTree.parse(report).iter("testcase"):
            _add_case(part, case)
    if done.returncode and not part.errors:
        part.errors.append(f"pytest ended with {done.returncode}: {part.more['closing_line']}")


def _add_case(part: Part, case: ElementTree.Element) -> None:
    """One test's outcome."""
    name, outcome = case.get("name"), "passed"
    for tag in ("failure", "error", "skipped"):
        found = case.find(tag)
        if found is not None:
            outcome = "skipped" if tag == "skipped" else "failed"
            message = found.get("message") or (found.text or "")[-500:]
            if tag == "skipped":
                part.leave_out(name, message)
            else:
                part.errors.append(f"{name}: {message[:2000]}")
    part.rows.append({"test": name, "outcome": outcome, "seconds": float(case.get("time", 0))})


def train(setting: Setting, part: Part) -> None:
    """Every schedule on a GPT: gradients, memory and times, in both precisions and every way to share the devices."""
    size = setting.size
    workload = models.gpt(source="sample", **size.gpt)
    optimizer = partial(torch.optim.AdamW, lr=1e-4)
    for num_ranks in size.ranks:
        for sharing in setting.sharings(num_ranks, part):
            with setting.pool(num_ranks, sharing) as pool:
                print(f"== {pool}", *pool.notes, sep="\n   ", flush=True)
                schedules = list(_schedules(size, num_ranks, part))
                for dtype in (None, torch.bfloat16):  # every schedule once before any is measured again
                    for schedule in schedules:
                        options = {"check_gradients": True, "optimizer": optimizer, "autocast": dtype}
                        options |= {"steps": size.steps}
                        run = partial(_run, pool, schedule, workload, sharing, size, **options)
                        part.attempt(f"{schedule.name}, {num_ranks} ranks, {sharing}, {_dtype(dtype)}", run)


def _schedules(size: Size, num_ranks: int, part: Part) -> Iterator[pp.Schedule]:
    """The size's schedules on so many ranks; those that can't be are left out with the reason."""
    for name in size.schedules:
        try:
            yield pp.build(name, num_ranks=num_ranks, num_microbatches=size.num_microbatches)
        except ValueError as error:
            part.leave_out(f"{name} on {num_ranks} ranks", str(error))


def warm_up_steps(train: Callable[..., pp.Run], size: Size, device: str) -> int:
    """How many steps it takes, `warm_ms` or more, until a GPU's last two agree; each trial is twice as long as the one
    before. On the CPU it is one."""
    if device == "cpu":
        return 1
    steps = max(2, math.ceil(size.warm_ms / train(steps=1).step_time_ms))
    while steps < size.most_warm_up and not settled(train(steps=steps).step_times_ms):
        steps *= 2
    return min(steps, size.most_warm_up)


def _run(
    pool: Pool,
    schedule: pp.Schedule,
    workload: object,
    sharing: str,
    size: Size,
    *extras: Extra,
    **options: object,
) -> dict:
    """One training run as a row: what it measured, its median timeline, and its prediction from its own durations.

    On a GPU, others come first until their steps agree; `settled` says whether the last two of the measured ones do.
    """
    usual = {"optimizer": options["optimizer"], "autocast": options.get("autocast")}
    options["warmup"] = warm_up_steps(partial(pool.train, schedule, workload, **usual), size, pool.devices[0])
    run = pool.train(schedule, workload, lab.Meter(), lab.Launches(), *extras, **options)
    print(run, flush=True)
    row = {**lab.run_to_dict(run), "dtype": _dtype(options.get("autocast")), "sharing": sharing, "wrong": []}
    if run.gradients is not None and not run.gradients.equal:
        row["wrong"].append(f"gradients differ from one process: {run.gradients}")
    if run.job.engine_name == "pplab" and run.held.peak_bytes != run.predicted_peak_bytes:
        row["wrong"].append(f"held {run.held.peak_bytes} bytes, predicted {run.predicted_peak_bytes}")
    row["wrong"] += [note for note in run.notes if note.startswith("MPS lists")]
    del row["versions"]  # the file's
    row["hosts_share"] = run.extras["launches"]
    row["warmup"], row["settled"] = options["warmup"], settled(row["step_times_ms"])
    row["timelines"] = [lab.timeline_to_dict(run.timeline)]
    row["measured"] = {"makespan_ms": run.timeline.makespan, "bubble_fraction": run.timeline.bubble_fraction}
    row["compute_share"] = sum(run.timeline.busy) / (schedule.num_ranks * run.step_time_ms)
    if run.job.engine_name == "pplab":
        predicted = pp.simulate(schedule, run.costs)
        row["predicted"] = {"makespan_ms": predicted.makespan, "bubble_fraction": predicted.bubble_fraction}
        row["where"] = lab.where(run.timeline).mean
    return row


def settled(times_ms: Sequence[float]) -> bool | None:
    """Whether the last two of these steps agree within a twentieth; None where there are fewer."""
    if len(times_ms) < 2:
        return None
    return abs(times_ms[-1] - times_ms[-2]) <= 0.05 * max(times_ms[-2:])


def slow_down(setting: Setting, part: Part) -> None:
    """How far ranks that compute at once slow each other down: 1 where each has a device, or a part of one, to itself;
    the number of ranks where they take turns."""
    for num_ranks in setting.size.ranks:
        for sharing in setting.sharings(num_ranks, part):
            with setting.pool(num_ranks, sharing) as pool:
                measure = partial(_slow_down, pool, sharing, setting.size)
                if row := part.attempt(f"{num_ranks} ranks, {sharing}", measure):
                    print(
                        f"{num_ranks} ranks, {sharing}: all at once take {row['ratio']:.2f} times one alone", flush=True
                    )


def _slow_down(pool: Pool, sharing: str, size: Size) -> dict:
    ratios = []
    for _ in range(size.rounds):
        alone, together = (
            statistics.median(pool.run(multiply_times, ranks, size.product)[0])
            for ranks in ((0,), tuple(range(pool.num_ranks)))
        )
        ratios.append(together / alone)
    notes = list(pool.notes)
    return {
        "num_ranks": pool.num_ranks,
        "sharing": sharing,
        "product": size.product,
        "alone_ms": alone,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "notes": notes,
    }


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
            for schedule in _schedules(size, num_ranks, part):
                part.attempt(f"{schedule.name}, {num_ranks} ranks", partial(_paced, pool, schedule, workload, size))


def _paced(pool: Pool, schedule: pp.Schedule, workload: object, size: Size) -> dict:
    free = pool.train(schedule, workload, steps=size.steps)
    longest = max(span.end - span.start for span in free.timeline.spans)
    pace = pp.Costs(*[1.5 * longest] * 3, unit="ms")  # with the others taking turns, and some room
    run = pool.train(schedule, workload, lab.Pace(pace), lab.Meter(), steps=size.steps)
    predicted = pp.simulate(schedule, pace)
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
        "timelines": [lab.timeline_to_dict(run.timeline)],
        "notes": list(run.notes),
    }


def against_torch(setting: Setting, part: Part) -> None:
    """pplab's runtime and PyTorch's in turn, where every rank has a device."""
    size = setting.size
    workload = models.gpt(source="sample", **size.gpt)
    for num_ranks in size.ranks:
        if setting.device == "cuda" and num_ranks > setting.num_devices:
            part.leave_out(f"{num_ranks} ranks", "PyTorch's runtime can't send between ranks that share a GPU")
            continue
        with setting.pool(num_ranks, "a GPU each") as pool:
            print(HEADINGS, flush=True)
            for name in CLASSES:
                if name not in size.schedules:
                    part.leave_out(f"{name} on {num_ranks} ranks", "not among this size's schedules")
                    continue
                schedule = pp.build(name, num_ranks=num_ranks, num_microbatches=size.num_microbatches)
                measure = partial(_versus, pool, schedule, workload, size)
                part.attempt(f"{name}, {num_ranks} ranks", measure)


def _versus(pool: Pool, schedule: pp.Schedule, workload: object, size: Size) -> dict:
    found = versus(pool, schedule, workload, rounds=size.rounds, steps=size.steps)
    print(found, flush=True)
    return found.to_dict()


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
                run = partial(_run, pool, schedule, workload, sharing, size, *extras, **options)
                part.attempt(f"{name} by {engine}, {sharing}", run)


def real_distilbert(folder: Path, *, checkpoint: str, **options: object) -> object:
    """The hub's DistilBERT where it can be reached; otherwise one of the same size with random weights, in `folder`."""
    workload = models.distilbert(checkpoint=checkpoint, **options)
    if checkpoint != "auto" or workload.checkpoint is not None:
        return workload
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    from pplab.lab.data import small_tokenizer

    torch.manual_seed(0)
    DistilBertForSequenceClassification(DistilBertConfig(num_labels=5)).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    workload = models.distilbert(checkpoint=str(folder), **options)
    return replace(workload, notes=(workload.notes[0], "model: DistilBERT's real size with random weights"))


def _dtype(dtype: torch.dtype | None) -> str:
    return "fp32" if dtype is None else "bf16"


# In the order of their worth: a deadline cuts off the last ones.
PARTS: dict[str, Callable[[Setting, Part], None]] = {
    "check": check,
    "runs": train,
    "assumptions": assumptions,
    "tests": run_tests,
    "slow_down": slow_down,
    "paced": paced,
    "versus": against_torch,
    "profile": profile,
}
