"""Divide the time of a measured step into named parts that add up to it exactly.

The step is replayed on machines that are less and less ideal. Each machine is a simulation with
what was measured, and what it adds to a rank's idle time is a part:

    1. every action takes the mean of its kind over all stages  idle time: the schedule's own bubble
    2. every action takes the mean of its kind on its own stage  what is added: imbalance
    3. messages take their link's latency                       what is added: communication
    4. every action starts late by the mean lateness on its rank  what is added: overhead
    5. the measured step itself                                 what is left: jitter

A part can be negative on a rank. For example, a slow stage leaves its own rank less idle than the
mean would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ...actions import COMPUTE, Action, B, F, I, Kind, Overlap, W, parts
from ...costs import Costs, Link
from ...errors import expect
from ...palette import NAME
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Span, Timeline, total
from .deliveries import link_of, observe

IDLE_PARTS = ("bubble", "imbalance", "communication", "overhead", "jitter")


@dataclass(frozen=True)
class Where:
    """The parts of a step: `by_rank[rank][part]` in the timeline's unit. Each rank's parts add up
    to `step_time`.

    `links[source, target]` is the time that messages between two ranks were found to take.
    """

    timeline: Timeline
    step_time: float
    by_rank: tuple[Mapping[str, float], ...]
    links: Mapping[tuple[int, int], Link] = field(repr=False, default_factory=dict)

    @property
    def mean(self) -> dict[str, float]:
        """Each part's mean over the ranks."""
        names = dict.fromkeys(
            part for row in self.by_rank for part in row if part not in IDLE_PARTS
        )
        return {
            part: total(row.get(part, 0) for row in self.by_rank) / len(self.by_rank)
            for part in (*names, *IDLE_PARTS)
        }

    def to_dict(self) -> dict:
        """The parts as plain JSON values."""
        return {
            "step_time": self.step_time,
            "unit": self.timeline.unit,
            "mean": self.mean,
            "by_rank": list(self.by_rank),
        }

    def __str__(self) -> str:
        unit = self.timeline.unit
        names = [part for part in self.mean if any(row.get(part) for row in self.by_rank)]
        rows = [
            *((f"rank {rank}", row) for rank, row in enumerate(self.by_rank)),
            ("mean", self.mean),
        ]
        lines = [f"{'part':16}" + "".join(f"{name:>10}" for name, _ in rows) + f"{'share':>8}"]
        for part in names:
            values = "".join(f"{row.get(part, 0):10.2f}" for _, row in rows)
            lines.append(f"{part:16}{values}{self.mean[part] / self.step_time:8.1%}")
        lines.append(f"{'step':16}" + f"{self.step_time:10.2f}" * len(rows) + f"{1:8.1%}")
        return (
            f"{self.timeline.schedule.name}, {self.timeline.how}, per rank"
            f"{unit and f' in {unit}'}\n" + "\n".join(lines)
        )

    __repr__ = __str__


def where(timeline: Timeline) -> Where:
    """Divide a step, measured or simulated, into parts.

    Compute is named by kind, and other work by its name, such as the optimizer. The step lasts
    until the last rank has finished its last work.
    """
    expect(Timeline, timeline=timeline)
    schedule = timeline.schedule
    step_time = max([timeline.makespan, *(span.end for span in timeline.others)])
    machines = _machines(timeline)
    replays = [simulate(schedule, costs) for costs in machines]
    levels = [replay.idle for replay in replays[:3]]
    # lateness is no work
    levels.append([replays[3].makespan - busy for busy in replays[1].busy])
    by_rank = []
    others: dict[int, list[Span]] = defaultdict(list)  # of every rank: its work beside the schedule
    for span in timeline.others:
        if isinstance(span.action, str):
            others[span.rank].append(span)
    for rank in range(schedule.num_ranks):
        did = _did(timeline.spans_of(rank), others[rank])
        idle = [*(level[rank] for level in levels), step_time - total(did.values())]
        added = [after - before for before, after in pairwise([0, *idle])]
        by_rank.append({**did, **dict(zip(IDLE_PARTS, added, strict=True))})
    return Where(timeline, step_time, tuple(by_rank), machines[-1].links)


