"""Checkers of the chapter on 1F1B."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import index

from pplab.builders import build
from pplab.lab import Case, Entry
from pplab.lab.planning import floor_makespan, one_f_one_b_peak_in_flight
from pplab.schedule import Schedule
from pplab.simulator import simulate
from pplab.timeline import Timeline

from .answers import actions_of, in_whole_backwards, rows_of, schedule_of, whole
from .spine import one_f_one_b_file as your_pipeline
from .verdict import (
    Verdict,
    Wrong,
    checker,
    joined,
    numbers,
    one_or_several,
    readers_code,
    right,
    told,
    wrong,
)

__all__ = [
    "by_hand",
    "longer_sequences",
    "order",
    "too_early",
    "traced",
    "twice_the_ranks",
    "unstick",
    "your_pipeline",
]

STUCK_ROWS = """0F0,0F1,0B0,0F2,0B1,0B2
1F0,1F1,1F2,1B0,1B1,1B2
2F0,2B0,2F1,2B1,2F2,2B2
"""
TOO_EARLY = "1B4"
LONGER = replace(Case(), model=replace(Case().model, sequence=16384))
BEST_LONGER = {"cut": (8, 8, 9, 7), "in_flight": (6, 4, 2, 1), "recompute": (6, 4, 0, 0)}
ENOUGH = 1.04  # of the best known bill


@in_whole_backwards(stage_per_rank=True)
@one_or_several
@checker(
    "five rows of actions, or a text with a line per rank",
    lambda answer: isinstance(answer, Iterable),
)
def by_hand(answer: object) -> Verdict:
    """Write the rows of 1F1B with 5 ranks and 3 microbatches: a text with a line per rank, such as
    "F0 F1 B0".
    """
    with told("", TypeError):
        rows = rows_of(answer)
    try:
        _is_1f1b(rows, 5, 3)
    except Wrong as error:
        right_rows = build("1F1B", num_ranks=5, num_microbatches=3).rows
        same = [
            rank
            for rank, (row, right_row) in enumerate(zip(rows, right_rows, strict=False))
            if _is_row(rank, row, right_row)
        ]
        fine = f"; the row of rank {' and of rank '.join(map(str, same))} is right" if same else ""
        raise Wrong(f"{error}{fine}") from None
    return right("at the floor, 21, and the ranks hold 3, 3, 3, 2 and 1")


@in_whole_backwards(stage_per_rank=True)
@checker("a function of (rank, P, M)")
def order(answer: Callable[[int, int, int], Iterable[str]]) -> Verdict:
    """Write `order(rank, P, M)`: a rank's actions under 1F1B, as texts such as "F0". M may be
    smaller than P.
    """
    for P, M in ((4, 8), (2, 4), (3, 5), (1, 3), (6, 6), (4, 2), (5, 1)):
        with told(f"at {P} ranks and {M} microbatches: "):
            with readers_code():
                rows = [answer(rank, P, M) for rank in range(P)]
            if any(row is None or row is ... for row in rows):
                raise Wrong("your function returned nothing: it must return a list of actions")
            _is_1f1b(rows, P, M)
    return right(
        "at the floor at seven sizes, with P-s forwards in flight, or M where that is less"
    )


def _is_row(rank: int, row: object, wanted: Iterable[object]) -> bool:
    """Whether these are the wanted actions, even if their form isn't that of a row."""
    try:
        return whole(actions_of(row), rank) == list(map(str, wanted))
    except (TypeError, Wrong):
        return False


def _is_1f1b(rows: Iterable[object], P: int, M: int) -> None:
    """Raise `Wrong` unless these rows have 1F1B's time and memory."""
    schedule = schedule_of(rows)
    wanted = f"{P} ranks with {M} microbatch{'es' if M > 1 else ''}"
    if (schedule.num_ranks, schedule.num_microbatches) != (P, M):
        raise Wrong(f"expected {wanted}, got {schedule.num_ranks} with {schedule.num_microbatches}")
    caps = one_f_one_b_peak_in_flight(P, M)
    for rank, (held, cap) in enumerate(zip(schedule.peak_in_flight, caps, strict=True)):
        if held != cap:
            raise Wrong(
                f"rank {rank} holds {held} forwards at its fullest; under 1F1B it holds {cap}"
            )
    if (took := simulate(schedule).makespan) != floor_makespan(P, M, 1, 2):
        raise Wrong(
            f"the ranks hold what they should, but it takes {took}, and 1F1B "
            f"{floor_makespan(P, M, 1, 2)}"
        )


def twice_the_ranks(*answer: object) -> Verdict:
    """Compute, in GB, rank 0's activations and what ranks 0 and 7 hold, for the case on 8 ranks
    with 4 layers each under 1F1B with M=32.
    """
    eight, four = (Case(num_ranks=ranks).row("1F1B", num_microbatches=32) for ranks in (8, 4))
    state = Case(num_ranks=8).state_gb()
    activations, half = eight.held_gb[0] - state[0], (four.held_gb[0] - Case().state_gb()[0]) / 2
    gpipe = 32 * Case(num_ranks=8).sequence_gb()[0]
    names = ("rank 0's activations", "rank 0 with its state", "rank 7 with its state")
    traps = (
        {
            gpipe: "that is GPipe's, with all 32 in flight",
            half: "each piece is half as large, and rank 0 has more of them in flight than on four "
            "ranks",
        },
        {activations + Case().state_gb()[0]: "the state of rank 0 gets smaller, too"},
        {state[-1]: "rank 7 has one microbatch in flight"},
    )
    why = (
        "eight in flight of half a piece are as much as four of a whole one: only the state of "
        "rank 0 gets smaller"
    )
    return numbers(
        joined(answer), (activations, eight.held_gb[0], eight.held_gb[-1]), why, names, traps=traps
    )


