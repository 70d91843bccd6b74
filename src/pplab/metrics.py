"""What a timeline means: what each idle interval waits for, the critical path, what is held, and a table."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass

from .actions import Action, Overlap, parts
from .costs import Memory
from .deps import made_by, outgoing
from .schedule import Schedule
from .timeline import Span, Timeline


@dataclass(frozen=True)
class Idle:
    """A stretch of time in which a rank does nothing."""

    rank: int
    start: float
    end: float
    phase: str  # "fill" before the rank's first action, "drain" after its last, "inner" between
    waits_for: Action | None = None  # what it needs from another rank; None when draining or ready
    on_rank: int | None = None
    until: float | None = None  # when that ends; what it makes arrives later

    def __str__(self) -> str:
        when = f"rank {self.rank} is idle from {self.start:g} to {self.end:g}"
        if self.phase == "drain":
            return f"{when}: it has nothing left to do"
        if self.waits_for is None:
            return f"{when}: it could go on"
        if self.until >= self.end:
            return f"{when}: it waits for {self.waits_for} on rank {self.on_rank}"
        return f"{when}: it waits for what {self.waits_for} on rank {self.on_rank} has made by {self.until:g}"


def idle_intervals(timeline: Timeline) -> tuple[Idle, ...]:
    """Every idle interval of every rank, with what it waits for."""
    schedule, starts, ends = timeline.schedule, timeline.starts, timeline.ends
    columns, gates = schedule.columns, set(schedule.columns.gates)
    dep, makers, ranks = schedule.graph.dep, made_by(columns, schedule.graph), columns.ranks()
    found = []
    for rank in range(schedule.num_ranks):
        now, phase = 0, "fill"
        for i in range(*columns.bounds[rank : rank + 2]):
            if i in gates:
                continue
            if starts[i] > now:
                users = (i - 1, i) if i - 1 in gates else (i,)
                last = max(
                    (u for u in users if dep[u] >= 0 and ranks[dep[u]] != rank), key=lambda u: ends[dep[u]], default=-1
                )
                awaited = (columns.action(makers[last]), ranks[dep[last]], ends[dep[last]]) if last >= 0 else ()
                found.append(Idle(rank, now, starts[i], phase, *awaited))
            now, phase = ends[i], "inner"
        if now < timeline.makespan:
            found.append(Idle(rank, now, timeline.makespan, "drain"))
    return tuple(found)


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """One longest chain of actions, each of which starts late because of the one before it. First to last."""
    columns, dep, starts, ends = timeline.schedule.columns, timeline.schedule.graph.dep, timeline.starts, timeline.ends
    firsts, gates, ranks = set(columns.bounds[:-1]), set(columns.gates), columns.ranks()
    i = max((i for i in range(len(ends)) if i not in gates), key=ends.__getitem__)
    path = []
    while i >= 0:
        first = i - 1 if i - 1 in gates else i
        item = columns.action(i) if first == i else Overlap(columns.action(first), columns.action(i))
        path.append(Span(ranks[i], item, starts[i], ends[i]))
        # an overlap's needs are those of both its halves
        awaited = max((d for d in dep[first : i + 1] if d >= 0), key=ends.__getitem__, default=-1)
        i = -1 if first in firsts else first - 1
        if awaited >= 0 and (i < 0 or path[-1].start > ends[i]):
            i = awaited
    return tuple(reversed(path))


def in_flight(timeline: Timeline) -> tuple[tuple[list[float], list[int]], ...]:
    """Per rank, how many forwards' activations are held over time: times and the count from each on.

    Held from the start of F until the end of B, or of W when the backward is split.
    """
    return held(timeline, Memory())


def held(timeline: Timeline, memory: Memory) -> tuple[tuple[list[float], list[float]], ...]:
    """Per rank, what is held over time, in the unit of `memory`: times and what is held from each on."""
    schedule = timeline.schedule
    memory.check(schedule.num_stages)
    curves = []
    for rank in range(schedule.num_ranks):
        times, amounts = [0], [memory.constant(schedule.stages_of(rank))]
        for i, both in enumerate(schedule.held(rank, memory), schedule.columns.bounds[rank]):
            for time, amount in zip((timeline.starts[i], timeline.ends[i]), both, strict=True):
                if time == times[-1]:
                    amounts[-1] = amount
                elif amount != amounts[-1]:
                    times.append(time)
                    amounts.append(amount)
        curves.append((times, amounts))
    return tuple(curves)


def num_messages(schedule: Schedule) -> int:
    """Messages between ranks in one step: activations and gradients that cross from one rank to another."""
    home = schedule.home()
    return sum(
        home[message.receive.stage, message.receive.microbatch] != rank
        for rank, row in enumerate(schedule.rows)
        for item in row
        for action in parts(item)
        if (message := outgoing(action, schedule.num_stages))
    )


_COLUMNS = (
    "schedule",
    "makespan",
    "bubble fraction",
    "bubble ratio",
    "span bubble",
    "peak held",
    "messages",
    "parameters",
)


class Table(list):
    """Rows of cells under `columns`, which print as text and draw themselves in a notebook."""

    columns: tuple[str, ...] = _COLUMNS

    def __str__(self) -> str:
        lines = [self.columns, *self]
        widths = [max(len(line[c]) for line in lines) for c in range(len(self.columns))]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *body = (
            "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line)
            for tag, line in (("th", self.columns), *(("td", line) for line in self))
        )
        rows = "".join(f"<tr>{cells}</tr>" for cells in body)
        return (
            f'<div class="pplab-table" style="overflow-x:auto"><table class="table"><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )


def table(timelines: Iterable[Timeline]) -> Table:
    """The schedules' balance sheet, a row each.

    Peaks are in full-stage units (a stage of a rank that holds two counts half), parameters in copies of the model.
    """
    return Table(_balance(timeline) for timeline in timelines)


def _balance(timeline: Timeline) -> tuple[str, ...]:
    schedule = timeline.schedule
    per_replica = schedule.num_ranks // len(schedule.replicas)
    peaks = ", ".join(f"{peak * per_replica / schedule.num_stages:g}" for peak in timeline.peak_in_flight)
    return (
        schedule.name,
        f"{timeline.makespan:g}{timeline.unit and ' ' + timeline.unit}",
        f"{timeline.bubble_fraction:.4f}",
        f"{timeline.bubble_ratio:.4f}",
        f"{timeline.span_bubble_fraction:.4f}",
        peaks,
        str(num_messages(schedule)),
        str(schedule.copies),
    )


def summary(timeline: Timeline) -> dict:
    """The figures of a timeline as plain JSON values."""
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_ratio": timeline.bubble_ratio,
        "span_bubble_fraction": timeline.span_bubble_fraction,
        "peak_in_flight": timeline.peak_in_flight,
        "busy": timeline.busy,
        "idle": timeline.idle,
        "messages": num_messages(schedule),
    }
