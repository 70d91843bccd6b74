"""What hosts enqueue on GPUs under NCCL.

The calls are those of the runtime's `Executor`, which runs here with a transport and stages that only write down what
they are asked; then come the sums of copies' gradients, in `Reducer`'s order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from pplab.actions import Action, F, Overlap, W
from pplab.lowering import lower
from pplab.runtime import Executor, Listeners
from pplab.schedule import Schedule


class Together(NamedTuple):
    """A transfer of a group's ranks, such as the sum of the gradients of a stage's copies."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} of ranks {', '.join(map(str, self.ranks))}"


Call = tuple[str, Action | Overlap | Together]  # what the host asks, and of what: see `host_calls`


class _Written:
    """A transport that writes down its calls."""

    def __init__(self, calls: list[Call]):
        self.calls = calls

    def post(self, receive: Action) -> None:
        self.calls.append(("post", receive))

    def receive(self, receive: Action) -> tuple:
        self.calls.append(("wait", receive))
        return ()

    def send(self, send: Action, tensors: tuple) -> None:
        self.calls.append(("send", send))


class _Host(Executor):
    """The runtime's executor, whose actions compute nothing. `sharing`: the ranks that share each stage's experts."""

    comm: Any
    sharing: dict[int, tuple[int, ...]]

    def host(self, calls: list[Call], sharing: dict[int, tuple[int, ...]]) -> None:
        """Write down the calls of the row."""
        self.comm, self.sharing = _Written(calls), sharing
        self.around, self.overlap = self._told, self._in_turn
        self.run(())

    def _told(self, event: str, what: object) -> AbstractContextManager:
        if event == "item":
            self.comm.calls.append(("compute", what))
        return nullcontext()

    def act(self, action: Action, received: tuple) -> tuple:
        self.comm.calls.extend(call for piece in self._pieces(action) for call in piece)
        return ()

    def _in_turn(self, *halves: partial) -> list[tuple]:
        """As `lab.Beside` does it: one half's turn lasts until its tokens are on their way. Which one begins is a
        matter of measured times, so ranks may differ."""
        pieces = [self._pieces(half.args[0]) for half in halves]
        for turn in zip_longest(*(pieces[::-1] if self.rank % 2 else pieces), fillvalue=()):
            self.comm.calls.extend(call for piece in turn for call in piece)
        return [() for _ in halves]

    def _pieces(self, action: Action) -> list[list[Call]]:
        """An action's turns after its start: two all-to-alls, with something to compute between them."""
        ranks = self.sharing.get(action.stage, ())
        if len(ranks) < 2 or action.kind is W:
            return []
        way = "forwards" if action.kind is F else "backwards"
        start, wait = (((what, Together(f"all-to-all of {way}", ranks))) for what in ("start", "join"))
        return [[start], [wait, ("go on", action), start], [wait]]


def host_calls(schedule: Schedule, *, ahead: int = 1, experts: bool = False) -> tuple[tuple[Call, ...], ...]:
    """What each rank's host asks of its GPU in one step, in order, if receives are posted `ahead` actions early.

    Row r is rank r's: ("compute", an item of the schedule), ("post", a receive), ("wait", the receive), ("send", a
    send); at the end ("start", the sum of copies' gradients) and ("join", that sum).
    `experts`: every stage's are shared by the ranks that have it, and an action starts and joins two all-to-alls.
    """
    held = [schedule.stages_of(rank) for rank in range(schedule.num_ranks)]
    holders = {s: tuple(r for r, stages in enumerate(held) if s in stages) for s in range(schedule.num_stages)}
    sums = [Together("sum", holders[s]) for s in sorted(holders, key=lambda s: f"stage {s}")]  # as `Reducer` has them
    rows = []
    for rank, row in enumerate(lower(schedule, ahead=ahead)):
        calls: list[Call] = []
        host = _Host(rank, row, {}, schedule.num_stages, schedule.home(), None, Listeners(()))
        host.host(calls, holders if experts else {})
        mine = [each for each in sums if rank in each.ranks and len(each.ranks) > 1]
        rows.append((*calls, *(("start", each) for each in mine), *(("join", each) for each in mine)))
    return tuple(rows)
