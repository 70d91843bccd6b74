"""What a rank does for a training run: make its stages, run the schedule some times, report what
happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..actions import COMPUTE, SEND_B, SEND_F, Action, I, Overlap, parts
from ..deps import incoming
from ..lowering import LoweredRow, lower
from .comm import Comm, SharedComm
from .executor import Executor
from .failures import different_batches
from .listener import Clock, Listener, Listeners, StepTrace
from .options import Job
from .rank import RankContext
from .stage import Stage
from .workload import Batch, loss_shares, names_in_whole


@dataclass(frozen=True)
class RankReport:
    """What one rank measured."""

    traces: list[StepTrace]
    losses: list[float]  # of the measured steps: this rank's part of the batch's mean
    first_loss: float
    gradients: dict[str, np.ndarray]
    unsplit: frozenset[
        str
    ]  # kinds of layers whose weights' gradients a split backward can't put off
    extras: tuple[object, ...]  # what the extras' listeners report


class Rank:
    """One rank of a run: its stages' modules by number, what it carries from step to step, and who
    listens.
    """

    def __init__(self, context: RankContext, job: Job):
        self.context, self.job = context, job
        context.watch("building its stages")
        schedule, build = job.schedule, job.workload.build_stage
        self.modules = {
            s: build(s, schedule.num_stages).to(context.device)
            for s in schedule.stages_of(context.rank)
        }
        self.names = names_in_whole(job.workload, self.modules, schedule.num_stages)
        parameters = [(name, p) for p, name in self.names.items() if p.requires_grad]
        self.optimizer = (
            job.options.optimizer(parameters) if job.options.optimizer and parameters else None
        )
        self.clock = Clock(context.ahead)
        if context.device.type == "cuda":
            from .gpu import CudaClock

            self.clock = CudaClock(context)
        self.comm: Comm | None = None
        self.stages: dict[int, Stage] = {}  # none, where another engine runs
        self.overlap, self.apart = (
            job.workload.overlap,
            set[nn.Parameter](),
        )  # apart: weights that no copy has, too
        self.last = (
            False  # no step follows: a listener has said so, on all ranks after the same step
        )
        self.shares: list[
            float
        ] = []  # what each microbatch's loss counts for in that of the step's batch
        context.watch("setting up")
        self._buffers = [
            (b, b.clone()) for module in self.modules.values() for b in module.buffers()
        ]

    @contextmanager
    def doing(self, label: str, phase: str) -> Iterator[None]:
        """Around what the rank does together with others beside its row; it is recorded under
        `label`.
        """
        self.context.watch(phase, True)
        with self.clock.span(label):
            yield

    def listen(self, *first: Listener) -> Listeners:
        """Everybody who listens to this rank. Who comes first is told first of what begins, and
        last of what ended.
        """
        self._extras = [extra.listen(self) or Listener() for extra in self.job.extras]
        tied = self.job.workload.tied(self.job.schedule.num_stages)
        if tied or self.job.schedule.copies > 1:
            from .reduction import Reducer  # of weights that are kept in several places

            first = (Reducer(self, tied), *first)
        self.around = Listeners([*first, self.clock, *self._extras])
        return self.around

    def train(self, run: Callable[[list[Batch]], Mapping[int, Tensor]]) -> RankReport:
        """Take all steps; `run(microbatches)` runs the row once and returns the losses of those
        that end here.

        The first pass isn't timed: it agrees on shapes and collects gradients. Only measured steps
        change weights.
        """
        options = self.job.options
        first_loss = self.step(run, 0)
        gradients = {}
        if options.check_gradients:
            from .reference import collect_gradients

            gradients = collect_gradients((name, p) for p, name in self.names.items())
        for _ in range(options.warmup):
            self.step(run, 0)
        for buffer, kept in self._buffers:  # running averages: those passes don't count
            buffer.copy_(kept)
        self.clock.traces.clear()
        losses: list[float] = []
        with self.around("steps"):
            while len(losses) < options.steps and not self.last:
                with self.around("turn", losses):
                    losses.append(self.step(run, len(losses), update=True))
                    self.context.place.steps = len(losses)
        self.context.watch("reporting")
        unsplit = frozenset(
            name for stage in self.stages.values() if stage.split for name in stage.deferred.unsplit
        )
        extras = tuple(listener.report() for listener in self._extras)
        report = RankReport(self.clock.traces, losses, first_loss, gradients, unsplit, extras)
        self.around.clear()  # listeners know the rank: without them its tensors and slots go now, not at a collection
        self._extras.clear()
        return report

    def step(
        self, run: Callable[[list[Batch]], Mapping[int, Tensor]], number: int, update: bool = False
    ) -> float:
        """Take one step; returns this rank's part of the batch's loss."""
        context = self.context
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)
        context.watch(f"loading batch {number}")
        batch = self.job.workload.batch(number)
        microbatches, digest = self.load(batch), batch.digest()
        context.watch("at the barrier", True)
        self.clock.tie()
        self._meet(digest, number)
        with self.around("step"):
            with self.around("row", microbatches):
                losses = run(microbatches)
            if update:
                with self.around("update"):
                    if self.optimizer is not None:
                        context.watch("in the optimizer")
                        with self.clock.span("optimizer"), self.around("optimizer"):
                            self.optimizer.step()
        most = max(self.shares)  # which all are, mostly: multiplied by 1 a loss stays what it is
        counted = [loss * (self.shares[m] / most) for m, loss in losses.items() if self.shares[m]]
        return torch.stack(counted).sum().item() * most if counted else 0.0

    def load(self, batch: Batch) -> list[Batch]:
        """The step's microbatches on the device, and in `shares` what their losses count for."""
        microbatches = batch.microbatches(count := self.job.schedule.num_microbatches)
        if len(microbatches) != count:
            raise ValueError(
                f"{type(batch).__name__}.microbatches({count}) made {len(microbatches)} microbatches"
            )
        self.shares[:] = loss_shares(
            self.job.workload, microbatches
        )  # on the host: looking at a GPU's labels waits
        return [each.to(self.context.device) for each in microbatches]

    def _meet(self, digest: int, number: int) -> None:
        """Wait for the other ranks, as at a barrier; ValueError when one of them has another
        batch.
        """
        most = torch.tensor([digest, -digest])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if most.sum():
            digests: list = [None] * self.context.num_ranks
            dist.all_gather_object(digests, digest)
            alike = digest == self.job.workload.batch(number).digest()
            raise different_batches(
                digests, number, alike, several_hosts=self.context.ahead is not None
            )


