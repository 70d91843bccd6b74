"""Run the same stages and batches under PyTorch's own pipelining runtime, for comparison."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...actions import Action, B, F, I, W, parts
from ...errors import unknown
from ...runtime import (
    Batch,
    Extra,
    Job,
    Rank,
    RankContext,
    RankReport,
    as_tuple,
    autocast,
    listening,
    unclaimed_losses,
)
from ...schedule import Schedule
from ..extras import Pace, paced, settle
from ..forms import CLASSES, check_order_of_losses, to_csv, unknown_to_torch
from .torch_pairs import run_pairs

_BESIDE = (
    "torch's split backward can't differentiate a loss that a layer adds by a way beside the "
    "stage's input, such as of weights alone or of x.detach(): run it by pplab's engine, or under "
    "a schedule with full backwards"
)


@dataclass(frozen=True)
class TorchEngine(Extra):
    """Run the same stages by `torch.distributed.pipelining`, by its class for the schedule's name
    or its interpreter.

    Times are those of its calls into the stages, without the waits between them, and a paced call
    lasts at least its pace. Bytes are what autograd saves.
    """

    name = "torch"
    flag = {
        "name": "--engine",
        "default": "pplab",
        "help": "runtime that runs the schedule: pplab or torch",
    }

    @classmethod
    def from_flag(cls, engine: str) -> TorchEngine | None:
        """The engine for the flag's value, None for pplab's own. Raises ValueError for an unknown
        one.
        """
        if engine not in ("pplab", "torch"):
            raise unknown("engine", engine, ("pplab", "torch"))
        return cls() if engine == "torch" else None

    def check(self, job: Job) -> Job:
        """Raise ValueError for what torch's runtime can't do."""
        schedule, needs = job.schedule, "needs pplab's engine"
        if schedule.copies > 1:
            if len(schedule.replicas) > 1:
                raise ValueError(
                    f"replicas {needs}: with torch's runtime, reduce gradients yourself (DDP, FSDP)"
                )
            raise ValueError(
                f"{schedule.name} is bidirectional, which torch's runtime doesn't know: it {needs}"
            )
        if job.workload.tied(schedule.num_stages):
            raise ValueError(
                f"a model with tied weights {needs}: torch's runtime doesn't add up their gradients"
            )
        check_order_of_losses(schedule)
        check_pairs(schedule)
        return replace(job, engine=train_torch, engine_name="torch")

    def check_devices(self, job: Job, devices: Sequence[str], transport: str) -> None:
        """Raise ValueError where ranks share a GPU."""
        if devices[0] != "cpu" and transport != "nccl":
            raise ValueError(
                "torch's runtime can't send between ranks that share a GPU: use a GPU for each "
                "rank, or the CPU"
            )


def check_pairs(schedule: Schedule) -> None:
    """Raise ValueError for two actions at once that torch has no name for."""
    if strange := [pair for row in schedule.rows if (pair := unknown_to_torch(row))]:
        known = "torch knows no overlap but a forward with a full backward, OVERLAP_F_B"
        raise ValueError(f"{schedule.name} has {strange[0]}, and {known}: run it by pplab's engine")


def train_torch(context: RankContext, job: Job) -> RankReport:
    """Run the job's steps on this rank by torch's runtime (see `TorchEngine`)."""
    rank, schedule, device = _Rank(context, job), job.schedule, context.device
    if rank.transport == "shared":
        rank.transport = "gloo"  # torch's runtime knows nothing of the memory that the ranks share
    rank.listen()
    runner, times = _runner(rank), rank.times
    if rank.overlap is not None and schedule.columns.overlaps:
        run_pairs(runner, rank, times)
    last = schedule.num_stages - 1 in rank.modules

    def run(batches: list[Batch]) -> list[tuple[int, torch.Tensor]]:
        (batch,) = batches
        rank.losses.clear()
        times.clear()
        context.watch("in a step of torch's runtime")  # where in its row, only torch knows
        with autocast(device, job.options.autocast), ExitStack() as learning:
            with torch.no_grad():
                # torch runs the stages once more, to learn their shapes
                learning.enter_context(listening())
            # torch 2.11 refuses others
            inputs = [x.contiguous() for x in batch.inputs] if 0 in rank.modules else ()
            runner.step(*inputs, **({"target": batch.target} if last else {}), **batch.context)
        for item in schedule.rows[context.rank]:
            # By itself torch runs the halves of an overlap in turn.
            marks = [times[item]] if item in times else [times[action] for action in parts(item)]
            rank.clock.add(item, marks[0][0], marks[-1][1], "item")
        return rank.losses

    rank.step(run, 0)  # torch learns the shapes in its first step, with an extra pass
    return rank.train(run)


class _Rank(Rank):
    """A rank where torch cuts the batches, and losses have the shares of the batch's. It notes in
    `times` when a step's actions run.
    """

    def __init__(self, context: RankContext, job: Job):
        super().__init__(context, job)
        self.losses: list[tuple[int, torch.Tensor]] = []  # this rank's parts, by microbatch
        self.adds = False  # whether a layer has added to the loss
        self.forward = 0  # the microbatch whose forward was the last one
        self.times: dict[Action, tuple[object, object]] = {}
        self._kind: str | None = None
        stages = job.schedule.num_stages
        self._pace_s = next(
            (extra.seconds(stages) for extra in job.extras if isinstance(extra, Pace)), None
        )

    @contextmanager
    def noting(self, action: Action) -> Iterator[None]:
        """A context for an action, which lasts at least its pace."""
        device, pace_s = self.context.device, self._pace_s
        if action.kind is F:
            self.forward = action.microbatch
        if pace_s:
            settle(device)
        start = self.clock.mark()
        with (
            self.around("call", action),
            paced(device, pace_s[action.kind][action.stage]) if pace_s else nullcontext(),
        ):
            yield
        self.times[action] = start, self.clock.mark()

    def load(self, batch: Batch) -> list[Batch]:
        """The batch, uncut. Raises ValueError for what torch's runtime can't take, because it cuts
        evenly and knows one shape.
        """
        kinds = {
            " ".join(str(tuple(x.shape)) for x in each.tensors) for each in super().load(batch)
        }
        self._kind = self._kind or min(kinds)
        if kinds != {self._kind}:
            raise ValueError(
                "torch's runtime takes microbatches of one shape in all steps, and here are "
                f"{self._kind} and "
                f"{', '.join(sorted(kinds - {self._kind}))}: pad them, or run them by pplab's "
                "engine"
            )
        return [batch.to(self.context.device)]

    def add(self, outputs: torch.Tensor | Sequence[torch.Tensor], added: list[torch.Tensor]) -> Any:
        """Return a stage's outputs for a microbatch. The first of them starts the gradient of what
        layers add to the loss.
        """
        share = self.shares[self.forward] * (
            len(self.shares) if self.job.workload.reduction == "mean" else 1
        )
        self.adds, extra = True, sum(added[1:], added[0])
        self.losses.append((self.forward, extra.detach()))
        if not (share and extra.requires_grad):
            return outputs
        first, *others = as_tuple(outputs)
        first = _Adding.apply(first, extra, share)
        return (first, *others) if others else first

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Scale a microbatch's loss so that torch's mean (or sum) of losses gives each its
        share.
        """
        loss, share = self.job.workload.loss(output, target), self.shares[self.forward]
        self.losses.append((self.forward, loss.detach()))
        if len(set(self.shares)) == 1:
            return loss
        # the loss may be no number
        return loss * (share * len(self.shares)) if share else output.sum() * 0


