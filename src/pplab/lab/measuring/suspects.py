"""What may make a job slow. Each suspect has the change that takes it away (see `job` for what can
change).

    pauses    actions that last far longer than the same rank's others
    slow      a rank against the same stage of other replicas; a stage against the others
    link      messages that take far longer than other links' once they are sent and asked for
    own gaps  what a rank idles without waiting: what all ranks have alike, and what one has more
    work      between the steps, by its name

A suspect is judged by medians. It becomes a cause if the job is shorter without it (see
`explaining`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median

from ...actions import parts
from ...schedule import plural
from ...text import parse
from .job import ACTION, OTHER, Change, Event, Message, TracedJob

_SLOW = 1.1  # times as long as the same work elsewhere
_PAUSE = 2  # times as long as the rank's same actions
_LINK = 3  # times as long as other links' messages
_NOTICED = 0.2  # of an action's usual time: what is shorter isn't looked at
_FEWEST = 4  # messages that were asked for before they were sent, to judge a link by
_PART = 0.2  # of the largest: an iteration with less hasn't got it


@dataclass(frozen=True, eq=False)
class Suspect:
    """Something that may make the job slow, and the job's times without it."""

    kind: str  # pauses, slow rank, slow stage, link, late rank, all ranks, work
    ranks: tuple[int, ...]
    what: str
    change: Change


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """`stage 2`, or `stages 0, 2`."""
    return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def find(seen: Seen) -> list[Suspect]:
    """Every suspect of a job."""
    if not seen.job.watched:
        return [*_slow(seen), *_work(seen)]
    return [*_pauses(seen), *_slow(seen), *_links(seen), *_gaps(seen), *_work(seen)]


class Seen:
    """A job's actions, sorted for comparing."""

    def __init__(self, job: TracedJob) -> None:
        self.job = job
        self.counted = {end for _, end in job.iterations} or {0}
        self.actions: dict[tuple[int, int, str], list[Event]] = defaultdict(list)
        for rank, row in job.rows.items():
            for event in row:
                if event.kind == ACTION:
                    action = parts(parse(event.name))[0]
                    self.actions[rank, action.stage, action.kind].append(event)
        self.usual = {
            key: median(event.duration for event in events) for key, events in self.actions.items()
        }
        self.pace: dict[int, dict[str, float]] = {}  # a rank's mean over its stages, by kind
        for rank in job.rows:
            kinds = {kind for owner, _, kind in self.usual if owner == rank}
            self.pace[rank] = {
                kind: fmean(
                    self.usual[key] for key in self.usual if (key[0], key[2]) == (rank, kind)
                )
                for kind in kinds
            }
        self.same: dict[tuple[int, ...], list[int]] = defaultdict(list)  # ranks by their stages
        for rank, stages in job.stages.items():
            self.same[stages].append(rank)

    @cached_property
    def noticed(self) -> float:
        return _NOTICED * median([value for value in self.usual.values() if value] or [0])

    @cached_property
    def pauses(self) -> dict[Event, float]:
        """Actions that last far longer than similar ones, each with how long those last."""
        return {
            event: self.usual[key]
            for key, events in self.actions.items()
            for event in events
            if event.duration > max(_PAUSE * self.usual[key], self.usual[key] + self.noticed)
        }

    def named(self, rank: int) -> str:
        return f"rank {rank} ({numbered('stage', self.job.stages[rank])})"

    def how_often(self, by_step: Mapping[int, float]) -> str:
        """In which iterations something happens, and for how long in one of them."""
        inside = {step: value for step, value in by_step.items() if step in self.counted}
        least = _PART * max(inside.values())
        found = sorted(step for step, value in inside.items() if value > least)
        usual = median(inside[step] for step in found)
        told = f"{usual:.0f} ms in {len(found)} of {plural(len(self.counted), 'iteration')}"
        every = {later - earlier for earlier, later in pairwise(found)}
        if len(found) == len(self.counted):
            return told
        if len(found) > 2 and len(every) == 1 and (apart := every.pop()) > 1:
            return f"{told}, each {apart} after the last"
        return told + f", to the end of {numbered('step', found)}" * (len(found) < 5)


