"""Read the traces of all of a job's ranks into the graph of `job`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import inf
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median

from ...actions import Action, F, parts
from ...schedule import Schedule
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
    """A message that the schedule has, with the events and the actions at its two ends."""

    step: int
    maker: Event
    user: Event
    made: Action
    used: Action
    sent: Post | None = None  # when it was handed over, if the trace says so
    asked: Post | None = None

    def row(self, target: bool) -> str:
        """The name that torch's rows give its receive, or its send."""
        action, way = (self.used, "RECV") if target else (self.made, "SEND")
        return f"{action.stage}{way}_{'F' if action.kind == F else 'B'}{action.microbatch}"


@dataclass
class _Rank:
    """What one rank's traces tell, by the job's clock."""

    rank: int
    traces: list[Trace]
    shift: float  # from a trace's clock to the job's
    # in which torch's interpreter sends and asks; empty where something else ran it
    order: Mapping[str, int]
    row: list[Event] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)  # its first start and last end
    files: list[int] = field(default_factory=list)  # which trace each step is in
    # what it may have waited for
    done: list[tuple[float, Message, Event | None]] = field(default_factory=list)

    def posts(self, what: str) -> list[Post]:
        found = chain(*(getattr(trace, what) for trace in self.traces))
        return sorted(Post(post.start - self.shift, post.end - self.shift) for post in found)

    def add(self, kind: str, name: str, span: Post, step: int) -> Event:
        self.row.append(Event(self.rank, kind, name, *span, step))
        return self.row[-1]

    def step_at(self, time: float) -> int:
        """The step that a time is in, or the next step after it."""
        return min(bisect_right(self.steps, time, key=itemgetter(1)), len(self.steps) - 1)


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
    steps: dict[int, list[Step]] = defaultdict(list)
    for trace in traces:
        steps[trace.rank] += cut(trace.dids)
    items = {rank: {str(did.item) for did in chain(*steps[rank])} for rank in sorted(steps)}
    pipelines = pipelines_of(items, traces)
    if alone := [str(rank) for rank in items if rank not in chain(*pipelines)]:
        raise ValueError(
            f"ranks {', '.join(alone)} are in no whole pipeline: give the traces of all ranks. "
            f"{RECORD}"
        )
    matched = []
    for ranks in pipelines:
        found, why = whole_steps([steps[rank] for rank in ranks])
        if not found:
            raise ValueError(
                f"ranks {ranks} have no step with all forwards and backwards: {why}. {RECORD}"
            )
        if left := max(len(steps[rank]) for rank in ranks) - len(found):
            notes.append(
                f"steps left out that aren't whole on every rank, or have forwards alone: {left}"
            )
        matched.append(found)
    members, ahead = _ranks(traces, pipelines, matched, notes)
    measured = [
        tuple(timeline_of(*step, [ahead[rank] for rank in ranks]) for step in found)
        for ranks, found in zip(pipelines, matched, strict=True)
    ]
    slowest = max(measured, key=lambda steps: fmean(step.makespan for step in steps))
    if len(measured) > 1:
        ranks = ", ".join(map(str, pipelines[measured.index(slowest)]))
        notes.append(
            f"single steps are those of the slowest of {len(measured)} pipelines, of ranks {ranks}"
        )
    count = min(map(len, matched))
    sent = []
    for ranks, found in zip(pipelines, matched, strict=True):
        for schedule, step in found[-count:]:
            sent += _actions([members[rank] for rank in ranks], schedule, step)
    messages = _messages(members, sent)
    stages = {
        rank: tuple(
            sorted({action.stage for did in chain(*steps[rank]) for action in parts(did.item)})
        )
        for rank in members
    }
    messages += _sums(members, stages)
    for member in members.values():
        _others(member)
        _link(member)
    _bound(members, messages)
    files = next(iter(members.values())).files
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
    rows = {rank: member.row for rank, member in members.items()}
    return TracedJob(
        tuple(map(tuple, pipelines)),
        stages,
        rows,
        messages,
        slowest,
        iterations,
        watched,
        tuple(notes),
    )


def _ranks(
    traces: Sequence[Trace],
    pipelines: Sequence[Sequence[int]],
    matched: Sequence[Sequence[tuple[Schedule, list[Step]]]],
    notes: list[str],
) -> tuple[dict[int, _Rank], dict[int, float]]:
    """Every rank, with its order of messages if torch's interpreter ran it, and how far its clock
    is ahead.
    """
    ahead, order = {}, {}
    for ranks, found in zip(pipelines, matched, strict=True):
        hosts = [next(trace.host for trace in traces if trace.rank == rank) for rank in ranks]
        ahead.update(zip(ranks, clocks_ahead(found, hosts, notes), strict=True))
        rows = (
            _torchs_order(found[0][0])
            if any(trace.by_rows for trace in traces)
            else [{}] * len(ranks)
        )
        order.update(zip(ranks, rows, strict=True))
    if len(pipelines) > 1 and len({trace.host for trace in traces}) > 1:
        notes.append(
            "clocks are tied within each pipeline alone, so waits for replicas on other hosts may "
            "be wrong"
        )
    zero = min(
        row[0].start - ahead[rank]
        for ranks, found in zip(pipelines, matched, strict=True)
        for rank, row in zip(ranks, found[0][1], strict=True)
    )
    members = {
        rank: _Rank(
            rank, [trace for trace in traces if trace.rank == rank], zero + ahead[rank], order[rank]
        )
        for rank in sorted(ahead)
    }
    return members, ahead


