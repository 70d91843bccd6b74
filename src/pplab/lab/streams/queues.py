"""Run lowered rows against the clock where a rank's messages wait in a queue, to see what an early
receive costs.

`simulate` lets every message go when it is made. A GPU's messages stand on one stream, in the order
in which the host posted them, and a receive at the head holds up the sends behind it until its own
message has come.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any

from ...actions import COMPUTE, RECV_F, SEND_B, SEND_F, Action, B, F, Overlap, parts
from ...costs import Costs
from ...deps import incoming, other_end, outgoing
from ...errors import ScheduleError, expect, shown, unknown
from ...lowering import LoweredRow
from ...schedule import Schedule
from ...text import parse
from ...timeline import Span, Timeline
from ..forms import cells_of
from .items import Items

QUEUES = ("rank", "direction", "pair", "channel", "none")
_WHOSE = {
    "channel": "direction between two ranks",
    "pair": "pair of ranks (NCCL's, of single messages)",
    "direction": "rank and direction, forward or backward (torch 2.14's, if asked)",
    "rank": "rank (NCCL's, of torch's batches)",
}
End = tuple[int, Action]  # of a message: a rank, and what it posts


def parse_lowered(
    rows: str | Iterable[Iterable[Action | Overlap | str] | str],
) -> tuple[LoweredRow, ...]:
    """Parse lowered rows from a text that `read_csv` reads, from one text per row, or from actions.
    Blank cells are left out, and so is what is neither computation nor a message: FSDP's actions,
    and torch 2.15's waits for sends.
    """
    lines = cells_of(rows) if isinstance(rows, str) else list(rows)
    cells = [
        line.replace(",", " ").split() if isinstance(line, str) else filter(None, line)
        for line in lines
    ]
    return tuple(
        tuple(
            parse(x) if isinstance(x, str) else x
            for x in row
            if not re.search("WAIT|SHARD|REDUCE", str(x))
        )
        for row in cells
    )


def compute_of(rows: Sequence[LoweredRow], name: str = "custom") -> Schedule:
    """The schedule of what lowered rows compute. Raises ValueError for rows of text."""
    if strange := [x for row in rows for x in row if not isinstance(x, Action | Overlap)]:
        raise ValueError(
            f"lowered rows are of actions, got {shown(strange[0])}: lab.parse_lowered reads text"
        )
    return Schedule(
        [[x for x in row if isinstance(x, Overlap) or x.kind in COMPUTE] for row in rows], name
    )


def check_messages(rows: Sequence[LoweredRow]) -> None:
    """Raise ScheduleError unless each message that the rows' computation needs has both its ends,
    on their ranks, and there is no other. It names what is missing or too much first, then what is
    posted before it is made or after it is used.
    """
    num_stages = compute_of(rows).num_stages
    places: dict[End, int] = {}
    makers, users = {}, {}  # of sends, of receives: which rank runs which action
    for rank, row in enumerate(rows):
        for at, item in enumerate(row):
            for action in parts(item):
                if (rank, action) in places:
                    raise ScheduleError(
                        f"rank {rank} has {action} twice", "remove one of the two", rank, action
                    )
                places[rank, action] = at
                if action.kind in COMPUTE:
                    if message := outgoing(action, num_stages):
                        makers[message.send] = rank, action
                    if receive := incoming(action, num_stages):
                        users[receive] = rank, action
    needed: dict[End, None] = {}
    for receive, (rank, user) in users.items():
        send = other_end(receive)
        if send not in makers:
            raise ScheduleError(
                f"rank {rank} runs {user}, and no rank has what makes {send} for it",
                "add that action",
                rank,
                user,
            )
        source, maker = makers[send]
        if source == rank:
            continue
        needed |= dict.fromkeys([(source, send), (rank, receive)])
        if (source, send) not in places:
            waits = f"rank {rank} waits for {receive}, and rank {source}'s row has no {send}"
            raise ScheduleError(waits, f"add it behind {maker}", source, send)
        if (rank, receive) not in places:
            lacks = f"rank {rank} runs {user}, and its row has no {receive}"
            raise ScheduleError(lacks, f"add it before {user}", rank, receive)
    for rank, action in places:
        if action.kind not in COMPUTE and (rank, action) not in needed:
            runs = makers.get(action) or users.get(action)
            why = (
                f"{runs[1]} is on rank {runs[0]}"
                if runs and runs[0] != rank
                else "no action needs that message"
            )
            raise ScheduleError(
                f"rank {rank} posts {action}, and {why}", "leave it out there", rank, action
            )
    for rank, message in needed:
        _, action = makers.get(message) or users[message]
        if (places[rank, message] > places[rank, action]) != _is_send(message):
            early, move = (
                (f"posts {message} before {action} makes it", f"move it behind {action}")
                if _is_send(message)
                else (
                    f"runs {action} before {message}, which it needs",
                    f"move {message} before {action}",
                )
            )
            raise ScheduleError(f"rank {rank} {early}", move, rank, message)


def check_queues(rows: Sequence[LoweredRow]) -> None:
    """Raise ScheduleError unless the rows' messages arrive, each by itself and in every queue that
    a framework may have.
    """
    schedule = simulate_lowered(rows, queue="none").schedule
    for queue, whose in _WHOSE.items():
        try:
            Flow(rows, schedule, queue).timeline()
        except ScheduleError as error:
            runs = "where no message waits for another (gloo) this runs"
            raise ScheduleError(
                f"{runs}, but not with a queue for each {whose}: {error.cause}", error.remedy
            ) from None


def simulate_lowered(
    rows: Sequence[LoweredRow],
    costs: Costs | None = None,
    *,
    queue: str = "rank",
    waits: Collection[Action] = (),
    name: str = "custom",
) -> Timeline:
    """Predict the timeline of lowered rows whose messages wait for each other.

    Sends and receives are posted in the row's order and cost the rank no time, and an action waits
    for its receive. Only the head of a queue is on its way. It starts once both its send and its
    receive are at the head of their queues, and takes the link's latency and the time that the
    bandwidth gives. Nothing is buffered. `queue` is one of these:

    - "rank": all of a rank's messages are in one queue, as with NCCL in torch 2.10, 2.11 and, by
      default, 2.15.
    - "pair": one queue for each pair of ranks, as with NCCL in torch 2.12 to 2.14, and with
      "nccl-lazy" in 2.15.
    - "channel": one for each direction of a pair, as torch 2.15 has it if asked, and pplab's pool
      on GPUs.
    - "direction": one for activations and one for gradients, whoever the peer is, as torch 2.14 has
      it if asked.
    - "none": a message leaves when it is made, as in `simulate`.

    `waits` are sends at which the rank stands still until the message has arrived. Receives that
    are posted with a send stand before it.

    The timeline's `others` are the sends and receives, from the head of their queue to the end.

    Raises ScheduleError for a message that lacks an end, that is too much, or that is posted before
    it is made or after it is used. Also when the rows or the queues can't go on, and then it names
    where each rank stands. Raises ValueError for an unknown queue, or costs that don't fit.
    """
    if queue not in QUEUES:
        raise unknown("queue", queue, QUEUES)
    check_messages(rows)
    return Flow(rows, compute_of(rows, name), queue, waits).timeline(costs)


class Flow:
    """Lowered rows as rows of the loop, one for each rank and one for each queue. The rows must
    have each message of the schedule, in order. `timeline` does what `simulate_lowered` does, for
    any costs.

    An action is an item. An end of a message is three items with consecutive numbers: one in its
    rank's row, where it is posted, and two in its queue's row, where it stands at the head and
    where it has passed.
    """

    def __init__(
        self,
        rows: Sequence[LoweredRow],
        schedule: Schedule,
        queue: str,
        waits: Collection[Action] = (),
    ) -> None:
        self.rows, self.schedule, self.home = rows, schedule, schedule.home()
        self.items, self.number = Items(), {}
        self.others: dict[End, tuple] = {}  # of every message's end the other one
        self.queues: dict[tuple, list[End]] = defaultdict(list)
        for rank, row in enumerate(rows):
            for item in row:
                peer = self._peer(item)
                number = self.number[rank, item] = self.items.new()
                if peer is None:
                    continue
                self.items.new(need=number)
                self.items.new()
                names = {
                    "rank": (),
                    "pair": (peer,),
                    "channel": (peer, _is_send(item)),
                    "none": (item,),
                }
                names["direction"] = (item.kind in (SEND_F, RECV_F),)
                self.queues[rank, *names[queue]].append((rank, item))
                self.others[rank, item] = peer, other_end(item)
        for end, other in self.others.items():
            send = end if _is_send(end[1]) else other
            self.items.needs[self.number[end] + 2] = (
                self.number[send if queue == "none" else other] + 1
            )
        self.turns = [self._turns(rank, waits) for rank in range(len(rows))]

    def timeline(self, costs: Costs | None = None) -> Timeline:
        """The timeline of the rows at these costs. Raises ScheduleError where the rows or the
        queues can't go on.
        """
        costs, schedule = Costs() if costs is None else costs, self.schedule
        expect(Costs, costs=costs)
        costs.check(schedule.num_stages, schedule.num_ranks, schedule.num_microbatches)
        durations, link_of = self.items.durations, cache(costs.link)
        for (rank, item), number in self.number.items():
            if (rank, item) not in self.others:
                durations[number] = costs.of_item(item)
        for end, other in self.others.items():
            send, receive = (end, other) if _is_send(end[1]) else (other, end)
            link, (stage, kind, m) = link_of(send[0], receive[0]), send[1]
            takes = costs.occupancy(F if kind is SEND_F else B, stage, link.bandwidth, m) or 0
            durations[self.number[end] + 2] = link.latency + takes
        starts, ends = self._run()
        own = [self.number[rank, item] for rank, row in enumerate(schedule.rows) for item in row]
        others = []
        for end in chain(*self.queues.values()):
            head = starts[self.number[end] + 1]
            others.append(Span(*end, head, max(head, ends[self._passed(end)])))
        begun, done = [starts[i] for i in own], [ends[i] for i in own]
        return Timeline(schedule, begun, done, unit=costs.unit, others=tuple(others))

    def _peer(self, item: Action | Overlap) -> int | None:
        """The rank at a message's other end, or None for what is computed."""
        if isinstance(item, Overlap) or item.kind in COMPUTE:
            return None
        return self.home[other_end(item).stage, item.microbatch]

    def _passed(self, end: End) -> int:
        """The last item of the message's sender, which ends when the message is there."""
        return self.number[end if _is_send(end[1]) else self.others[end]] + 2

    def _is_through(self, end: End, ends: list) -> bool:
        return all(ends[self.number[each] + 2] is not None for each in (end, self.others[end]))

    def _turns(self, rank: int, waits: Collection[Action]) -> list[int]:
        """A rank's row."""
        row: list[int] = []
        for item in self.rows[rank]:
            if (rank, item) not in self.others:
                self._wait(row, self._received(rank, item))
            row.append(self.number[rank, item])
            if item in waits:
                self._wait(row, [(rank, item)])
        return row

    def _received(self, rank: int, item: Action | Overlap) -> list[End]:
        """The ends of the messages that an item needs."""
        receives = [incoming(action, self.schedule.num_stages) for action in parts(item)]
        return [(rank, receive) for receive in receives if receive and self._peer(receive) != rank]

    def _wait(self, row: list[int], ends: Iterable[tuple[int, Any]]) -> None:
        for end in ends:
            row += [self.items.new(need=need) for need in (self.number[end], self._passed(end))]

    def _run(self) -> tuple[list, list]:
        """When every item starts and when it ends. Raises ScheduleError if one never does."""
        queues = [
            [self.number[end] + k for end in queue for k in (1, 2)]
            for queue in self.queues.values()
        ]
        starts, ends = self.items.run(self.turns + queues)
        if None in ends:
            raise self._stuck(ends)
        return starts, ends

    def _stuck(self, ends: list) -> ScheduleError:
        said = []
        for rank, row in enumerate(self.rows):
            heads = []  # what the rank has posted, and waits for at the head of a queue
            for queue in self.queues.values():
                left = [end for end in queue if not self._is_through(end, ends)]
                if left and left[0][0] == rank and ends[self.number[left[0]]] is not None:
                    heads.append(str(left[0][1]))
            at = next((item for item in row if ends[self.number[rank, item]] is None), None)
            if heads or at:
                standing = f"waits at {at}" if at else "has run its row"
                having = f" with {', '.join(heads)} at the head of its messages" if heads else ""
                said.append(f"rank {rank} {standing}{having}")
        return ScheduleError(
            f"deadlock of messages: {'; '.join(said)}",
            "on both ranks, put the send and the receive of a message in one order with the "
            "messages around them",
        )


def _is_send(message: Action) -> bool:
    return message.kind in (SEND_F, SEND_B)
