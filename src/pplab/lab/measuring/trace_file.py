"""Read one trace of torch.profiler: which actions of a pipeline it names, and when each one
computed.

There are three kinds of names, all of which are spans:

    pplab:0F1                        by `watching` and `lab.Profile`: around computing alone
    PP:0F1, PP:(0F7;7B3)OVERLAP_F_B  by torch's interpreter, by which most of its classes run:
                                     with the wait before it
    Forward 1, Backward 1            by torch's ScheduleGPipe: with the wait before it and the
                                     sending after it

With the last two, an action lasts from its first operator to its last, and the time before it is
the wait for its message. An overlap of torch's is two actions in turn, as torch runs them, and
autograd's first operator begins the second.

If kernels were recorded, an action lasts from the first to the last of those launched during its
span, on the stream that has most of them, apart from NCCL's own. The profiler's mirrors of spans on
a GPU leave out backwards, because a different thread launches their kernels (pytorch/kineto, issues
1022 and 1132).
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, pairwise
from math import inf
from pathlib import Path
from typing import NamedTuple

from ...actions import B, F, Item, parts
from ...text import parse
from ..forms import printable, reading

RECORD = """Record it so, on every rank:
    with torch.profiler.profile() as profiler:
        for _ in range(4):
            schedule.step(...)
    profiler.export_chrome_trace(f"rank{rank}.json.gz")
and start the program by `python -m pplab.watch torchrun ...`, which names its actions (or call
lab.watch_torch() before the first step). Megatron-LM records such traces by --profile
--use-pytorch-profiler."""
_UNREAD = {  # what a file begins with
    b"SQLite format 3": "of Nsight Systems, which isn't read",
    b"times across ranks": "of Megatron-LM's timers, which aren't read",
    b"resourceSpans": "of OpenTelemetry, which isn't read",
    b'"span_id"': "of OpenTelemetry, which isn't read",
    b"nccl_comm_state": "a dump of NCCL's flight recorder: say which schedule ran, by --schedule "
    "or --csv",
}
_MOST_BYTES, _MOST_MS = 2**32, 1e14  # of a file, unpacked; of a time since 1970
_NAME = re.compile(r"(pplab|PP):(\d+[FBIW]\d+|\(.+\)OVERLAP.+)")
_SINGLE = re.compile(r"(F)orward (\d+)|(B)ackward (\d+)")
_ACTION = re.compile(r"\d+[FBIW]\d+")
_APART = ("c10d::", "record_param_comms")  # operators that are no computing
_OWN = ("c10d::", "autograd::engine")  # operators that are looked for by name
_TRANSPORT = (
    ("c10d::recv", "gloo:recv"),
    ("c10d::send", "gloo:send"),
    ("c10d::allreduce", "gloo:all_reduce"),
)

_Spans = Mapping[str, Sequence[dict]]  # by their category
_Named = tuple[float, float, str, str]  # start, end, who named it, and the actions' text


class Did(NamedTuple):
    """An action in a trace: when it began to wait for its message, when it began, and when it
    ended, in ms.
    """

    item: Item
    asked: float
    start: float
    end: float


class Post(NamedTuple):
    """A message or a sum: when the rank posted it, and when the transport was done with it, in
    ms.
    """

    start: float
    end: float


class Trace(NamedTuple):
    """What a trace file tells."""

    rank: int
    host: str  # "" where it isn't told
    groups: list[tuple[int, ...]]  # the ranks of each of torch's process groups
    dids: list[Did]  # in order
    notes: Sequence[str] = ()
    asked: Sequence[Post] = ()  # receives, in order
    sent: Sequence[Post] = ()
    summed: Sequence[Post] = ()  # with other replicas
    others: Sequence[tuple[str, Post]] = ()  # what else the host did, by name
    watched: bool = True  # whether the names are around computing alone
    by_rows: bool = False  # torch's interpreter ran it: it asks for messages in its rows' order
    on_gpu: bool = False  # `asked` and `sent` are kernels then, which do both


def read_trace(path: Path) -> Trace:
    """Read a rank's trace. Raises ValueError for a file that names no action, or is something
    else.
    """
    name = printable(str(path))
    with path.open("rb") as file:
        head = file.read(2**20)
    for mark, tool in _UNREAD.items():
        if mark in head:
            raise ValueError(f"{name} is {tool}. {RECORD}")
    with reading(
        str(path),
        "a Chrome trace of torch.profiler, .json or .json.gz, of a rank of torch.distributed",
    ):
        data = _unpacked(path, head.startswith(b"\x1f\x8b"))
        info = data["distributedInfo"]
        rank = int(info["rank"])
        groups = [tuple(map(int, group.get("ranks", ()))) for group in info.get("pg_config", ())]
        by = _spans(data)
        dids, notes = _dids(by, rank)
    if not dids:
        raise ValueError(
            f"{name} names no action of a pipeline in its {len(data['traceEvents'])} events. "
            "torch's Schedule1F1B and Megatron-LM's schedules name none by themselves. "
            f"{RECORD}"
        )
    on_gpu = bool(by["kernel"])
    if info.get("backend") == "nccl" and not on_gpu:
        raise ValueError(
            f"{name} is of a run on GPUs, and has no kernel: record ProfilerActivity.CUDA, too. "
            f"{RECORD}"
        )
    if on_gpu:
        # Each runs from when its rank is ready for the message until it is done on both.
        asked = sent = sorted(
            Post(event["start"], event["end"])
            for event in by["kernel"]
            if "sendrecv" in event["name"].lower()
        )
        summed, others = [], []
    else:
        asked, sent, summed = (_posts(by, *each) for each in _TRANSPORT)
        others = _others(by, dids)
    names = [event["name"] for event in by["user_annotation"]]
    watched, by_rows = (any(each.startswith(mark) for each in names) for mark in ("pplab:", "PP:"))
    host = printable(str(data.get("host_name", "")))
    return Trace(
        rank, host, groups, dids, notes, asked, sent, summed, others, watched, by_rows, on_gpu
    )


def _unpacked(path: Path, zipped: bool) -> dict:
    """A file's JSON. Raises ValueError for a file that unpacks to too much."""
    raw = bytearray()
    with gzip.open(path) if zipped else path.open("rb") as file:
        while piece := file.read(2**24):  # a browser's Python has no room for all at once
            raw += piece
            if len(raw) > _MOST_BYTES:
                raise ValueError(
                    f"more than {_MOST_BYTES >> 20:,} MiB: record fewer steps, without shapes "
                    "and stacks"
                )
    return json.loads(raw)