def _torchs_order(schedule: Schedule) -> list[dict[str, int]]:
    """The place of each send and receive in a rank's row, as torch's interpreter puts them."""
    from ..against_torch import lower_by_torch

    try:
        rows = lower_by_torch(schedule)
    except (ImportError, ValueError):  # no torch here, or rows that it didn't make
        return [{} for _ in schedule.rows]
    return [{str(action): place for place, action in enumerate(row)} for row in rows]


def _actions(members: Sequence[_Rank], schedule: Schedule, step: Sequence[Step]) -> list[_Sent]:
    """Turn a step's actions into events of their ranks, and return the messages between ranks."""
    made: list[Event] = []
    for member, row in zip(members, step, strict=True):
        number = len(member.steps)
        for did in row:
            span = Post(did.start - member.shift, did.end - member.shift)
            made.append(member.add(ACTION, str(did.item), span, number))
        member.steps.append((made[-len(row)].start, made[-1].end))
        traces = enumerate(member.traces)
        member.files.append(
            max((n for n, trace in traces if trace.dids[0].start <= row[0].start), default=0)
        )
    graph, sent = schedule.graph, []
    for i, user in enumerate(made):
        for used, maker in graph.awaited(i):
            source = made[graph.id_of(maker)]
            if source.rank != user.rank:
                sent.append(_Sent(user.step, source, user, graph.action(maker), graph.action(used)))
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
            incoming, outgoing = to[rank, step], by[rank, step]
            asked = asks[bisect_left(asks, (before,)) : bisect_left(asks, (end,))]
            handed = sends[bisect_left(sends, (start,)) : bisect_left(sends, (after,))]
            if on_gpu:
                _join_kernels(sorted({*asked, *handed}), incoming, outgoing)
                continue
            order = member.order
            incoming.sort(
                key=lambda each: order.get(each.row(True), 0) if order else each.user.start
            )
            outgoing.sort(
                key=lambda each: order.get(each.row(False), 0) if order else each.maker.end
            )
            posted = asked[-len(incoming) :]
            if len(posted) == len(incoming):
                for each, post in zip(incoming, posted, strict=True):
                    each.asked = post if post.start <= each.user.start >= post.end - 1 else None
            posted = handed[: len(outgoing)]
            if len(posted) == len(outgoing):
                for each, post in zip(outgoing, posted, strict=True):
                    each.sent = post
    return [_message(members[each.maker.rank], members[each.user.rank], each) for each in sent]


def _join_kernels(
    kernels: Sequence[Post], incoming: Sequence[_Sent], outgoing: Sequence[_Sent]
) -> None:
    """Join kernels that send and receive at once: the first one after an action sends, and the last
    one before an action receives.
    """
    for each in outgoing:
        each.sent = next(
            (post for post in kernels if post.start >= each.maker.end - _CLOSE_MS), None
        )
    for each in incoming:
        each.asked = next(
            (post for post in reversed(kernels) if post.end <= each.user.start + _CLOSE_MS), None
        )


def _message(source: _Rank, target: _Rank, each: _Sent) -> Message:
    posts, there = [each.maker], each.user.start
    if each.sent:
        posts = [
            source.add(
                SEND, f"send to {each.used}", Post(each.sent.start, each.sent.start), each.step
            )
        ]
    if each.asked:
        posts.append(
            target.add(
                ASK, f"ask for {each.used}", Post(each.asked.start, each.asked.start), each.step
            )
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


def _sums(members: Mapping[int, _Rank], stages: Mapping[int, tuple[int, ...]]) -> list[Message]:
    """Add the sums over the ranks of the same stages. No rank has a sum before all have posted
    their part.
    """
    found = []
    for place in sorted({*stages.values()}):
        ranks = [rank for rank in members if stages[rank] == place]
        sums = [members[rank].posts("summed") for rank in ranks]
        if len(ranks) == 1 or len({*map(len, sums)}) > 1:
            continue
        for handed in zip(*sums, strict=True):
            posts = []
            for rank, post in zip(ranks, handed, strict=True):
                step = members[rank].step_at(post.start)
                posts.append(
                    members[rank].add(SUM, "sum over replicas", Post(post.start, post.start), step)
                )
            found.append(Message(None, posts, max(post.end for post in handed)))
            for rank, post in zip(ranks, handed, strict=True):
                members[rank].done.append((post.end, found[-1], None))
    return found


def _others(member: _Rank) -> None:
    """What the rank did between its steps, by name: spans that aren't inside others, with
    neighbouring operators as one.
    """
    last: Event | None = None
    everything = chain(*(trace.others for trace in member.traces))
    for name, post in everything:
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
            last = member.add(OTHER, name, Post(start, end), step)


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
                ):
                    if message.transit > 1 and message.pair:
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
