"""`pplab`: list, simulate, validate and run schedules from a shell."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path

from . import builders
from .actions import Kind
from .costs import Costs, Link
from .errors import positive_int
from .footprint import Memory
from .lab.attribution import Where, calibrate, calibrating, where
from .metrics import summary
from .schedule import Schedule
from .simulator import simulate, validate
from .timeline import Timeline


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 for success, 1 for an error that is told on stderr, 2 for usage."""
    options = _parser().parse_args(arguments)
    try:
        _check_places(options)
        return options.command(options) or 0
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        print(f"pplab {options.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"pplab {options.name}: interrupted", file=sys.stderr)
        return 130


def _schedules(options: argparse.Namespace) -> None:
    if options.json:
        rows = [
            {
                "name": b.name,
                "summary": b.summary,
                "placement": b.placement,
                "rules": b.rules,
                "options": b.options,
                "source": b.source,
            }
            for b in builders.ALL
        ]
        print(json.dumps(rows, indent=1))
        return
    for b in builders.ALL:
        print(f"{b.name}\n    {b.summary}\n    placement: {b.placement}\n    rules: {b.rules}")
        print(f"    options: {', '.join(b.options) or 'none'}")
        print(f"    source: {b.source}")


def _simulate(options: argparse.Namespace) -> None:
    costs = Costs(
        options.forward,
        options.backward_input,
        options.backward_weight,
        options.latency,
        recompute=options.recompute,
        overlap=options.overlap,
        bandwidth=options.bandwidth,
        message=options.message,
        links=dict(options.link),
    )
    schedule = _schedule(options, costs)
    timeline = simulate(schedule, costs)
    _write(options, timeline)
    if options.json:
        _write_json(options.json, {**summary(timeline), **timeline.to_dict()})
    if options.json != "-":
        for name, value in summary(timeline).items():
            print(f"{name:22} {_readable(value)}")


def _validate(options: argparse.Namespace) -> None:
    source = sys.stdin.read() if options.file == "-" else Path(options.file)
    schedule = Schedule.from_csv(source, "stdin" if options.file == "-" else Path(options.file).name)
    memory = Memory(options.activation, options.weight_input)
    validate(schedule, max_in_flight=options.max_in_flight, memory=memory, limit=options.limit)
    print(f"ok: {repr(schedule)[10:-1]}; peak in flight {_readable(schedule.peak_in_flight)}")


def _train(options: argparse.Namespace) -> int:
    import torch

    from . import models
    from .lab.torchrun import is_torchrun, train_here
    from .runtime import Pool
    from .runtime.checks import check_job

    if options.explain and options.engine == "torch":
        raise ValueError("--explain needs --engine pplab: torch's runtime doesn't tell when a message was there")
    schedule = _schedule(options)
    workload = models.workload(options.model, batch_size=options.batch_size, source=options.source)
    details = {
        "steps": options.steps,
        "warmup": options.warmup,
        "check_gradients": options.check_gradients,
        "optimizer": partial(torch.optim.AdamW, lr=options.learning_rate),
        "autocast": torch.bfloat16 if options.bf16 else None,
        "engine": options.engine,
        "profile": options.profile,
        "replicas": options.replicas,
        "reduction": options.reduction,
        "recompute": options.recompute,
        "clip_norm": options.clip_norm,
        "resume": options.resume,
        "save": options.save,
    }
    if is_torchrun():
        if options.share != "turns":
            raise ValueError(f"--share {options.share} is for ranks that pplab starts: torchrun has started these")
        run = train_here(schedule, workload, device=options.device, **details)
        if run is None:
            return 0
    else:
        num_ranks = schedule.num_ranks * positive_int("replicas", options.replicas)
        check_job(schedule, workload, num_ranks, **details)
        with Pool(num_ranks, device=options.device, share=options.share) as pool:
            print(f"starting {num_ranks} ranks on {', '.join(dict.fromkeys(pool.devices))} ...", file=sys.stderr)
            run = pool.train(schedule, workload, **details)
    explained = where(run.timeline) if run.engine == "pplab" else None
    _write(options, explained if options.explain else run.timeline)
    if options.json:
        _write_json(options.json, {**run.to_dict(), "where": explained and explained.to_dict()})
    if options.json != "-":
        print(run)
        if options.explain:
            print(explained)
        if run.profile:
            print(run.profile)
    return 0 if run.gradients is None or run.gradients.equal else 1


def _predict(options: argparse.Namespace) -> None:
    from . import models
    from .runtime import Pool
    from .runtime.checks import check_job

    others = [argparse.Namespace(**{**vars(options), "schedule": name, "csv": None}) for name in options.predict]
    schedules, rounds = [_schedule(given) for given in (options, *others)], positive_int("rounds", options.rounds)
    workload = models.workload(options.model, batch_size=options.batch_size, source=options.source)
    for schedule in schedules:
        check_job(schedule, workload, schedule.num_ranks, steps=options.steps)
        if schedule.placement != schedules[0].placement:
            raise ValueError(f"{schedule.name} cuts or places the model otherwise than {schedules[0].name}: measure it")
        if _is_split(schedule) and not _is_split(schedules[0]):
            raise ValueError(
                f"{schedules[0].name} splits no backward, so it doesn't tell how long the halves are that "
                f"{schedule.name} runs apart: measure one that does, with --schedule ZB-H1, say"
            )
    first, runs, measured = calibrating(schedules[0]), [], [[] for _ in schedules]
    with Pool(schedules[0].num_ranks, device=options.device) as pool:
        print(f"measuring {schedules[0].name} on {', '.join(dict.fromkeys(pool.devices))} ...", file=sys.stderr)
        for _ in range(rounds):
            runs += pool.train(first, workload, steps=options.steps).timelines
            for schedule, found in zip(schedules, measured, strict=True):
                found += (step.makespan for step in pool.train(schedule, workload, steps=options.steps).timelines)
        notes = (*workload.notes, *pool.notes)
    costs = calibrate(min(runs, key=lambda step: step.makespan))
    rows = [
        {
            "schedule": schedule.name,
            "predicted_ms": simulate(schedule, costs).makespan,
            "measured_ms": min(found),
            "steps_ms": found,
        }
        for schedule, found in zip(schedules, measured, strict=True)
    ]
    if options.json:
        _write_json(options.json, {"rows": rows, "notes": notes})
    if options.json != "-":
        print(f"the fastest of {rounds * options.steps} steps each")
        print(f"{'schedule':22} {'predicted ms':>13} {'measured ms':>12} {'error':>7} {'slowest':>9}")
        errors = [row["predicted_ms"] / row["measured_ms"] - 1 for row in rows]
        for row, error in zip(rows, errors, strict=True):
            print(
                f"{row['schedule']:22} {row['predicted_ms']:13.1f} {row['measured_ms']:12.1f} {error:7.1%} "
                f"{max(row['steps_ms']):9.1f}"
            )
        worst = max(range(len(rows)), key=lambda i: abs(errors[i]))
        print(
            f"largest error {errors[worst]:.1%}, of {rows[worst]['schedule']}: "
            "smaller differences between predictions say nothing"
        )
        for how in ("predicted", "measured"):
            order = sorted(rows, key=lambda row: row[f"{how}_ms"])
            print(f"{how}, fastest first: {', '.join(row['schedule'] for row in order)}")
        for note in notes:
            print(f"note: {note}")


def _is_split(schedule: Schedule) -> bool:
    return Kind.I in schedule.columns.kinds


def _bench(options: argparse.Namespace) -> None:
    from . import models
    from .lab.against_torch import HEADINGS, versus
    from .runtime import Pool
    from .runtime.checks import check_job

    schedule = _schedule(options)
    workload = models.workload(options.model, batch_size=options.batch_size, source=options.source)
    check_job(schedule, workload, schedule.num_ranks, steps=options.steps, engine="torch")
    with Pool(schedule.num_ranks, device=options.device) as pool:
        print(f"{workload.name}, {options.rounds} rounds of {options.steps} steps in turn", file=sys.stderr)
        found = versus(pool, schedule, workload, rounds=positive_int("rounds", options.rounds), steps=options.steps)
    if options.json:
        _write_json(options.json, found.to_dict())
    if options.json != "-":
        print(HEADINGS, found, *(f"note: {note}" for note in (*workload.notes, *pool.notes)), sep="\n")


def _schedule(options: argparse.Namespace, costs: Costs | None = None) -> Schedule:
    """The schedule that the options name: built, for these costs if it asks for them, or read from a CSV file."""
    if options.schedule is None:
        if options.csv is None:
            raise ValueError("name a schedule with --schedule (pplab schedules lists them), or a file with --csv")
        return Schedule.from_csv(Path(options.csv), Path(options.csv).stem)
    if options.ranks is None or options.microbatches is None:
        raise ValueError("a schedule by name needs --ranks and --microbatches")
    extra = {} if options.stages_per_rank is None else {"stages_per_rank": options.stages_per_rank}
    if costs is not None and "costs" in builders.find(options.schedule).options:
        extra["costs"] = costs
    schedule = builders.build(options.schedule, num_ranks=options.ranks, num_microbatches=options.microbatches, **extra)
    if options.csv:
        Path(options.csv).write_text(schedule.to_csv())
    return schedule


def _check_places(options: argparse.Namespace) -> None:
    """Raise before anything is measured if what is found couldn't be written."""
    for name in ("json", "png", "perfetto", "csv"):
        place = getattr(options, name, None)
        if isinstance(place, str) and place != "-" and not Path(place).parent.is_dir():
            raise FileNotFoundError(f"--{name} {place}: there is no folder {Path(place).parent}: make it first")


def _write(options: argparse.Namespace, found: Timeline | Where) -> None:
    timeline = found if isinstance(found, Timeline) else found.timeline
    if options.png:
        import matplotlib

        matplotlib.use("Agg")
        from .plot import gantt

        gantt(timeline).figure.savefig(options.png, dpi=150, bbox_inches="tight")
    if options.perfetto:
        found.to_perfetto(options.perfetto)


def _write_json(path: str, data: dict) -> None:
    text = json.dumps(data, indent=1)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n")


def _readable(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_readable, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _overlap(text: str) -> str | float:
    """`sum`, `max` or a duration."""
    return text if text in ("sum", "max") else float(text)


def _link(text: str) -> tuple[tuple[int, int], Link]:
    """`1-2:LATENCY` or `1-2:LATENCY:BANDWIDTH`."""
    try:
        pair, latency, *bandwidth = text.split(":")
        source, target = pair.split("-")
        return (int(source), int(target)), Link(float(latency), *map(float, bandwidth))
    except (ValueError, TypeError) as error:
        expected = "expected SOURCE-TARGET:LATENCY or SOURCE-TARGET:LATENCY:BANDWIDTH, such as 1-2:0.5:8"
        raise argparse.ArgumentTypeError(f"{text!r} is not a link: {expected} ({error})") from None


def _times(text: str) -> float | tuple[float, ...]:
    """A duration, or one per stage with commas between."""
    values = tuple(float(part) if "." in part or "e" in part else int(part) for part in text.split(","))
    return values[0] if len(values) == 1 else values


def _stages(text: str) -> list[int]:
    """Numbers with commas between."""
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pplab", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    listing = commands.add_parser("schedules", help="list the schedules, with their rules and options")
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.set_defaults(command=_schedules)

    simulating = commands.add_parser("simulate", help="predict a schedule's timeline")
    _add_schedule(simulating)
    for name in ("--forward", "--backward-input", "--backward-weight"):
        simulating.add_argument(
            name, type=_times, default=1, metavar="T", help="per stage: one number, or one each: 1,1,2"
        )
    simulating.add_argument("--recompute", type=_times, default=0, metavar="T", help="added to backwards, per stage")
    simulating.add_argument(
        "--overlap", type=_overlap, default="sum", metavar="T", help="of a pair: sum, max, a number"
    )
    simulating.add_argument("--latency", type=float, default=0, metavar="T", help="of a message between ranks")
    simulating.add_argument("--bandwidth", type=float, default=inf, metavar="R", help="of every link (infinite)")
    simulating.add_argument("--message", type=_times, default=1, metavar="SIZE", help="of what stages exchange")
    simulating.add_argument(
        "--link", type=_link, action="append", default=[], metavar="A-B:T[:R]", help="latency and bandwidth from A to B"
    )
    _add_output(simulating)
    simulating.set_defaults(command=_simulate)

    checking = commands.add_parser("validate", help="check a schedule in PyTorch's CSV form")
    checking.add_argument("file", metavar="FILE", help="CSV file, or - for standard input")
    checking.add_argument("--max-in-flight", type=int, metavar="N", help="forwards that a rank may hold at once")
    checking.add_argument("--limit", type=float, metavar="X", help="the most that a rank may hold, in activations")
    checking.add_argument("--activation", type=_times, default=1, metavar="X", help="of a forward, per stage (1)")
    checking.add_argument("--weight-input", type=_times, metavar="X", help="what stays of it after I (default: all)")
    checking.set_defaults(command=_validate)

    training = commands.add_parser("train", help="run a schedule on a real model, with a process per rank")
    _add_schedule(training)
    _add_workload(training)
    training.add_argument("--steps", type=int, default=5, metavar="N", help="measured steps (default 5)")
    training.add_argument("--warmup", type=int, default=1, metavar="N", help="steps before them (default 1)")
    training.add_argument("--share", default="turns", help="of one GPU by several ranks: turns or mps (default turns)")
    training.add_argument("--bf16", action="store_true", help="compute in bfloat16 where that is safe")
    training.add_argument(
        "--explain",
        action="store_true",
        help="say where the median step's time went, also in a --perfetto trace",
    )
    training.add_argument("--profile", metavar="DIR", help="record torch.profiler traces of all ranks, and sum them up")
    training.add_argument("--engine", default="pplab", help="pplab or torch: whose runtime (default pplab)")
    training.add_argument("--replicas", type=int, default=1, metavar="D", help="pipelines, on D * P ranks (default 1)")
    training.add_argument(
        "--reduction", default="end", metavar="WHEN", help="of gradients kept in several places: end or drain"
    )
    training.add_argument(
        "--recompute", type=_stages, nargs="?", const=True, default=False, metavar="S,S", help="all stages, or these"
    )
    training.add_argument("--clip-norm", type=float, metavar="X", help="the most that all gradients' norm may be")
    training.add_argument("--save", metavar="FILE", help="write a checkpoint after the last step")
    training.add_argument("--resume", metavar="FILE", help="go on from a checkpoint, of any number of ranks")
    training.add_argument("--learning-rate", type=float, default=1e-3, metavar="R", help="of AdamW (default 0.001)")
    training.add_argument(
        "--check-gradients", action="store_true", help="compare with one process; exit 1 if they differ"
    )
    _add_output(training)
    training.set_defaults(command=_train)

    predicting = commands.add_parser("predict", help="measure one schedule, predict others, measure them too")
    _add_schedule(predicting)
    _add_workload(predicting)
    predicting.add_argument("predict", nargs="+", metavar="NAME", help="schedules to predict, of the same stages")
    predicting.add_argument("--steps", type=int, default=3, metavar="N", help="measured steps of a run (default 3)")
    predicting.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="runs of each, in turn; the fastest step counts (default 3)"
    )
    predicting.add_argument("--json", nargs="?", const="-", metavar="FILE", help="to FILE or standard output")
    predicting.set_defaults(command=_predict)

    comparing = commands.add_parser("bench", help="pplab's runtime and PyTorch's in turn, on the same stages")
    _add_schedule(comparing)
    _add_workload(comparing)
    comparing.add_argument("--against", default="torch", choices=["torch"], help="what to compare with")
    comparing.add_argument("--rounds", type=int, default=5, metavar="N", help="of both (default 5)")
    comparing.add_argument("--steps", type=int, default=6, metavar="N", help="of each in a round (default 6)")
    comparing.add_argument("--json", nargs="?", const="-", metavar="FILE", help="to FILE or standard output")
    comparing.set_defaults(command=_bench)
    return parser


def _add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gpt", help="gpt or distilbert (default gpt)")
    parser.add_argument("--source", default="auto", help="of the reviews: auto, hub or sample")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="samples per step (default 32)")


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedule", metavar="NAME", help="see pplab schedules")
    parser.add_argument("--ranks", type=int, metavar="P", help="processes in the pipeline")
    parser.add_argument("--microbatches", type=int, metavar="M", help="slices of the batch")
    parser.add_argument("--stages-per-rank", type=int, metavar="V", help="for schedules that have several")
    parser.add_argument("--csv", metavar="FILE", help="read the schedule from FILE, or with --schedule write it there")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="everything, to FILE or standard output")
    parser.add_argument("--png", metavar="FILE", help="the Gantt chart")
    parser.add_argument("--perfetto", metavar="FILE", help="a trace for the Perfetto viewer")
