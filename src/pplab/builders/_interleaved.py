"""Interleaved 1F1B: several stages per rank in a loop, with stage s on rank s mod P."""

from collections.abc import Sequence
from itertools import pairwise

from ..actions import Action, B, F, Kind
from ..errors import positive_int
from ..schedule import Schedule
from ..simulator import stuck_at
from ._weave import actions_of, phases
from .registry import Rows, register


@register(
    "Interleaved1F1B",
    rules="any number of ranks, microbatches and stages per rank; "
    "the ramps are shortest if M is at least P",
    placement="loop",
    source="Narayanan et al. 2021, arXiv:2104.04473; torch's ScheduleInterleaved1F1B",
    aliases=("interleaved", "VPP", "VPP-1F1B"),
)
def interleaved(
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int = 2,
    group_size: int | None = None,
) -> Rows:
    """Run 1F1B on several stages per rank, each a V-th as deep, so that the bubble gets shorter.

    A group of microbatches goes through a rank's first stage, then through its second. By default
    there are as many groups as P fits into M, as even as possible, with larger ones first. When all
    are equal, they are torch's, which refuses any other M. `group_size` sets the size of the
    groups, and the last group then has the rest.

    >>> print(interleaved(2, 2))
    Interleaved1F1B: 2 ranks, 4 stages, 2 microbatches, 16 actions
    rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1  1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    return looped_rows(num_ranks, num_microbatches, stages_per_rank, group_size, warmup_per_rank=2)


# Two stages on each of three ranks, F = B = 1. Rank 0 has stages 0 and 3, and so on.
#
#     unit     0    1    2    3    4    5    6    7    8    9    10   11
#     rank 0  0F0  0F1  0F2  3F0  3F1  3F2  0F3  0F4  3B0  0F5  3B1
#     rank 1       1F0  1F1  1F2  4F0  4F1  4F2  4B0  1F3  4B1  1F4  4B2
#     rank 2            2F0  2F1  2F2  5F0  5B0  5F1  5B1  5F2  5B2  2F3
#
# A group of P is as long as the loop: after 0F2, microbatch 0 is back for 3F0. So (V-1)P forwards
# take the first group through all of a rank's stages but the last. The rest of the warm-up goes
# ahead for the ranks below: one forward for each, as in 1F1B, is as fast and holds less where
# messages take no time; two, as in eager 1F1B, leave each message the time of an action.
def looped_rows(
    P: int, M: int, stages_per_rank: int, group_size: int | None, warmup_per_rank: int
) -> list[list[Action]]:
    """A row per rank, which goes through the microbatches in groups: the warm-up, then a forward
    and a backward in turn, then the backwards left over.
    """
    groups = _groups(P, M, group_size)
    rows = []
    for rank in range(P):
        stages = stages_of_loop(rank, P, stages_per_rank)
        warmup = min(
            (len(stages) - 1) * len(groups[0]) + warmup_per_rank * (P - 1 - rank), len(stages) * M
        )
        rows.append(
            phases(in_groups(stages, F, groups), in_groups(stages[::-1], B, groups), warmup)
        )
    if group_size is not None and len(groups[-1]) < len(groups[0]) and stuck_at(Schedule(rows)):
        raise ValueError(
            f"group_size = {group_size} leaves a last group of {len(groups[-1])} for {P} ranks, "
            f"and rank 0 would wait for itself: take a size that divides {M}, or leave it out"
        )
    return rows


def stages_of_loop(rank: int, num_ranks: int, stages_per_rank: int) -> range:
    """The stages of a rank, first to last."""
    return range(rank, num_ranks * positive_int("stages_per_rank", stages_per_rank), num_ranks)


def _groups(num_ranks: int, num_microbatches: int, group_size: int | None) -> list[range]:
    """Divide the microbatches into groups that go through a rank's stages together. The first group
    is the largest, so that the warm-ups fit.
    """
    everything = range(num_microbatches)
    if group_size is None:
        count = max(1, num_microbatches // num_ranks)
        each, rest = divmod(num_microbatches, count)
        bounds = [g * each + min(g, rest) for g in range(count + 1)]
        return [everything[first:end] for first, end in pairwise(bounds)]
    if positive_int("group_size", group_size) < min(num_ranks, num_microbatches):
        raise ValueError(
            f"group_size must be at least P = {num_ranks}, got {group_size}: fewer microbatches "
            "than ranks don't fill the loop, and rank 0 would wait for itself"
        )
    return [everything[first : first + group_size] for first in everything[::group_size]]


def in_groups(stages: Sequence[int], kind: Kind, groups: Sequence[range]) -> list[Action]:
    """Group by group, run the group's microbatches on the first of `stages`, then on the next.

    >>> print(*in_groups((0, 2), F, [range(2), range(2, 3)]))
    0F0 0F1 2F0 2F1 0F2 2F2
    """
    return [a for group in groups for stage in stages for a in actions_of(stage, kind, group)]
