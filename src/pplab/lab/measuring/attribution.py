"""Where the time of a measured step went: the step divided into named parts that add up to it exactly.

The parts come from replaying the step on machines that are less and less ideal. Each machine is a simulation with what
was measured, and what it adds to a rank's idle time is the part's:

    1. every action takes the mean of its kind over all stages         idle time: the schedule's own bubble
    2. every action takes the mean of its kind on its own stage        what is added: imbalance
    3. messages take their link's latency and bandwidth                what is added: communication
    4. every action starts late by the mean lateness on its rank       what is added: overhead
    5. the measured step itself                                        what is left: jitter

A part can be negative on a rank: a slow stage leaves its own rank less idle than the mean would.

What a link's latency and bandwidth are is said in `pplab.lab.link_fit`.

Every machine idles before an action or after the last one, so each measured gap between actions has its parts, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import NamedTuple

from ...actions import COMPUTE, Action, B, F, I, Kind, Overlap, W
from ...costs import Costs, Link, PerMicrobatch
from ...errors import number
from ...palette import NAME
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Span, Timeline, total
from ..forms import MICROSECONDS, events_of, write_events
from ..planning import message_time
from .link_fit import fit, observe

IDLE_PARTS = ("bubble", "imbalance", "communication", "overhead", "jitter")


class Gap(NamedTuple):
    """What a rank did between two actions that wasn't work, before the first, or after the last: its parts add up to
    the gap's idle time. A part can be negative, where a less ideal machine starts the next action earlier."""

    start: float
    end: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Where:
    """A step's parts: `by_rank[rank][part]` in the timeline's unit. Each rank's parts add up to `step_time`.

    `gaps[rank]` divides the same idle time by when it was: before each action, and after the last.
    `links[source, target]` is what messages between two ranks were found to take.
    """

    timeline: Timeline
    step_time: float
    by_rank: tuple[Mapping[str, float], ...]
    gaps: tuple[tuple[Gap, ...], ...] = field(repr=False, default=())
    links: Mapping[tuple[int, int], Link] = field(repr=False, default_factory=dict)

    @property
    def mean(self) -> dict[str, float]:
        """Each part's mean over the ranks."""
        names = dict.fromkeys(part for row in self.by_rank for part in row if part not in IDLE_PARTS)
        return {
            part: total(row.get(part, 0) for row in self.by_rank) / len(self.by_rank) for part in (*names, *IDLE_PARTS)
        }

    def to_dict(self) -> dict:
        """The parts as plain JSON values."""
        return {
            "step_time": self.step_time,
            "unit": self.timeline.unit,
            "mean": self.mean,
            "by_rank": list(self.by_rank),
            "links": [
                {
                    "source": source,
                    "target": target,
                    "latency": link.latency,
                    "bandwidth": link.bandwidth if link.bandwidth < inf else None,
                }
                for (source, target), link in sorted(self.links.items())
            ],
        }

    def to_perfetto(self, path: str | Path) -> None:
        """Write the timeline as Chrome trace JSON with more tracks per rank: one of the gaps, named by their largest
        part, and for every part a counter of how much of it there has been so far."""
        scale = MICROSECONDS.get(self.timeline.unit, 1e3)
        events = events_of(self.timeline)
        for rank, gaps in enumerate(self.gaps):
            track = {"pid": 1, "tid": rank}
            events.append({"ph": "M", **track, "name": "thread_name", "args": {"name": f"rank {rank}: why idle"}})
            so_far = dict.fromkeys(IDLE_PARTS, 0.0)
            for start, end, parts in gaps:
                if end > start:
                    largest = max(parts, key=parts.__getitem__)
                    slot = {"ts": start * scale, "dur": (end - start) * scale}
                    events.append({"ph": "X", "cat": "idle", "name": largest, **track, **slot, "args": parts})
                for part, value in parts.items():
                    so_far[part] += value
                    name = f"rank {rank}: {part} so far{self.timeline.unit and f' ({self.timeline.unit})'}"
                    counted = {"ts": end * scale, "args": {part: so_far[part]}}
                    events.append({"ph": "C", "pid": 1, "name": name, **counted})
        events.append({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "where the time went"}})
        write_events(events, path)

    def __str__(self) -> str:
        unit = self.timeline.unit
        names = [part for part in self.mean if any(row.get(part) for row in self.by_rank)]
        rows = [*((f"rank {rank}", row) for rank, row in enumerate(self.by_rank)), ("mean", self.mean)]
        lines = [f"{'part':16}" + "".join(f"{name:>10}" for name, _ in rows) + f"{'share':>8}"]
        for part in names:
            values = "".join(f"{row.get(part, 0):10.2f}" for _, row in rows)
            lines.append(f"{part:16}{values}{self.mean[part] / self.step_time:8.1%}")
        lines.append(f"{'step':16}" + f"{self.step_time:10.2f}" * len(rows) + f"{1:8.1%}")
        if self.mean["communication"]:
            (source, target), link = max(
                sorted(self.links.items()), key=lambda item: message_time(1, item[1].latency, item[1].bandwidth)
            )
            takes = f"{link.latency:.2f}" + f" and {1 / link.bandwidth:.2f} to pass" * (link.bandwidth < inf)
            lines.append(f"slowest link: rank {source} to rank {target}, a message takes {takes}")
        return f"{self.timeline.schedule.name}, {self.timeline.how}, per rank{unit and f' in {unit}'}\n" + "\n".join(
            lines
        )

    __repr__ = __str__


