"""A training run by pplab's own engine: what it tells of where it is, and its channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from ..actions import COMPUTE, SEND_B, SEND_F, Action, I, Item, parts
from ..deps import incoming
from ..lowering import LoweredRow, lower
from .comm import Comm, Home, SharedComm
from .context import RankContext
from .executor import Executor
from .listener import Listener
from .options import Job
from .rank import Rank, RankReport
from .stage import Stage
from .workload import Batch


class Whereabouts(Listener):
    """Tells `watch` where in its lowered row a rank is, for whoever must say where it failed or
    waits.
    """

    events = frozenset(("item", "receive", "send"))

    def __init__(self, row: Sequence[Item], num_stages: int, watch: Callable[..., None]):
        self._watch = watch
        self._at = {item: f"at {item}" for item in row}
        self._waits: dict[Action | None, str] = {}  # by what is awaited
        for item in row:
            awaited = [incoming(a, num_stages) for a in parts(item) if a.kind in COMPUTE]
            words = " and ".join(str(receive) for receive in awaited if receive)
            self._waits |= dict.fromkeys(awaited, f"waits at {item} for {words}")

    def begin(self, event: str, what: object) -> None:
        """It has come to an item, or waits for a message."""
        if event == "receive":
            self._watch(self._waits[what], True)
        else:
            self._watch(self._at[what])


def train(context: RankContext, job: Job) -> RankReport:
    """Run the job's steps on this rank by the executor."""
    rank, schedule, number = Rank(context, job), job.schedule, context.rank
    num_stages, home = schedule.num_stages, schedule.home()
    split = {a.stage for item in schedule.rows[number] for a in parts(item) if a.kind is I}
    loss, dtype = job.workload.loss, job.options.autocast
    for s, module in rank.modules.items():
        rank.stages[s] = Stage(module, s, num_stages, loss, rank.shares, s in split, dtype)

    rows = lower(schedule, ahead=1)
    comm = rank.comm = connect(context, rows, home)
    passes = []  # by what else the first ones send: memory is reserved in them, which NCCL can't bear
    if context.transport == "nccl":
        by_host = type(comm)(replace(context, transport="gloo"), home, comm.key)
        by_host.specs = comm.specs
        passes = [by_host, by_host]

    around = rank.listen(Whereabouts(rows[number], num_stages, context.watch))
    for stage in rank.stages.values():
        stage.around = around
    executor = Executor(
        number, rows[number], rank.stages, num_stages, home, comm, around, rank.overlap
    )

    def run_row(microbatches: list[Batch]) -> dict[int, Tensor]:
        executor.comm = passes.pop() if passes else comm
        executor.comm.expect(microbatches)
        executor.run(microbatches)
        executor.comm.flush()
        losses = {}
        for stage in rank.stages.values():
            losses |= stage.losses
            stage.losses.clear()
        return losses

    return rank.train(run_row)


def connect(context: RankContext, rows: Sequence[LoweredRow], home: Home) -> Comm:
    """This rank's ends of the channels that the rows need, each of which has carried something."""
    make = SharedComm
    if context.pipes is None:
        from .process_groups import GroupComm as make
    context.runs += 1
    comm = make(context, home, f"run{context.runs}")
    channels = set()
    for rank, row in enumerate(rows):
        sends = [item for item in row if parts(item)[0].kind in (SEND_F, SEND_B)]
        channels |= {(rank, comm.peer(send)) for send in sends}
    context.watch("opening the channels", True)
    comm.warm_up(sorted(channels))  # one order for all ranks
    context.watch("setting up")
    return comm
