"""1F1B and its eager form: a forward is admitted when a backward has paid for it."""

from __future__ import annotations

from collections.abc import Sequence

from ..actions import Action, B, F, actions
from ..errors import positive_int
from .registry import builder


@builder(
    "1F1B",
    rules="any number of ranks and microbatches",
    source="PipeDream-Flush: Narayanan et al. 2021, arXiv:2006.09503; torch's Schedule1F1B",
)
def one_f_one_b(num_ranks: int, num_microbatches: int, *, in_flight: Sequence[int] | None = None):
    """Warm-up of P-1-s forwards on rank s, then one forward and one backward in turn, then the backwards left over.

    `in_flight[s]` sets another cap: the forwards that rank s runs before its first backward, P-s by default. All M on
    every rank is GPipe's order.
    """
    caps = [num_ranks - rank for rank in range(num_ranks)] if in_flight is None else list(in_flight)
    if len(caps) != num_ranks:
        raise ValueError(f"in_flight has {len(caps)} values for {num_ranks} ranks: give one per rank")
    caps = [positive_int(f"in_flight[{rank}]", cap) for rank, cap in enumerate(caps)]
    return [phases(rank, min(cap, num_microbatches) - 1, num_microbatches) for rank, cap in enumerate(caps)]


@builder(
    "eager-1F1B",
    rules="any number of ranks and microbatches",
    source="Zhuang et al. 2023, arXiv:2211.05322",
)
def eager_one_f_one_b(num_ranks: int, num_microbatches: int):
    """1F1B with twice the warm-up, 2(P-1-s) forwards: messages have time to arrive while a rank still has work."""
    return one_f_one_b.rows(num_ranks, num_microbatches, in_flight=[2 * (num_ranks - s) - 1 for s in range(num_ranks)])


def phases(rank: int, warmup: int, num_microbatches: int) -> tuple[Action, ...]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards left over."""
    forwards = actions(rank, F, range(num_microbatches))
    backwards = actions(rank, B, range(num_microbatches))
    steady = [a for pair in zip(forwards[warmup:], backwards, strict=False) for a in pair]
    return (*forwards[:warmup], *steady, *backwards[num_microbatches - warmup :])
