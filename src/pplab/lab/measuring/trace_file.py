"""One trace of torch.profiler: which actions of a pipeline it names, and when each one computed.

There are three kinds of names, all of which are spans:

    pplab:0F1                        by `watch_torch` and `lab.Profile`: around the action's computing alone
    PP:0F1, PP:(0F7;7B3)OVERLAP_F_B  by torch's interpreter, by which most of its classes run: with the wait before it
    Forward 1, Backward 1            by torch's ScheduleGPipe: with the wait before it and the sending after it

Of the last two, an action lasts from its first operator to its last, and what is before it is the wait for its message.
An overlap of torch's is two actions in turn, as torch runs them: autograd's first operator begins the second.

Where kernels were recorded, an action lasts from the first to the last of those that were launched during its span, on
the stream that has most of them, NCCL's own aside. The profiler's mirrors of spans on a GPU leave out backwards, whose
kernels another thread launches (pytorch/kineto, issues 1022 and 1132).
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from ...actions import Action, Item, Kind, Overlap
from ...text import parse
from ..forms import printable, reading

RECORD = """Record it so, on every rank:
    lab.watch_torch()
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            schedule.step(...)
    profiler.export_chrome_trace(f"rank{rank}.json.gz")"""
_NAME = re.compile(r"(pplab|PP):\(?(\d+[FBIW]\d+)(?:;(\d+[FBIW]\d+)\).*)?|(Forward|Backward) (\d+)")
_APART = ("c10d::", "record_param_comms")  # operators that are no computing

Busy = tuple[float, float, float]  # an operator or a kernel: called, began, ended; in µs of the trace's own clock


class Did(NamedTuple):
    """An action in a trace: since when it waited for its message, when it began, when it ended; in ms."""

    item: Item
    asked: float
    start: float
    end: float


class Trace(NamedTuple):
    """What a file tells."""

    rank: int
    host: str  # "" where it isn't told
    groups: list[Sequence[int]]  # the ranks of each of torch's process groups
    dids: list[Did]  # in order
    notes: list[str]


def read_trace(path: Path) -> Trace:
    """Read a rank's trace. ValueError where it names no action, or is something else."""
    with reading(str(path), "a Chrome trace of torch.profiler, .json or .json.gz"):
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw)
        events = [event for event in data["traceEvents"] if event.get("ph") == "X"]
        info, number = data.get("distributedInfo", {}), re.search(r"rank[_-]?(\d+)", path.name)
        rank = info.get("rank", number and number[1])
        if rank is None:
            raise ValueError("no distributedInfo, and no rank in the file's name, such as rank0.json")
        dids, notes = _dids(events, int(rank), data.get("baseTimeNanoseconds", 0) / 1e6)
    if not dids:
        raise ValueError(
            f"{path} names no action of a pipeline in its {len(events)} spans. torch's Schedule1F1B names none by "
            f"itself, and traces of Megatron-LM aren't read. {RECORD}"
        )
    if info.get("backend") == "nccl" and not any(event.get("cat") == "kernel" for event in events):
        raise ValueError(f"{path} is of a run on GPUs, and has no kernel: record ProfilerActivity.CUDA, too. {RECORD}")
    groups = [group.get("ranks", ()) for group in info.get("pg_config", ())]
    return Trace(int(rank), printable(str(data.get("host_name", ""))), groups, dids, notes)


