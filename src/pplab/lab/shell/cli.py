"""`pplab`: list, simulate and validate schedules from a shell. `commands` has the commands that run
them.

A flag is a dict of the arguments of argparse's `add_argument`, with its name as "name". `flag`
makes one.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import select
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ... import __version__, builders
from ...costs import DURATIONS, Costs
from ...errors import ScheduleError
from ...footprint import Memory
from ...optional import EXTRA_OF, bring
from ...schedule import Schedule, plural
from ...timeline import Timeline
from ..forms import (
    lowered_cells,
    num_messages,
    printable,
    read_csv,
    spans_until_stuck,
    text_chart,
    timeline_to_dict,
    to_csv,
    to_perfetto,
)
from ..searches import check_memory
from ..streams import SENDS, check_queues, parse_lowered, simulate_sends

Flag = Mapping[str, Any]

_SHARED = [name for name in DURATIONS if name != "backward"]  # of a share, or of each stage
MOST_WORK = 2**22  # forwards of a schedule that is built by name: some GB, some minutes


class Command(NamedTuple):
    """A word after `pplab`. Its help begins with the usage, the description, and examples."""

    name: str
    says: str  # in the list of commands
    run: Callable[[argparse.Namespace], int | None]  # returns the exit status; None is 0
    flags: Callable[[], Iterable[Flag]]  # called only for the command that is given
    usage: str
    about: str  # paragraphs, each on a line of its own
    examples: Mapping[str, str]  # a question or a purpose, and the command for it


def main(arguments: Sequence[str] | None = None, more: Sequence[Command] = ()) -> int:
    """Run a command, of these or of `more`, and return the exit status: 0 for success, 1 for an
    error that is printed on stderr, 2 for wrong usage.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="pplab",
        usage="pplab COMMAND [options]",
        description=_described(_ABOUT, _EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='"pplab COMMAND --help" explains a command and its options.',
    )
    parser.add_argument("--version", action="version", version=f"pplab {__version__}")
    chosen = parser.add_subparsers(
        dest="name", title="commands", metavar="COMMAND [options]", prog="pplab"
    )
    for command in (*COMMANDS, *more):
        inner = chosen.add_parser(
            command.name,
            help=command.says,
            usage=command.usage,
            description=_described(command.about, command.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        inner.set_defaults(run=command.run)
        asks = not {"-h", "--help"}.isdisjoint(arguments)
        for each in _flags(command, inner, asks) if command.name in arguments[:1] else ():
            usual = "N" if each.get("type") is int else each["name"].lstrip("-").upper()
            words = ({} if "action" in each else {"metavar": usual}) | each
            if each.get("default") and "default" not in each["help"]:
                words["help"] += " (default: %(default)s)"
            inner.add_argument(words.pop("name"), **words)
    given, strange = parser.parse_known_args(arguments)
    if strange:
        asked = chosen.choices.get(given.name, parser)
        said = f"{' '.join(strange)} (see the usage above, and {asked.prog} --help)"
        asked.error(f"unrecognized arguments: {said}")
    if given.name is None:
        parser.print_help()
        return 0
    plain, warnings.showwarning = warnings.showwarning, partial(_said, given.name)
    try:
        if getattr(given, "png", None) or getattr(given, "html", None):
            bring("matplotlib")
        # before anything is measured that couldn't be written
        for name in ("json", "png", "html", "perfetto", "csv"):
            place = getattr(given, name, None)
            if place == "-" and name != "json":
                raise ValueError(
                    f"--{name} needs the name of a file, got -: only --json writes to standard "
                    "output"
                )
            if isinstance(place, str) and not Path(place).parent.is_dir():
                raise FileNotFoundError(
                    f"--{name} {place}: there is no folder {Path(place).parent}: make it first"
                )
        status = given.run(given) or 0
        if sys.stdout:  # None where a shell has closed it: `>&-`
            sys.stdout.flush()
        return status
    except BrokenPipeError as error:
        return _closed(given.name, error)
    except Exception as error:
        status, said = 1, _in_words(error) if isinstance(error, OSError) else str(error)
        lacking = isinstance(error, ModuleNotFoundError) and error.name in EXTRA_OF
        if not lacking and not isinstance(
            error, ValueError | OSError | RuntimeError | FloatingPointError
        ):
            if os.environ.get("PPLAB_TRACEBACK"):
                raise
            said = (
                f"{type(error).__name__}: {error}. That is a fault of pplab's: PPLAB_TRACEBACK=1 "
                "shows where"
            )
    except KeyboardInterrupt as error:
        status, said = 130, f"interrupted{f': {error}' * bool(str(error))}"
    finally:
        warnings.showwarning = plain
    say(f"pplab {given.name}: {said}", file=sys.stderr)
    return status


def say(*texts: object, file: TextIO | None = None) -> None:
    """Print texts below each other, so that a terminal takes nothing in them for a command,
    whichever file they come from.
    """
    print(*(printable(str(text), keep="\n") for text in texts), sep="\n", file=file)


def _said(name: str, message: Warning | str, *_: object) -> None:
    """A warning for somebody in a shell, without the line of code that it is from."""
    say(f"pplab {name}: {message}", file=sys.stderr)


def _in_words(error: OSError) -> str:
    """What the system has refused, and for which file."""
    if not error.strerror:  # one of pplab's own, which is words
        return str(error)
    if isinstance(error, FileNotFoundError):
        return f"there is no file {error.filename}: check its name, and the folder"
    why = error.strerror[0].lower() + error.strerror[1:]
    return f"{error.filename or 'a file'} can't be read or written: {why}"


def _described(about: str, examples: Mapping[str, str]) -> str:
    """The text of a help before its list of options."""
    paragraphs = [textwrap.fill(each, 79) for each in about.splitlines()]
    return "\n\n".join(
        [*paragraphs, "\n".join(["examples:", *(f"  {a}\n    {b}" for a, b in examples.items())])]
    )


def flag(name: str, says: str, **words: Any) -> Flag:
    """A flag with this help text."""
    return {"name": name, "help": says, **words}


def _flags(command: Command, parser: argparse.ArgumentParser, asks: bool) -> list[Flag]:
    """The flags of a command. With `asks`, which is a call for help, those that need a missing
    package are left out.
    """
    flags: list[Flag] = []
    try:
        for each in command.flags():
            flags.append(each)
    except ModuleNotFoundError as error:  # some load torch
        if not asks:
            parser.exit(1, f"pplab {command.name}: {error}\n")
        parser.epilog = f"These are not all of its options: {error}"
    return flags


def _closed(name: str, error: BrokenPipeError) -> int:
    """The exit status after a pipe that nobody reads any more. For standard output it is quietly
    that of SIGPIPE.
    """
    out = select.poll()
    if sys.stdout:
        out.register(sys.stdout.fileno(), 0)  # tells of errors alone
    if not out.poll(0):
        say(f"pplab {name}: {error}", file=sys.stderr)
        return 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains as it ends
    return 128 + 13


def _schedules(given: argparse.Namespace) -> None:
    listed = []
    for b in builders.known():
        summary = (inspect.getdoc(b.rows) or "").partition("\n")[0]
        listed.append(
            {name: getattr(b, name) for name in "name placement rules options source".split()}
        )
        listed[-1]["summary"] = summary
        if not given.json:
            say(f"{b.name}\n    {summary}\n    placement: {b.placement}\n    rules: {b.rules}")
            say(f"    options: {', '.join(b.options) or 'none'}\n    source: {b.source}")
    if given.json:
        say(json.dumps(listed, indent=1))


def _whole(given: argparse.Namespace) -> Costs:
    """The flags COSTS, whose times are of a rank's whole share."""
    names = (each["name"].lstrip("-").replace("-", "_") for each in _COSTS)
    return Costs(**{name: getattr(given, name) for name in names})


def _draw(given: argparse.Namespace) -> None:
    whole = _whole(given)
    schedule = schedule_of(given, whole)
    costs, fault = _of_stages(whole, _cut(schedule), schedule), None
    try:
        timeline = simulate_sends(schedule, costs, given.sends)
    except ScheduleError as error:
        spans, fault = spans_until_stuck(schedule, costs), error
    else:
        spans = timeline.spans
    terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else 100
    print(
        text_chart(
            schedule, spans, max(width, 40), colour=terminal and "NO_COLOR" not in os.environ
        )
    )
    if fault:
        raise fault
    say(
        f"It takes {timeline.makespan:g}, and {timeline.bubble_fraction:.1%} of all rank-time is "
        "idle. At most in flight: "
        f"{_readable(timeline.peak_in_flight)}."
    )


def _simulate(given: argparse.Namespace) -> None:
    whole = _whole(given)
    schedule = schedule_of(given, whole)
    cut = _cut(schedule)
    timeline = simulate_sends(schedule, _of_stages(whole, cut, schedule), given.sends)
    figures = summary(timeline)
    if {*cut} != {1}:
        shares = [f"1/{each:g}".removesuffix("/1") for each in cut]
        takes = (
            f"stages take {', '.join(shares)}" if len({*cut}) > 1 else f"a stage takes {shares[0]}"
        )
        figures["times"] = f"numbers are of a rank's whole share, of which {takes}"
        figures["times"] += "; a list has each stage's own" * any(
            isinstance(getattr(whole, name), tuple) for name in _SHARED
        )
    texts = [f"{name:22} {_readable(value)}" for name, value in figures.items()]
    write(given, {**figures, **timeline_to_dict(timeline)}, texts)
    draw(given, timeline)


def _cut(schedule: Schedule) -> list[float]:
    """For every stage, into how many stages its rank's share of the model is cut. Two ranks that
    mirror each other have half a share of each of their stages.
    """
    cut = [1.0] * schedule.num_stages
    for ranks in schedule.replicas[::-1]:
        for own in map(schedule.stages_of, ranks):
            for stage in own:
                cut[stage] = len(own) / sum(
                    rank in ranks for rank in schedule.columns.holders[stage]
                )
    return cut


def _of_stages(whole: Costs, cut: Sequence[float], schedule: Schedule | None = None) -> Costs:
    """The times of stages, where a number is the time of a rank's whole share and a list has one
    time per stage. So schedules with different numbers of stages are compared on one model.
    """
    given = vars(whole).items()
    lists = {name: value for name, value in given if isinstance(value, tuple)}
    finer = {each: whole.finer(each) for each in cut}
    if len(finer) == 1:
        return replace(finer[cut[0]], **lists)
    numbers = {
        name: tuple(getattr(finer[each], name) for each in cut)
        for name in _SHARED
        if name not in lists
    }
    if not isinstance(whole.overlap, str):
        each = map(schedule.stages_of, range(schedule.num_ranks))
        pairs = (pair for own in each for pair in product(own, own))
        numbers["overlap"] = {(a, b): finer[cut[a]].overlap for a, b in pairs}
    return replace(whole, **numbers)


def _validate(given: argparse.Namespace) -> None:
    text = text_of(given.file)
    schedule = read_csv(text, "stdin" if given.file == "-" else Path(given.file).name)
    limit = inf if given.limit is None else given.limit
    check_memory(schedule, limit, Memory(given.activation, given.weight_input))
    say(
        f"ok: {repr(schedule)[10:-1]}; peak in flight "
        f"{_readable(schedule.peak_in_flight)}{check_lowered(text)}"
    )


def check_lowered(text: str) -> str:
    """The sentence about a schedule's messages and sharding, if its text names any. Raises
    ScheduleError for wrong messages.
    """
    beside = lowered_cells(text)
    if messages := [cell for cell in beside if re.search(r"\d(SEND|RECV)", cell)]:
        check_queues(parse_lowered(text))
    left = len(beside) - len(messages)
    arrive = f"{plural(len(messages) // 2, 'message')} can arrive in every kind of queue"
    return (
        f"; {arrive if messages else 'it names no messages'}"
        + f"; not looked at: {plural(left, 'other action')}" * (left > 0)
    )


def schedule_of(given: argparse.Namespace, costs: Costs | None = None) -> Schedule:
    """The schedule that the flags SCHEDULE ask for, built (for these costs if its builder takes
    them) or read from a CSV file.
    """
    if given.schedule is None:
        if given.csv is None:
            raise ValueError("name a schedule (pplab schedules lists them), or a file with --csv")
        schedule = _read(given.csv, Path(given.csv).stem)
        _check_sizes(given, schedule)
        return schedule
    if given.ranks is None or given.microbatches is None:
        raise ValueError("a schedule by name needs --ranks and --microbatches")
    work = given.ranks * given.microbatches * (given.stages_per_rank or 1)
    if work > MOST_WORK:
        raise ValueError(
            f"--ranks, --microbatches and --stages-per-rank make {work:,} forwards, and at most "
            f"{MOST_WORK:,} are built here: take fewer, since the figures hardly change"
        )
    options = {} if given.stages_per_rank is None else {"stages_per_rank": given.stages_per_rank}
    builder = builders.find(given.schedule)
    if options and not options.keys() & {*builder.options}:
        raise ValueError(f"--stages-per-rank can't be chosen for {builder.name}: leave it out")
    if costs is not None and "costs" in builder.options:
        options["costs"] = _of_stages(costs, [2 if builder.placement == "V" else 1])
    schedule = builders.build(
        given.schedule, num_ranks=given.ranks, num_microbatches=given.microbatches, **options
    )
    if given.csv:
        Path(given.csv).write_text(to_csv(schedule))
    return schedule


def _read(file: str, name: str) -> Schedule:
    """The schedule in a CSV file, or on standard input for -."""
    text = text_of(file)
    schedule = read_csv(text, name)
    if lowered_cells(text):
        left_out = (
            f"the sends, receives and sharding in {file} are left out: pplab validate checks them"
        )
        warnings.warn(left_out, stacklevel=2)
    return schedule


def text_of(file: str) -> str:
    """The text in a file (or on standard input for -), up to the end of its last line."""
    place = "standard input" if file == "-" else file
    try:
        return (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode(
            "utf-8-sig"
        ) + "\n"
    except UnicodeDecodeError:
        expected = (
            "expected a text file with a line per rank and an action per cell, such as 0F0,0B0"
        )
        raise ValueError(f"{place} is no text in UTF-8: {expected}") from None


def _check_sizes(given: argparse.Namespace, schedule: Schedule) -> None:
    """Raise ValueError where flags ask for sizes that a file doesn't have."""
    sizes = {
        "--ranks": (given.ranks, schedule.num_ranks),
        "--microbatches": (given.microbatches, schedule.num_microbatches),
        "--stages-per-rank": (given.stages_per_rank, schedule.num_stages / schedule.num_ranks),
    }
    for flag, (asked, has) in sizes.items():
        if asked not in (None, has):
            raise ValueError(
                f"{flag} {asked}: {given.csv} has {has:g}, and a file's sizes are fixed: leave "
                f"{flag} out"
            )


def summary(timeline: Timeline) -> dict:
    """The figures of a timeline as plain JSON values."""
    schedule = timeline.schedule
    sizes = {
        name: getattr(schedule, name) for name in "num_ranks num_stages num_microbatches".split()
    }
    names = "makespan bubble_fraction bubble_ratio span_bubble_fraction peak_in_flight busy idle"
    figures = {name: getattr(timeline, name) for name in names.split()}
    return {"schedule": schedule.name, **sizes, **figures, "messages": num_messages(schedule)}


def write(given: argparse.Namespace, data: Mapping[str, object], texts: Iterable[object]) -> None:
    """Print `texts` and write `data`, as the flag JSON asks for."""
    text = json.dumps(data, indent=1) if given.json else ""
    say(*(texts if given.json != "-" else [text]))
    if given.json not in (None, "-"):
        Path(given.json).write_text(text + "\n")


def draw(given: argparse.Namespace, timeline: Timeline) -> None:
    """Draw and trace as OUTPUT asks."""
    if given.png:
        from ...plot import gantt

        bring("matplotlib").use("Agg")
        gantt(timeline).figure.savefig(given.png, dpi=150, bbox_inches="tight")
    if given.perfetto:
        to_perfetto(timeline, given.perfetto)


def _readable(value: object) -> str:
    """A value, or a list's values. If there are more than sixteen ranks, they are in columns within
    80 characters, unless all are equal.
    """
    if not isinstance(value, (list, tuple)):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    texts = [*map(_readable, value)]
    if len(texts) <= 16:
        return ", ".join(texts)
    if len({*texts}) == 1:
        return f"{texts[0]} on each of {len(texts)} ranks"
    width = max(map(len, texts))
    each = 16 if width <= 2 else 8
    lines = []
    for first in range(0, len(texts), each):
        some = texts[first : first + each]
        ranks = f"ranks {first}-{first + len(some) - 1}:"
        lines.append(f"\n  {ranks:14}{', '.join(text.rjust(width) for text in some)}")
    return "".join(lines)


def _overlap(text: str) -> str | float:
    try:
        return text if text in ("sum", "max") else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither sum nor max, nor a number") from None


def _times(text: str) -> Any:
    def read(part: str) -> float | tuple[float, ...]:
        if ":" in part:
            return tuple(map(read, part.split(":")))
        return float(part) if {*".enai"} & {*part.lower()} else int(part)

    try:
        values = tuple(map(read, text.split(",")))
    except ValueError:
        expected = "expected a number, or one for each stage with commas between, such as 1,1,2"
        raise argparse.ArgumentTypeError(f"{text!r} is no number: {expected}") from None
    return values if values[1:] or ":" in text else values[0]


_TIMES = (
    "The time T of an action is one number, for all layers of a rank, which pplab divides among "
    "the rank's stages. If stages differ, give a list with one time per stage, such as 1,1,2. If "
    "microbatches differ, too, join the times of a stage with colons: 1:2:1,1:2:1. All times are "
    "in one unit of your choice, for example milliseconds."
)
_CSV = flag(
    "--csv",
    "read the schedule from FILE, in PyTorch's CSV form. If you also name a schedule, it is "
    "written to FILE instead",
    metavar="FILE",
)
_SIZES = (
    flag(
        "--ranks",
        "number of ranks in the pipeline, for a schedule that you name",
        type=int,
        metavar="P",
    ),
    flag(
        "--microbatches",
        "number of microbatches that a batch is cut into, for a schedule that you name",
        type=int,
        metavar="M",
    ),
    flag(
        "--stages-per-rank",
        "number of stages on each rank, for schedules that let you choose it, such as "
        "Interleaved1F1B",
        type=int,
        metavar="V",
    ),
    _CSV,
)
SCHEDULE = (
    flag(
        "--schedule",
        'schedule to build, such as 1F1B. "pplab schedules" lists all of them',
        metavar="NAME",
    ),
    *_SIZES,
)
JSON = flag(
    "--json",
    "write all results as JSON to FILE. Without FILE, print them instead of the text",
    nargs="?",
    const="-",
    metavar="FILE",
)
OUTPUT = (
    JSON,
    flag(
        "--png", "draw the Gantt chart into FILE (needs pip install 'pplab[plot]')", metavar="FILE"
    ),
    flag("--perfetto", "write a trace to FILE, which ui.perfetto.dev shows", metavar="FILE"),
)
_time = partial(flag, type=_times, default=0, metavar="T")
_COSTS = (
    _time("--forward", "time of a forward", default=1),
    _time(
        "--backward-input",
        "time of the first half of a backward, which computes the gradient of a stage's input",
        default=1,
    ),
    _time(
        "--backward-weight",
        "time of the second half of a backward, which computes the gradients of the weights",
        default=1,
    ),
    _time(
        "--recompute",
        "time to compute a forward again before each backward (default: 0, nothing is computed "
        "again)",
    ),
    _time(
        "--overhead",
        "time that every action takes in addition. It isn't divided among a rank's stages "
        "(default: 0)",
    ),
    _time(
        "--overlap",
        "time of two actions that run as a pair, for schedules that have pairs, such as DualPipe: "
        '"sum" (nothing is hidden, the default), "max" (the shorter one is hidden), or a number, '
        "for one pair over "
        "all layers of a rank",
        type=_overlap,
        default="sum",
    ),
    _time(
        "--latency",
        "time that a message takes to the next rank, whatever its size (default: 0)",
        type=float,
    ),
    flag(
        "--bandwidth",
        "size that passes over a link between two ranks in one unit of time (default: no limit)",
        type=float,
        default=inf,
        metavar="R",
    ),
    flag(
        "--message",
        "size of what a stage sends to the next one, in the unit that --bandwidth counts in. Give "
        "a list if stages differ, such as 1,1,2",
        type=_times,
        default=1,
        metavar="SIZE",
    ),
)
_LINKS = (
    flag(
        "--sends",
        f'who waits until a message has arrived: "{SENDS[0]}" (the default), "{SENDS[1]}" (as in '
        "Megatron-LM's 1F1B), "
        f'or "{SENDS[2]}" (as in its interleaved 1F1B)',
        choices=SENDS,
        default=SENDS[0],
    ),
)
_MEMORY = (
    flag("file", "CSV file with a line per rank and an action per cell, or - for standard input"),
    flag(
        "--limit",
        "most that a rank may keep in memory, in units of one forward's activations (default: no "
        "limit)",
        type=float,
        metavar="X",
    ),
    flag(
        "--activation",
        "what a forward keeps in memory until its backward. Give a list if stages differ, such as "
        "1,1,2",
        type=_times,
        default=1,
        metavar="X",
    ),
    flag(
        "--weight-input",
        "what of a forward stays in memory between its input gradient and its weight gradient "
        "(default: all of it)",
        type=_times,
        metavar="X",
    ),
)
_NAMED = flag(
    "schedule",
    'schedule to build, such as 1F1B. "pplab schedules" lists all of them',
    nargs="?",
    metavar="NAME",
)
_LISTING = flag("--json", "print the list as JSON", action="store_true")
_ABOUT = "Plan, draw, simulate and run pipeline-parallel training."
_BOX = "--ranks 4 --microbatches 8"
_EXAMPLES = {
    "Who waits in 1F1B, and for how long?": f"pplab draw 1F1B {_BOX}",
    "Train a small GPT with it (needs pip install 'pplab[run]'):": "pplab train --schedule 1F1B "
    f"{_BOX}",
}
COMMANDS = (
    Command(
        "schedules",
        "list the schedules, with their rules and options",
        _schedules,
        lambda: [_LISTING],
        "pplab schedules [--json]",
        "List every schedule that pplab can build, with the numbers of ranks and microbatches that "
        "it accepts, its options, and the paper or framework that it is from.",
        {
            "Which schedules are there?": "pplab schedules",
            "Hand the list to a program:": "pplab schedules --json",
        },
    ),
    Command(
        "draw",
        "draw a schedule as text",
        _draw,
        lambda: (_NAMED, *_SIZES, *_COSTS, *_LINKS),
        "pplab draw NAME --ranks P --microbatches M [options]\n       pplab draw --csv FILE "
        "[options]",
        "Draw when each rank computes and when it waits, as text with a line per rank. A schedule "
        "that gets stuck is drawn as far as it gets. This needs neither PyTorch nor a "
        f"GPU.\n{_TIMES}",
        {
            "Who waits in 1F1B, and for how long?": f"pplab draw 1F1B {_BOX}",
            "What if each message takes as long as a forward?": f"pplab draw 1F1B {_BOX} --latency "
            "1",
            "Draw a schedule of my own:": "pplab draw --csv mine.csv",
        },
    ),
    Command(
        "simulate",
        "predict how long a step takes, and who waits",
        _simulate,
        lambda: (*SCHEDULE, *_COSTS, *_LINKS, *OUTPUT),
        "pplab simulate --schedule NAME --ranks P --microbatches M [options]\n"
        "       pplab simulate --csv FILE [options]",
        "Predict how long one training step takes, how long each rank waits, and how many "
        "microbatches it keeps in memory. This needs neither PyTorch nor a "
        f"GPU.\n{_TIMES}",
        {
            "How long is the bubble of 1F1B?": f"pplab simulate --schedule 1F1B {_BOX}",
            "What if each message takes as long as a forward, and both ranks wait for it?": (
                f'pplab simulate --schedule 1F1B {_BOX} --latency 1 --sends "both wait"'
            ),
            "What if the last stage's forward takes a quarter longer?": (
                f"pplab simulate --schedule 1F1B {_BOX} --forward 1,1,1,1.25"
            ),
            "Draw a schedule of my own (needs pip install 'pplab[plot]'):": (
                "pplab simulate --csv mine.csv --png mine.png"
            ),
        },
    ),
    Command(
        "validate",
        "check a schedule in PyTorch's CSV form",
        _validate,
        lambda: _MEMORY,
        "pplab validate FILE [options]",
        "Check that a schedule in PyTorch's CSV form can run: each action is there once, every "
        "rank can finish, and no rank needs more memory than you allow. Where the file names sends "
        "and receives, each must have its other end, and all must arrive in every kind of queue. "
        "If it can't run, an error says which action of which rank is wrong.",
        {
            "Can this schedule run?": "pplab validate mine.csv",
            "Does each rank get by with four forwards' activations?": "pplab validate mine.csv "
            "--limit 4",
        },
    ),
)