def calibrate(timeline: Timeline) -> Costs:
    """Costs that predict other schedules of the same stages on the same machine: the mean duration
    of every kind on every stage, the latency of every link, and as `overhead` each rank's mean
    lateness, from being able to start an action to starting it.

    The cost of launching *inside* an action can't be separated from its work in a run with one size
    of microbatches, so it counts as work. This matters if the costs are to predict finer stages or
    other microbatches.

    The whole time of a message counts as latency. If a link is so narrow that messages queue,
    `measure_link` finds its bandwidth.

    A schedule that splits no backward can't separate I from W, so its costs only predict schedules
    that don't split. If a schedule splits all, a whole backward is taken to last as long as its
    halves. `calibrating` makes a schedule that has both.
    """
    return _machines(timeline)[-1]


def calibrating(schedule: Schedule) -> Schedule:
    """The schedule with every other microbatch's backward in one piece, if it splits backwards.

    From its run, `calibrate` learns how long a backward takes both ways. The halves together last a
    little longer than the whole, so a run that has only halves predicts whole backwards too slow.

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


def _machines(timeline: Timeline) -> tuple[Costs, ...]:
    """The durations in the four replays (see the module's text)."""
    schedule, mean = timeline.schedule, _means(timeline)
    of_kinds = {halves: lasts for halves, lasts in mean.items() if halves[0] in COMPUTE}
    on_stages = _costs(timeline, mean)
    found, lateness = observe(timeline)
    links = {pair: link_of(messages) for pair, messages in found.items()}
    with_links = replace(on_stages, links=links)
    holders = [place if isinstance(place, tuple) else (place,) for place in schedule.placement]
    late = [total(lateness[rank] for rank in ranks) / len(ranks) for ranks in holders]
    return _costs(timeline, of_kinds), on_stages, with_links, replace(with_links, overhead=late)


def _means(timeline: Timeline) -> dict[tuple[str, ...], float]:
    """The mean duration of every action by its kind, such as ("F",), and by its kind on its stage,
    such as ("0F",). An overlap has both of its halves, sorted: ("B", "F") and ("0F", "1B").
    """
    durations: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for span in timeline.spans:
        halves = parts(span.action)
        kinds = sorted(half.kind for half in halves)
        on_stages = sorted(f"{half.stage}{half.kind}" for half in halves)
        for key in (kinds, on_stages):
            durations[tuple(key)].append(span.end - span.start)
    return {key: total(found) / len(found) for key, found in durations.items()}


def _costs(timeline: Timeline, mean: Mapping[tuple[str, ...], float]) -> Costs:
    """What every kind takes on every stage: its mean there, or else its mean over all stages."""

    def on_stages(kind: Kind) -> list[float]:
        usual, stages = mean.get((kind,), 0), range(timeline.schedule.num_stages)
        return [mean.get((f"{stage}{kind}",), usual) for stage in stages]

    forward, whole, inputs, weights = map(on_stages, (F, B, I, W))
    overlap = {halves: lasts for halves, lasts in mean.items() if len(halves) > 1}
    if (I,) not in mean:
        return Costs(forward, whole, 0, overlap=overlap, unit=timeline.unit)
    if (B,) not in mean:
        whole = [i + w for i, w in zip(inputs, weights, strict=True)]
    return Costs(forward, inputs, weights, backward=whole, overlap=overlap, unit=timeline.unit)


def _did(spans: Sequence[Span], others: Sequence[Span]) -> dict[str, float]:
    """How long a rank spent on each kind of work."""
    did: dict[str, float] = defaultdict(float)
    for span in spans:
        name = "overlap" if isinstance(span.action, Overlap) else NAME[span.action.kind]
        did[name] += span.end - span.start
    for span in others:
        did[span.action] += span.end - span.start
    return dict(did)
