"""What a checker says, and the checks that chapters share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Set
from decimal import Decimal
from math import isfinite
from numbers import Real

from ..costs import Costs
from ..schedule import Schedule, plural
from ..simulator import simulate, validate
from ..timeline import Timeline


class Verdict:
    """Right, wrong (with what is wrong) or not answered. True only when right."""

    def __init__(self, right: bool | None, says: str):
        self.right, self.says = right, says

    def __bool__(self) -> bool:
        return bool(self.right)

    def __repr__(self) -> str:
        return f"{ {True: '✓ right', False: '✗ not yet', None: '… not answered'}[self.right] }: {self.says}"


def right(says: str) -> Verdict:
    """The answer is right."""
    return Verdict(True, says)


def wrong(says: str) -> Verdict:
    """The answer is wrong."""
    return Verdict(False, says)


def unanswered(answer: object) -> Verdict | None:
    """The verdict on an answer that still is `...`; None for any other."""
    return Verdict(None, "put your answer in place of the dots") if answer is ... else None


def number(
    answer: object,
    expected: float,
    why: str,
    *,
    traps: Mapping[float, str] | None = None,
    tolerance: float = 1e-3,
    digits: int = 3,
) -> Verdict:
    """Check a number: an int exactly, a float to a relative tolerance or as rounded by whoever answers.

    Rounded is the expected number to as many significant digits as the answer has, and to `digits` of them at least.
    `traps` explains the wrong ones that people give. Of a count it isn't said which way it lies, unless the answer is
    far off: whoever asks again and again would be led to it.
    """
    if (verdict := unanswered(answer)) is not None:
        return verdict
    if isinstance(answer, str):
        return wrong(f"expected a number, got the text {answer!r}: write it without quotes")
    if isinstance(answer, bool) or not isinstance(answer, Real):
        return wrong(f"expected a number, got {answer!r}")
    if _same(answer, expected, tolerance, digits):
        return right(why)
    for trap, explanation in (traps or {}).items():
        if _same(answer, trap, tolerance, digits):
            return wrong(explanation)
    if not isinstance(expected, int) and 0 < expected <= 1 and _same(answer, 100 * expected, tolerance, digits):
        return wrong("that is in per cent: give it as a share of 1")
    direction = "smaller" if answer > expected else "larger"
    if isinstance(expected, int):
        far = not expected / 2 <= answer <= 2 * expected
        return wrong(f"{answer:g} isn't it; " + (f"the number is much {direction}" if far else "the hint may help"))
    if _near(answer, expected, 0.02):
        if _significant(answer) < digits:
            return wrong(f"{answer:g} is near: give {digits} digits")
        return wrong(f"{answer:g} is near; the number is a little {direction}")
    return wrong(f"{answer:g} isn't it; the number is {direction}")


def numbers(
    answer: object,
    expected: Iterable[float],
    why: str,
    names: Iterable[str],
    *,
    traps: Iterable[Mapping[float, str]] | None = None,
    digits: int = 3,
) -> Verdict:
    """Check several numbers, each with a name, and perhaps with traps; the first wrong one is told."""
    if (verdict := unanswered(answer)) is not None:
        return verdict
    expected, names = tuple(expected), tuple(names)
    traps = tuple(traps or ({},) * len(names))
    if isinstance(answer, (str, Mapping, Set)) or not isinstance(answer, Iterable):
        return wrong(f"expected {len(expected)} numbers in a row ({', '.join(names)}), got {answer!r}")
    answer = tuple(answer)
    if len(answer) != len(expected):
        return wrong(f"expected {len(expected)} numbers ({', '.join(names)}), got {len(answer)}")
    for name, given, value, known in zip(names, answer, expected, traps, strict=True):
        verdict = number(given, value, why, traps=known, digits=digits)
        if not verdict:
            return wrong(f"{name}: {verdict.says}")
    return right(why)


def actions_of(row: object) -> list:
    """A row's actions: a sequence's as they are, a text's between its commas and blanks; TypeError for others."""
    if isinstance(row, str):
        return row.replace(",", " ").split()
    if not isinstance(row, Iterable):
        raise TypeError(f'expected a row of actions, such as ["0F0", "0B0"], got {row!r}')
    return list(row)