def _spans(data: Mapping) -> dict[str, list[dict]]:
    """A trace's spans by their category, each with its `start` and `end` in ms since 1970. Raises
    ValueError for times that can't be.
    """
    base = data.get("baseTimeNanoseconds", 0) / 1e6
    by: dict[str, list[dict]] = defaultdict(list)
    for event in data["traceEvents"]:
        if event.get("ph") == "X":
            start, lasts = base + event["ts"] / 1e3, event.get("dur", 0) / 1e3
            if not (abs(start) < _MOST_MS and 0 <= lasts < _MOST_MS):
                raise ValueError(f"{event['name']} at ts {event['ts']} lasts {lasts:g} ms")
            event["start"], event["end"] = start, start + lasts
            by[event.get("cat", "")].append(event)
    by["torch's own"] = [event for event in by["cpu_op"] if event["name"].startswith(_OWN)]
    return by


def _dids(by: _Spans, rank: int) -> tuple[list[Did], list[str]]:
    """What a rank did, in order, and notes. A name that directly follows itself, as a loss's
    follows its forward's, is one action.
    """
    named = _named(by, rank)
    alone = any(mark == "pplab" for _, _, mark, _ in named)  # then other names are around these
    kernels = _kernels(by)
    busy = kernels  # when each was launched, began and ended
    if not (kernels or alone):
        busy = sorted(
            (e["start"], e["start"], e["end"])
            for e in by["cpu_op"]
            if not e["name"].startswith(_APART)
        )
    dids: list[Did] = []
    free = -inf
    for item, since, until, around in _turns(by, named, alone):
        asked = max(around[0], free) if since < around[1] else since
        if kernels or not alone:  # it lasts as long as what ran in its turn
            inside = busy[bisect_left(busy, (since,)) : bisect_left(busy, (until,))]
            # of an evaluation, or before kernels were recorded
            if not inside and parts(item)[0].kind in (F, B):
                continue
            since = min((each[1] for each in inside), default=max(free, until))
            until = max((each[2] for each in inside), default=since)
        if dids and dids[-1].item == item:
            dids[-1] = dids[-1]._replace(end=until)
        else:
            dids.append(Did(item, since if kernels else asked, since, until))
        free = until
    notes = [
        "times are those of a GPU's kernels, which don't show how long a message was waited for"
    ] * bool(kernels)
    if not alone and any(event["name"] == "Forward 0" for event in by["user_annotation"]):
        notes.append(
            "ScheduleGPipe's names don't tell the stage, lab.watch_torch's do: each rank is taken "
            "to be one"
        )
    return dids, notes


