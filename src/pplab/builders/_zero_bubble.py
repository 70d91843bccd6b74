"""ZB-H1 and ZB-H2: 1F1B with the backward split, and the weight gradients put where a rank would
wait.
"""

from ._one_f_one_b import capped_row
from ._weave import split_backwards
from .registry import Rows, register

_PAPER = "Qi et al. 2023, arXiv:2401.10241"


@register("ZB-H1", rules="any number of ranks and microbatches", source=_PAPER)
def zb_h1(num_ranks: int, num_microbatches: int) -> Rows:
    """1F1B's order with I for B, and on rank s every W put off by s microbatches: P forwards held
    on every rank.
    """
    P, M = num_ranks, num_microbatches
    return [split_backwards(capped_row(rank, P - rank, M), delay=rank) for rank in range(P)]


@register(
    "ZB-H2", rules="any number of ranks and microbatches; pays off from M = 2P-1 on", source=_PAPER
)
def zb_h2(num_ranks: int, num_microbatches: int) -> Rows:
    """Twice the warm-up and W put off twice as far: 2P-1 forwards held, and no bubble inside any
    rank's span if F=I=W.

    The ranks' spans are shifted against each other, so the makespan keeps P-1 forwards: only the
    span bubble is zero.
    """
    P, M = num_ranks, num_microbatches
    return [
        split_backwards(capped_row(rank, 2 * (P - rank) - 1, M), delay=2 * rank)
        for rank in range(P)
    ]
