"""GPipe: all forwards, then all backwards."""

from ..actions import B, F
from ._weave import actions_of
from .registry import Rows, register


@register(
    "GPipe",
    rules="any number of ranks and microbatches",
    source="Huang et al. 2019, arXiv:1811.06965; torch's ScheduleGPipe",
    aliases=("AFAB", "F-then-B"),
)
def gpipe(num_ranks: int, num_microbatches: int, *, reverse_backward: bool = False) -> Rows:
    """Run all forwards, then all backwards in the order of the forwards, as PyTorch does.

    With `reverse_backward=True` the last forward's backward comes first, as the paper draws it.
    """
    order = range(num_microbatches)
    back = order[::-1] if reverse_backward else order
    return [actions_of(rank, F, order) + actions_of(rank, B, back) for rank in range(num_ranks)]
