"""One rank of a run: its stages, the steps that it takes by the executor or a different engine, and
its report on them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..actions import COMPUTE, SEND_B, SEND_F, Action, I, Item, parts
from ..deps import incoming
from ..lowering import LoweredRow, lower
from .comm import Comm, Home, SharedComm
from .context import RankContext
from .executor import Executor
from .failures import NO_BATCH, different_batches, too_few_batches
from .listener import Clock, Listener, Listeners, StepTrace
from .options import Job
from .stage import Stage, why_unclaimed
from .workload import Batch, EndOfBatches, loss_shares, names_in_whole

# Of the microbatches: each with a part of its loss that is computed here, maybe several times.
RunRow = Callable[[list[Batch]], Iterable[tuple[int, Tensor]]]


@dataclass(frozen=True)
class RankReport:
    """What one rank measured."""

    traces: list[StepTrace]
    losses: list[float]  # of the measured steps: this rank's part of the batch's mean
    first_loss: float
    gradients: dict[str, np.ndarray]
    unsplit: frozenset[str]  # layers whose weights' gradients a split backward can't put off
    extras: tuple[object, ...]  # what the extras' listeners report
    transport: str  # by which tensors crossed
    ended: str = ""  # why no further batch came
    notes: tuple[str, ...] = ()  # what its run couldn't have


class Rank:
    """One rank of a run, as listeners see it.

    `modules` are the modules of its stages, by number. `stages` are pplab's stages around them
    (there are none if a different engine runs). `names` has the name in the whole model of every
    parameter. `overlap` runs the halves of an overlap at once. `apart` are weights that no other
    copy of their stage has. A listener that sets `last`, on all ranks after the same step, ends the
    run with that step.
    """

    def __init__(self, context: RankContext, job: Job):
        self.context, self.job = context, job
        context.watch("building its stages")
        schedule, workload = job.schedule, job.workload
        self.modules = {
            stage: workload.build_stage(stage, schedule.num_stages).to(context.device)
            for stage in schedule.stages_of(context.rank)
        }
        self.names = names_in_whole(workload, self.modules, schedule.num_stages)
        named = [(name, p) for p, name in self.names.items() if p.requires_grad]
        make = job.options.optimizer
        self.optimizer = make(named) if make and named else None
        self.clock = Clock()
        if context.device.type == "cuda":
            from .gpu import CudaClock

            self.clock = CudaClock(context)
        self.comm: Comm | None = None
        self.stages: dict[int, Stage] = {}
        self.overlap = workload.overlap
        self.apart: set[nn.Parameter] = set()
        self.last = False
        self.unclaimed: list[str] = []  # what an engine without pplab's stages finds of that kind
        self.shares: list[
            float
        ] = []  # what each microbatch's loss counts for in the step's batch's
        self.transport = context.transport
        context.watch("setting up")
        buffers = [b for module in self.modules.values() for b in module.buffers()]
        self._buffers = [(b, b.clone()) for b in buffers]

    @contextmanager
    def doing(self, label: str, phase: str) -> Iterator[None]:
        """A context for what the rank does together with others outside its row. It is recorded
        under `label`.
        """
        self.context.watch(phase, True)
        with self.clock.span(label):
            yield

    def listen(self, *first: Listener) -> Listeners:
        """Set the listeners of this rank. The first one is told first when something begins, and
        last when it has ended.
        """
        self._extras = [extra.listen(self) or Listener() for extra in self.job.extras]
        self.tied = self.job.workload.tied(self.job.schedule.num_stages)
        if self.tied or self.job.schedule.copies > 1:
            from .reduction import Reducer  # of weights that are kept in several places

            first = (Reducer(self, self.tied), *first)
        self.around = Listeners([*first, self.clock, *self._extras])
        return self.around

    def train(self, run_row: RunRow) -> RankReport:
        """Take all steps. `run_row(microbatches)` runs the row once and returns this rank's parts
        of the losses.

        The first pass isn't timed, because it agrees on shapes and collects gradients. Only
        measured steps change weights.
        """
        options = self.job.options
        first_loss = self.step(run_row, 0)
        said = self._equal_weights()
        unclaimed = [each for s in self.stages.values() for each in s.unclaimed or ()]
        unclaimed += self.unclaimed
        if unclaimed:
            said.append(why_unclaimed(unclaimed))
        for note in said:
            print("note:", note)  # before any weight changes
        gradients = {}
        if options.check_gradients:
            from .reference import collect_gradients

            gradients = collect_gradients((name, p) for p, name in self.names.items())
        for _ in range(options.warmup):
            self.step(run_row, 0)
        for buffer, kept in self._buffers:  # running averages: those passes don't count
            buffer.copy_(kept)
        traces = self.clock.traces
        traces.clear()
        losses: list[float] = []
        ended = ""
        with self.around("steps"):
            while len(losses) < options.steps and not self.last:
                try:
                    with self.around("turn", losses):
                        losses.append(self.step(run_row, len(losses), update=True))
                        self.context.status.loss = losses[-1]
                        self.context.status.steps = len(losses)
                except EndOfBatches as error:  # of all ranks: what was done stays
                    ended = str(error)
                    break
        self.context.watch("reporting")
        splitting = [stage.deferred for stage in self.stages.values() if stage.split]
        unsplit = frozenset(name for deferred in splitting for name in deferred.unsplit)
        extras = tuple(listener.report() for listener in self._extras)
        notes = (*(self.comm.notes if self.comm else ()), *said)
        # Listeners know the rank: without them its tensors and slots go now, not at a collection.
        self.around.clear()
        self._extras.clear()
        return RankReport(
            traces, losses, first_loss, gradients, unsplit, extras, self.transport, ended, notes
        )

    def _equal_weights(self) -> list[str]:
        """The note of rank 0 about equal weights on several stages that `tied` doesn't name."""
        own = [
            (Batch((), p).digest(), stage, f"{self.names[p]} of stage {stage}")
            for stage, module in self.modules.items()
            for p in module.parameters()
            if p.dim() > 1 and p.any() and self.names[p] not in self.tied
        ]
        found: list = [None] * self.context.num_ranks
        self.context.watch("comparing weights", True)
        dist.all_gather_object(found, own)
        pairs = [
            f"{a[2]} and {b[2]}"
            for a, b in pairwise(sorted(chain(*found)))
            if a[0] == b[0] and a[1] != b[1]
        ]
        if not pairs or self.context.rank:
            return []
        return [
            f"equal weights that tied() doesn't name: {', '.join(pairs[:3])}. If two are one "
            "weight, they drift apart from the first step on: let the workload's tied() name it"
        ]

    def step(self, run_row: RunRow, number: int, update: bool = False) -> float:
        """Take one step, and return this rank's part of the batch's loss."""
        context = self.context
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)
        context.watch(f"loading batch {number}")
        ended = None
        try:
            batch = self.job.workload.batch(number)
            microbatches, digest = self.load(batch), batch.digest()
        except EndOfBatches as error:  # the others would wait for a rank that left without a word
            digest, ended = NO_BATCH, error
        context.watch("at the barrier", True)
        self.clock.tie()
        self._meet(digest, number, ended)
        with self.around("step"):
            with self.around("row", microbatches):
                losses = run_row(microbatches)
            if update:
                with self.around("update"):
                    if self.optimizer is not None:
                        context.watch("in the optimizer")
                        with self.clock.span("optimizer"), self.around("optimizer"):
                            self.optimizer.step()
        # What counts for nothing may be no number.
        return sum(loss.item() * self.shares[m] for m, loss in losses if self.shares[m])

    def load(self, batch: Batch) -> list[Batch]:
        """Put the step's microbatches on the device, and in `shares` what their losses count
        for.
        """
        count = self.job.schedule.num_microbatches
        microbatches = batch.microbatches(count)
        if (made := len(microbatches)) != count:
            name = type(batch).__name__
            raise ValueError(f"{name}.microbatches({count}) made {made} microbatches")
        # On the host: looking at a GPU's labels waits.
        self.shares[:] = loss_shares(self.job.workload, microbatches)
        return [each.to(self.context.device) for each in microbatches]

    def _meet(self, digest: int, number: int, ended: EndOfBatches | None) -> None:
        """Wait for the other ranks, as at a barrier. All of them raise EndOfBatches when one has no
        batch, and ValueError when one has a different batch.
        """
        most = torch.tensor([digest, -digest])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if most.sum():
            digests: list = [None] * self.context.num_ranks
            dist.all_gather_object(digests, digest)
            if NO_BATCH in digests:
                raise too_few_batches(digests, number)
            alike = digest == self.job.workload.batch(number).digest()
            raise different_batches(digests, number, alike)
        if ended:
            raise ended