def where(timeline: Timeline) -> Where:
    """Divide a step, measured or simulated, into parts.

    Compute is named by kind, and by what else the ranks did (the optimizer). The step lasts until the last rank has
    ended, whatever it did last.
    """
    schedule = timeline.schedule
    step_time = max([timeline.makespan, *(span.end for span in timeline.others)])
    on_mean, on_stages, with_links, with_overhead = _machines(timeline)
    replays = [simulate(schedule, costs) for costs in (on_mean, on_stages, with_links, with_overhead)]
    levels = [replay.idle for replay in replays[:3]]
    work = replays[1].busy  # lateness is no work
    levels.append([replays[3].makespan - busy for busy in work])
    by_rank = []
    others: dict[int, list[Span]] = defaultdict(list)  # of every rank: its work beside the schedule
    for span in timeline.others:
        if isinstance(span.action, str):
            others[span.rank].append(span)
    for rank in range(schedule.num_ranks):
        did = _did(timeline.spans_of(rank), others[rank])
        idle = [*(level[rank] for level in levels), step_time - total(did.values())]
        added = [idle[0], *(after - before for before, after in pairwise(idle))]
        by_rank.append({**did, **dict(zip(IDLE_PARTS, added, strict=True))})
    gaps = (_gaps(timeline, others[rank], rank, step_time, replays) for rank in range(schedule.num_ranks))
    return Where(timeline, step_time, tuple(by_rank), tuple(map(tuple, gaps)), with_links.links)


def _gaps(
    timeline: Timeline, others: Sequence[Span], rank: int, step_time: float, replays: Sequence[Timeline]
) -> list[Gap]:
    """A rank's idle time before each of its actions and after the last, divided into parts."""
    lasts = [span.end - span.start for span in replays[1].spans_of(rank)]
    idle = [_idle_before(replay, rank, replay.makespan, lasts) for replay in replays[1:]]
    idle.insert(0, _idle_before(replays[0], rank, replays[0].makespan, None))
    spans = timeline.spans_of(rank)
    starts, ends = [*(s.start for s in spans), step_time], [0.0, *(s.end for s in spans)]
    measured = [start - end for start, end in zip(starts, ends, strict=True)]
    for other in others:  # work beside the schedule isn't idle time
        measured[bisect_right(starts, other.start, hi=len(spans))] -= other.end - other.start
    levels = zip(*idle, measured, strict=True)
    added = [[first, *(after - before for before, after in pairwise((first, *rest)))] for first, *rest in levels]
    return [
        Gap(end, start, dict(zip(IDLE_PARTS, values, strict=True)))
        for end, start, values in zip(ends, starts, added, strict=True)
    ]


def _idle_before(replay: Timeline, rank: int, makespan: float, lasts: Sequence[float] | None) -> list[float]:
    """Idle time before each action and after the last. What an action lasts beyond `lasts` is lateness before it."""
    idle, free = [], 0.0
    for position, (_, _, start, end) in enumerate(replay.spans_of(rank)):
        late = 0.0 if lasts is None else end - start - lasts[position]
        idle.append(start - free + late)
        free = end
    return [*idle, makespan - free]


