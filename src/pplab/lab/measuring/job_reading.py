"""Read the traces of all of a job's ranks into the graph of `job`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from math import inf
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from ...actions import Action, Item, parts
from ...deps import incoming, other_end
from ...schedule import Schedule
from ...timeline import Timeline
from .job import ACTION, ASK, OTHER, SEND, SUM, Event, Message, TracedJob
from .trace_file import RECORD, Post, Trace
from .traces import Step, clocks_ahead, cut, pipelines_of, timeline_of, traces_in, whole_steps

# gloo ends a send's span in its wait, which may come long after the message: it counts this much
_SEEN_MS = 0.5
_TOGETHER_MS = 1.0  # operators that follow each other within this are one event
_CLOSE_MS = 0.2  # how far a kernel's start may be from the action before or after it
_EXACT_MS = 0.02  # by which spans of one rank may overlap


@dataclass(eq=False)
class _Sent:
    """A message that the schedule has, with the events at its two ends, the action that uses it,
    and its receive.
    """

    step: int
    maker: Event
    user: Event
    used: Action
    receive: Action
    sent: Post | None = None  # when it was handed over, if the trace says so
    asked: Post | None = None


@dataclass
class _Rank:
    """What one rank's traces tell, by the job's clock."""

    rank: int
    traces: list[Trace]
    ahead: float = 0.0  # its host's clock, of that of its pipeline's first rank
    shift: float = 0.0  # from a trace's clock to the job's
    # in which torch's interpreter sends and asks; empty where something else ran it
    order: Mapping[Item, int] = field(default_factory=dict)
    row: list[Event] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)  # its first start and last end
    files: list[int] = field(default_factory=list)  # which trace each step is in, from 1 on
    # what it may have waited for
    done: list[tuple[float, Message, Event | None]] = field(default_factory=list)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        actions = chain(*(parts(did.item) for trace in self.traces for did in trace.dids))
        return tuple(sorted({action.stage for action in actions}))

    def posts(self, what: str) -> list[Post]:
        found = chain(*(getattr(trace, what) for trace in self.traces))
        return sorted(Post(post.start - self.shift, post.end - self.shift) for post in found)

    def add(self, kind: str, name: str, start: float, end: float, step: int) -> Event:
        self.row.append(Event(self.rank, kind, name, start, end, step))
        return self.row[-1]

    def step_at(self, time: float) -> int:
        """The step that a time is in, or the next step after it."""
        return min(bisect_right(self.steps, time, key=itemgetter(1)), len(self.steps) - 1)


class _Pipeline(NamedTuple):
    """A pipeline's ranks, in order, and the steps that are whole on all of them."""

    members: list[_Rank]
    steps: list[tuple[Schedule, list[Step]]]


def read_traces(*places: str | Path) -> TracedJob:
    """Read the traces of all ranks of a job, from files or from folders with files in them: .json
    or .json.gz.

    They are Chrome traces of torch.profiler, from torch's pipelining in all its classes, from
    torchtitan, which uses them, and from `lab.Profile`. Each may hold several steps, and a rank may
    have several. Steps that aren't whole on every rank are left out, and so are evaluations.
    Torch's process groups distinguish the pipelines. Ranks of one host share a clock, and messages
    both ways tie the clocks of several hosts. `timelines` has the steps of the slowest pipeline,
    with the wait for an action's message in `Timeline.others`, where the trace shows it.

    Raises ValueError for what isn't such a trace, and for ranks or stages that are missing or there
    twice. Raises OSError for a file that can't be opened. An error tells how to record what is
    missing.
    """
    traces = sorted(traces_in(places), key=lambda trace: trace.dids[0].start)
    notes = sorted({note for trace in traces for note in trace.notes})
    members = {
        rank: _Rank(rank, [trace for trace in traces if trace.rank == rank])
        for rank in sorted({trace.rank for trace in traces})
    }
    pipelines = _pipelines(members, traces, notes)
    _tie_clocks(pipelines, traces, notes)
    timelines = _slowest(pipelines, notes)
    if any(trace.by_rows for trace in traces):
        for pipeline in pipelines:
            _set_torchs_order(pipeline)

    # Every rank's events, from the last steps that all pipelines have, and what they waited for.
    count = min(len(pipeline.steps) for pipeline in pipelines)
    sent = []
    for pipeline in pipelines:
        for schedule, step in pipeline.steps[-count:]:
            sent += _actions(pipeline.members, schedule, step)
    messages = _messages(members, sent) + _sums([*members.values()])
    for member in members.values():
        _others(member)
        _link(member)
    _bound(members, messages)

    # A step and the next one are an iteration if one file has both.
    files = members[min(members)].files
    iterations = tuple((a, b) for a, b in pairwise(range(count)) if files[a] == files[b])
    if not iterations:
        notes.append(
            "one step alone doesn't tell what is between steps, nor an error: record three or more"
        )
    if not (watched := all(trace.watched for trace in traces)):
        notes.append(
            "without lab.watch_torch an action's time is from its first operator to its last, so "
            "pauses, links and late ranks can't be told apart"
        )
    return TracedJob(
        tuple(tuple(member.rank for member in pipeline.members) for pipeline in pipelines),
        {rank: member.stages for rank, member in members.items()},
        {rank: member.row for rank, member in members.items()},
        messages,
        timelines,
        iterations,
        watched,
        tuple(notes),
    )


