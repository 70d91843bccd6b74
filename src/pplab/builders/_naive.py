"""The naive pipeline: one microbatch at a time."""

from ..actions import B, F
from ._weave import actions_of
from .registry import Rows, register


@register(
    "naive",
    rules="any number of ranks and microbatches",
    source="what splitting a model over devices does by itself",
)
def naive(num_ranks: int, num_microbatches: int) -> Rows:
    """One microbatch goes through all stages and back, then the next: one rank works at a time."""
    rows = []
    for rank in range(num_ranks):
        forwards = actions_of(rank, F, range(num_microbatches))
        backwards = actions_of(rank, B, range(num_microbatches))
        rows.append([a for pair in zip(forwards, backwards, strict=True) for a in pair])
    return rows