class Whereabouts(Listener):
    """Tells `watch` where in its lowered row a rank is, so that errors can name where it failed or
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

    def begin(self, event: str, what: Any) -> None:
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
    passes = []  # who sends in the first ones: memory is reserved in them, which NCCL can't bear
    if context.transport == "nccl":
        by_host = type(comm)(replace(context, transport="gloo"), home, comm.key)
        by_host.specs, by_host.reserves = comm.specs, True
        passes = [by_host, by_host]

    around = rank.listen(Whereabouts(rows[number], num_stages, context.watch))
    for stage in rank.stages.values():
        stage.around = around
    executor = Executor(
        number, rows[number], rank.stages, num_stages, home, comm, around, rank.overlap
    )

    def run_row(microbatches: list[Batch]) -> list[tuple[int, Tensor]]:
        executor.comm = passes.pop() if passes else comm
        executor.comm.expect(microbatches)
        executor.run(microbatches)
        executor.comm.flush()
        context.watch("after its row")
        losses = []
        for stage in rank.stages.values():
            losses += stage.losses.items()
            stage.losses.clear()
        return losses

    return rank.train(run_row)


def connect(context: RankContext, rows: Sequence[LoweredRow], home: Home) -> Comm:
    """This rank's ends of the channels that the rows need. Each has already carried something."""
    make: type[Comm] = SharedComm
    if context.pipes is None:
        from .process_groups import GroupComm as make
    context.runs += 1
    comm = make(context, home, f"run{context.runs}")
    channels = {
        (rank, comm.peer(action))
        for rank, row in enumerate(rows)
        for item in row
        for action in parts(item)
        if action.kind in (SEND_F, SEND_B)
    }
    context.watch("opening the channels", True)
    comm.warm_up(sorted(channels))  # one order for all ranks
    context.watch("setting up")
    return comm
