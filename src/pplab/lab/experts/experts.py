"""Experts spread over replicas: each rank of them has a part of a stage's experts, and tokens go to
the rank that has theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ...runtime import Extra, Job, Listener, Rank, naming
from ...schedule import Schedule
from ..checkpoints import Resume, Save
from ..extras import Clip
from .wire import Wire, layers_of, wire_of


@dataclass(frozen=True)
class Experts(Extra):
    """Spread every layer's experts over the replicas of a schedule (`lab.replicate`).

    Ranks that run the same row in different replicas share experts. All-to-alls take each of their
    tokens to the rank that has its expert and back, in the forward and in the backward. An expert's
    gradients come from the tokens of all.
    """

    name = "experts"
    needs_pplab = "spread experts need replicas, and those need pplab's engine"

    def check(self, job: Job) -> Job:
        """Raise ValueError for a model without experts or with a number of them that doesn't
        divide, and for extras that count or keep every weight of a stage on its first rank.
        """
        replicas = len(job.schedule.replicas)
        count = getattr(getattr(job.workload, "config", None), "num_experts", None)
        if count is None:
            raise ValueError(
                f"{job.workload.name} has no experts to spread: take lab.models.mixture(...)"
            )
        if count % replicas:
            raise ValueError(
                f"{count} experts don't divide into {replicas} replicas: take a multiple of that"
            )
        if any(isinstance(extra, Clip | Resume | Save) for extra in job.extras):
            raise ValueError(
                "Clip, Save and Resume look for a stage's weights on its first rank, and spread "
                "experts aren't all there: leave one of them out"
            )
        return job

    def listen(self, rank: Rank) -> Listener:
        """Keep this rank's experts, and connect it with the ranks that have the others."""
        wire, groups = wire_of(rank), sharing(rank.job.schedule)
        for ranks in groups:  # all ranks ask for all, in one order
            both = [
                rank.context.group(f"experts {way}", ranks) for way in ("forwards", "backwards")
            ]
            if rank.context.rank in ranks:
                wire.groups = both if len(ranks) > 1 else ()
                mine, of = ranks.index(rank.context.rank), len(ranks)
        for layer in layers_of(rank):
            keep(layer.experts, rank, mine, of)
        if rank.optimizer is not None:
            rank.optimizer = rank.job.options.optimizer(
                [(n, p) for p, n in rank.names.items() if p.requires_grad]
            )
        return Copies(rank, wire)

    def lines(self, found: tuple[int, ...]) -> list[str]:
        return [
            f"tokens sent      {', '.join(f'{each:,}' for each in found)} per rank, in all forwards"
        ]

    def finish(self, job: Job, reports: Sequence[int]) -> tuple[int, ...]:
        """Per rank, how many copies of tokens its forwards sent to other ranks, in all passes."""
        return tuple(reports)


def sharing(schedule: Schedule) -> list[tuple[int, ...]]:
    """The ranks that share experts, which are in the same place of every replica and run the same
    row.
    """
    return list(zip(*schedule.replicas, strict=True))


def keep(experts: nn.ModuleDict, rank: Rank, mine: int, of: int) -> None:
    """Keep in a layer only this rank's share of its experts. No other rank that shares them has
    these.
    """
    names = list(experts)
    share = len(names) // of
    for number, name in enumerate(names):
        if number // share == mine:
            rank.apart.update(experts[name].parameters() if of > 1 else ())
        else:
            for p in experts[name].parameters():
                del rank.names[p]
            del experts[name]


class Copies(Listener):
    """Adds up the gradients of experts that two ranks of a replica have, as in a bidirectional
    schedule.
    """

    events = frozenset(("row",))

    def __init__(self, rank: Rank, wire: Wire):
        self.rank, self.wire, schedule = rank, wire, rank.job.schedule
        self.sums: list[tuple[list[nn.Parameter], dist.ProcessGroup]] = []
        for stage, place in enumerate(schedule.placement):
            for replica in schedule.replicas if isinstance(place, tuple) else ():
                if len(ranks := sorted(set(place) & set(replica))) < 2:
                    continue
                group = rank.context.group("copies of experts", ranks)
                if rank.context.rank in ranks:
                    apart = [p for p in rank.modules[stage].parameters() if p in rank.apart]
                    self.sums += [(apart, group)] if apart else []

    def end(self, event: str, what: object) -> None:
        for parameters, group in self.sums:
            with self.rank.doing(
                "gradients of both copies' experts", "adding the experts' gradients"
            ):
                flat = torch.cat([p.grad.flatten() for p in parameters]).to(self.rank.context.wire)
                with naming("adding up gradients"):
                    dist.all_reduce(flat, group=group)
                for p, total in zip(
                    parameters, flat.split([p.numel() for p in parameters]), strict=True
                ):
                    p.grad.copy_(total.view_as(p))

    def report(self) -> int:
        return self.wire.sent
