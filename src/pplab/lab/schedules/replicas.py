"""Data parallelism as a schedule: the same rows on more ranks, each copy with microbatches of its
own.
"""

from __future__ import annotations

from ...actions import Action, Overlap
from ...builders.registry import MOST_FORWARDS
from ...errors import positive_int
from ...schedule import Schedule


def replicate(schedule: Schedule, replicas: int) -> Schedule:
    """`schedule` on `replicas` times as many ranks: replica d of P ranks each is ranks dP to
    dP+P-1.

    With M microbatches in `schedule`, replica d works on microbatches dM to dM+M-1. Every stage
    then lives on one rank of each replica (two, when the schedule is bidirectional), and all of
    them need the sum of its gradients.

    >>> print(replicate(Schedule([["0F0", "0B0"], ["1F0", "1B0"]], "two ranks"), 2))
    two ranks, 2 replicas: 4 ranks, 2 stages, 2 microbatches, 8 actions
    rank 0  0F0 0B0
    rank 1  1F0 1B0
    rank 2  0F1 0B1
    rank 3  1F1 1B1
    """
    if (replicas := positive_int("replicas", replicas)) == 1:
        return schedule
    if replicas * schedule.columns.bounds[-1] > 2 * MOST_FORWARDS:
        raise ValueError(f"replicas make more than {2 * MOST_FORWARDS:,} actions: take fewer")
    rows = [
        [_shifted(item, d * schedule.num_microbatches) for item in row]
        for d in range(replicas)
        for row in schedule.rows
    ]
    return Schedule(rows, f"{schedule.name}, {replicas} replicas")


def _shifted(item: Action | Overlap, by: int) -> Action | Overlap:
    if isinstance(item, Overlap):
        return Overlap(_shifted(item.first, by), _shifted(item.second, by))
    return item._replace(microbatch=item.microbatch + by)
