"""Lowered rows against the clock, where a rank's messages wait in a queue: what an early receive costs.

`simulate` lets every message go when it is made. A GPU's messages stand in the order in which the host posted them, on
one stream, and a receive at the head holds up the sends behind it until its own message has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from ...actions import COMPUTE, SEND_B, SEND_F, Action, B, F, Overlap, parts
from ...costs import Costs
from ...deps import incoming, other_end
from ...errors import ScheduleError, unknown
from ...lowering import LoweredRow
from ...schedule import Schedule
from ...text import parse
from ...timeline import Span, Timeline

QUEUES = ("rank", "pair", "channel", "none")


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
    rows: Sequence[LoweredRow], costs: Costs | None = None, *, queue: str = "rank", name: str = "custom"
) -> Timeline:
    """Predict the timeline of lowered rows whose messages wait for each other.

    Sends and receives are posted in the row's order and cost the rank nothing; an action waits for its receive. Of a
    queue only the head is on the way, from when both its send and its receive are at the head of their queues; that
    takes the link's latency and what the bandwidth says. Nothing is buffered. `queue`:

    - "rank": all of a rank's messages in one queue, as torch's batches stand on the group's stream;
    - "pair": one for each pair of ranks, as torch's single sends and receives with NCCL;
    - "channel": one for each direction of a pair;
    - "none": a message leaves when it is made, as in `simulate`.

    The timeline's `others` are the sends and receives, from the head of their queue to the end.

    Raises ScheduleError when the rows or the queues can't go on, naming what each rank stands at; ValueError for an
    unknown queue or costs that don't fit.
    """
    if queue not in QUEUES:
        raise unknown("queue", queue, QUEUES)
    costs = costs or Costs()
    schedule = compute_of(rows, name)
    costs.check(schedule.num_stages, schedule.num_ranks)
    flow = _Flow(rows, schedule, costs, queue)
    flow.run()
    starts, ends = zip(*(flow.times[item] for row in schedule.rows for item in row), strict=True)
    return Timeline(schedule, starts, ends, unit=costs.unit, others=tuple(flow.messages))


@dataclass
class _Flow:
    """The rows as far as they have come."""

    rows: Sequence[LoweredRow]
    schedule: Schedule
    costs: Costs
    queue: str
    times: dict[Action | Overlap, tuple[float, float]] = field(default_factory=dict)
    messages: list[Span] = field(default_factory=list)

    def run(self) -> None:
        """Run every row to its end, or raise ScheduleError."""
        self.home = self.schedule.home()
        self.position, self.clock = [0] * len(self.rows), [0] * len(self.rows)
        self.waiting: dict[tuple, deque[tuple[Action, float]]] = {}  # queue -> messages with the time they were posted
        self.free: dict[tuple, float] = {}
        self.arrived: dict[Action, float] = {}
        while any([self._advance(rank) for rank in range(len(self.rows))] + [self._pass()]):
            pass
        if any(self.position[rank] < len(row) for rank, row in enumerate(self.rows)) or any(self.waiting.values()):
            raise self._stuck()

    def _advance(self, rank: int) -> bool:
        """Run a rank's row until it needs a message that isn't there; whether it moved."""
        row, before = self.rows[rank], self.position[rank]
        while self.position[rank] < len(row):
            item = row[self.position[rank]]
            if isinstance(item, Action) and item.kind not in COMPUTE:
                self.waiting.setdefault(self._queue_of(rank, item), deque()).append((item, self.clock[rank]))
            else:
                needed = [n for a in parts(item) if (n := self._needs(rank, a)) is not None]
                if any(n not in self.arrived for n in needed):
                    break
                start = max([self.clock[rank], *(self.arrived[n] for n in needed)])
                self.clock[rank] = start + self.costs.of_item(item)
                self.times[item] = (start, self.clock[rank])
            self.position[rank] += 1
        return self.position[rank] > before

    def _needs(self, rank: int, action: Action) -> Action | None:
        """The receive that `action` waits for, if it comes from another rank."""
        receive = incoming(action, self.schedule.num_stages)
        return receive if receive and self._peer(receive) != rank else None

    def _peer(self, message: Action) -> int:
        """The rank at the other end."""
        return self.home[other_end(message).stage, message.microbatch]

    def _queue_of(self, rank: int, message: Action) -> tuple:
        names = {
            "rank": (),
            "pair": (self._peer(message),),
            "channel": (self._peer(message), message.kind in (SEND_F, SEND_B)),
            "none": (message,),
        }
        return (rank, *names[self.queue])

    def _pass(self) -> bool:
        """Let every message pass whose send and receive are both at the head of their queues; whether one did."""
        passed = False
        for rank in range(len(self.rows)):
            for own in [key for key in self.waiting if key[0] == rank and self.waiting[key]]:
                send, posted = self.waiting[own][0]
                if send.kind not in (SEND_F, SEND_B):
                    continue
                receive, target = other_end(send), self._peer(send)
                other = self._queue_of(target, receive)
                if not self.waiting.get(other) or self.waiting[other][0][0] != receive:
                    continue
                heads = max(posted, self.free.get(own, 0)), max(self.waiting[other][0][1], self.free.get(other, 0))
                end = (heads[0] if self.queue == "none" else max(heads)) + self._takes(rank, target, send)
                for key, action, head, at in ((own, send, heads[0], rank), (other, receive, heads[1], target)):
                    self.waiting[key].popleft()
                    self.free[key] = end
                    self.messages.append(Span(at, action, head, max(end, head)))
                self.arrived[receive] = end
                passed = True
        return passed

    def _takes(self, source: int, target: int, send: Action) -> float:
        link = self.costs.link(source, target)
        if link.bandwidth == inf:
            return link.latency
        made_by = F if send.kind is SEND_F else B
        return link.latency + self.costs.occupancy(made_by, send.stage, link.bandwidth)

    def _stuck(self) -> ScheduleError:
        said = []
        for rank, row in enumerate(self.rows):
            heads = ", ".join(str(queue[0][0]) for key, queue in self.waiting.items() if key[0] == rank and queue)
            at = f"waits at {row[self.position[rank]]}" if self.position[rank] < len(row) else "has run its row"
            if heads or self.position[rank] < len(row):
                said.append(f"rank {rank} {at}{f' with {heads} at the head of its messages' if heads else ''}")
        return ScheduleError(
            f"deadlock of messages: {'; '.join(said)}",
            "on both ranks, put the send and the receive of a message in one order with the messages around them",
        )