def _pauses(seen: Seen) -> Iterator[Suspect]:
    for rank, row in seen.job.rows.items():
        mine = [event for event in row if event in seen.pauses and event.step in seen.counted]
        if mine:
            longest = max(mine, key=lambda event: event.duration)
            by_step: dict[int, float] = defaultdict(float)
            for event in mine:
                by_step[event.step] += event.duration - seen.pauses[event]
            what = (
                f"{seen.named(rank)} pauses in {plural(len(mine), 'action')}: "
                f"{seen.how_often(by_step)}. The longest is "
                f"{longest.name} of step {longest.step} with {longest.duration:.0f} ms, where its "
                "like take "
                f"{seen.pauses[longest]:.0f}"
            )
            yield Suspect(
                "pauses", (rank,), what, Change({event: seen.pauses[event] for event in mine})
            )


def _shortened(seen: Seen, ranks: Sequence[int], ratios: Mapping[str, float]) -> Change:
    """These ranks' actions, so many times shorter, by kind. A pause becomes as long as similar
    actions.
    """
    durations = {}
    for (rank, _, kind), events in seen.actions.items():
        if rank in ranks:
            for event in events:
                durations[event] = min(
                    event.duration, seen.pauses.get(event, event.duration)
                ) / max(1, ratios[kind])
    return Change(durations)