def calibrate(timeline: Timeline, message: PerMicrobatch = 1, overhead: float = 0) -> Costs:
    """Costs by which to predict other schedules of the same stages on the same machine: the mean duration of every kind
    on every stage, latency and bandwidth of every link, and as `overhead` each rank's mean lateness, from being able to
    start an action to starting it.

    What launching costs *inside* an action can't be told from its work in a run with one size of microbatches, so it
    counts as work: that matters where the costs are to predict finer stages or other microbatches. Whoever knows it,
    for example from two sizes, gives it as `overhead`, in the timeline's unit: that is moved from every action's
    duration to the overhead. ValueError where an action takes less.

    `message` is what a stage gives the next one, as in `Costs`; with a run's `message_bytes` a link's bandwidth is in
    bytes per unit of time, and in messages without. It is found where messages queued for it or differed in size;
    elsewhere the whole time of a message is latency, and the bandwidth infinite.

    A schedule that splits no backward tells nothing of I and W apart, so it predicts only those that split none. Of one
    that splits all, a whole backward is taken to last as long as its halves; `calibrating` makes one that has both.
    """
    return _machines(timeline, message, number("overhead", overhead))[-1]


def calibrating(schedule: Schedule) -> Schedule:
    """The schedule with every other microbatch's backward in one piece, where it splits them.

    A run of it tells `calibrate` how long a backward takes both ways. The halves together last a little longer than
    the whole, so a run that has only halves predicts whole backwards too slow.

    >>> from pplab import build
    >>> print(*calibrating(build("ZB-H1", num_ranks=2, num_microbatches=2)).rows[0])
    0F0 0F1 0I0 0W0 0B1
    """

    def merged(row: Sequence) -> Iterator[Action | Overlap]:
        for item in row:
            kind = item.kind if type(item) is Action and item.microbatch % 2 else None
            if kind != W:
                yield item._replace(kind=B) if kind == I else item

    return replace(schedule, rows=[merged(row) for row in schedule.rows])


def _machines(timeline: Timeline, message: PerMicrobatch = 1, inside: float = 0) -> tuple[Costs, Costs, Costs, Costs]:
    """What the four replays take: see the module's text. Of what actions last, so much counts as overhead: `inside`."""
    schedule = timeline.schedule
    durations: dict[object, list[float]] = defaultdict(list)
    for span in timeline.spans:
        lasted = span.end - span.start
        if isinstance(span.action, Overlap):
            durations[tuple(sorted(half.kind for half in span.action))].append(lasted)
            durations[tuple(sorted(f"{half.stage}{half.kind}" for half in span.action))].append(lasted)
        else:
            durations[span.action.kind].append(lasted)
            durations[span.action.kind, span.action.stage].append(lasted)
    mean = {key: total(found) / len(found) - inside for key, found in durations.items()}
    if min(mean.values()) < 0:
        raise ValueError(f"overhead is {inside:g}, and an action takes {min(mean.values()) + inside:g}: give less")
    overlaps = {key: value for key, value in mean.items() if isinstance(key, tuple) and isinstance(key[1], str)}
    of_kinds = {pair: value for pair, value in overlaps.items() if pair[0] in COMPUTE}

    def of(kind: Kind, stage: int) -> float:
        return mean.get((kind, stage), mean.get(kind, 0))

    def costs(value: Callable[[Kind, int], float]) -> Costs:
        stages = range(schedule.num_stages)
        forward, whole, inputs, weights = ([value(kind, s) for s in stages] for kind in (F, B, I, W))
        if I not in mean:
            return Costs(forward, whole, 0, overlap=of_kinds, unit=timeline.unit)
        if B not in mean:
            whole = [i + w for i, w in zip(inputs, weights, strict=True)]
        return Costs(forward, inputs, weights, backward=whole, overlap=of_kinds, unit=timeline.unit)

    found, lateness = observe(timeline, message)
    action = total(timeline.busy) / len(timeline.spans)
    links = {pair: fit(messages, action, total(lateness) / len(lateness)) for pair, messages in found.items()}
    holders = [place if isinstance(place, tuple) else (place,) for place in schedule.placement]
    late = [total(lateness[rank] for rank in ranks) / len(ranks) for ranks in holders]
    on_stages = replace(costs(of), overlap=overlaps)
    with_links = replace(on_stages, links=links, message=message)
    with_overhead = replace(with_links, overhead=[inside + each for each in late])
    return costs(lambda kind, _: mean.get(kind, 0)), on_stages, with_links, with_overhead


def _did(spans: Sequence[Span], others: Sequence[Span]) -> dict[str, float]:
    """What a rank spent on each kind of work."""
    did: dict[str, float] = defaultdict(float)
    for span in spans:
        name = "overlap" if isinstance(span.action, Overlap) else NAME[span.action.kind]
        did[name] += span.end - span.start
    for span in others:
        did[span.action] += span.end - span.start
    return dict(did)
