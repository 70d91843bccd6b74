"""Schedules of slices: a microbatch is cut along its sequences, and its pieces follow each other
through the stages.

What such a schedule numbers as microbatches are slices. With k slices each, slice j of microbatch m
has number m k + j. Between stages they need what microbatches need. Within a stage, a slice's
forward comes after that of the slice before it, because it reads that slice's keys and values. A
slice's backward comes after that of the next slice, which has gradients for its keys and values. A
stage's slices are on one rank, so the order of its row ensures this.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

from ...actions import INPUT_GRADIENT, Action, B, F, parts
from ...builders import in_groups, phases, register, split_backwards, stages_of_loop
from ...builders._weave import actions_of
from ...builders.registry import Rows
from ...deps import Need
from ...errors import ScheduleError, positive_int
from ...schedule import Schedule
from ...simulator import validate


@register(
    "Seq1F1B",
    rules="any number of ranks, slices and stages per rank; microbatches are slices: a multiple of "
    "`slices`",
    placement="loop",
    source="Sun et al. 2024, arXiv:2406.03488; interleaved: Li et al. 2025 (SlimPipe), "
    "arXiv:2504.14519",
)
def seq_one_f_one_b(
    num_ranks: int,
    num_microbatches: int,
    *,
    slices: int = 2,
    stages_per_rank: int = 1,
    warmup_per_rank: int = 1,
    split: bool = False,
) -> Rows:
    """Run 1F1B on slices of sequences, with k-1 more warm-up forwards on every rank.

    So many forwards lie between a sequence's first forward and its first backward, since a
    microbatch's last slice has the first backward. `warmup_per_rank` is the number of warm-up
    forwards that a rank runs for each rank below it. With two, as in eager 1F1B, each message has
    the time of an action, and a rank holds one slice more for each rank below it.

    With several stages per rank, groups of whole microbatches, of at least P slices, go through
    them as in interleaved 1F1B. With `split`, rank r runs every weight gradient after r others, as
    in ZB-H1. `num_microbatches` counts slices.

    >>> print(seq_one_f_one_b(2, 4, slices=2))
    Seq1F1B: 2 ranks, 2 stages, 4 microbatches, 16 actions
    rank 0  0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2
    rank 1  1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2
    """
    count, rows = _sequences("Seq1F1B", num_microbatches, slices), []
    positive_int("warmup_per_rank", warmup_per_rank)
    least = -(-num_ranks // slices)  # microbatches, for a group that is as long as the loop
    groups = max(1, count // least)
    ends = accumulate((count // groups + (g < count % groups) for g in range(groups)), initial=0)
    order = [range(first * slices, end * slices) for first, end in pairwise(ends)]
    for rank in range(num_ranks):
        stages = stages_of_loop(rank, num_ranks, stages_per_rank)
        warmup = (
            (len(stages) - 1) * len(order[0])
            + warmup_per_rank * (num_ranks - 1 - rank)
            + slices
            - 1
        )
        forwards, backwards = in_groups(stages, F, order), in_groups(stages[::-1], B, order)
        row = phases(forwards, last_first(backwards, slices), min(warmup, len(forwards) - 1))
        rows.append(split_backwards(row, delay=rank) if split else row)
    return rows


@register(
    "TeraPipe",
    rules="any number of ranks and slices; microbatches are slices: a multiple of `slices`",
    source="Li et al. 2021, arXiv:2102.07988",
)
def terapipe(num_ranks: int, num_microbatches: int, *, slices: int = 2) -> Rows:
    """Run GPipe on slices: all forwards, then all backwards, last first.

    `num_microbatches` counts slices.
    """
    _sequences("TeraPipe", num_microbatches, slices)
    order = range(num_microbatches)
    return [
        actions_of(rank, F, order) + actions_of(rank, B, order[::-1]) for rank in range(num_ranks)
    ]


def last_first(actions: Iterable[Action], slices: int) -> list[Action]:
    """The same actions, with each microbatch's slices in the opposite order.

    >>> last_first([Action(0, B, 0), Action(0, B, 1), Action(0, B, 2), Action(0, B, 3)], 2)
    [0B1, 0B0, 0B3, 0B2]
    """
    return [
        Action(stage, kind, n - n % slices + slices - 1 - n % slices) for stage, kind, n in actions
    ]


def slice_needs(action: Action, slices: int) -> Need | None:
    """What an action waits for on its own stage because its microbatch is cut. `pplab.deps.needs`
    has the rest.

        F of slice j       waits for F of slice j-1          unless it is the first
        B or I of slice j  waits for the B or I of j+1       unless it is the last

    >>> print(*(slice_needs(Action(2, kind, n), 4) for kind, n in ((F, 5), (B, 5), (B, 7))))
    2F4 2B/I6 None
    """
    stage, kind, n = action
    if kind is F and n % slices:
        return Need(stage, (F,), n - 1)
    return (
        Need(stage, INPUT_GRADIENT, n + 1) if kind in INPUT_GRADIENT and (n + 1) % slices else None
    )


def check_slices(schedule: Schedule, slices: int) -> None:
    """Raise ScheduleError unless every rank can run its row when each microbatch is cut into so
    many slices. On top of `pplab.validate`, a stage's slices have to be on one rank, with the first
    slice's forward first and the last slice's backward first.
    """
    validate(schedule)
    if schedule.num_microbatches % positive_int("slices", slices):
        has = f"{schedule.name} has {schedule.num_microbatches} microbatches"
        cause = f"{has}, which don't make whole sequences of {slices} slices"
        raise ScheduleError(cause, f"build it for a multiple of {slices}: each counts as a slice")
    home = schedule.home()
    for rank, row in enumerate(schedule.rows):
        done: set[Action] = set()
        for item in row:
            for action in parts(item):
                need = slice_needs(action, slices)
                if need and done.isdisjoint(
                    Action(need.stage, kind, need.microbatch) for kind in need.kinds
                ):
                    raise _too_early(rank, action, need, slices, home[need.stage, need.microbatch])
            done.update(parts(item))


def _too_early(rank: int, action: Action, need: Need, slices: int, home: int) -> ScheduleError:
    what = "keys and values" if action.kind is F else "gradients for its keys and values"
    of = (
        f"{need} has {what} that it needs: they are slices of microbatch "
        f"{action.microbatch // slices}"
    )
    if home != rank:
        return ScheduleError(
            f"rank {rank} runs {action}, and {of}", f"put {need} on rank {rank}", rank, action
        )
    return ScheduleError(
        f"rank {rank} runs {action} before {need}; {of}",
        f"move {need} in front of it",
        rank,
        action,
    )


def _sequences(name: str, num_slices: int, slices: int) -> int:
    """How many microbatches so many slices make."""
    count, rest = divmod(num_slices, positive_int("slices", slices))
    if rest:
        raise ValueError(
            f"{name} takes a multiple of slices = {slices} microbatches, since each counts as a "
            f"slice, got {num_slices}"
        )
    return count
