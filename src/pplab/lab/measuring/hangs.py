"""Find out which rank waits for which in a job that hangs, from the last messages of every rank and
the schedule that they belong to.

NCCL's flight recorder dumps the messages, as pickles or as JSON. Between two ranks messages arrive
in the order of sending, so the k-th send from one rank to the other is the k-th message that the
schedule has there.

The recorder keeps each rank's last operations, 2,000 by default, so in a long job the first are
lost. Every operation has its number in its process group, from 1 on (`op_id`). The number tells how
many messages are lost and where in a step the first one is that isn't lost. The rest of that step's
messages then tells which ones the lost ones were, whatever their order.

Before the first step, torch's stages send each other their mode and their shapes, as whole numbers.
If these messages may be among the lost ones, a line has to be true in three cases: without them,
with the mode alone, and with both. Cases that the messages contradict don't count.

A receive may be posted long before it is needed. So only its sends tell how far a rank has come.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ...actions import Item
from ...schedule import Schedule, plural
from ..forms import printable, reading

_MESSAGE = re.compile(r"nccl:(send|recv) (\d+)(?:->|<-)(\d+)")
_REMEDY = "set TORCH_FR_BUFFER_SIZE (older torch: TORCH_NCCL_TRACE_BUFFER_SIZE)"
Stream = tuple[str, int]  # "send" or "recv", and the peer's place in its pipeline


class _Dump(NamedTuple):
    """A rank's messages, each with its state, and how many lost messages came before them.

    A host that doesn't wait for its GPU posts messages ahead of time. They are "scheduled".
    """

    messages: list[tuple[Stream, str]]
    lost: int


class _Plain(pickle.Unpickler):
    """Reads a pickle of plain values, and refuses any that would import or call something."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(
            f"the pickle asks for {module}.{name}, and a flight recorder's has plain values alone"
        )


def explain_hang(schedule: Schedule, *places: str | Path) -> str:
    """Tell for which message each rank of a hanging job waits, and what the ranks do that wait for
    none.

    `places` are the dumps of NCCL's flight recorder, one per rank, or their folder. `schedule` is
    what ran. If dumps have lost their first messages, a line tells what wasn't seen, or that a
    rank's last messages don't tell where it is. Raises ValueError for other files.
    """
    dumps: dict[int, _Dump] = {}
    pipelines = set()
    for file in chain(*(each.iterdir() if each.is_dir() else [each] for each in map(Path, places))):
        with reading(str(file), "a dump of NCCL's flight recorder"):
            raw = file.read_bytes()
            data = json.loads(raw) if raw.startswith(b"{") else _Plain(io.BytesIO(raw)).load()
            place, ranks, dump = _posted(data)
            rank = ranks[place] if ranks else int("0" + "".join(re.findall(r"\d+", file.name)[-1:]))
        if isinstance(dump, str):
            raise ValueError(f"{printable(str(file))} doesn't tell where its rank is: {dump}")
        if rank in dumps and ranks:
            raise ValueError(
                f"{printable(str(file))} is a second dump of rank {rank}: give one each"
            )
        dumps.setdefault(rank, dump)
        pipelines.add(ranks)
    if not any(pipelines):
        raise ValueError(
            "no dump of a flight recorder has a message: give those of all ranks, or their folder"
        )
    pipelines = {ranks for ranks in pipelines if len(ranks) == schedule.num_ranks}
    if not pipelines:
        raise ValueError(
            f"no dump has messages among {schedule.num_ranks} ranks: {schedule.name} isn't what ran"
        )
    return "\n".join(chain(*(_told(schedule, ranks, dumps) for ranks in sorted(pipelines))))