@in_whole_backwards(stage_per_rank=True)
@one_or_several
@checker()
def unstick(answer: object) -> Verdict:
    """Reorder one row of `STUCK_ROWS` so that it runs at the floor. The answer is CSV text or
    rows.
    """
    schedule = schedule_of(answer, (3, 3, 3), "keep 3 ranks, 3 stages and 3 microbatches")
    stuck = [line.split(",") for line in STUCK_ROWS.split()]
    changed = [
        rank for rank, row in enumerate(schedule.rows) if [str(a) for a in row] != stuck[rank]
    ]
    if len(changed) > 1:
        return wrong(
            f"rows {' and '.join(map(str, changed))} differ from the exercise's: reorder one row "
            "only"
        )
    if (makespan := simulate(schedule).makespan) > floor_makespan(3, 3, 1, 2):
        alone = (
            "No order of this row alone is faster than 18. If you reorder a different row, it "
            "takes 15"
        )
        better = "A different order of this row takes 15" if changed[0] == 0 else alone
        return wrong(f"with row {changed[0]} reordered it runs, in {makespan}. {better}")
    return right("the circle is broken, and the time is the floor")


@cache
def traced() -> Timeline:
    """A simulated step for exercise 6: 1F1B, P=4, M=12, in which one backward of rank 1 comes a
    forward too early.
    """
    rows = [list(map(str, row)) for row in build("1F1B", num_ranks=4, num_microbatches=12).rows]
    row = rows[1]
    # each before its backward, one pair later than it should be
    late = [row.index(f"1F{m}") for m in (6, 7, 8)]
    for at in late:
        row[at], row[at + 1] = row[at + 1], row[at]
    return simulate(Schedule(rows, "traced"))


@one_or_several
@checker(
    'the text of an action, such as "3B5"', lambda answer: isinstance(answer, (str, list, tuple))
)
def too_early(answer: str | Sequence) -> Verdict:
    """Find the action that comes too early in a step with P=4 and M=12 that takes 54 instead of
    45.
    """
    schedule = traced().schedule
    given = " ".join(map(str, actions_of(answer))).upper()
    found = {
        str(action): (rank, action) for rank, row in enumerate(schedule.rows) for action in row
    }
    if given not in found:
        return wrong(f"{answer} isn't an action of this schedule")
    rank, action = found[given]
    if given == TOO_EARLY:
        return right(
            "no forward comes before it, so from here on rank 1 has two in flight, and it needs "
            "three"
        )
    if rank != 1:
        return wrong(
            f"rank {rank}'s row is 1F1B's, action by action, and waits for a different rank"
        )
    if action.kind.name == "F":
        return wrong(
            "it is the right rank, but a forward that comes early would keep more in flight, not "
            "fewer"
        )
    later = action.microbatch > int(TOO_EARLY[2:])
    return wrong(
        "it is the right rank, but "
        f"{'something went wrong before' if later else 'all is well up to'} {given}"
    )


@checker(
    'a dict such as {"cut": (8, 8, 8, 8), "in_flight": (4, 3, 2, 1), "recompute": (0, 0, 0, 0)}',
    lambda answer: isinstance(answer, Mapping) and set(answer) <= set(BEST_LONGER),
)
def longer_sequences(answer: Mapping[str, object]) -> Verdict:
    """Give a cut, in_flight and recomputation that fit and cost little, for sequences of 16,384
    tokens and M=16. The default for what you leave out is 1F1B's: an even cut, P-s in flight,
    nothing recomputed.
    """
    asked = {
        name: value if isinstance(value, bool) else _whole(name, value)
        for name, value in answer.items()
    }
    with told("", TypeError, ValueError):  # in_flight=True, or a cut of 33 layers
        row = LONGER.row("1F1B", num_microbatches=16, **asked)
    if not row.fits:
        over = [
            f"rank {r} holds {gb:.1f} GB" for r, gb in enumerate(row.held_gb) if gb > LONGER.room_gb
        ]
        return wrong(f"it doesn't fit in {LONGER.room_gb:g} GB: {', '.join(over)}")
    best = _best_longer()
    says = f"it fits, and a billion tokens cost ${row.dollars:.2f}"
    if row.dollars > ENOUGH * best.dollars:
        more = f"{100 * (row.dollars / best.dollars - 1):.1f} % more than the best known"
        busiest = max(range(LONGER.num_ranks), key=row.timeline.busy.__getitem__)
        slow = (
            f"rank {busiest} has the most to do, {row.timeline.busy[busiest]:.2f} of "
            f"{row.step_s:.2f} s"
        )
        return wrong(f"{says}, {more}: come within {100 * (ENOUGH - 1):.0f} %; {slow}")
    if row.dollars < best.dollars - 0.005:
        return right(f"{says}, which is less than the best known, ${best.dollars:.2f}: tell us")
    return right(f"{says}; the best known is ${best.dollars:.2f}")


def _whole(name: str, values: object) -> tuple[int, ...]:
    """Four whole numbers, because half a layer can't be moved."""
    try:
        found = tuple(map(index, values))
    except TypeError:
        found = ()
    if len(found) != 4:
        raise Wrong(f"{name}: expected a whole number for each of four ranks, got {values!r}")
    return found


@cache
def _best_longer() -> Entry:
    return LONGER.row("1F1B", num_microbatches=16, **BEST_LONGER)
