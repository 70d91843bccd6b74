"""A limit on the bytes of a rank. Where a rank would need more, the run ends, and the error names
where and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from numbers import Real

import torch
from torch import nn

from ...actions import Action
from ...runtime import Extra, Job, Listener, Options, Rank, RankContext, RankReport, cuda
from .meter import Counting, Held, Meter, readable_bytes


class OutOfMemoryError(MemoryError):
    """A rank needs more than its budget. The caller gets a RankError, whose `rank` and `action`
    tell where.
    """


@dataclass(frozen=True)
class Budget(Meter):
    """End the run where a rank would hold more than `limit` bytes.

    It also works as a `Meter`, so `run.held` is there, and its `memory` includes the stages' state.
    On the CPU no allocator counts, so a rank holds what the meter counts and its state: weights,
    gradients and what the optimizer keeps. The state counts from the start, as if it had buffers of
    its own. Otherwise a schedule that can't train would run until the second step, the first with
    an optimizer's state. Messages under way don't count, and neither does what an action needs only
    while it computes.

    An action that has already run on that stage for a different microbatch is refused before it
    runs, because it takes as much. The first one's size isn't known, so it runs, and then the run
    ends. All this happens in the first pass, which isn't timed. Every step holds as much, so the
    other steps run without a count.

    On a GPU it is the limit of the process' allocator (torch's `set_per_process_memory_fraction`)
    in all steps. The allocator counts what it hands out and what it keeps to hand out again, and
    gradients and the optimizer's state once they exist. Afterwards the limit is restored.
    """

    limit: float
    needs_pplab = "Budget needs pplab's engine: torch's runtime doesn't say which action comes next"

    def __post_init__(self) -> None:
        if (
            isinstance(self.limit, bool)
            or not isinstance(self.limit, Real)
            or not 0 < self.limit < inf
        ):
            raise ValueError(
                f"Budget takes a number of bytes above 0, such as 80e6, got {self.limit!r}"
            )

    def check(self, job: Job) -> Job:
        """The job with this Budget as its only meter. Raises ValueError for two budgets."""
        if sum(isinstance(extra, Budget) for extra in job.extras) > 1:
            raise ValueError("a run has one Budget, which is every rank's: leave the others out")
        others: tuple[Extra, ...] = tuple(extra for extra in job.extras if type(extra) is not Meter)
        return replace(job, extras=others, engine=partial(train_within, self.limit, job.engine))

    def listen(self, rank: Rank) -> Listener:
        """Count on this rank, and check for room where no allocator does."""
        return _Bounded(rank, inf if rank.context.device.type == "cuda" else self.limit)

    def lines(self, found: Held) -> list[str]:
        state = ", ".join(map(readable_bytes, found.state_of))
        return [
            f"budget           {readable_bytes(self.limit)}; state of each stage: {state}",
            *super().lines(found),
        ]


class _Bounded(Counting):
    """Counts, and raises OutOfMemoryError where the count and the state exceed `limit`."""

    def __init__(self, rank: Rank, limit: float):
        super().__init__(rank)
        self.limit, self.name = limit, f"rank {rank.context.rank}"
        self.found.state = {
            stage: state_bytes(module, rank.job.options) for stage, module in rank.modules.items()
        }
        self.state = sum(self.found.state.values())
        if self.state > limit:
            raise OutOfMemoryError(
                f"weights, gradients and the optimizer's state of {self.name} take "
                f"{readable_bytes(self.state)}, and the budget is {readable_bytes(limit)}: give "
                "it less of the model (a different cut, or more ranks)"
            )

    def begin(self, event: str, what: Action) -> None:
        """Refuse an action for which there is no room, if an earlier microbatch has shown what it
        takes.
        """
        if event == "action" and (what.stage, what.kind) in self.found.changes:
            self._look(
                f"{what} takes", self.meter.held, self.found.changes[what.stage, what.kind][1]
            )
        super().begin(event, what)

    def end(self, event: str, what: Action) -> None:
        super().end(event, what)
        if event == "action":
            self._look(f"{what} took", self._before, self.meter.lately - self._before)

    def _look(self, takes: str, held: int, more: int) -> None:
        if self.state + held + more > self.limit:
            raise OutOfMemoryError(
                words(self.name, self.state + held, takes, readable_bytes(more), self.limit)
            )


def state_bytes(module: nn.Module, options: Options) -> int:
    """The bytes of a stage's weights, buffers and gradients, and of what the optimizer will keep
    for it after its first step.
    """
    found = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    for name, p in module.named_parameters():
        if p.requires_grad:
            found += p.nbytes
            if options.optimizer:  # which doesn't say: so it takes a step on a copy
                copy = nn.Parameter(torch.zeros_like(p, device="cpu"))
                copy.grad = torch.zeros_like(copy)
                optimizer = options.optimizer([(name, copy)])
                optimizer.step()
                found += sum(
                    x.nbytes for x in optimizer.state[copy].values() if isinstance(x, torch.Tensor)
                )
    return found


def train_within(limit: float, engine: Callable, context: RankContext, job: Job) -> RankReport:
    """Run the engine. A GPU's allocator hands out no more than `limit` bytes."""
    if context.device.type != "cuda":
        return engine(context, job)
    device = context.device
    before = cuda.get_per_process_memory_fraction(device)
    whole = cuda.get_device_properties(device).total_memory
    cuda.empty_cache()  # what earlier runs left would count
    cuda.set_per_process_memory_fraction(min(before, limit / whole), device)
    try:
        return engine(context, job)
    except torch.OutOfMemoryError as error:
        held = cuda.memory_allocated(device)
        raise OutOfMemoryError(
            words(f"rank {context.rank}", held, "it asks for", "piece", limit)
        ) from error
    finally:
        cuda.set_per_process_memory_fraction(before, device)


def words(name: str, held: int, takes: str, more: str, limit: float) -> str:
    """What happened, and what to do."""
    return (
        f"{name} holds {readable_bytes(held)}, {takes} another {more}, and the budget is "
        f"{readable_bytes(limit)}: have fewer microbatches in flight (1F1B), recompute "
        "(lab.Recompute), or cut the model elsewhere"
    )