def _posted(data: Any) -> tuple[int, tuple[int, ...], _Dump | str]:
    """The rank's place in its pipeline, the ranks of that pipeline, and its messages, or the reason
    why they don't tell. In a batch of messages, only the batch's own entry tells a state.
    """
    messages, ranks, before, told, place = [], [], 0, 0, 0
    first = min((each["record_id"] for each in data["entries"]), default=0)
    ended = {
        (e["process_group"][0], e["p2p_seq_id"]): e["state"]
        for e in data["entries"]
        if e["profiling_name"] == "nccl:coalesced"
    }
    for entry in data["entries"]:
        if match := _MESSAGE.match(entry["profiling_name"]):
            if {"Int", "Long", "Byte"}.issuperset(entry.get("input_dtypes") or ["Float"]):
                if first and messages:
                    return (
                        place,
                        tuple(ranks),
                        (
                            f"the first {first} operations are lost, and messages with shapes come "
                            f"between the others, so their numbers don't tell: {_REMEDY}"
                        ),
                    )
                told += 1
                continue  # a mode, or a shape
            if first and not messages and not told:
                if "op_id" not in entry:
                    return (
                        0,
                        (),
                        (
                            f"the first {first} operations are lost, and this torch doesn't number "
                            f"them: {_REMEDY}"
                        ),
                    )
                # from 1 on, with the group's collectives
                before = entry["op_id"] - 1 - entry.get("collective_seq_id", 0)
            messages.append(
                (
                    (match[1], int(match[3])),
                    ended.get((entry["process_group"][0], entry["p2p_seq_id"]), entry["state"]),
                )
            )
            place = int(match[2])
            ranks = json.loads(data["pg_config"][entry["process_group"][0]]["ranks"])
    if first and not messages:
        return 0, (), f"none of its last operations is a message of a stage: {_REMEDY}"
    return place, tuple(ranks), _Dump(messages, before)


class _Row(NamedTuple):
    """What a schedule tells about a rank's messages."""

    first: int  # the number of its first action
    length: int
    # of each message of a step: what makes it, and what uses it
    streams: dict[Stream, list[tuple[int, int]]]

    @property
    def messages(self) -> int:
        """How many messages a step has."""
        return sum(map(len, self.streams.values()))

    def place(self, stream: Stream, number: int) -> tuple[int, int, int]:
        """The rank's action in the job that a message of a stream belongs to, what makes the
        message, and what uses it.
        """
        step, k = divmod(number, len(self.streams[stream]))
        maker, user = self.streams[stream][k]
        own = maker if stream[0] == "send" else user
        return step * self.length + own - self.first, maker, user


def _rows(schedule: Schedule) -> list[_Row]:
    graph, columns = schedule.graph, schedule.columns
    rows = [_Row(columns.bounds[place], len(row), {}) for place, row in enumerate(schedule.rows)]
    for user in range(columns.bounds[-1]):
        for _, entry in graph.awaited(user):
            maker = graph.id_of(entry)
            source, target = columns.ranks[maker], columns.ranks[user]
            if source != target:
                rows[source].streams.setdefault(("send", target), []).append((maker, user))
                rows[target].streams.setdefault(("recv", source), []).append((maker, user))
    for found in chain(*(row.streams.values() for row in rows)):
        found.sort()
    return rows


