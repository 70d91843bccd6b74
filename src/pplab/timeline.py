"""When things happened: one type for what a simulation predicts and for what real processes did."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import NamedTuple

from .actions import Action, Overlap, parse, parts
from .deps import incoming, outgoing
from .schedule import Schedule


class Span(NamedTuple):
    """Something that a rank was busy with. `action` is an item of the schedule, a communication action, or a label."""

    rank: int
    action: Action | Overlap | str
    start: float
    end: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """The start and end of every action of a schedule, and what else the ranks did.

    `starts` and `ends` are in the order of `schedule.columns` (in `unit`, from 0). `others` are spans beside the
    schedule: waiting for a message (its receive action), the optimizer's step.
    """

    schedule: Schedule
    starts: Sequence[float] = field(repr=False)
    ends: Sequence[float] = field(repr=False)
    unit: str = ""
    how: str = "simulated"  # or "measured", or "paced": measured, with actions stretched to given durations
    others: tuple[Span, ...] = ()

    @property
    def makespan(self) -> float:
        """From 0 to the end of the last action of any rank."""
        return max(self.ends)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per rank, the time spent in actions."""
        ranks = range(self.schedule.num_ranks)
        return tuple(total(end - start for start, end in self._row(rank)) for rank in ranks)

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank, the time not spent in actions, until the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all rank-time: idle / (P * makespan). For 1F1B (P-1)/(M+P-1)."""
        return total(self.idle) / (self.schedule.num_ranks * self.makespan)

    @property
    def bubble_ratio(self) -> float:
        """Idle time relative to the work: idle / ideal. For 1F1B (P-1)/M."""
        return total(self.idle) / total(self.busy)

    @cached_property
    def spans_per_rank(self) -> tuple[float, ...]:
        """Per rank, from the start of its first action to the end of its last."""
        bounds = self.schedule.columns.bounds
        return tuple(self.ends[end - 1] - self.starts[first] for first, end in pairwise(bounds))

    @property
    def span_bubble_fraction(self) -> float:
        """The zero-bubble papers' bubble rate: 1 - work / span for the rank whose span is the longest."""
        rank = max(range(self.schedule.num_ranks), key=self.spans_per_rank.__getitem__)
        return 1 - self.busy[rank] / self.spans_per_rank[rank]

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank, the most forwards whose activations are held at once: F until B, or until W when split."""
        return self.schedule.peak_in_flight

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every action of the schedule with its rank, start and end, rank by rank in order."""
        return tuple(span for rank in range(self.schedule.num_ranks) for span in self.spans_of(rank))

    def spans_of(self, rank: int) -> list[Span]:
        """A rank's actions with start and end, in order."""
        row = self.schedule.rows[rank]
        return [Span(rank, item, start, end) for item, (start, end) in zip(row, self._row(rank), strict=True)]

    def _row(self, rank: int) -> Iterator[tuple[float, float]]:
        """(start, end) of every item of a rank's row. An overlap's gate is no item of its own."""
        ids = range(*self.schedule.columns.bounds[rank : rank + 2])
        if gates := set(self.schedule.columns.gates):
            ids = [i for i in ids if i not in gates]
        return ((self.starts[i], self.ends[i]) for i in ids)

    def to_dict(self) -> dict:
        """Everything needed to redraw the run, as plain JSON values."""
        return {
            "schedule": self.schedule.name,
            "rows": [[str(item) for item in row] for row in self.schedule.rows],
            "placement": self.schedule.placement,
            "unit": self.unit,
            "how": self.how,
            "spans": [[s.rank, str(s.action), s.start, s.end] for s in self.spans],
            "others": [[s.rank, str(s.action), s.start, s.end] for s in self.others],
        }

    @classmethod
    def from_dict(cls, data: dict) -> Timeline:
        """The timeline that `to_dict` wrote."""
        schedule = Schedule(data["rows"], data["schedule"])
        times = [(start, end) for _, _, start, end in data["spans"]]
        starts, ends = [], []
        items = iter(times)
        for row in schedule.rows:
            for item in row:
                start, end = next(items)
                starts += [start] * (1 + isinstance(item, Overlap))
                ends += [start, end] if isinstance(item, Overlap) else [end]
        others = tuple(
            Span(rank, _action_or_label(text), start, end) for rank, text, start, end in data.get("others", ())
        )
        return cls(schedule, starts, ends, data["unit"], data["how"], others)

    def to_perfetto(self, path: str | Path) -> None:
        """Write Chrome trace JSON, which the Perfetto viewer opens: a track per rank, an arrow per message.

        A simulation without a unit shows one of its units as one millisecond.
        """
        Path(path).write_text(json.dumps({"traceEvents": chrome_events(self), "displayTimeUnit": "ms"}))

    def __repr__(self) -> str:
        return f"<Timeline {self.schedule.name}, {self.how}: makespan {self.makespan:g}{self.unit and ' ' + self.unit}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple[dict, dict]:
        """Its Gantt chart."""
        from matplotlib import pyplot as plt

        from .figures import figure_bundle
        from .plot import gantt

        figure = gantt(self).figure
        plt.close(figure)  # or the notebook shows it once more
        return figure_bundle(figure)


def total(values: Iterable[float]) -> float:
    """The sum from left to right, on every Python: `sum` compensates rounding from 3.12 on, numpy doesn't."""
    return reduce(add, values, 0)


def _action_or_label(text: str) -> Action | Overlap | str:
    try:
        return parse(text)
    except ValueError:
        return text


MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0}


def chrome_events(timeline: Timeline) -> list[dict]:
    """The timeline in Chrome's trace event format, times in microseconds."""
    scale = MICROSECONDS.get(timeline.unit, 1e3)
    num_stages = timeline.schedule.num_stages
    events: list[dict] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": repr(timeline)[10:-1]}}]
    events += [
        {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        for rank in range(timeline.schedule.num_ranks)
    ]
    for category, spans in (("schedule", timeline.spans), ("other", timeline.others)):
        for rank, action, start, end in spans:
            slot = {"pid": 0, "tid": rank, "ts": start * scale, "dur": (end - start) * scale}
            events.append({"ph": "X", "name": str(action), "cat": category, **slot})

    users = {incoming(a, num_stages): span for span in timeline.spans for a in parts(span.action)}
    for span in timeline.spans:
        for action in parts(span.action):
            message = outgoing(action, num_stages)
            user = message and users[message.receive]
            if user and user.rank != span.rank:
                flow = {"pid": 0, "cat": "message", "name": str(message.receive), "id": str(message.send)}
                # An arrow binds to the slice around its time: just before the producer's end, at the user's start.
                leave = span.end - 1e-3 * (span.end - span.start)
                events.append({"ph": "s", "tid": span.rank, "ts": leave * scale, **flow})
                events.append({"ph": "f", "bp": "e", "tid": user.rank, "ts": user.start * scale, **flow})
    return events