def schedule_of(rows: object) -> Schedule | Verdict:
    """The legal schedule that rows make, or what is wrong with them.

    Takes a Schedule, a text with a line per rank, and rows, of which each may be a text.
    """
    try:
        if isinstance(rows, Schedule):
            schedule = rows
        elif isinstance(rows, str):
            schedule = Schedule.from_csv(rows if "," in rows else re.sub(r"[ \t]+", ",", rows))
        elif isinstance(rows, Iterable):
            schedule = Schedule([actions_of(row) for row in rows])
        else:
            return wrong(f'expected a row of actions for each rank, such as [["0F0", "0B0"]], got {rows!r}')
        validate(schedule)
    except (ValueError, TypeError, OSError) as error:
        return wrong(str(error))
    return schedule


def sizes_of(schedule: Schedule) -> str:
    """A schedule's sizes in words, for a verdict on an answer that has the wrong ones."""
    ranks, stages = plural(schedule.num_ranks, "rank"), plural(schedule.num_stages, "stage")
    on = ", ".join(map(str, schedule.placement))
    return f"{ranks}, {stages} (on rank {on}) and {plural(schedule.num_microbatches, 'microbatch')}"


def builder(
    build: object,
    judge: Callable[[Timeline, int, int], str | None],
    why: str,
    grid: Iterable[tuple[int, int]] = ((2, 4), (4, 8), (3, 5), (1, 3), (4, 2)),
    costs: Costs | None = None,
    misfit: Callable[[Schedule, int, int], str | None] | None = None,
) -> Verdict:
    """Check a function from (num_ranks, num_microbatches) to rows on several sizes.

    `misfit` looks at the schedule's sizes and placement, `judge` at the simulated timeline, and each returns what is
    wrong with it, or None. By default a schedule must have one stage per rank.
    """
    misfit = misfit or _other_sizes
    if (verdict := unanswered(build)) is not None:
        return verdict
    if not callable(build):
        return wrong(f"expected a function of (num_ranks, num_microbatches), got {build!r}")
    for num_ranks, num_microbatches in grid:
        where = f"at {num_ranks} ranks and {num_microbatches} microbatches: "
        try:
            rows = build(num_ranks, num_microbatches)
        except Exception as error:  # the reader's code: whatever it raises is the answer to show
            return wrong(f"{where}your function raised {type(error).__name__}: {error}")
        if rows is None or rows is ...:
            return wrong(f"{where}your function returned {rows!r}: it must return the rows")
        schedule = schedule_of(rows)
        if isinstance(schedule, Verdict):
            return wrong(where + schedule.says)
        size = num_ranks, num_microbatches
        if fault := misfit(schedule, *size) or judge(simulate(schedule, costs), *size):
            return wrong(where + fault)
    return right(why)


def _other_sizes(schedule: Schedule, num_ranks: int, num_microbatches: int) -> str | None:
    if (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) != (num_ranks, num_ranks, num_microbatches):
        return (
            f"expected a stage on each of {num_ranks} ranks, and {num_microbatches} microbatches; your schedule has "
            + (sizes_of(schedule))
        )
    return None


def _same(answer: Real, value: float, tolerance: float, digits: int) -> bool:
    """Whether the answer is the value: a count exactly, else to the tolerance or rounded."""
    if isinstance(value, int):
        return _near(answer, value, 1e-9)
    if _near(answer, value, tolerance):
        return True
    if not (found := _significant(answer)):
        return False
    last = Decimal(repr(float(answer))).adjusted() - max(found, digits) + 1  # the place of the last digit
    return abs(float(answer) - value) <= 0.5 * 10.0**last * (1 + 1e-9)  # a half may be rounded up or down


def _significant(answer: Real) -> int:
    """How many digits a number has from its first to its last that isn't 0."""
    return len(Decimal(repr(float(answer))).normalize().as_tuple().digits) if answer and isfinite(answer) else 0


def _near(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(b), 1e-12)