def _runner(rank: _Rank) -> Any:
    """torch's runtime for the rank: its class for the schedule's name, or its interpreter, which
    gets the rows.
    """
    from torch.distributed.pipelining import schedules

    schedule, stages = rank.job.schedule, _stages(rank)
    name = CLASSES.get(schedule.name, "_PipelineScheduleRuntime")
    only_one = schedule.num_stages == schedule.num_ranks and name in (
        "ScheduleGPipe",
        "Schedule1F1B",
    )
    runner = getattr(schedules, name)(
        stages[0] if only_one else stages,
        schedule.num_microbatches,
        loss_fn=rank.loss,
        scale_grads=rank.job.workload.reduction == "mean",
    )
    if schedule.name not in CLASSES:
        load_rows(runner, schedule)
    return runner


def _stages(rank: _Rank) -> list[Any]:
    """The rank's stages as torch's runtime takes them. They tell the rank when each action runs and
    what layers add to the loss.
    """
    from torch.distributed import pipelining  # takes a second: only where it is used

    class Told(pipelining.PipelineStage):
        def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
            with rank.noting(Action(self.stage_index, F, fwd_chunk_id)):
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

        def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, **kwargs):
            kind = B if full_backward else I
            with rank.noting(Action(self.stage_index, kind, bwd_chunk_id)):
                return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, **kwargs)

        def backward_weight_one_chunk(self, bwd_chunk_id, **kwargs):
            try:
                with rank.noting(Action(self.stage_index, W, bwd_chunk_id)):
                    return super().backward_weight_one_chunk(bwd_chunk_id, **kwargs)
            except RuntimeError as error:
                if "graph a second time" not in str(error) or not rank.adds:
                    raise
                raise RuntimeError(_BESIDE) from error

        def forward_maybe_with_nosync(self, *args, **kwargs):
            with listening() as added:
                outputs = super().forward_maybe_with_nosync(*args, **kwargs)
            if not (self.is_last or rank.clock.traces):  # in the first steps, which aren't measured
                found = unclaimed_losses(self.submod, (*as_tuple(outputs), *added), True)
                rank.unclaimed = [*dict.fromkeys((*rank.unclaimed, *found))]
            return rank.add(outputs, added) if added else outputs

        def _get_init_p2p_neighbors_ops(self):
            """Leave out messages from this rank to itself. torch before 2.13 makes them for V
            placements, and gloo can't send them.
            """
            return [
                op
                for op in super()._get_init_p2p_neighbors_ops()
                if op.group_peer != self.group_rank
            ]

    count, device = rank.job.schedule.num_stages, rank.context.device
    group = _own_group(rank.context) if device.type == "cuda" else None
    return [
        Told(module, index, count, device, group=group) for index, module in rank.modules.items()
    ]


class _Adding(torch.autograd.Function):
    """Returns `x`, and gives the added loss its gradient, `share`, when x gets one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, added: torch.Tensor, share: float) -> torch.Tensor:
        ctx.gradient = torch.full_like(added, share)
        return x.detach()  # torch can't detach a view when it has its gradient

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *gradients, ctx.gradient, None


def load_rows(runner: Any, schedule: Schedule) -> None:
    """Give torch's interpreter the schedule's rows, which it lowers itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        path.write_text(to_csv(schedule))
        runner._load_csv(str(path))


def _own_group(context: RankContext) -> dist.ProcessGroup:
    """All ranks on NCCL with torch's own options, which let it use as many blocks of a GPU as it
    likes.
    """
    key = name, ranks = "torch's own", tuple(range(context.num_ranks))
    if key not in context.groups:
        context.groups[key] = dist.new_group(
            ranks, backend="nccl", timeout=2 * context.timeout, group_desc=name
        )
    return context.groups[key]
