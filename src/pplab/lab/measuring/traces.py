"""Other people's runs: the traces that torch.profiler writes of torch's pipelining become timelines.

A trace names what a rank did. torch's interpreter writes `PP:0F1`, a span that begins with the wait for the action's
message; ScheduleGPipe writes `Forward 1`; Schedule1F1B names nothing. `watch_torch` gives every action of every class a
name, `pplab:0F1`, around what it computes alone. On a GPU the profiler repeats the names above the kernels.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import NamedTuple

from ...actions import COMPUTE, SEND_B, SEND_F, Action, F, Item, W, parts
from ...deps import incoming, other_end
from ...schedule import Schedule, plural
from ...simulator import validate
from ...text import parse
from ...timeline import Span, Timeline, total
from ..forms import printable, reading

HOW = """Record it anew: call lab.watch_torch() before the first step, and on every rank write
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            schedule.step(...)
    profiler.export_chrome_trace(f"rank{rank}.json.gz")"""
_NAMES = (r"pplab:(.+)", r"PP:(.+)", r"(Forward|Backward) (\d+)")  # the first that a trace has is taken
_APART = ("c10d::", "record_param_comms")  # operators that are no computing


@dataclass(frozen=True)
class Traced:
    """What traces say: `timelines` has a measured one for each whole step, in ms; `notes` say what else there was."""

    timelines: tuple[Timeline, ...]
    notes: tuple[str, ...] = ()


class _Did(NamedTuple):
    item: Item
    asked: float  # when its span began, in ms: with a wait for its message, or with `start`
    start: float
    end: float


class _Trace(NamedTuple):
    path: Path
    rank: int
    host: str
    did: list[_Did]  # in order
    on_gpu: bool


def read_traces(*places: str | Path) -> Traced:
    """Read the traces of one pipeline's ranks, of files or of folders with one for each: .json or .json.gz.

    They are Chrome traces of torch.profiler, of torch's pipelining in all its classes, of torchtitan, which uses them,
    and of `lab.Profile`. Each may hold several steps. A step that isn't whole on all ranks is left out, and a note
    says so. Ranks of one host share a clock; clocks of several hosts are tied by messages that went both ways, or a
    note says that they aren't. The wait for an action's message is in `Timeline.others`, where the trace shows it: on
    a GPU it doesn't.

    Raises ValueError for what isn't such a trace, for stages that are missing or there twice, and OSError for a file
    that can't be opened. An error says how to record what is missing.
    """
    traces = sorted((_read(path) for path in _files(places)), key=lambda trace: trace.rank)
    if not any(trace.did for trace in traces):
        raise ValueError(
            f"{traces[0].path} names no action of a pipeline. torch's Schedule1F1B writes none, and traces of "
            f"Megatron-LM aren't read. {HOW}"
        )
    for one, other in pairwise(traces):
        if one.rank == other.rank:
            raise ValueError(f"{one.path} and {other.path} are both of rank {one.rank}: give one trace for each rank")
    steps, notes = _steps(traces), []
    _check(traces, steps)
    if len({trace.host for trace in traces}) > 1:
        steps, note = _tied(traces, steps)
        notes.append(note)
    if cut := sum(len(t.did) - sum(map(len, each)) for t, each in zip(traces, steps, strict=True)):
        notes.append(f"{plural(cut, 'action')} of steps that aren't whole left out")
    if any(trace.on_gpu for trace in traces):
        notes.append("a trace of a GPU shows no wait for a message: a late rank counts as communication")
    whole = [*zip(*steps, strict=True)]
    if between := [after[0].asked - before[-1].end for each in steps for before, after in pairwise(each)]:
        mean = total(between) / len(between)
        notes.append(f"between its steps a rank spends {mean:.1f} ms, which are in no step: the optimizer, data")
    return Traced(tuple(map(_timeline, whole)), tuple(notes))


def watch_torch() -> None:
    """Name every action of torch's pipelining, whatever the class, in the traces of this process: `pplab:0F1` is stage
    0's forward of microbatch 1, without the wait for its message. Call it before the first step. It costs a
    `record_function` an action."""
    from torch.distributed.pipelining.stage import _PipelineStageBase as Stage
    from torch.profiler import record_function

    def named(method: Callable, kind: Callable[[bool], str]) -> Callable:
        @wraps(method)
        def call(self: Stage, microbatch: int, *given: object, **options: object) -> object:
            with record_function(f"pplab:{self.stage_index}{kind(options.get('full_backward', True))}{microbatch}"):
                return method(self, microbatch, *given, **options)

        return call

    kinds = {
        "forward": lambda _: "F",
        "backward": lambda whole: "B" if whole else "I",
        "backward_weight": lambda _: "W",
    }
    for name, kind in kinds.items():
        method = getattr(Stage, f"{name}_one_chunk")
        if not hasattr(method, "__wrapped__"):
            setattr(Stage, f"{name}_one_chunk", named(method, kind))


def _files(places: Sequence[str | Path]) -> list[Path]:
    found: list[Path] = []
    for place in map(Path, places):
        inside = sorted(each for each in place.glob("*.json*") if each.is_file()) if place.is_dir() else [place]
        if not inside:
            raise ValueError(f"{place} has no trace: expected files of torch.profiler, .json or .json.gz. {HOW}")
        found += inside
    if not found:
        raise ValueError("give the traces' files, one for each rank, or their folder")
    return found


def _read(path: Path) -> _Trace:
    with reading(str(path), "a Chrome trace of torch.profiler"):
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        base = data.get("baseTimeNanoseconds", 0) / 1e3
        events = [event for event in data["traceEvents"] if event.get("ph") == "X" and "dur" in event]
        number = re.search(r"rank[_-]?(\d+)", path.name)
        rank = data.get("distributedInfo", {}).get("rank", number and number[1])
        if rank is None:
            raise ValueError("no distributedInfo, and no rank in the file's name, such as rank0.json")
        did, on_gpu = _did(events, int(rank))
        at = [each._replace(**{name: (getattr(each, name) + base) / 1e3 for name in each._fields[1:]}) for each in did]
        return _Trace(path, int(rank), printable(str(data.get("host_name", ""))), at, on_gpu)


def _did(events: Iterable[dict], rank: int) -> tuple[list[_Did], bool]:
    """What a rank computed, in order, in the trace's own time; and whether that is a GPU's."""
    marks = [event for event in events if event.get("cat") in ("user_annotation", "gpu_user_annotation")]
    for pattern in _NAMES:
        tracks: dict[tuple[bool, object], list[tuple[Item, float, float]]] = {}
        for event in marks:
            if (match := re.fullmatch(pattern, event["name"])) and (item := _item(match.groups(), rank)):
                track = event["cat"] == "gpu_user_annotation", event.get("tid")
                tracks.setdefault(track, []).append((item, event["ts"], event["ts"] + event["dur"]))
        if tracks:
            on_gpu, thread = max(tracks, key=lambda track: (track[0], len(tracks[track])))
            found = sorted(tracks[on_gpu, thread], key=lambda each: each[1])
            if on_gpu or pattern == _NAMES[0]:
                return [_Did(item, start, start, end) for item, start, end in found], on_gpu
            return [*_computing(found, events)], False
    return [], False


def _item(words: Sequence[str], rank: int) -> Item | None:
    """What a span's name says; None for a send, a receive, a gather of weights."""
    if len(words) == 2:  # ScheduleGPipe's
        return Action(rank, parse(f"0{words[0][0]}0").kind, int(words[1]))
    try:
        item = parse(words[0])
    except ValueError:
        return None
    return item if all(action.kind in COMPUTE for action in parts(item)) else None


