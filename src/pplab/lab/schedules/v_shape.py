"""Two stages per rank in a V: stages r and 2P-1-r on rank r, so that the first and the last share a
rank. ZB-V.
"""

from __future__ import annotations

from ...actions import Action, B, F, I, Kind, W
from ...builders import register
from ...builders.registry import Rows


class Local:
    """One stage as its rank sees it: how many actions of each kind it has been given, and what
    comes next.

    >>> stage = Local(2)
    >>> print(stage(F), stage(F), stage(I), stage.weights_due)
    2F0 2F1 2I0 1
    """

    def __init__(self, stage: int, first_microbatch: int = 0):
        self.stage, self.first_microbatch = stage, first_microbatch
        self.given = dict.fromkeys((F, I, W), 0)

    def __call__(self, kind: Kind) -> Action:
        """The next action of that kind. A full backward counts as I and W."""
        counted = (I, W) if kind is B else (kind,)
        microbatch = self.given[counted[0]]
        self.given.update(dict.fromkeys(counted, microbatch + 1))
        return Action(self.stage, kind, self.first_microbatch + microbatch)

    @property
    def weights_due(self) -> int:
        """The number of weight gradients that wait to be computed."""
        return self.given[I] - self.given[W]


@register(
    "ZBVZeroBubble",
    rules="any number of ranks and microbatches; pays off from M = 2P-1 on",
    placement="V",
    source="Qi et al. 2023, arXiv:2401.10241; torch's ScheduleZBVZeroBubble",
    aliases=("ZB-V",),
)
def zb_v(num_ranks: int, num_microbatches: int) -> Rows:
    """Run without a wait in any span when F = I = W, in 1F1B's memory, on a V.

    Every rank holds at most P activations of a full stage. It is built for at least 2P-1
    microbatches. With fewer, actions of microbatches beyond M are left out, as in torch.
    """
    P, enough = num_ranks, max(num_microbatches, 2 * num_ranks - 1)
    return [
        [a for a in _row(rank, P, enough) if a.microbatch < num_microbatches] for rank in range(P)
    ]


# Three ranks, six microbatches, F = I = W: F I W are of the stage on the way down, f i w of the one
# on the way up.
#
#     rank 0  F F F F F f i w f i w f i w F I W f i w I W f i w I W f i w I W I W I W
#     rank 1  . F F F f F f i w f i w F I W f i w F I W f i w F I W f i w I i I W I W w W
#     rank 2  . . F f F f F f i w F I W f i w F I W f i w F I W f i w I i I i I W w w W W
#
# 2(P-r)-1 forwards pass until microbatch 0 is back from the bottom, 2r more until its gradient is
# back from the top, P-r times the upward half until that is back from the bottom. The steady state
# is a microbatch's whole work, as long on all ranks. As the V empties a W is put off where others
# wait for the I: nothing new comes in, so the peak stays.
def _row(rank: int, P: int, M: int) -> list[Action]:
    down, up = Local(rank), Local(2 * P - 1 - rank)
    row = [down(F) for _ in range(2 * (P - rank) - 1)]  # the V fills, down and back up
    for _ in range(rank):
        row += [up(F), down(F)]
    for _ in range(P - rank):
        row += [up(F), up(I), up(W)]
    while up.given[F] < M:  # steady state
        if down.given[F] < M:
            row.append(down(F))
        row += [down(I), down(W), up(F), up(I), up(W)]
    for _ in range(rank):  # the V empties: weight gradients can wait
        row += [down(I), up(I)]
    for _ in range(P - rank):
        row += [down(I), down(W)]
    for stage in (up, down):
        row += [stage(W) for _ in range(stage.weights_due)]
    return row