def _numbers(dump: _Dump, row: _Row) -> tuple[list[int], dict[Stream, int]] | None:
    """Each message's number on its stream, from the job's first step on, and the number that would
    be next on each. None where the messages don't tell.
    """
    step = row.messages
    left = -dump.lost % step  # of the step in which they begin
    if len(dump.messages) < left:
        return None
    rest = Counter(stream for stream, _ in dump.messages[:left])
    steps = -(-dump.lost // step)
    next_of = {stream: steps * len(found) - rest[stream] for stream, found in row.streams.items()}
    numbers = []
    for stream, _ in dump.messages:
        numbers.append(next_of[stream])
        next_of[stream] += 1
    return numbers, next_of


def _told(schedule: Schedule, ranks: Sequence[int], dumps: Mapping[int, _Dump]) -> Iterator[str]:
    """A line for each rank of a pipeline, and one for what was lost."""
    rows, here = _rows(schedule), {rank: dumps[rank] for rank in ranks if rank in dumps}
    for place, rank in enumerate(ranks):
        if rank in here:
            if other := {peer for (_, peer), _ in dumps[rank].messages} - {
                peer for _, peer in rows[place].streams
            }:
                raise ValueError(
                    f"rank {rank} has messages with rank {ranks[min(other)]}, and in "
                    f"{schedule.name} it has none: that isn't what ran"
                )
    lost, readings = [dump.lost for dump in here.values()], []
    for each in (0, 1, 3) if max(lost) else [0]:
        numbers = {}
        for place, rank in enumerate(ranks):
            if rank in here:
                step, dump = rows[place].messages, here[rank]
                before = each * step // schedule.num_microbatches
                if before <= dump.lost or not dump.lost:
                    fewer = _Dump(dump.messages, max(0, dump.lost - before))
                    numbers[rank] = _numbers(fewer, rows[place])
        one = _Reading(schedule, ranks, here, rows, numbers)
        if len(numbers) == len(here) and not one.is_contradicted():
            readings.append([one.line(place) for place in range(len(ranks))])
    if not readings and not max(lost):
        raise ValueError(f"the messages aren't in {schedule.name}'s order: that isn't what ran")
    for place, rank in enumerate(ranks):
        lines = {told[place] for told in readings}
        if rank not in here:
            yield f"rank {rank}: no dump, so it may be the one that hangs"
        elif len(lines) == 1 and "" not in lines:
            yield lines.pop()
        else:
            enough = 4 * rows[place].messages  # of two steps, in batches
            yield (
                f"rank {rank}: its last {plural(len(here[rank].messages), 'message')} don't tell "
                f"where it is: {_REMEDY} to {enough} or more, or best so that none is lost"
            )
    if max(lost):
        yield (
            f"The dumps have lost the first {min(lost):,} to {max(lost):,} messages of each rank, "
            "which are taken to have arrived."
        )


class _Waiting(NamedTuple):
    """A message that hasn't ended: which of the rank's actions needs or makes it, what uses it and
    what makes it, as ids.
    """

    way: str
    here: int
    user: int
    maker: int
    peer: int
    number: int
    state: str


@dataclass(frozen=True)
class _Reading:
    """The messages of a pipeline's ranks, if they have these numbers, which are `_numbers`' of each
    rank.
    """

    schedule: Schedule
    ranks: Sequence[int]
    dumps: Mapping[int, _Dump]
    rows: Sequence[_Row]
    numbers: Mapping[int, tuple[list[int], dict[Stream, int]] | None]

    @cached_property
    def _items(self) -> list[Item]:
        return [*chain(*self.schedule.rows)]

    def _messages(self, rank: int) -> Iterator[tuple[Stream, str, int]]:
        """A rank's messages, with their states and numbers; none where they don't tell."""
        if mine := self.numbers.get(rank):
            for (stream, state), number in zip(self.dumps[rank].messages, mine[0], strict=True):
                yield stream, state, number

    def is_contradicted(self) -> bool:
        """Whether a message came before others that must come first, or before it was sent."""
        for place, rank in enumerate(self.ranks):
            after = 0
            for (way, peer), state, number in self._messages(rank):
                # what is posted behind a send is of later actions than it, or of one sent with it
                at, _, _ = self.rows[place].place((way, peer), number)
                if at < after - 1:
                    return True
                if way == "send":
                    after = max(after, at)
                elif state == "completed" and self._is_unsent(place, peer, number):
                    return True
        return False

    def line(self, place: int) -> str:
        """Where the rank of this place is; empty where its messages don't tell."""
        rank, row, of_row = self.ranks[place], self.schedule.rows[place], self.rows[place]
        if not self.numbers.get(rank):
            return ""
        at, waiting = 0, []
        for (way, peer), state, number in self._messages(rank):
            here, maker, user = of_row.place((way, peer), number)
            if way == "send" and state != "scheduled":
                at = max(at, here + 1)
            if state != "completed":
                waiting.append(_Waiting(way, here, user, maker, peer, number, state))
        if self.dumps[rank].lost and not at:  # nothing sent
            return ""
        makers = {
            maker
            for (way, _), found in of_row.streams.items()
            if way == "send"
            for maker, _ in found
        }
        later = range(at, at + len(row))
        until = next((i for i in later if of_row.first + i % len(row) in makers), at)
        first = min(waiting, default=None)
        untaken = next((each for each in sorted(waiting) if each.way == "send"), None)
        # a receive behind `until` is posted for later, and not needed yet
        waits = first and first.way == "recv" and first.here <= until
        end = first.here if waits else until + 1
        what = " or ".join(str(row[i % len(row)]) for i in range(at, end))
        what = f"is in {what}" if what else ""
        if waits:
            sent = self._sent(place, first.peer, first.number)
            what += ", or " if what else ""
            what += (
                f"waits in {self._items[first.user]} for what {self._items[first.maker]} gives, "
                f"which rank {self.ranks[first.peer]} {sent}"
            )
        elif untaken:
            joined = "or" if untaken.state == "scheduled" else "and"
            what += (
                f", {joined} rank {self.ranks[untaken.peer]} hasn't taken what "
                f"{self._items[untaken.maker]} gives"
            )
        return f"rank {rank} {what}"

    def _is_unsent(self, place: int, peer: int, number: int) -> bool:
        theirs = self.numbers.get(self.ranks[peer])
        return bool(theirs) and number >= theirs[1]["send", place]

    def _sent(self, place: int, peer: int, number: int) -> str:
        """Whether a peer has sent the rank of this place the message of this number."""
        if self._is_unsent(place, peer, number):
            return "hasn't sent"
        for stream, state, each in self._messages(self.ranks[peer]):
            if stream == ("send", place) and each == number and state != "scheduled":
                return "has sent, so look at their link"
        return "may have sent"