def _pipelines(
    members: Mapping[int, _Rank], traces: Sequence[Trace], notes: list[str]
) -> list[_Pipeline]:
    """The job's pipelines, each with its whole steps. Raises ValueError for ranks that are in no
    pipeline, and for a pipeline without a whole step.
    """
    cuts: dict[int, list[Step]] = defaultdict(list)
    for trace in traces:
        cuts[trace.rank] += cut(trace.dids)
    items = {rank: {str(did.item) for did in chain(*cuts[rank])} for rank in members}
    grouped = pipelines_of(items, traces)
    if alone := [str(rank) for rank in items if rank not in chain(*grouped)]:
        raise ValueError(
            f"ranks {', '.join(alone)} are in no whole pipeline: give the traces of all ranks. "
            f"{RECORD}"
        )
    found = []
    for ranks in grouped:
        steps, why = whole_steps([cuts[rank] for rank in ranks])
        if not steps:
            raise ValueError(
                f"ranks {ranks} have no step with all forwards and backwards: {why}. {RECORD}"
            )
        if left := max(len(cuts[rank]) for rank in ranks) - len(steps):
            notes.append(
                f"steps left out that aren't whole on every rank, or have forwards alone: {left}"
            )
        found.append(_Pipeline([members[rank] for rank in ranks], steps))
    return found


def _tie_clocks(pipelines: Sequence[_Pipeline], traces: Sequence[Trace], notes: list[str]) -> None:
    """Set how far each rank's clock is ahead, and its shift to the job's clock, which begins with
    the first whole step.
    """
    for members, steps in pipelines:
        hosts = [member.traces[0].host for member in members]
        for member, ahead in zip(members, clocks_ahead(steps, hosts, notes), strict=True):
            member.ahead = ahead
    if len(pipelines) > 1 and len({trace.host for trace in traces}) > 1:
        notes.append(
            "clocks are tied within each pipeline alone, so waits for replicas on other hosts may "
            "be wrong"
        )
    zero = min(
        row[0].start - member.ahead
        for members, steps in pipelines
        for member, row in zip(members, steps[0][1], strict=True)
    )
    for pipeline in pipelines:
        for member in pipeline.members:
            member.shift = zero + member.ahead


def _slowest(pipelines: Sequence[_Pipeline], notes: list[str]) -> tuple[Timeline, ...]:
    """The steps of the pipeline whose steps take longest."""
    measured = [
        tuple(timeline_of(*step, [member.ahead for member in members]) for step in steps)
        for members, steps in pipelines
    ]
    slowest = max(measured, key=lambda steps: fmean(step.makespan for step in steps))
    if len(measured) > 1:
        members = pipelines[measured.index(slowest)].members
        ranks = ", ".join(str(member.rank) for member in members)
        notes.append(
            f"single steps are those of the slowest of {len(measured)} pipelines, of ranks {ranks}"
        )
    return slowest


