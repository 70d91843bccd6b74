"""Other people's runs: the traces that torch.profiler writes of torch's pipelining become timelines.

What a trace tells of actions, and by which names, is said in `trace_file`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise, product
from math import inf
from pathlib import Path

from ...actions import F, parts
from ...deps import incoming
from ...schedule import Schedule
from ...simulator import validate
from ...timeline import Span, Timeline
from .trace_file import RECORD, Did, Trace, read_trace

Step = list[Did]  # of one rank


def traces_in(places: Sequence[str | Path]) -> list[Trace]:
    """Every trace in files and folders."""
    return [read_trace(path) for path in _files(places)]


def _files(places: Sequence[str | Path]) -> list[Path]:
    found: list[Path] = []
    for place in map(Path, places):
        found += [each for each in place.rglob("*.json*") if each.is_file()] if place.is_dir() else [place]
    if not found:
        given = ", ".join(map(str, places)) or "nothing given"
        raise ValueError(f"{given}: expected traces of torch.profiler, .json or .json.gz, or their folder. {RECORD}")
    return sorted({*found})


def cut(dids: Sequence[Did]) -> list[Step]:
    """The steps of a trace: each begins with the first forward of the rank's lowest stage."""
    first = min((action for did in dids for action in parts(did.item) if action.kind == F), default=None)
    bounds = [i for i, did in enumerate(dids) if i == 0 or first in parts(did.item)]
    return [[*dids[start:end]] for start, end in pairwise([*bounds, len(dids)])]


def pipelines_of(items: dict[int, set[str]], traces: Sequence[Trace]) -> list[list[int]]:
    """The ranks of each pipeline, in order: of torch's process groups the smallest that do every action once."""
    every = sorted(set.union(*items.values()))
    groups = sorted({tuple(sorted(group)) for trace in traces for group in trace.groups}, key=lambda g: (len(g), g))
    whole = [ranks for ranks in [(*items,), *groups] if sorted(chain(*(items.get(r, ()) for r in ranks))) == every]
    found = [ranks for ranks in dict.fromkeys(whole) if len(ranks) == len(whole[0])] or [(*items,)]
    known = next((group for group in groups if {*found[0]} <= {*group}), found[0])
    if missing := [f"rank {rank}" for rank in known if rank not in found[0]]:
        raise ValueError(f"no trace is of {', '.join(missing)}: give those of all ranks of a pipeline")
    return [[*ranks] for ranks in found]


def whole_steps(found: Sequence[list[Step]]) -> tuple[list[tuple[Schedule, list[Step]]], str]:
    """Of each step of the first rank, what all ranks did meanwhile, if that is a whole step; and why another isn't."""
    whole, why = [], "these are of different steps, or of hosts whose clocks differ by more than a step"
    for first in found[0]:
        step = []
        for steps in found:
            together = [min(first[-1].end, each[-1].end) - max(first[0].start, each[0].start) for each in steps]
            if max(together) > 0:
                step.append(steps[together.index(max(together))])
        if len(step) == len(found):
            schedule = Schedule([[did.item for did in row] for row in step], "traced")
            try:
                validate(schedule)
                whole.append((schedule, step))
            except ValueError as error:
                why = str(error)
    return whole, why


def clocks_ahead(steps: Sequence[tuple[Schedule, list[Step]]], hosts: Sequence[str], notes: list[str]) -> list[float]:
    """How far each rank's clock is ahead of the first one's, in ms. No message arrives before it has left: one way that
    says how far a clock is ahead at most, the other way at least."""
    first, names = hosts[0], sorted({*hosts})
    most = {(a, b): inf if a != b else 0.0 for a, b in product(names, names)}  # so far b's is ahead of a's, at most
    for schedule, step in steps:
        did, graph, on = [*chain(*step)], schedule.graph, [hosts[rank] for rank in schedule.columns.ranks]
        for i, user in enumerate(did):
            for _, entry in graph.awaited(i):
                if on[entry] != on[i]:
                    room = user.start - did[graph.id_of(entry)].end
                    most[on[entry], on[i]] = min(most[on[entry], on[i]], room)
    for via, a, b in product(names, names, names):
        most[a, b] = min(most[a, b], most[a, via] + most[via, b])
    if min(most[name, name] for name in names) < 0:
        notes.append("clocks of the hosts aren't tied: no shift of them lets every message arrive after it has left")
        return [0.0] * len(hosts)
    if len(names) > 1:
        width = max(most[first, name] + most[name, first] for name in names)
        notes.append(f"clocks of {len(names)} hosts tied by their messages, to within {width / 2:.3g} ms either way")
    return [(most[first, host] - most[host, first]) / 2 for host in hosts]


def timeline_of(schedule: Schedule, step: list[Step], ahead: Sequence[float]) -> Timeline:
    """A step that starts with its first action; waits for messages of other ranks are beside the schedule."""
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
