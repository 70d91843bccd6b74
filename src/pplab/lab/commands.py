"""What the lab adds to the command line: `pplab predict`, `pplab bench`, and further flags of `pplab train`.

Loading this module loads no torch: what does is imported where it is used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pkgutil import resolve_name

from ..cli import JSON, SCHEDULE, WORKLOAD, Command, Flag, Training, schedule_of, workload_of, write
from ..errors import positive_int

# What has a flag of `pplab train`: a class whose `flag` has words of argparse's `add_argument`. Its object is made from
# the flag's value, by `from_flag` where it has that, and is an Extra of the run, or what its pool has beside it.
EXTRAS = [
    "pplab.lab.clip:Clip",
    "pplab.lab.checkpoint:Save",
    "pplab.lab.checkpoint:Resume",
    "pplab.lab.profiling:Profile",
    "pplab.lab.torch_engine:TorchEngine",
    "pplab.lab.recompute:Recompute",
    "pplab.lab.reduction:Drain",
    "pplab.lab.mps:Mps",
]


def flags() -> Iterator[Flag]:
    """What can be asked of `pplab train` beside the options that every run has."""
    yield dict(name="--replicas", type=int, default=1, metavar="D", help="pipelines, on D * P ranks")
    yield dict(name="--explain", action="store_true", help="say where the median step's time went, also in --perfetto")
    for path in EXTRAS:
        yield {"dest": path, **resolve_name(path).flag}


def before(training: Training) -> None:
    """Change the run to what the flags ask for. ValueError for what doesn't go together."""
    from ..runtime import Extra
    from .meter import Meter
    from .replicas import replicate
    from .torch_engine import TorchEngine
    from .torchrun import is_torchrun

    given = training.given
    training.schedule = replicate(training.schedule, given.replicas)
    training.extras.append(Meter())
    for path in EXTRAS:
        kind, value = resolve_name(path), getattr(given, path)
        if value is None or value is False:
            continue
        make = getattr(kind, "from_flag", kind)
        asked = make() if value is True else make(value)
        if isinstance(asked, Extra):
            training.extras.append(asked)
        elif asked is not None:
            training.beside = asked
    if given.explain and any(isinstance(extra, TorchEngine) for extra in training.extras):
        raise ValueError("--explain needs --engine pplab: torch's runtime doesn't tell when a message was there")
    if is_torchrun():
        if training.beside is not None:
            raise ValueError("--share mps is for ranks that pplab starts: torchrun has started these")
        training.carry_out = _be_a_rank


def _be_a_rank(training: Training) -> object:
    from .torchrun import train_here

    given, what = training.given, (training.schedule, training.workload)
    return train_here(*what, *training.extras, device=given.device, **training.options)


def after(training: Training) -> None:
    """Say more of the run: where its time went, and what its extras found that is to be read."""
    given, run = training.given, training.run
    if given.explain or given.json:
        from .attribution import where

        found = where(run.timeline) if run.job.engine_name == "pplab" else None
        training.data["where"] = found and found.to_dict()
        if given.explain:
            training.trace = found
            training.texts.append(found)
    training.texts += [run.extras[extra.name] for extra in run.job.extras if getattr(extra, "printed", False)]


def _predict(given: argparse.Namespace) -> None:
    from ..runtime import Pool
    from .prediction import check, predict

    rows = [argparse.Namespace(**{**vars(given), "schedule": name, "csv": None}) for name in given.predict]
    (measured, *others), workload = map(schedule_of, (given, *rows)), workload_of(given)
    asked = {"steps": given.steps, "rounds": given.rounds}
    check(measured.num_ranks, measured, others, workload, **asked)  # so that errors come before "measuring"
    with Pool(measured.num_ranks, device=given.device) as pool:
        print(f"measuring {measured.name} on {', '.join(dict.fromkeys(pool.devices))} ...", file=sys.stderr)
        found = predict(pool, measured, others, workload, **asked)
    write(given, found.to_dict(), [found])


def _predict_flags(_: object) -> Iterator[Flag]:
    yield from (*SCHEDULE, *WORKLOAD, JSON)
    yield dict(name="predict", nargs="+", metavar="NAME", help="schedules to predict, of the same stages")
    yield dict(name="--steps", type=int, default=3, metavar="N", help="measured steps of a run")
    rounds = "runs of each, in turn; the fastest step counts"
    yield dict(name="--rounds", type=int, default=3, metavar="N", help=rounds)


def _bench(given: argparse.Namespace) -> None:
    from ..runtime import Pool
    from ..runtime.options import make_job
    from .against_torch import HEADINGS, versus
    from .torch_engine import TorchEngine

    schedule, workload, rounds = schedule_of(given), workload_of(given), positive_int("rounds", given.rounds)
    make_job(schedule, workload, schedule.num_ranks, [TorchEngine()], steps=given.steps)
    with Pool(schedule.num_ranks, device=given.device) as pool:
        print(f"{workload.name}, {rounds} rounds of {given.steps} steps in turn", file=sys.stderr)
        found = versus(pool, schedule, workload, rounds=rounds, steps=given.steps)
        notes = [f"note: {note}" for note in (*workload.notes, *pool.notes)]
    write(given, found.to_dict(), [HEADINGS, found, *notes])


def _bench_flags(_: object) -> Iterator[Flag]:
    yield from (*SCHEDULE, *WORKLOAD, JSON)
    yield dict(name="--against", default="torch", choices=["torch"], help="what to compare with")
    yield dict(name="--rounds", type=int, default=5, metavar="N", help="of both")
    yield dict(name="--steps", type=int, default=6, metavar="N", help="of each in a round")


COMMANDS = (
    Command("predict", "measure one schedule, predict others, measure them too", _predict, _predict_flags),
    Command("bench", "pplab's runtime and PyTorch's in turn, on the same stages", _bench, _bench_flags),
)
