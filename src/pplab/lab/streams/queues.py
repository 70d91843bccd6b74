"""Lowered rows against the clock, where a rank's messages wait in a queue: what an early receive costs.

`simulate` lets every message go when it is made. A GPU's messages stand in the order in which the host posted them, on
one stream, and a receive at the head holds up the sends behind it until its own message has come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf

from ...actions import COMPUTE, SEND_B, SEND_F, Action, B, F, Overlap, parts
from ...costs import Costs
from ...deps import incoming, other_end
from ...errors import ScheduleError, unknown
from ...lowering import LoweredRow
from ...schedule import Schedule
from ...text import parse
from ...timeline import Span, Timeline
from .items import Items

QUEUES = ("rank", "pair", "channel", "none")
WAITS = ("never", "at once", "later")


def parse_lowered(rows: str | Iterable[Iterable[Action | Overlap | str] | str]) -> tuple[LoweredRow, ...]:
    """Lowered rows from CSV text, from one text per row, or from actions, without FSDP's actions and blank cells."""
    lines = rows.strip().splitlines() if isinstance(rows, str) else list(rows)
    cells = [line.replace(",", " ").split() if isinstance(line, str) else list(line) for line in lines]
    sharding = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
    return tuple(
        tuple(parse(x) if isinstance(x, str) else x for x in row if not str(x).endswith(sharding)) for row in cells
    )


def compute_of(rows: Sequence[LoweredRow], name: str = "custom") -> Schedule:
    """The schedule whose computation lowered rows hold."""
    return Schedule([[x for x in row if isinstance(x, Overlap) or x.kind in COMPUTE] for row in rows], name)


def simulate_lowered(
    rows: Sequence[LoweredRow],
    costs: Costs | None = None,
    *,
    queue: str = "rank",
    waits: str = "never",
    name: str = "custom",
) -> Timeline:
    """Predict the timeline of lowered rows whose messages wait for each other.

    Sends and receives are posted in the row's order and cost the rank nothing; an action waits for its receive. Of a
    queue only the head is on the way, from when both its send and its receive are at the head of their queues; that
    takes the link's latency and what the bandwidth says. Nothing is buffered. `queue`:

    - "rank": all of a rank's messages in one queue, as torch's batches stand on the group's stream;
    - "pair": one for each pair of ranks, as torch's single sends and receives with NCCL;
    - "channel": one for each direction of a pair;
    - "none": a message leaves when it is made, as in `simulate`.

    An exchange is what stands together in a row and goes to or comes from one rank. `waits` says when a rank waits for
    the messages of its exchanges, its sends among them:

    - "never": nobody waits for a send, as in `simulate` and in torch's interpreter;
    - "at once": before the next action or exchange, as Megatron-LM's schedules without interleaving;
    - "later": the same, but for sends that no receive goes with after the next action, as torch's `Schedule1F1B`.

    The timeline's `others` are the sends and receives, from the head of their queue to the end.

    Raises ScheduleError when the rows or the queues can't go on, naming what each rank stands at; ValueError for an
    unknown queue or wait, or costs that don't fit.
    """
    if queue not in QUEUES:
        raise unknown("queue", queue, QUEUES)
    if waits not in WAITS:
        raise unknown("wait", waits, WAITS)
    costs = costs or Costs()
    schedule = compute_of(rows, name)
    costs.check(schedule.num_stages, schedule.num_ranks, schedule.num_microbatches)
    flow = _Flow(rows, schedule, costs, queue, waits)
    starts, ends = flow.run()
    own = [flow.actions[item] for row in schedule.rows for item in row]
    others = [
        Span(end.rank, end.message, starts[end.head], max(starts[end.head], ends[end.arrives]))
        for end in flow.ends.values()
    ]
    return Timeline(schedule, [starts[i] for i in own], [ends[i] for i in own], unit=costs.unit, others=tuple(others))


@dataclass
class _End:
    """A send or a receive, and its items: each is over after the one before it, a message once it has passed."""

    rank: int
    message: Action
    posted: int
    head: int  # of its queue
    met: int  # by the other end
    passed: int
    other: _End | None = None

    @property
    def is_send(self) -> bool:
        return self.message.kind in (SEND_F, SEND_B)

    @property
    def arrives(self) -> int:
        """The item that ends when the message is there: the sender's last."""
        return self.other.passed if self.other and not self.is_send else self.passed