def _computing(spans: Iterable[tuple[Item, float, float]], events: Iterable[dict]) -> Iterable[_Did]:
    """Spans that begin with a wait for a message: an action starts with its first operator."""
    starts = sorted(e["ts"] for e in events if e.get("cat") == "cpu_op" and not e["name"].startswith(_APART))
    k = 0
    for item, asked, end in spans:
        while k < len(starts) and starts[k] < asked:
            k += 1
        yield _Did(item, asked, starts[k] if k < len(starts) and starts[k] < end else asked, end)


def _steps(traces: Sequence[_Trace]) -> list[list[list[_Did]]]:
    """Every rank's whole steps. A step starts with the first forward of the rank's first stage."""
    found = []
    for trace in traces:
        forwards = [a for did in trace.did for a in parts(did.item) if a.kind == F]
        first = min(forwards, default=None)
        steps: list[list[_Did]] = []
        for did in trace.did:
            if first in parts(did.item):
                steps.append([])
            if steps:
                steps[-1].append(did)
        most = max(map(len, steps), default=0)
        found.append([step for step in steps if len(step) == most])
    return found


def _check(traces: Sequence[_Trace], steps: Sequence[Sequence[Sequence[_Did]]]) -> None:
    """ValueError unless these are the ranks of one pipeline, with as many whole steps each, which train."""
    found = [{action.stage for step in each for did in step for action in parts(did.item)} for each in steps]
    missing = {*range(max(set.union(*found), default=0))} - set.union(*found)
    given = ", ".join(f"rank {trace.rank} in {trace.path}" for trace in traces)
    if missing or not all(found):
        lacks = f"no trace has stage {min(missing)}" if missing else "a rank has no whole step"
        raise ValueError(f"{lacks}; given are {given}. Give the traces of all ranks of one pipeline. {HOW}")
    if len({*map(len, steps)}) > 1:
        counts = ", ".join(f"rank {trace.rank} has {len(each)}" for trace, each in zip(traces, steps, strict=True))
        raise ValueError(f"the ranks have unequal numbers of whole steps: {counts}. {HOW}")
    try:
        validate(_schedule([each[0] for each in steps]))
    except ValueError as error:
        raise ValueError(f"these aren't the ranks of one pipeline that trains: {error}; given are {given}") from None


