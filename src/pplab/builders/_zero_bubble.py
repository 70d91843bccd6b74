"""ZB-H1 and ZB-H2: 1F1B with backwards in two halves, whose weight gradients run where a rank would
wait.
"""

from ._one_f_one_b import capped_row
from ._weave import split_backwards
from .registry import Rows, register

_PAPER = "Qi et al. 2023, arXiv:2401.10241"


@register("ZB-H1", rules="any number of ranks and microbatches", source=_PAPER)
def zb_h1(num_ranks: int, num_microbatches: int) -> Rows:
    """Run 1F1B with I instead of B, and on rank s each W s microbatches later, with P in flight."""
    P, M = num_ranks, num_microbatches
    return [split_backwards(capped_row(rank, P - rank, M), delay=rank) for rank in range(P)]


@register(
    "ZB-H2", rules="any number of ranks and microbatches; pays off from M = 2P-1 on", source=_PAPER
)
def zb_h2(num_ranks: int, num_microbatches: int) -> Rows:
    """Warm up twice as long as ZB-H1 and run each W twice as late, with 2P-1 forwards in flight.

    If F = I = W, no rank waits inside its span. But the spans start one after the other, so the
    makespan still contains P-1 forwards of waiting. Only the span bubble is zero.
    """
    P, M = num_ranks, num_microbatches
    return [
        split_backwards(capped_row(rank, 2 * (P - rank) - 1, M), delay=2 * rank)
        for rank in range(P)
    ]