def _set_torchs_order(pipeline: _Pipeline) -> None:
    """Set the places of each rank's sends and receives in its row, as torch's interpreter puts
    them.
    """
    from ..against_torch import lower_by_torch

    try:
        rows = lower_by_torch(pipeline.steps[0][0])
    except (ImportError, ValueError):  # no torch here, or rows that it didn't make
        return
    for member, row in zip(pipeline.members, rows, strict=True):
        member.order = {action: place for place, action in enumerate(row)}


def _actions(members: Sequence[_Rank], schedule: Schedule, step: Sequence[Step]) -> list[_Sent]:
    """Turn a step's actions into events of their ranks, and return the messages between ranks."""
    made: list[Event] = []
    for member, row in zip(members, step, strict=True):
        number = len(member.steps)
        for did in row:
            start, end = did.start - member.shift, did.end - member.shift
            made.append(member.add(ACTION, str(did.item), start, end, number))
        member.steps.append((made[-len(row)].start, made[-1].end))
        member.files.append(
            bisect_right(member.traces, row[0].start, key=lambda trace: trace.dids[0].start)
        )
    graph, sent = schedule.graph, []
    for i, user in enumerate(made):
        for used, maker in graph.awaited(i):
            source = made[graph.id_of(maker)]
            if source.rank != user.rank:
                action = graph.action(used)
                receive = incoming(action, schedule.num_stages)
                assert receive  # no other thing is awaited from another rank
                sent.append(_Sent(user.step, source, user, action, receive))
    return sent


def _messages(members: Mapping[int, _Rank], sent: Sequence[_Sent]) -> list[Message]:
    """Join each message with what the traces of its two ranks tell about it."""
    to, by = defaultdict(list), defaultdict(list)  # of a rank and a step
    for each in sent:
        to[each.user.rank, each.step].append(each)
        by[each.maker.rank, each.step].append(each)
    for rank, member in members.items():
        on_gpu = any(trace.on_gpu for trace in member.traces)
        asks, sends = member.posts("asked"), member.posts("sent")
        for step, (start, end) in enumerate(member.steps):
            before = member.steps[step - 1][1] if step else -inf
            after = member.steps[step + 1][0] if step + 1 < len(member.steps) else inf
            coming, going = to[rank, step], by[rank, step]
            asked = asks[bisect_left(asks, (before,)) : bisect_left(asks, (end,))]
            handed = sends[bisect_left(sends, (start,)) : bisect_left(sends, (after,))]
            if on_gpu:
                _join_kernels(sorted({*asked, *handed}), coming, going)
                continue
            order = member.order
            coming.sort(key=lambda each: order.get(each.receive, 0) if order else each.user.start)
            going.sort(
                key=lambda each: order.get(other_end(each.receive), 0) if order else each.maker.end
            )
            posted = asked[-len(coming) :]
            if len(posted) == len(coming):
                for each, post in zip(coming, posted, strict=True):
                    each.asked = post if post.start <= each.user.start >= post.end - 1 else None
            posted = handed[: len(going)]
            if len(posted) == len(going):
                for each, post in zip(going, posted, strict=True):
                    each.sent = post
    return [_message(members[each.maker.rank], members[each.user.rank], each) for each in sent]


def _join_kernels(kernels: Sequence[Post], coming: Sequence[_Sent], going: Sequence[_Sent]) -> None:
    """Join kernels that send and receive at once: the first one after an action sends, and the last
    one before an action receives.
    """
    for each in going:
        each.sent = next(
            (post for post in kernels if post.start >= each.maker.end - _CLOSE_MS), None
        )
    for each in coming:
        each.asked = next(
            (post for post in reversed(kernels) if post.end <= each.user.start + _CLOSE_MS), None
        )


def _message(source: _Rank, target: _Rank, each: _Sent) -> Message:
    posts, there = [each.maker], each.user.start
    if each.sent:
        posts = [
            source.add(SEND, f"send to {each.used}", each.sent.start, each.sent.start, each.step)
        ]
    if each.asked:
        posts.append(
            target.add(ASK, f"ask for {each.used}", each.asked.start, each.asked.start, each.step)
        )
        there = each.asked.end
    message = Message((source.rank, target.rank), posts, there)
    handed = each.sent.start if each.sent else each.maker.end
    message.bound = each.asked is None or each.asked.start > handed
    target.done.append((there, message, each.user))
    # else it was buffered, and its sender waited for nobody
    if each.sent and each.sent.end >= posts[-1].start:
        source.done.append((each.sent.end, message, None))
    elif (
        source.order and each.asked and not each.sent
    ):  # the interpreter waits for what it sends, at the step's end
        source.done.append((there, message, None))
    return message