def _dids(events: Sequence[dict], rank: int, base: float) -> tuple[list[Did], list[str]]:
    """What a rank did, in order, and notes. A name that follows itself, as a loss's its forward's, is one action."""
    named = [(e, _NAME.fullmatch(e["name"])) for e in events if e.get("cat") == "user_annotation"]
    spans = sorted(((e["ts"], e["ts"] + e["dur"], match) for e, match in named if match), key=itemgetter(0))
    alone = any(match[1] == "pplab" for *_, match in spans)  # then other names are around these
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    backwards = sorted(event["ts"] for event in operators if event["name"].startswith("autograd::engine"))
    computing = (event for event in operators if not event["name"].startswith(_APART))
    kernels, notes = _kernels(events)
    busy = kernels or sorted((event["ts"], event["ts"], event["ts"] + event["dur"]) for event in computing)
    if any(match[4] for *_, match in spans) and not alone:
        notes.append("ScheduleGPipe's names don't tell the stage, lab.watch_torch's do: each rank is taken to be one")
    found: list[tuple[Item, list[float]]] = []
    around, free = (-inf, -inf), -inf
    for start, end, match in spans:
        if match[1] != "pplab":
            around = start, end
            if alone:
                continue
        turns = [(item, start, end) for item in _items(match, rank)]
        if len(turns) > 1:
            turn = backwards[bisect_left(backwards, start)]
            turns = [(turns[0][0], start, turn), (turns[1][0], turn, end)]
        for item, since, until in turns:
            asked, begun, ended = max(around[0], free) if since < around[1] else since, since, until
            if kernels or not alone:
                inside = busy[bisect_left(busy, (since,)) : bisect_left(busy, (until,))]
                nothing = free if kernels else until
                begun = min((each[1] for each in inside), default=nothing)
                ended = max((each[2] for each in inside), default=nothing)
            if found and found[-1][0] == item:
                found[-1][1][2] = ended
            else:
                found.append((item, [begun if kernels else asked, begun, ended]))
            free = ended
    return [Did(item, *(base + at / 1e3 for at in times)) for item, times in found], notes


def _items(match: re.Match, rank: int) -> list[Item]:
    """What a name says that a rank does in turn."""
    if match[4]:
        return [Action(rank, Kind(match[4][0]), int(match[5]))]
    actions = [parse(text) for text in match.group(2, 3) if text]
    return [Overlap(*actions)] if match[3] and match[1] == "pplab" else [*actions]


def _kernels(events: Sequence[dict]) -> tuple[list[Busy], list[str]]:
    """The kernels of the stream that has most, in the order of their launches, and a note."""
    kernels = [event for event in events if event.get("cat") == "kernel" and "nccl" not in event["name"].lower()]
    if not kernels:
        return [], []
    stream = Counter(event["tid"] for event in kernels).most_common(1)[0][0]
    launched = {
        event["args"].get("correlation"): event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    calls = [(launched.get(event["args"].get("correlation")), event) for event in kernels if event["tid"] == stream]
    found = sorted((call, event["ts"], event["ts"] + event["dur"]) for call, event in calls if call is not None)
    return found, ["times are those of a GPU's kernels, which don't show how long a message was waited for"]


def watch_torch() -> None:
    """Name every action of torch's pipelining, whatever the class, in the traces of this process: `pplab:0F1` is stage
    0's forward of microbatch 1.

    Call it before the first step; a second call changes nothing. The name is around the computing alone, without the
    wait for a message and the sending. The loss is part of the last stage's forward; an evaluation's backwards, which
    compute nothing, get no name. Costs a `record_function` an action.
    """
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from torch.distributed.pipelining.stage import _PipelineStageBase

    def backward(stage: Any, m: int, loss: object = None, full_backward: bool = True, **_: object) -> str:
        return f"{stage.stage_index}{'B' if full_backward else 'I'}{m}" * stage.has_backward

    def loss(_: object, stage: Any, output: object, target: object, m: int, *__: object) -> str:
        return f"{stage.stage_index}F{m}" * stage.is_last

    _name(_PipelineStageBase, "forward_one_chunk", lambda stage, m, *_, **__: f"{stage.stage_index}F{m}")
    _name(_PipelineStageBase, "backward_one_chunk", backward)
    _name(_PipelineStageBase, "backward_weight_one_chunk", lambda stage, m, **_: f"{stage.stage_index}W{m}")
    _name(_PipelineSchedule, "_maybe_compute_loss", loss)


def _name(owner: type, method: str, name: Callable[..., str]) -> None:
    """Put a span around every call of a method for which `name` gives one."""
    from torch.profiler import record_function

    plain = getattr(owner, method)

    @wraps(plain)
    def call(*given: Any, **options: Any) -> Any:
        text = name(*given, **options)
        with record_function(f"pplab:{text}") if text else nullcontext():
            return plain(*given, **options)

    if not hasattr(plain, "__wrapped__"):
        setattr(owner, method, call)
