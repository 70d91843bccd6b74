"""1F1B: after the warm-up, each forward waits until a backward has freed the memory for it."""

from collections.abc import Iterable, Sequence

from ..actions import Action, B, F
from ..errors import positive_int
from ._weave import actions_of, phases
from .registry import Rows, register


@register(
    "1F1B",
    rules="any number of ranks and microbatches",
    source="PipeDream-Flush: Narayanan et al. 2021, arXiv:2006.09503; torch's Schedule1F1B",
    aliases=("PipeDream-Flush", "1F1B-Flush"),
)
def one_f_one_b(
    num_ranks: int, num_microbatches: int, *, in_flight: Sequence[int] | None = None
) -> Rows:
    """Run P-1-s forwards on rank s, then a forward and a backward in turn, then backwards alone.

    `in_flight[s]` is the number of forwards that rank s runs before its first backward, by default
    P-s. It is exact and no upper limit, but never more than M. With M on every rank the order is
    GPipe's.
    """
    caps = range(num_ranks, 0, -1) if in_flight is None else in_flight
    caps = list(caps) if isinstance(caps, Iterable) else [caps]
    if len(caps) != num_ranks:
        raise ValueError(
            f"in_flight has {len(caps)} values for {num_ranks} ranks: give one per rank"
        )
    caps = [positive_int(f"in_flight[{rank}]", cap) for rank, cap in enumerate(caps)]
    return [capped_row(rank, cap, num_microbatches) for rank, cap in enumerate(caps)]


def capped_row(rank: int, cap: int, num_microbatches: int) -> list[Action]:
    """The row of a rank with one stage that runs at most `cap` forwards ahead of its backwards."""
    order = range(num_microbatches)
    return phases(
        actions_of(rank, F, order), actions_of(rank, B, order), min(cap, num_microbatches) - 1
    )
