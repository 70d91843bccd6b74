"""`pplab`: list, simulate, validate and run schedules from a shell.

These are the small package's commands; `pplab.__main__` joins them with those of `pplab.lab.commands`.
A flag is a dict of what argparse's `add_argument` takes, with its name as "name".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from . import builders
from .costs import Costs, Link
from .footprint import Memory
from .metrics import summary
from .schedule import Schedule
from .simulator import simulate, validate
from .timeline import Timeline

if TYPE_CHECKING:
    from .runtime import Extra, Run, Workload

Flag = Mapping[str, object]


class Command(NamedTuple):
    """A word after `pplab`."""

    name: str
    says: str
    run: Callable[[argparse.Namespace], int | None]  # returns the exit status; None is 0
    flags: Callable[[Sequence[ModuleType]], Iterable[Flag]]  # called only for the command that is given


def main(arguments: Sequence[str] | None = None, *, plugins: Sequence[ModuleType] = ()) -> int:
    """Run a command; returns the exit status: 0 for success, 1 for an error that is told on stderr, 2 for usage.

    `plugins` have further COMMANDS and, for `pplab train`, `flags()`, `before(training)` and `after(training)`.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="pplab", description="list, simulate, validate and run schedules")
    chosen = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for command in (*COMMANDS, *(each for plugin in plugins for each in plugin.COMMANDS)):
        inner = chosen.add_parser(command.name, help=command.says)
        inner.set_defaults(run=command.run, plugins=plugins)
        for flag in command.flags(plugins) if command.name in arguments else ():  # train's flags load torch
            words = {} if "action" in flag else {"metavar": flag["name"].lstrip("-").upper()}
            words |= {word: value for word, value in flag.items() if word != "name"}
            words["help"] += " (default %(default)s)" * bool(flag.get("default"))
            inner.add_argument(flag["name"], **words)
    given = parser.parse_args(arguments)
    try:
        for name in ("json", "png", "perfetto", "csv"):  # before anything is measured that couldn't be written
            place = getattr(given, name, None)
            if isinstance(place, str) and place != "-" and not Path(place).parent.is_dir():
                raise FileNotFoundError(f"--{name} {place}: there is no folder {Path(place).parent}: make it first")
        return given.run(given) or 0
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        print(f"pplab {given.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"pplab {given.name}: interrupted", file=sys.stderr)
        return 130


def _schedules(given: argparse.Namespace) -> None:
    names = ("name", "summary", "placement", "rules", "options", "source")
    if given.json:
        print(json.dumps([{name: getattr(b, name) for name in names} for b in builders.ALL], indent=1))
        return
    for b in builders.ALL:
        print(f"{b.name}\n    {b.summary}\n    placement: {b.placement}\n    rules: {b.rules}")
        print(f"    options: {', '.join(b.options) or 'none'}\n    source: {b.source}")


def _simulate(given: argparse.Namespace) -> None:
    names = ("forward", "backward_input", "backward_weight", "latency", "recompute", "overlap", "bandwidth", "message")
    costs = Costs(**{name: getattr(given, name) for name in names}, links=dict(given.link or ()))
    timeline = simulate(schedule_of(given, costs), costs)
    figures = summary(timeline)
    _draw(given, timeline)
    texts = (f"{name:22} {_readable(value)}" for name, value in figures.items())
    write(given, {**figures, **timeline.to_dict()}, texts)


def _validate(given: argparse.Namespace) -> None:
    source, name = (sys.stdin.read(), "stdin") if given.file == "-" else (Path(given.file), Path(given.file).name)
    schedule = Schedule.from_csv(source, name)
    memory = Memory(given.activation, given.weight_input)
    validate(schedule, max_in_flight=given.max_in_flight, memory=memory, limit=given.limit)
    print(f"ok: {repr(schedule)[10:-1]}; peak in flight {_readable(schedule.peak_in_flight)}")


def _train_in_pool(training: Training) -> Run:
    from .runtime import Pool
    from .runtime.options import make_job

    what, num_ranks = (training.schedule, training.workload), training.schedule.num_ranks
    make_job(*what, num_ranks, training.extras, **training.options)  # so that errors come before "starting"
    with Pool(num_ranks, device=training.given.device, beside=training.beside) as pool:
        print(f"starting {num_ranks} ranks on {', '.join(dict.fromkeys(pool.devices))} ...", file=sys.stderr)
        return pool.train(*what, *training.extras, **training.options)


@dataclass
class Training:
    """What `pplab train` is going to do, and then what it says. Plugins change it before the run and after it."""

    given: argparse.Namespace
    schedule: Schedule
    workload: Workload
    options: dict[str, object]  # fields of `pplab.runtime.Options`
    extras: list[Extra] = field(default_factory=list)
    beside: object | None = None  # see `Pool`
    carry_out: Callable[[Training], Run | None] = _train_in_pool  # None: another process has the run

    run: Run | None = None
    data: dict[str, object] = field(default_factory=dict)  # in JSON, beside the run's
    texts: list[object] = field(default_factory=list)  # printed below the run
    trace: object = None  # whose `to_perfetto` writes --perfetto's file, instead of the timeline's


def _train(given: argparse.Namespace) -> int:
    from .runtime import Options

    options = {each.name: getattr(given, each.name) for each in fields(Options) if each.metadata["flag"]}
    training = Training(given, schedule_of(given), workload_of(given), options)
    for plugin in given.plugins:
        plugin.before(training)
    run = training.run = training.carry_out(training)
    if run is None:
        return 0
    for plugin in given.plugins:
        plugin.after(training)
    _draw(given, run.timeline, training.trace)
    write(given, {**run.to_dict(), **training.data}, (run, *training.texts))
    return 0 if run.gradients is None or run.gradients.equal else 1


def _train_flags(plugins: Sequence[ModuleType]) -> Iterable[Flag]:
    from .runtime import Options

    yield from (*SCHEDULE, *WORKLOAD)
    for each in fields(Options):
        if flag := each.metadata["flag"]:
            usual = {"name": f"--{each.name.replace('_', '-')}", "help": each.metadata["says"], "default": each.default}
            yield {"dest": each.name, **usual, **flag}
    for plugin in plugins:
        yield from plugin.flags()
    yield from OUTPUT


def schedule_of(given: argparse.Namespace, costs: Costs | None = None) -> Schedule:
    """What the flags SCHEDULE ask for: built, for these costs if its builder takes them, or read from a CSV file."""
    if given.schedule is None:
        if given.csv is None:
            raise ValueError("name a schedule with --schedule (pplab schedules lists them), or a file with --csv")
        return Schedule.from_csv(Path(given.csv), Path(given.csv).stem)
    if given.ranks is None or given.microbatches is None:
        raise ValueError("a schedule by name needs --ranks and --microbatches")
    options = {} if given.stages_per_rank is None else {"stages_per_rank": given.stages_per_rank}
    if costs is not None and "costs" in builders.find(given.schedule).options:
        options["costs"] = costs
    schedule = builders.build(given.schedule, num_ranks=given.ranks, num_microbatches=given.microbatches, **options)
    if given.csv:
        Path(given.csv).write_text(schedule.to_csv())
    return schedule


def workload_of(given: argparse.Namespace) -> Workload:
    """What the flags WORKLOAD ask for."""
    from . import models

    return models.workload(given.model, batch_size=given.batch_size, source=given.source)


def write(given: argparse.Namespace, data: Mapping[str, object], texts: Iterable[object]) -> None:
    """Print `texts` and write `data`, as the flag JSON asks for."""
    text = json.dumps(data, indent=1) if given.json else ""
    print(*(texts if given.json != "-" else [text]), sep="\n")
    if given.json not in (None, "-"):
        Path(given.json).write_text(text + "\n")


def _draw(given: argparse.Namespace, timeline: Timeline, trace: object = None) -> None:
    if given.png:
        import matplotlib

        from .plot import gantt

        matplotlib.use("Agg")
        gantt(timeline).figure.savefig(given.png, dpi=150, bbox_inches="tight")
    if given.perfetto:
        (trace or timeline).to_perfetto(given.perfetto)


def _readable(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_readable, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _overlap(text: str) -> str | float:
    return text if text in ("sum", "max") else float(text)


def _link(text: str) -> tuple[tuple[int, int], Link]:
    try:
        pair, latency, *bandwidth = text.split(":")
        source, target = pair.split("-")
        return (int(source), int(target)), Link(float(latency), *map(float, bandwidth))
    except (ValueError, TypeError) as error:
        expected = "expected SOURCE-TARGET:LATENCY or SOURCE-TARGET:LATENCY:BANDWIDTH, such as 1-2:0.5:8"
        raise argparse.ArgumentTypeError(f"{text!r} is not a link: {expected} ({error})") from None


def _times(text: str) -> float | tuple[float, ...]:
    values = tuple(float(part) if "." in part or "e" in part else int(part) for part in text.split(","))
    return values[0] if len(values) == 1 else values


SCHEDULE: tuple[Flag, ...] = (
    dict(name="--schedule", metavar="NAME", help="see pplab schedules"),
    dict(name="--ranks", type=int, metavar="P", help="processes in the pipeline"),
    dict(name="--microbatches", type=int, metavar="M", help="slices of the batch"),
    dict(name="--stages-per-rank", type=int, metavar="V", help="for schedules that have several"),
    dict(name="--csv", metavar="FILE", help="read the schedule from FILE, or with --schedule write it there"),
)
WORKLOAD: tuple[Flag, ...] = (
    dict(name="--model", default="gpt", help="gpt or distilbert"),
    dict(name="--source", default="auto", help="of the reviews: auto, hub or sample"),
    dict(name="--device", default="auto", help="auto, cpu or cuda"),
    dict(name="--batch-size", type=int, default=32, metavar="N", help="samples per step"),
)
JSON: Flag = dict(name="--json", nargs="?", const="-", metavar="FILE", help="everything, to FILE or standard output")
OUTPUT: tuple[Flag, ...] = (
    JSON,
    dict(name="--png", metavar="FILE", help="the Gantt chart"),
    dict(name="--perfetto", metavar="FILE", help="a trace for the Perfetto viewer"),
)
_TIME = {"type": _times, "default": 1, "metavar": "T", "help": "per stage: one number, or one each, such as 1,1,2"}
_COSTS: tuple[Flag, ...] = (
    *({"name": name, **_TIME} for name in ("--forward", "--backward-input", "--backward-weight")),
    dict(name="--recompute", type=_times, default=0, metavar="T", help="added to backwards, per stage"),
    dict(name="--overlap", type=_overlap, default="sum", metavar="T", help="of a pair: sum, max, a number"),
    dict(name="--latency", type=float, default=0, metavar="T", help="of a message between ranks"),
    dict(name="--bandwidth", type=float, default=inf, metavar="R", help="of every link"),
    dict(name="--message", type=_times, default=1, metavar="SIZE", help="of what stages exchange"),
    dict(name="--link", type=_link, action="append", metavar="A-B:T[:R]", help="latency and bandwidth from A to B"),
)
_MEMORY: tuple[Flag, ...] = (
    dict(name="file", metavar="FILE", help="CSV file, or - for standard input"),
    dict(name="--max-in-flight", type=int, metavar="N", help="forwards that a rank may hold at once"),
    dict(name="--limit", type=float, metavar="X", help="the most that a rank may hold, in activations"),
    dict(name="--activation", type=_times, default=1, metavar="X", help="of a forward, per stage"),
    dict(name="--weight-input", type=_times, metavar="X", help="what stays of it after I (default: all)"),
)
_LISTING: Flag = dict(name="--json", action="store_true", help="as JSON")
COMMANDS = (
    Command("schedules", "list the schedules, with their rules and options", _schedules, lambda _: [_LISTING]),
    Command("simulate", "predict a schedule's timeline", _simulate, lambda _: (*SCHEDULE, *_COSTS, *OUTPUT)),
    Command("validate", "check a schedule in PyTorch's CSV form", _validate, lambda _: _MEMORY),
    Command("train", "run a schedule on a real model, with a process per rank", _train, _train_flags),
)
