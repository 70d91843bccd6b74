"""1F1B in pairs, with one stage per rank or interleaved. `pplab.build` knows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...actions import Action, B, F, I, Overlap, W
from ...builders import looped_rows, register
from ...builders.registry import Rows


@register(
    "paired-1F1B",
    rules="any number of ranks, microbatches and stages per rank; pays off from M = 2P on",
    placement="loop",
    source="Megatron-Core's --overlap-moe-expert-parallel-comm; Moonshot AI 2025 (Kimi K2), "
    "arXiv:2507.20534",
)
def paired_one_f_one_b(
    num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 1, split: bool = False
) -> Rows:
    """Run 1F1B with one more warm-up forward, so that every backward has a forward at its side.

    With one stage per rank, rank s holds 2(P-s) forwards, and with more it is interleaved. With
    `split`, a forward runs with an input gradient, and rank s runs each weight gradient once 2s
    others wait. As the pipeline empties, weight gradients run with the input gradients that are
    left.

    >>> print(*paired_one_f_one_b(2, 4).rows[1])
    1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B 1B3
    """
    rows = looped_rows(num_ranks, num_microbatches, stages_per_rank, None, warmup_per_rank=2)
    return [_split_pairs(row, 2 * rank) if split else _pairs(row) for rank, row in enumerate(rows)]


def _phases(
    row: Sequence[Action],
) -> tuple[list[Action], list[tuple[Action, Action]], list[Action]]:
    """The forwards before a row's first backward, the other forwards with the backwards that they
    run with, and the backwards left over. In the row a forward and a backward take turns, and here
    each forward comes one backward later.
    """
    forwards, backwards = ([action for action in row if action.kind is kind] for kind in (F, B))
    first = next(i for i, action in enumerate(row) if action.kind is B)
    together = len(forwards) - first
    return (
        forwards[:first],
        list(zip(forwards[first:], backwards, strict=False)),
        backwards[together:],
    )


def _pairs(row: Sequence[Action]) -> list[Action | Overlap]:
    warmup, steady, rest = _phases(row)
    return [*warmup, *(Overlap(*pair) for pair in steady), *rest]


def _split_pairs(row: Sequence[Action], delay: int) -> list[Action | Overlap]:
    made, steady, rest = _phases(row)
    waiting: deque[Action] = deque()
    for forward, backward in steady:
        made.append(Overlap(forward, backward._replace(kind=I)))
        waiting.append(backward._replace(kind=W))
        if len(waiting) > delay:
            made.append(waiting.popleft())
    for backward in rest:
        inputs = backward._replace(kind=I)
        made.append(Overlap(waiting.popleft(), inputs) if waiting else inputs)
        waiting.append(backward._replace(kind=W))
    return [*made, *waiting]