def _named(by: _Spans, rank: int) -> list[_Named]:
    """The spans that name actions, in order."""
    found = []
    for event in by["user_annotation"]:
        name = event["name"]
        if name.startswith(("Forward", "Backward")):
            name = _SINGLE.sub(rf"PP:{rank}\1\3\2\4", name)
        if match := _NAME.fullmatch(name):
            found.append((event["start"], event["end"], match[1], match[2]))
    return sorted(found)


def _turns(
    by: _Spans, named: Sequence[_Named], alone: bool
) -> Iterator[tuple[Item, float, float, tuple[float, float]]]:
    """Each action that is named, when its turn began and ended, and torch's span around it. Where
    torch's interpreter runs two in a span, autograd's first operator begins the second one's turn.
    """
    backwards = sorted(
        event["start"]
        for event in by["torch's own"]
        if event["name"].startswith("autograd::engine")
    )
    around = -inf, -inf
    for start, end, mark, text in named:
        if mark == "PP":
            around = start, end
            if alone:
                continue
        items = [parse(text)] if alone else [*map(parse, _ACTION.findall(text))]
        bounds = [start, *(backwards[bisect_left(backwards, start)] for _ in items[1:]), end]
        for item, (since, until) in zip(items, pairwise(bounds), strict=False):
            yield item, since, until, around


def _posts(by: _Spans, operator: str, transport: str) -> list[Post]:
    """A rank's receives, sends or sums. An operator posts each, and gloo's span of the same number
    ends it.
    """
    handed = sorted(
        event["start"] for event in by["torch's own"] if event["name"].startswith(operator)
    )
    spans = (event for event in by["user_annotation"] if event["name"] == transport)
    done = [event["end"] for event in sorted(spans, key=lambda event: event["start"])]
    return [*map(Post, handed, done)] if len(handed) == len(done) else []


def _others(by: _Spans, dids: Sequence[Did]) -> list[tuple[str, Post]]:
    """Operators and annotations outside actions that are no messages, in the order of their
    starts.
    """
    starts, posts = [did.start for did in dids], []
    for what in ("user_annotation", "cpu_op"):
        for event in by[what]:
            before = bisect_right(starts, event["start"])
            if not before or event["end"] > dids[before - 1].end:
                if name := _other(event["name"], what):
                    posts.append((name, Post(event["start"], event["end"])))
    return sorted(posts, key=lambda each: (each[1].start, -each[1].end))


@cache
def _other(name: str, what: str) -> str:
    """The name of work that is neither an action nor a message, or "" for those."""
    named = what == "user_annotation" and not re.match(
        r"(pplab|PP|gloo|nccl):|Optimizer\.profile", name
    )
    if named or (what == "cpu_op" and not name.startswith((*_APART, "autograd::"))):
        return printable(name.split("#")[0].removesuffix(".__next__"))
    return ""


def _kernels(by: _Spans) -> list[tuple[float, float, float]]:
    """When each kernel was launched, began and ended, on the stream that has most of them, in
    order.
    """
    calls = chain(*(events for what, events in by.items() if "cuda" in what))
    launched = {event["args"].get("correlation"): event["start"] for event in calls}
    kernels = [event for event in by["kernel"] if "nccl" not in event["name"].lower()]
    streams = Counter(event["tid"] for event in kernels).most_common(1)
    return sorted(
        (launched.get(event["args"].get("correlation"), -inf), event["start"], event["end"])
        for event in kernels
        if event["tid"] == streams[0][0]
    )
