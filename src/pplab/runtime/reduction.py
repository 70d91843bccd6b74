"""Weights that are kept in several places. Every place needs the sum of their gradients.

A stage is kept on a rank of every replica, and on two ranks of a bidirectional schedule. A tied
weight is kept in several stages. Both become buckets, which list parameters of this rank and the
other ranks that have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .comm import naming
from .listener import Listener
from .rank import Rank
from .workload import Places


@dataclass
class _Bucket:
    """Parameters whose gradients are added up together. Each parameter is a list, its places on
    this rank.
    """

    parameters: list[list[nn.Parameter]]
    group: dist.ProcessGroup | None  # None where this rank alone has them
    flat: torch.Tensor | Any = None
    work: dist.Work | None = None


class Reducer(Listener):
    """The buckets of this rank, which are added up once the rank has run its row. A weight with a
    single place needs none.

    All ranks must make their Reducer, and all add up buckets in the same order. Otherwise two ranks
    could wait for each other.
    """

    events = frozenset(("row",))

    def __init__(self, rank: Rank, tied: Mapping[str, Places]):
        self.rank, self.wire, schedule = rank, rank.context.wire, rank.job.schedule
        own = {
            (stage, name): p
            for stage, module in rank.modules.items()
            for name, p in module.named_parameters()
            if p not in rank.apart
        }
        kept = {}  # by name: the stages that keep it, and its parameters here
        for name, places in tied.items():
            here = [own.pop((*at,)) for at in places if (*at,) in own]
            trained = [p for p in here if p.requires_grad]
            kept[name] = [stage for stage, _ in places], [trained]
        for stage in range(schedule.num_stages):
            here = [[p] for (at, _), p in own.items() if at == stage and p.requires_grad]
            kept[f"stage {stage}"] = [stage], here
        self.buckets: list[_Bucket] = []
        holding = [set(schedule.stages_of(r)) for r in range(schedule.num_ranks)]
        for _, (stages, found) in sorted(kept.items()):
            ranks = [r for r, held in enumerate(holding) if not held.isdisjoint(stages)]
            several = len(ranks) > 1
            # All ranks ask for a group, in one order.
            group = rank.context.group("copies", ranks) if several else None
            if rank.context.rank in ranks and any(found) and (several or len(found[0]) > 1):
                self.buckets.append(_Bucket(found, group))
                if several and self.wire.type == "cuda":
                    # NCCL connects at first use, which would be in the first step.
                    dist.all_reduce(torch.zeros(1, device=self.wire), group=group)
        which = "all" if tied or len(schedule.replicas) > 1 else "both"
        self.label = f"gradients of {which} copies"

    def end(self, event: str, what: object) -> None:
        """Give every place of every parameter the sum of its gradients."""
        with self.rank.doing(self.label, "adding the copies' gradients"):
            for bucket in self.buckets:
                self.start(bucket)
            for bucket in self.buckets:
                if bucket.work is not None:
                    with naming("adding up gradients"):
                        bucket.work.wait()
                sizes = [places[0].numel() for places in bucket.parameters]
                for places, total in zip(bucket.parameters, bucket.flat.split(sizes), strict=True):
                    for p in places:
                        p.grad.copy_(total.view_as(p))
                bucket.flat = bucket.work = None

    def start(self, bucket: _Bucket) -> None:
        """Send a bucket on its way. Its sum is in `flat` when its work is done."""
        for p in (p for places in bucket.parameters for p in places):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        own = [sum((p.grad for p in places[1:]), places[0].grad) for places in bucket.parameters]
        bucket.flat = torch.cat([total.flatten() for total in own]).to(self.wire)
        if bucket.group is not None:
            with naming("adding up gradients"):
                bucket.work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)