def _sums(members: Sequence[_Rank]) -> list[Message]:
    """Add the sums over the ranks of the same stages. No rank has a sum before all have posted
    their part.
    """
    found = []
    for stages in sorted({member.stages for member in members}):
        replicas = [member for member in members if member.stages == stages]
        sums = [member.posts("summed") for member in replicas]
        if len(replicas) == 1 or len({*map(len, sums)}) > 1:
            continue
        for handed in zip(*sums, strict=True):
            posts = []
            for member, (start, _) in zip(replicas, handed, strict=True):
                step = member.step_at(start)
                posts.append(member.add(SUM, "sum over replicas", start, start, step))
            found.append(Message(None, posts, max(post.end for post in handed)))
            for member, post in zip(replicas, handed, strict=True):
                member.done.append((post.end, found[-1], None))
    return found


def _others(member: _Rank) -> None:
    """What the rank did between its steps, by name: spans that aren't inside others, with
    neighbouring operators as one.
    """
    last: Event | None = None
    for name, post in chain(*(trace.others for trace in member.traces)):
        start, end = post.start - member.shift, post.end - member.shift
        step = member.step_at(start)
        before = member.steps[step - 1][1] if step else inf
        if not (before <= start and end <= member.steps[step][0]) or (
            last and end <= last.end + _EXACT_MS
        ):
            continue
        if last and "::" in last.name and "::" in name and start <= last.end + _TOGETHER_MS:
            last.end = end
        else:
            last = member.add(OTHER, name, start, end, step)


def _link(member: _Rank) -> None:
    """Put a rank's events in order, and find for each what it may have waited for and the rank's
    own gap.
    """
    member.row.sort(key=lambda event: (event.start, event.kind == ACTION))
    done = sorted(member.done, key=lambda each: each[0])
    by_user = defaultdict(list)
    for _, message, user in done:
        by_user[user].append(message)
    passed, before = 0, None
    for event in member.row:
        event.before = before
        while passed < len(done) and done[passed][0] <= event.start + _EXACT_MS:
            end, message, _ = done[passed]
            # torch's interpreter waits for a message only where it is used, and for sums and sends
            # at a step's end
            if member.order and event.kind != OTHER:
                break
            if any(post.start >= event.start for post in message.posts):
                break  # so that whatever is needed began before, and nothing waits in a circle
            if not member.order or end > event.start - 2:
                event.needs.append((message, min(end - message.there, _SEEN_MS)))
            passed += 1
        for message in by_user[event]:
            if all(message is not needed for needed, _ in event.needs):
                event.needs.append((message, 0.0))
        _set_gap(event)
        # a kernel of messages may run during an action
        if before is None or event.end >= before.end:
            before = event


def _set_gap(event: Event) -> None:
    free = [event.before.end] if event.before else []
    came = [message.there + known for message, known in event.needs]
    event.gap = event.start - max(free + came, default=event.start)


def _bound(members: Mapping[int, _Rank], messages: Sequence[Message]) -> None:
    """Correct messages that torch's interpreter asked for early and found there. gloo's span tells
    only when it looked.

    The message gets its link's usual transit, and the rank gets the rest as its own gap.
    """
    looked = set()
    for member in members.values():
        for event in member.row if member.order else ():
            for message, _ in event.needs:
                if (
                    event.kind == ACTION
                    and event.before
                    and message.there - event.before.end < _SEEN_MS
                    and message.transit > 1
                    and message.pair
                ):
                    looked.add(message)
    known = defaultdict(list)
    for message in messages:
        if message.pair and message not in looked:
            known[message.pair].append(message.transit)
    for message in looked:
        seen = known[message.pair] or known[message.pair[::-1]] or [_SEEN_MS]
        shorter = min(message.transit, median(seen))
        message.there -= message.transit - shorter
        message.transit, message.bound = shorter, True
    for member in members.values():
        for event in member.row:
            if any(message in looked for message, _ in event.needs):
                _set_gap(event)