def _ratios(own: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """How many times as long as the others' each kind of action lasts."""
    usual = {
        kind: median([other[kind] for other in others if kind in other] or [0.0]) for kind in own
    }
    return {kind: own[kind] / value if value else 1.0 for kind, value in usual.items()}


def _slow(seen: Seen) -> Iterator[Suspect]:
    """Compare a rank with other replicas' ranks of the same stages, then stages, by their fastest
    replica, with the others.
    """
    fastest = {
        place: {kind: min(seen.pace[rank][kind] for rank in ranks) for kind in seen.pace[ranks[0]]}
        for place, ranks in seen.same.items()
    }
    for place, ranks in seen.same.items():
        stages = numbered("stage", place)
        for rank in ranks if len(ranks) > 1 else ():
            ratios = _ratios(
                seen.pace[rank], [seen.pace[other] for other in ranks if other != rank]
            )
            if (ratio := median(ratios.values())) > _SLOW:
                what = (
                    f"rank {rank} computes {ratio:.2f} times as long as the other replicas' ranks "
                    f"with {stages}"
                )
                yield Suspect("slow rank", (rank,), what, _shortened(seen, (rank,), ratios))
        ratios = _ratios(
            fastest[place], [pace for other, pace in fastest.items() if other != place]
        )
        if (ratio := median(ratios.values())) > _SLOW:
            if len(ranks) == 1:
                what = (
                    f"{seen.named(ranks[0])} computes {ratio:.2f} times as long as the other "
                    "ranks: its stage has more work or its GPU is slow, which one replica alone "
                    "doesn't tell apart"
                )
            else:
                what = (
                    f"{stages} computes {ratio:.2f} times as long as the other stages, in every "
                    f"replica ({numbered('rank', ranks)}), so it has more work"
                )
            yield Suspect("slow stage", tuple(ranks), what, _shortened(seen, ranks, ratios))


def link_times(job: TracedJob) -> dict[tuple[int, int], tuple[float, bool]]:
    """What a message of each link takes, and whether that is only a bound, because no rank waited
    for one.
    """
    by_pair: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for message in job.messages:
        if message.pair:
            by_pair[message.pair].append(message)
    found = {}
    for pair, messages in by_pair.items():
        told = [message.transit for message in messages if not message.bound]
        enough = len(told) >= min(_FEWEST, len(messages))
        times = told if enough else [message.transit for message in messages]
        found[pair] = median(times) if enough else min(times), not enough
    return found


def _links(seen: Seen) -> Iterator[Suspect]:
    """Slow links, with both directions as one. A link isn't suspected if only a bound is known."""
    times = {pair: time for pair, (time, bound) in link_times(seen.job).items() if not bound}
    # slow ways, with the others' time
    both: dict[tuple[int, ...], dict[tuple[int, int], float]] = defaultdict(dict)
    for pair, time in times.items():
        rest = median([each for other, each in times.items() if {*other} != {*pair}] or [0])
        if time > max(_LINK * rest, seen.noticed):
            both[tuple(sorted(pair))][pair] = max(0.0, rest)
    for ranks, ways in both.items():
        told = " and ".join(
            f"{times[way]:.1f} ms from rank {way[0]} to {way[1]}" for way in sorted(ways)
        )
        others = (
            f"other links take {max(ways.values()):.1f}"
            if len(times) > 2
            else "no other link is known"
        )
        transits = {
            message: min(message.transit, ways[message.pair])
            for message in seen.job.messages
            if message.pair in ways
        }
        what = f"the link of ranks {ranks[0]} and {ranks[1]} is slow: "
        what += f"once it is sent and asked for, a message takes {told}; {others}"
        yield Suspect("link", ranks, what, Change(transits=transits))


def _place(events: Sequence[Event]) -> str:
    """Where most of these events' own gaps are."""
    times: dict[str, float] = defaultdict(float)
    for event in events:
        before = event.before
        names = [each.name if each and each.kind == OTHER else "" for each in (before, event)]
        if before and before.step == event.step and before.kind != OTHER != event.kind:
            place = "within a step"
        else:
            place = f"after {names[0] or 'the step before'} and before {names[1] or 'the step'}"
        times[place] += event.gap
    return max(times, key=times.__getitem__)


def _gaps(seen: Seen) -> Iterator[Suspect]:
    """The time that all ranks idle alike in an iteration, then the time that one of them idles
    more.
    """
    large = {
        rank: [
            event
            for event in row
            if event.before and event.gap > seen.noticed and event.step in seen.counted
        ]
        for rank, row in seen.job.rows.items()
    }
    total: dict[int, dict[int, float]] = {rank: dict.fromkeys(seen.counted, 0.0) for rank in large}
    for rank, events in large.items():
        for event in events:
            total[rank][event.step] += event.gap
    common = {step: min(of_rank[step] for of_rank in total.values()) for step in seen.counted}

    def without(ranks: Iterable[int], by_step: Mapping[int, Mapping[int, float]]) -> Change:
        """Gaps without so much of a step."""
        return Change(
            gaps={
                event: event.gap * (1 - by_step[rank][event.step] / total[rank][event.step])
                for rank in ranks
                for event in large[rank]
            }
        )

    if len(total) > 1 and (most := max(common.values())) > seen.noticed:
        events = [
            event for each in large.values() for event in each if common[event.step] > _PART * most
        ]
        what = f"all ranks idle alike: {seen.how_often(common)}, {_place(events)}"
        yield Suspect("all ranks", tuple(total), what, without(total, dict.fromkeys(total, common)))
    for rank, of_rank in total.items():
        more = {step: value - common[step] * (len(total) > 1) for step, value in of_rank.items()}
        if (most := max(more.values())) > seen.noticed:
            events = [event for event in large[rank] if more[event.step] > _PART * most]
            what = f"{seen.named(rank)} is late by its own fault: {seen.how_often(more)}, "
            what += _place(events)
            yield Suspect("late rank", (rank,), what, without([rank], {rank: more}))


def _work(seen: Seen) -> Iterator[Suspect]:
    """Named work between the steps: all of it if all ranks have it, or what a rank has."""
    by_name: dict[str, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for rank, row in seen.job.rows.items():
        for event in row:
            if event.kind == OTHER and event.step in seen.counted:
                by_name[event.name][rank].append(event)
    for name, by_rank in by_name.items():
        times = {
            rank: sum(event.duration for event in by_rank.get(rank, ())) for rank in seen.job.rows
        }
        most = max(times, key=times.__getitem__)
        if times[most] / len(seen.counted) <= seen.noticed:
            continue
        alike = len(times) > 1 and min(times.values()) > times[most] / 2
        ranks = (
            [*times]
            if alike
            else [rank for rank, value in times.items() if value > times[most] / 2]
        )
        by_step: dict[int, float] = defaultdict(float)
        for event in by_rank[most]:
            by_step[event.step] += event.duration
        who = "all ranks" if alike else " and ".join(map(seen.named, ranks))
        what = f"{name} between the steps, on {who}: {seen.how_often(by_step)}"
        change = Change({event: 0.0 for rank in ranks for event in by_rank[rank]})
        yield Suspect("work", tuple(ranks), what, change)
