"""1F1B in pairs, with one stage per rank or interleaved, and how long pairs take of which all-to-all is a part.

`pplab.build` knows the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product

from ...actions import Action, B, F, I, Kind, Overlap, W
from ...builders import looped_rows, register
from ...builders.registry import Rows
from ...costs import Costs, PerStage, check_length, of_stage, per_stage


@register(
    "paired-1F1B",
    rules="any number of ranks, microbatches and stages per rank; pays off from M = 2P on",
    placement="loop",
    source="Megatron-Core's --overlap-moe-expert-parallel-comm; Moonshot AI 2025 (Kimi K2), arXiv:2507.20534",
)
def paired_one_f_one_b(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 1, split: bool = False) -> Rows:
    """1F1B, or interleaved 1F1B, with one more warm-up forward, so that every backward has a forward beside it.

    With one stage per rank, rank s holds 2(P-s) forwards. With `split`, a forward runs beside an input gradient, and
    each weight gradient is put off until 2s others wait on rank s; as the pipeline empties, they run beside the input
    gradients that are left.

    >>> print(*paired_one_f_one_b(2, 4).rows[1])
    1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B 1B3
    """
    rows = looped_rows(num_ranks, num_microbatches, stages_per_rank, None, warmup_per_rank=2)
    return [_split_pairs(row, 2 * rank) if split else _pairs(row) for rank, row in enumerate(rows)]


def _phases(row: Sequence[Action]) -> tuple[list[Action], list[tuple[Action, Action]], list[Action]]:
    """The forwards before a row's first backward, the others with the backwards beside which they run, and the
    backwards left over. In the row a forward and a backward take turns; here each forward comes one backward later."""
    forwards, backwards = ([action for action in row if action.kind is kind] for kind in (F, B))
    first = next(i for i, action in enumerate(row) if action.kind is B)
    together = len(forwards) - first
    return forwards[:first], list(zip(forwards[first:], backwards, strict=False)), backwards[together:]


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


def with_all_to_all(costs: Costs, forward: PerStage, backward_input: PerStage) -> Costs:
    """`costs` with the times of pairs that follow when so much of F, and of I, is all-to-all (of B, as much as of I).

    A rank computes one thing at a time, and its network does one all-to-all at a time. So two actions at once take at
    least the longest of four: each of the two alone, what both compute, what both send. The pairs get that least time,
    which they reach where a layer's two pieces that compute take equally long. ValueError where more is all-to-all than
    there is of F or I.

    >>> costs = with_all_to_all(Costs(4, 4, 2), 2, 2)
    >>> costs.of_overlap(0, 0), costs.of_overlap(0, 0, F, I), costs.of_overlap(0, 0, W, I)
    (6, 4, 4)
    """
    work = replace(costs, overhead=0)  # which a pair has besides
    sent = {F: per_stage("forward", forward), I: per_stage("backward_input", backward_input), W: 0}
    sent[B] = sent[I]
    times = ("forward", "backward_input", "backward_weight", "backward", "recompute")
    given = {name: getattr(costs, name) for name in times}
    lists = [value for value in (*given.values(), *sent.values()) if isinstance(value, tuple)]
    stages = range(len(lists[0]) if lists else 1)
    for name, value in (*given.items(), ("forward", sent[F]), ("backward_input", sent[I])):
        check_length(name, value, len(stages))
    for (kind, name), stage in product(((F, "forward"), (I, "backward_input")), stages):
        if of_stage(sent[kind], stage) > work.of(kind, stage):
            whole = f"{kind} on stage {stage} takes {work.of(kind, stage):g}"
            raise ValueError(f"{name}: {of_stage(sent[kind], stage):g} of it is all-to-all, and {whole}")

    def lasts(*pair: tuple[int, Kind]) -> float:
        alone = [work.of(kind, stage) for stage, kind in pair]
        network = [of_stage(sent[kind], stage) for stage, kind in pair]
        return max(*alone, sum(alone) - sum(network), sum(network))

    name = "{0}{1}" if lists else "{1}"  # of a half: its stage, too, where stages differ
    pairs = combinations_with_replacement(product(stages, (F, B, I, W)), 2)
    return replace(costs, overlap={(name.format(*a), name.format(*b)): lasts(a, b) for a, b in pairs})
