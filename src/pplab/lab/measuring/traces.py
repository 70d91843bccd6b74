"""Turn other people's runs into timelines: the traces that torch.profiler writes of torch's
pipelining.

`trace_file` explains what a trace tells about actions, and by which names.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from math import inf
from pathlib import Path

from ...actions import F, parts
from ...deps import incoming
from ...schedule import Schedule
from ...simulator import validate
from ...timeline import Span, Timeline
from .trace_file import RECORD, Did, Trace, read_trace

Step = list[Did]  # of one rank


# Which files of a folder are read, and by what. A file of any other name is taken for torch's.
READERS: dict[str, Callable[[Path], Trace]] = {"*.json*": read_trace}


def traces_in(places: Sequence[str | Path]) -> list[Trace]:
    """Every trace in files and folders."""
    return [_reader(path)(path) for path in _files(places)]


def _reader(path: Path) -> Callable[[Path], Trace]:
    return next((read for names, read in READERS.items() if path.match(names)), read_trace)


def _files(places: Sequence[str | Path]) -> list[Path]:
    found: list[Path] = []
    for place in map(Path, places):
        found += (
            [each for names in READERS for each in place.rglob(names) if each.is_file()]
            if place.is_dir()
            else [place]
        )
    if not found:
        given = ", ".join(map(str, places)) or "nothing given"
        raise ValueError(
            f"{given}: expected traces of torch.profiler, .json or .json.gz, or their folder. "
            f"{RECORD}"
        )
    return sorted({*found})


def cut(dids: Sequence[Did]) -> list[Step]:
    """The steps of a trace, each of which begins with the first forward of the rank's lowest
    stage.
    """
    first = min(
        (action for did in dids for action in parts(did.item) if action.kind == F), default=None
    )
    bounds = [i for i, did in enumerate(dids) if i == 0 or first in parts(did.item)]
    return [[*dids[start:end]] for start, end in pairwise([*bounds, len(dids)])]


def pipelines_of(items: dict[int, set[str]], traces: Sequence[Trace]) -> list[list[int]]:
    """The ranks of each pipeline, in order. They are the smallest of torch's process groups that
    run every action once.
    """
    everybody, every = tuple(items), sorted(set.union(*items.values()))

    def do_all_once(ranks: Sequence[int]) -> bool:
        return sorted(chain(*(items.get(rank, ()) for rank in ranks))) == every

    named = {tuple(sorted(group)) for trace in traces for group in trace.groups}
    groups = sorted(named, key=lambda group: (len(group), group))
    whole = [ranks for ranks in dict.fromkeys([everybody, *groups]) if do_all_once(ranks)]
    found = [ranks for ranks in whole if len(ranks) == len(whole[0])] or [everybody]
    # a group of one rank is of replicas or of what else there is only one of
    known = next(
        (group for group in groups if len(group) > 1 and {*found[0]} <= {*group}), found[0]
    )
    if missing := [f"rank {rank}" for rank in known if rank not in items]:
        raise ValueError(
            f"no trace is of {', '.join(missing)}: give those of all ranks of a pipeline"
        )
    return [[*ranks] for ranks in found]


def whole_steps(found: Sequence[list[Step]]) -> tuple[list[tuple[Schedule, list[Step]]], str]:
    """For each step of the first rank, what all ranks did meanwhile if that is a whole step, and
    why other steps aren't.
    """
    whole, why = (
        [],
        "these are of different steps, or of hosts whose clocks differ by more than a step",
    )
    ends = [[step[-1].end for step in steps] for steps in found]
    schedules: dict[tuple, Schedule] = {}
    for first in found[0]:
        begin, end, step = first[0].start, first[-1].end, []
        for steps, times in zip(found, ends, strict=True):
            longest, meanwhile = -inf, None
            for number in range(bisect_right(times, begin), len(steps)):
                each = steps[number]
                if each[0].start >= end:
                    break
                if min(end, each[-1].end) - each[0].start > longest:
                    longest, meanwhile = min(end, each[-1].end) - each[0].start, each
            if meanwhile:
                step.append(meanwhile)
        if len(step) == len(found):
            rows = tuple(tuple(did.item for did in row) for row in step)
            try:
                if rows not in schedules:
                    validate(schedule := Schedule(rows, "traced"))
                    schedules[rows] = schedule
                whole.append((schedules[rows], step))
            except ValueError as error:
                why = str(error)
    return whole, why


def clocks_ahead(
    steps: Sequence[tuple[Schedule, list[Step]]], hosts: Sequence[str], notes: list[str]
) -> list[float]:
    """How far each rank's clock is ahead of the first one's, in ms. No message arrives before it
    has left, so one direction gives an upper bound and the other a lower one.
    """
    first, names = hosts[0], {*hosts}
    most: dict[tuple[str, str], float] = defaultdict(lambda: inf)  # so far b is ahead of a, at most
    for schedule, step in steps:
        did, graph, on = (
            [*chain(*step)],
            schedule.graph,
            [hosts[rank] for rank in schedule.columns.ranks],
        )
        for i, user in enumerate(did):
            for _, entry in graph.awaited(i):
                if on[entry] != on[i]:
                    room = user.start - did[graph.id_of(entry)].end
                    most[on[entry], on[i]] = min(most[on[entry], on[i]], room)
    there, back = ({name: inf for name in names} | {first: 0.0} for _ in "12")
    for _ in range(len(names) + 1):
        before = {**there}, {**back}
        for (a, b), room in most.items():
            there[b] = min(there[b], there[a] + room)
            back[a] = min(back[a], back[b] + room)
        if before == (there, back):
            break
    else:
        notes.append(
            "clocks of the hosts aren't tied: no shift of them lets every message arrive after it "
            "has left"
        )
        return [0.0] * len(hosts)
    if len(names) > 1:
        width = max(there[name] + back[name] for name in names)
        notes.append(
            f"clocks of {len(names)} hosts tied by their messages, to within {width / 2:.3g} ms "
            "either way"
        )
    return [(there[host] - back[host]) / 2 for host in hosts]


def timeline_of(schedule: Schedule, step: list[Step], ahead: Sequence[float]) -> Timeline:
    """A step that starts with its first action. Waits for messages of other ranks are in
    `others`.
    """
    zero = min(row[0].start - off for row, off in zip(step, ahead, strict=True))
    starts, ends, waits = [], [], []
    for rank, row in enumerate(step):
        for did in row:
            asked, start, end = (at - ahead[rank] - zero for at in did[1:])
            if asked < start and schedule.graph.sources[len(starts)] != rank:
                receive = incoming(parts(did.item)[0], schedule.num_stages)
                waits.append(Span(rank, receive, max(0.0, asked), start))
            starts.append(start)
            ends.append(end)
    return Timeline(schedule, starts, ends, "ms", "measured", tuple(waits))
