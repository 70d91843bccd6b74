"""A timeline as Chrome trace JSON, which the Perfetto viewer opens."""

from __future__ import annotations

import json
from pathlib import Path

from ...actions import Action, Overlap, parts
from ...deps import incoming, outgoing
from ...errors import expect
from ...timeline import Timeline

MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0}


def to_perfetto(timeline: Timeline, path: str | Path) -> None:
    """Write Chrome trace JSON, with a track per rank and an arrow per message. If a simulation has
    no unit, one unit is shown as one millisecond.

    Click an action to see its stage and microbatch. Two actions at once are one event, which shows
    both.
    """
    expect(Timeline, timeline=timeline)
    scale = MICROSECONDS.get(timeline.unit, 1e3)
    num_stages = timeline.schedule.num_stages
    events: list[dict] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": repr(timeline)[10:-1]}}
    ]
    events += [
        {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        for rank in range(timeline.schedule.num_ranks)
    ]
    for category, spans in (("schedule", timeline.spans), ("other", timeline.others)):
        for rank, action, start, end in spans:
            slot = {"pid": 0, "tid": rank, "ts": start * scale, "dur": (end - start) * scale}
            said = {"args": _said(action)} if isinstance(action, (Action, Overlap)) else {}
            events.append({"ph": "X", "name": str(action), "cat": category, **slot, **said})

    users = {incoming(a, num_stages): span for span in timeline.spans for a in parts(span.action)}
    for span in timeline.spans:
        for action in parts(span.action):
            message = outgoing(action, num_stages)
            user = message and users[message.receive]
            if user and user.rank != span.rank:
                flow = {
                    "pid": 0,
                    "cat": "message",
                    "name": str(message.receive),
                    "id": str(message.send),
                }
                # An arrow binds to the slice around its time: just before the producer's end, at
                # the user's start.
                leave = span.end - 1e-3 * (span.end - span.start)
                events.append({"ph": "s", "tid": span.rank, "ts": leave * scale, **flow})
                events.append(
                    {"ph": "f", "bp": "e", "tid": user.rank, "ts": user.start * scale, **flow}
                )
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _said(item: Action | Overlap) -> dict[str, str]:
    """The stage and microbatch of each action of an item."""
    return {
        str(action): f"stage {action.stage}, microbatch {action.microbatch}"
        for action in parts(item)
    }