class _Flow:
    """Lowered rows as rows of the loop: one for each rank, and one for each queue."""

    def __init__(self, rows: Sequence[LoweredRow], schedule: Schedule, costs: Costs, queue: str, waits: str):
        self.rows, self.num_stages, self.home = rows, schedule.num_stages, schedule.home()
        self.items, self.queues = Items(), defaultdict(list)
        self.actions: dict[Action | Overlap, int] = {}
        self.ends: dict[tuple[int, Action], _End] = {}
        for rank, row in enumerate(rows):
            for item in row:
                if self._peer(item) is None:
                    self.actions[item] = self.items.new(costs.of_item(item))
                else:
                    self._post(rank, item, queue)
        for end in self.ends.values():
            self._meet(end, costs, queue)
        self.turns = [self._turns(rank, waits) for rank in range(len(rows))]

    def _peer(self, item: Action | Overlap) -> int | None:
        """The rank at a message's other end; None for what is computed."""
        if isinstance(item, Overlap) or item.kind in COMPUTE:
            return None
        return self.home[other_end(item).stage, item.microbatch]

    def _post(self, rank: int, message: Action, queue: str) -> None:
        if (rank, message) in self.ends:
            raise ScheduleError(f"rank {rank} posts {message} twice", "remove one of the two", rank, message)
        new, peer = self.items.new, self._peer(message)
        posted = new()
        end = self.ends[rank, message] = _End(rank, message, posted, new(need=posted), new(), new())
        names = {"rank": (), "pair": (peer,), "channel": (peer, end.is_send), "none": (message,)}
        self.queues[rank, *names[queue]].append(end)

    def _meet(self, end: _End, costs: Costs, queue: str) -> None:
        """Let one end wait for the other; for itself, and so for ever, if there is none."""
        end.other = self.ends.get((self._peer(end.message), other_end(end.message)))
        self.items.needs[end.met] = end.met
        if end.other:
            send, receive = (end, end.other) if end.is_send else (end.other, end)
            self.items.needs[end.met] = send.head if queue == "none" else end.other.head
            link, (stage, kind, m) = costs.link(send.rank, receive.rank), send.message
            self.items.durations[end.passed] = link.latency
            if link.bandwidth < inf:
                self.items.durations[end.passed] += costs.occupancy(
                    F if kind is SEND_F else B, stage, link.bandwidth, m
                )

    def _turns(self, rank: int, waits: str) -> list[int]:
        """A rank's row."""
        row: list[int] = []
        now: list[_End] = []  # for these it waits before whatever comes next
        later: list[_End] = []  # and for these after the next action
        for peer, items in groupby(self.rows[rank], self._peer):
            if peer is None:
                for item in items:
                    self._wait(row, [*now, *self._received(rank, item)])
                    row.append(self.actions[item])
                    now, later = later, []
            else:
                self._wait(row, now)
                exchange = [self.ends[rank, message] for message in items]
                row += [end.posted for end in exchange]
                now = exchange if waits != "never" else []
                if waits == "later" and all(end.is_send for end in exchange):
                    now, later = [], later + exchange
        return row

    def _received(self, rank: int, item: Action | Overlap) -> list[_End | None]:
        """The ends of the messages that an item needs; None where nobody receives one."""
        receives = [incoming(action, self.num_stages) for action in parts(item)]
        return [self.ends.get((rank, each)) for each in receives if each and self._peer(each) != rank]

    def _wait(self, row: list[int], ends: Iterable[_End | None]) -> None:
        for end in ends:
            never = len(self.items.needs)  # an item that needs itself
            row += [self.items.new(need=need) for need in ((end.posted, end.arrives) if end else (never,))]

    def run(self) -> tuple[list, list]:
        """When every item starts, and when it ends. ScheduleError where one doesn't."""
        queues = [[x for end in queue for x in (end.head, end.met, end.passed)] for queue in self.queues.values()]
        starts, ends = self.items.run(self.turns + queues)
        if None in ends:
            raise self._stuck(ends)
        return starts, ends

    def _stuck(self, ends: list) -> ScheduleError:
        heads: dict[int, list[str]] = defaultdict(list)  # of every rank: what it has posted, and waits for at a head
        for queue in self.queues.values():
            left = [end for end in queue if ends[end.passed] is None or ends[end.other.passed] is None]
            if left and ends[left[0].posted] is not None:
                heads[left[0].rank].append(str(left[0].message))
        said = []
        for rank, row in enumerate(self.rows):
            its = (
                (item, self.actions[item] if self._peer(item) is None else self.ends[rank, item].posted) for item in row
            )
            at = next((item for item, i in its if ends[i] is None), None)
            if heads[rank] or at:
                standing = f"waits at {at}" if at else "has run its row"
                having = f" with {', '.join(heads[rank])} at the head of its messages" if heads[rank] else ""
                said.append(f"rank {rank} {standing}{having}")
        return ScheduleError(
            f"deadlock of messages: {'; '.join(said)}",
            "on both ranks, put the send and the receive of a message in one order with the messages around them",
        )
