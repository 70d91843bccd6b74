"""The naive pipeline: one microbatch at a time."""

from __future__ import annotations

from ..actions import B, F, actions
from .registry import register


@register(
    "naive",
    rules="any number of ranks and microbatches",
    source="what splitting a model over devices does by itself",
)
def naive(num_ranks: int, num_microbatches: int):
    """One microbatch goes through all stages and back, then the next: one rank works at a time."""
    rows = []
    for rank in range(num_ranks):
        forwards = actions(rank, F, range(num_microbatches))
        backwards = actions(rank, B, range(num_microbatches))
        rows.append([a for pair in zip(forwards, backwards, strict=True) for a in pair])
    return rows