class Whereabouts(Listener):
    """Tells `watch` where in its lowered row a rank is, for whoever must say where it failed or
    waits.
    """

    events = frozenset(("item", "receive", "send"))

    def __init__(
        self, row: Sequence[Action | Overlap], num_stages: int, watch: Callable[..., None]
    ):
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
    rank, schedule, workload = Rank(context, job), job.schedule, job.workload
    num_stages = schedule.num_stages
    split = {a.stage for item in schedule.rows[context.rank] for a in parts(item) if a.kind is I}
    rank.stages = stages = {
        s: Stage(
            module, s, num_stages, workload.loss, rank.shares, s in split, job.options.autocast
        )
        for s, module in rank.modules.items()
    }
    home, rows = schedule.home(), lower(schedule, ahead=1)
    rank.comm = comm = connect(context, rows, home)
    row, cold = rows[context.rank], []
    if context.transport == "nccl":  # passes in which memory is reserved send through the host's
        cold = [type(comm)(replace(context, transport="gloo"), home, comm.key)] * 2
        cold[0].specs = comm.specs
    around = rank.listen(Whereabouts(row, num_stages, context.watch))
    for stage in stages.values():
        stage.around = around
    executor = Executor(context.rank, row, stages, num_stages, home, comm, around, rank.overlap)

    def run(microbatches: list[Batch]) -> dict[int, Tensor]:
        executor.comm = now = cold.pop() if cold else comm
        now.expect(microbatches)
        executor.run(microbatches)
        now.flush()
        losses = {m: loss for stage in stages.values() for m, loss in stage.losses.items()}
        for stage in stages.values():
            stage.losses.clear()
        return losses

    return rank.train(run)


def connect(
    context: RankContext, rows: Sequence[LoweredRow], home: Mapping[tuple[int, int], int]
) -> Comm:
    """This rank's ends of the channels that the rows need, each of which has carried something."""
    kind = SharedComm
    if context.pipes is None:
        from .process_groups import GroupComm as kind
    context.runs += 1
    comm = kind(context, home, f"run{context.runs}")
    sends = [
        (rank, item)
        for rank, row in enumerate(rows)
        for item in row
        if parts(item)[0].kind in (SEND_F, SEND_B)
    ]
    context.watch("opening the channels", True)
    comm.warm_up(
        sorted({(rank, comm.peer(send)) for rank, send in sends})
    )  # one order for all ranks
    context.watch("setting up")
    return comm
