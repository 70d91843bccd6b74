"""Weights that are kept in several places: every place needs the sum of their gradients.

A stage is kept on a rank of every replica, and on two ranks of a bidirectional schedule. A tied weight is kept in
several stages. Both are buckets: parameters of this rank, and the ranks that have them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..actions import parts
from ..schedule import Schedule
from .comm import naming
from .listener import Listener
from .workload import Places


@dataclass
class _Bucket:
    """Parameters whose gradients are added up together. Each parameter is a list: its places on this rank."""

    parameters: list[list[nn.Parameter]]
    group: dist.ProcessGroup | None  # None where this rank alone has them
    waits_for: set[int]  # this rank's stages that haven't run their last backward
    flat: torch.Tensor | None = None
    work: dist.Work | None = None


class Reducer(Listener):
    """This rank's buckets, added up in every step. None are there where every weight is kept in one place.

    `when` is "drain" (a bucket is on its way as soon as this rank has run the last backward of its stages) or "end"
    (once the rank has run its row). `group` gives the process group of some ranks. All ranks must make theirs, and
    every rank adds up buckets in the same order: otherwise two ranks could wait for each other. `doing(label, phase)`
    is told while it waits.
    """

    events = frozenset(("row", "item", "receive"))

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        modules: Mapping[int, nn.Module],
        tied: Mapping[str, Places],
        group: Callable[[Sequence[int]], dist.ProcessGroup],
        wire: torch.device,
        doing: Callable[[str, str], AbstractContextManager],
        when: str = "end",
    ):
        self.wire, self.doing, self.when = wire, doing, when
        own = {stage: dict(module.named_parameters()) for stage, module in modules.items()}
        shared = {place for places in tied.values() for place in places}
        held = {name: tuple(stage for stage, _ in places) for name, places in tied.items()}
        held |= {f"stage {stage}": (stage,) for stage in range(schedule.num_stages)}
        self.buckets: list[_Bucket] = []
        last = _last_actions(schedule)
        for name in sorted(held, key=lambda name: (max(last[at][0] for at in last if at[1] in held[name]), name)):
            ranks = tuple(sorted({r for r, stage in last if stage in held[name]}))
            shares = group(ranks) if len(ranks) > 1 else None  # all ranks ask, in one order
            if rank not in ranks:
                continue
            if name in tied:
                found = [[own[stage][local] for stage, local in tied[name] if stage in own]]
            else:
                (stage,) = held[name]
                found = [[p] for local, p in own[stage].items() if p.requires_grad and (stage, local) not in shared]
            if found and (len(ranks) > 1 or len(found[0]) > 1):
                self.buckets.append(_Bucket(found, shares, {s for s in held[name] if s in own}))
        for bucket in self.buckets:  # NCCL connects at first use, which would be in the first step
            if bucket.group is not None and wire.type == "cuda":
                dist.all_reduce(torch.zeros(1, device=wire), group=bucket.group)
        self._last = {stage: item for (r, stage), (_, item) in last.items() if r == rank}
        self.label = "gradients of both copies"
        if tied or len(schedule.replicas) > 1:
            self.label = "gradients of all copies"

    def begin(self, event: str, what: object) -> None:
        """A step starts, or what the rank ran last is done, and what it sent has gone: it goes on."""
        if event == "row":
            self._next, self._ran = 0, None
            self._left = [set(bucket.waits_for) for bucket in self.buckets]
        elif self.when == "drain":
            self._done()

    def end(self, event: str, what: object) -> None:
        """An item has run, or the row has."""
        if event == "item":
            self._ran = what
        elif event == "row":
            with self.doing(self.label, "adding the copies' gradients"):
                self.finish()

    def _done(self) -> None:
        """Start the buckets that waited for what the rank ran last."""
        item, self._ran = self._ran, None
        for action in parts(item) if item else ():
            if self._last[action.stage] == item:
                for left in self._left:
                    left.discard(action.stage)
        while self._next < len(self.buckets) and not self._left[self._next]:
            self._start(self.buckets[self._next])

    def finish(self) -> None:
        """Give every place of every parameter the sum of its gradients."""
        for bucket in self.buckets[self._next :]:
            self._start(bucket)
        for bucket in self.buckets:
            if bucket.work is not None:
                with naming("adding up gradients"):
                    bucket.work.wait()
            sizes = [places[0].numel() for places in bucket.parameters]
            for places, total in zip(bucket.parameters, bucket.flat.split(sizes), strict=True):
                for p in places:
                    p.grad.copy_(total.view_as(p))
            bucket.flat = bucket.work = None

    def _start(self, bucket: _Bucket) -> None:
        """Send a bucket on its way; the sum is in `bucket.flat` when its work is done."""
        self._next += 1
        for p in (p for places in bucket.parameters for p in places):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        own = [sum((p.grad for p in places[1:]), places[0].grad) for places in bucket.parameters]
        bucket.flat = torch.cat([total.flatten() for total in own]).to(self.wire)
        if bucket.group is not None:
            with naming("adding up gradients"):
                bucket.work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)


def _last_actions(schedule: Schedule) -> dict[tuple[int, int], tuple[float, object]]:
    """Of every rank and stage that it holds, the stage's last item, and where in the row it is, as a share."""
    found = {}
    for rank, row in enumerate(schedule.rows):
        for position, item in enumerate(row):
            for action in parts(item):
                found[rank, action.stage] = ((position + 1) / len(row), item)
    return found