def _schedule(step: Sequence[Sequence[_Did]]) -> Schedule:
    return Schedule([[did.item for did in row] for row in step], "traced")


def _messages(step: Sequence[Sequence[_Did]]) -> Iterator[tuple[int, int, _Did, _Did, Action]]:
    """From and to which rank a message goes, what made it and what waited for it, and the receive."""
    made: dict[Action, tuple[int, _Did]] = {}
    for rank, row in enumerate(step):
        for did in row:
            for stage, kind, m in parts(did.item):
                if kind != W:
                    made[Action(stage, SEND_F if kind == F else SEND_B, m)] = rank, did
    last = max(action.stage for action in made)
    for target, row in enumerate(step):
        for did in row:
            for action in parts(did.item):
                receive = incoming(action, last + 1)
                if receive and (source := made[other_end(receive)])[0] != target:
                    yield source[0], target, source[1], did, receive


def _tied(traces: Sequence[_Trace], steps: list[list[list[_Did]]]) -> tuple[list[list[list[_Did]]], str]:
    """The steps by the first host's clock. A message is made before it is there: one way that says how far a clock is
    ahead at most, the other way at least."""
    hosts, ahead, width = [trace.host for trace in traces], {traces[0].host: 0.0}, 0.0
    pairs = [pair for step in zip(*steps, strict=True) for pair in _messages(step)]
    for host in dict.fromkeys(hosts):
        low, high = -inf, inf
        for source, target, before, after, _ in pairs:
            if hosts[target] == host and hosts[source] in ahead:
                high = min(high, after.start - before.end + ahead[hosts[source]])
            if hosts[source] == host and hosts[target] in ahead:
                low = max(low, before.end - after.start + ahead[hosts[target]])
        if host not in ahead:
            if inf in (-low, high):
                return steps, "clocks of the hosts aren't tied: no messages went both ways between them"
            ahead[host], width = (low + high) / 2, max(width, high - low)
    tied = [
        [[did._replace(**{n: getattr(did, n) - ahead[host] for n in did._fields[1:]}) for did in row] for row in each]
        for host, each in zip(hosts, steps, strict=True)
    ]
    return tied, f"clocks of {len(ahead)} hosts tied by their messages, to within {width / 2:.3g} ms either way"


def _timeline(step: Sequence[Sequence[_Did]]) -> Timeline:
    """A step that starts when the first rank asks for anything."""
    zero = min(row[0].asked for row in step)
    waits = tuple(
        Span(rank, receive, did.asked - zero, did.start - zero)
        for _, rank, _, did, receive in _messages(step)
        if did.start > did.asked
    )
    starts, ends = ([getattr(did, name) - zero for row in step for did in row] for name in ("start", "end"))
    return Timeline(_schedule(step), starts, ends, "ms", "measured", waits)
