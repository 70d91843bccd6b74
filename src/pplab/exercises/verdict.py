"""What a checker says, and the checks that chapters share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Real

from ..costs import Costs
from ..schedule import Schedule
from ..simulate import simulate
from ..timeline import Timeline
from ..validate import validate


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
    answer: object, expected: float, why: str, *, traps: Mapping[float, str] | None = None, tolerance: float = 1e-3
) -> Verdict:
    """Check a number to a relative tolerance. `traps` explains the wrong ones that people give."""
    if (verdict := unanswered(answer)) is not None:
        return verdict
    if isinstance(answer, bool) or not isinstance(answer, Real):
        return wrong(f"expected a number, got {answer!r}")
    if _near(answer, expected, tolerance):
        return right(why)
    for trap, explanation in (traps or {}).items():
        if _near(answer, trap, tolerance):
            return wrong(explanation)
    direction = "smaller" if answer > expected else "larger"
    return wrong(f"{answer:g} isn't it; the number is {direction}")


def numbers(answer: object, expected: Iterable[float], why: str, names: Iterable[str]) -> Verdict:
    """Check several numbers, each with a name; the first wrong one is told."""
    if (verdict := unanswered(answer)) is not None:
        return verdict
    expected, names = tuple(expected), tuple(names)
    try:
        answer = tuple(answer)
    except TypeError:
        return wrong(f"expected {len(expected)} numbers, got {answer!r}")
    if len(answer) != len(expected):
        return wrong(f"expected {len(expected)} numbers ({', '.join(names)}), got {len(answer)}")
    for name, given, value in zip(names, answer, expected, strict=True):
        verdict = number(given, value, why)
        if not verdict:
            return wrong(f"{name}: {verdict.says}")
    return right(why)


def schedule_of(rows: object) -> Schedule | Verdict:
    """The legal schedule that rows make, or what is wrong with them. Takes rows, CSV text or a Schedule."""
    try:
        if isinstance(rows, Schedule):
            schedule = rows
        else:
            schedule = Schedule.from_csv(rows) if isinstance(rows, str) else Schedule(rows)
        validate(schedule)
    except (ValueError, TypeError) as error:
        return wrong(str(error))
    return schedule


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
        schedule = schedule_of(rows)
        if isinstance(schedule, Verdict):
            return wrong(where + schedule.says)
        size = num_ranks, num_microbatches
        if fault := misfit(schedule, *size) or judge(simulate(schedule, costs), *size):
            return wrong(where + fault)
    return right(why)


def _other_sizes(schedule: Schedule, num_ranks: int, num_microbatches: int) -> str | None:
    sizes = schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
    if sizes != (num_ranks, num_ranks, num_microbatches):
        return f"your schedule is for {repr(schedule)[10:-1]}"
    return None


def _near(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(b), 1e-12)
