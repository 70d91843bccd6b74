"""Schedules of the field that vary those of the small package: eager 1F1B, interleaved zero bubble,
looped BFS.
"""

from __future__ import annotations

from ...actions import B, F
from ...builders import (
    capped_row,
    interleaved,
    looped_rows,
    register,
    split_backwards,
    stages_of_loop,
)
from ...builders._weave import actions_of
from ...builders.registry import Rows


@register(
    "eager-1F1B",
    rules="any number of ranks and microbatches",
    source="Zhuang et al. 2023, arXiv:2211.05322",
)
def eager_one_f_one_b(num_ranks: int, num_microbatches: int) -> Rows:
    """Run 1F1B with twice the warm-up, 2(P-1-s) forwards, so that messages have time to arrive."""
    return [
        capped_row(rank, 2 * (num_ranks - rank) - 1, num_microbatches) for rank in range(num_ranks)
    ]


@register(
    "InterleavedZeroBubble",
    rules=interleaved.rules,
    placement="loop",
    source="torch's ScheduleInterleavedZeroBubble, after Qi et al. 2023, arXiv:2401.10241",
)
def interleaved_zero_bubble(
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int = 2,
    group_size: int | None = None,
) -> Rows:
    """Run interleaved 1F1B with half the warm-up between ranks, and on rank r every W r later."""
    rows = looped_rows(num_ranks, num_microbatches, stages_per_rank, group_size, warmup_per_rank=1)
    return [split_backwards(row, delay=rank) for rank, row in enumerate(rows)]


@register(
    "LoopedBFS",
    rules="any number of ranks, microbatches and stages per rank",
    placement="loop",
    source="Lamy-Poirier 2022, arXiv:2211.05953; torch's ScheduleLoopedBFS",
)
def looped_bfs(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Rows:
    """Run GPipe in a loop: all microbatches through a rank's first stage, then its second.

    The backwards follow, last first. A stage's weights are needed once per pass, which suits
    sharded parameters.
    """
    order, rows = range(num_microbatches), []
    for rank in range(num_ranks):
        stages = stages_of_loop(rank, num_ranks, stages_per_rank)
        forwards = [a for stage in stages for a in actions_of(stage, F, order)]
        rows.append(
            forwards + [a for stage in reversed(stages) for a in actions_of(stage, B, order[::-1])]
        )
    return rows
