"""DualPipe, which feeds the pipeline from both ends, and DualPipeV, which cuts it in half.
`pplab.build` knows both.
"""

from __future__ import annotations

from collections import deque

from ...actions import Action, B, F, I, Item, Overlap, W
from ...builders import register
from ...builders.registry import Rows
from .v_shape import Local


@register(
    "DualPipe",
    rules="an even number of ranks P; an even number of microbatches, at least 2P: each end gets "
    "half of them",
    placement="bidirectional",
    source="DeepSeek-AI 2024, arXiv:2412.19437; github.com/deepseek-ai/DualPipe",
)
def dualpipe(num_ranks: int, num_microbatches: int) -> Rows:
    """Feed the pipeline from both ends, and overlap forwards of one direction with backwards.

    Ranks s and P-1-s each have a copy of the same stage. Half of the microbatches enter at rank 0,
    the rest at rank P-1. Raises ValueError for an odd P or other M. torch has no such placement,
    because its CSV reader takes a stage on one rank only.
    """
    P, M = num_ranks, num_microbatches
    if P % 2:
        raise ValueError(
            f"DualPipe needs an even number of ranks, got {P}, because each rank is paired with "
            f"its mirror image: take {P + 1}, for example"
        )
    if M % 2 or M < 2 * P:
        raise ValueError(
            f"DualPipe on {P} ranks needs an even number of microbatches of at least 2P = {2 * P}, "
            f"got {M}"
        )
    rows = []
    for rank in range(P):
        mirror = P - 1 - rank
        own, other = Local(rank), Local(mirror, first_microbatch=M // 2)
        near, far = (own, other) if rank < mirror else (other, own)
        rows.append(dualpipe_row(near, far, min(rank, mirror), P // 2, M // 2))
    return rows


@register(
    "DualPipeV",
    rules="at least 2P microbatches: fewer don't fill the V",
    placement="V",
    source="Sea AI Lab 2025, cut-in-half of DeepSeek-AI's DualPipe; torch's ScheduleDualPipeV",
)
def dualpipe_v(num_ranks: int, num_microbatches: int) -> Rows:
    """Fold DualPipe in the middle: stages r and 2P-1-r are on rank r, with one copy of each."""
    P, M = num_ranks, num_microbatches
    if M < 2 * P:
        raise ValueError(
            f"DualPipeV on {P} ranks needs at least 2P = {2 * P} microbatches, got {M}"
        )
    return [dualpipe_row(Local(rank), Local(2 * P - 1 - rank), rank, P, M) for rank in range(P)]


# DualPipeV on three ranks (DualPipe's first three of six; the others mirror them), six microbatches
# in each stream. F B I W are of the near stream, f b i w of the far one, (Fb) is an overlap; below
# the numbers, the published names:
#
#     step      1     2       3        4                       5             6       7      8
#               nF0   nF0F1   nB1W1F1  nF0B1F1B0               nB1F1B0       nB1B0   nWB0   nW
#     depth 0   FFFF  Ff      iwf iwf  (Fb)(fB)                b(fB) b(fB)   bI      WI WI  W
#     depth 1   FF    FfFf    iwf      (Fb)(fB)(Fb)(fB)        b(fB)         bBiI    wI     WW
#     depth 2         FfFfFf           F b(fB)(Fb)(fB)(Fb)(fB)               bBbIiI         WwW
#
#     1  only the near stream is here; the far one comes 2 rest + 1 forwards later
#     2  both, until the far stream's first gradient is back
#     3  a near forward more would be held for long: the far backward instead, I first, for which
#        others wait
#     4  pairs of opposite streams, while both have both: one's communication hides behind the
#        other's compute
#     5  the near stream has no forwards left, 6 nor has the far one; from the middle on I alone,
#        others wait for it
#     7  the far stream is done: a W that was put off fills the wait for each I; 8 the W's left
def dualpipe_row(near: Local, far: Local, depth: int, reach: int, M: int) -> list[Item]:
    """One rank's row of the published schedule's eight steps. The rank is `depth` ranks from where
    its `near` stream enters.

    The streams meet `reach` ranks away from there. `M` microbatches are in each stream.
    """
    rest = reach - depth - 1  # ranks from here to the last of them
    row: list[Item] = [near(F) for _ in range(2 * rest)]  # 1
    for _ in range(depth + 1):  # 2
        row += [near(F), far(F)]
    waiting: deque[Action] = deque()  # weight gradients put off

    def split(stage: Local) -> Action:
        action = stage(I)
        waiting.append(stage(W))
        return action

    for _ in range(rest):  # 3
        row += [split(far), waiting.popleft(), far(F)]
    for i in range(M - 2 * reach + depth + 1):  # 4, the steady state
        if rest == 0 and i == 0:  # these two could be a pair; the published row has them apart
            row += [near(F), far(B)]
        else:
            row.append(Overlap(near(F), far(B)))
        row.append(Overlap(far(F), near(B)))
    for _ in range(rest):  # 5
        row += [far(B), Overlap(far(F), near(B))]
    for i in range(2 * depth + 2):  # 6, both in turn, split from the middle on
        stage = (far, near)[i % 2]
        row.append(split(stage) if i > depth else stage(B))
    for _ in range(rest):  # 7
        row += [waiting.popleft(), split(near)]
    return row + list(waiting)  # 8
