"""The naive pipeline: one microbatch at a time."""

from __future__ import annotations

from itertools import chain

from ..actions import B, F, actions
from .registry import builder


@builder(
    "naive",
    rules="any number of ranks and microbatches",
    source="what splitting a model over devices does by itself",
)
def naive(num_ranks: int, num_microbatches: int):
    """Each microbatch goes through all stages and back before the next one starts: one rank works at a time."""
    microbatches = range(num_microbatches)
    return [
        list(chain.from_iterable(zip(actions(rank, F, microbatches), actions(rank, B, microbatches), strict=True)))
        for rank in range(num_ranks)
    ]
