"""The verdict of a checker, and what all checkers share: a decorator, running the reader's code,
comparing numbers.

A checker takes an answer and returns a `Verdict`. Decorate it with `checker`, unless it only calls
a decorated function such as `number`. Inside it, code that finds a fault may raise `Wrong` with the
words of the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from decimal import Decimal
from functools import wraps
from itertools import islice, permutations
from math import isfinite
from numbers import Real

MOST_ORDERS = 200  # of several numbers, which are tried when they aren't right as they stand
_AROUND = str.maketrans(",;()[]{}'\"", " " * 10)  # the numbers of a text
# behind an error that speaks of NoneType
UNASKED = ": a tensor that nobody asked for a gradient has None"


class Verdict:
    """Right, wrong (with what is wrong) or not answered. True only when right."""

    def __init__(self, right: bool | None, says: str):
        self.right, self.says = right, says

    def __bool__(self) -> bool:
        return bool(self.right)

    def __repr__(self) -> str:
        return (
            f"{ {True: '✓ right', False: '✗ not yet', None: '… not answered'}[self.right] }: "
            f"{self.says}"
        )


class Wrong(Exception):
    """What is wrong with an answer, raised where it is found. `checker` turns it into a verdict."""


def right(says: str) -> Verdict:
    """The answer is right."""
    return Verdict(True, says)


def wrong(says: str) -> Verdict:
    """The answer is wrong."""
    return Verdict(False, says)


def values_of(answer: object) -> tuple:
    """The numbers of an answer: those in a text, whatever stands between and around them, and those
    in a sequence of numbers and such texts. A text with anything else in it stays as it is.
    """
    if isinstance(answer, str):
        values = tuple(map(_value, answer.translate(_AROUND).split()))
        return (answer,) if any(isinstance(value, str) for value in values) else values
    if isinstance(answer, (list, tuple)):
        return tuple(value for each in answer for value in values_of(each))
    return tuple(answer) if isinstance(answer, Iterable) else (answer,)


def _value(text: str) -> Real | str:
    """The number that a text is, or the text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def joined(answers: tuple[object, ...]) -> object:
    """The answer that a checker was given. Several arguments are a row of them, and one is
    itself.
    """
    return answers[0] if len(answers) == 1 else answers


def one_or_several(check: Callable[[object], Verdict]) -> Callable[..., Verdict]:
    """Decorate a checker of one answer, so that several arguments are a row of them."""

    @wraps(check)
    def checked(*answer: object) -> Verdict:
        return check(joined(answer))

    return checked


def checker(
    expected: str | None = None, fits: Callable[[object], bool] = callable
) -> Callable[[Callable], Callable]:
    """Decorate a function from an answer to a verdict. Dots are no answer, and `Wrong` becomes a
    verdict.

    With `expected`, which is by default some function, an answer of the wrong kind gets a verdict
    that names what was expected.
    """

    def decorate(check: Callable[..., Verdict]) -> Callable[..., Verdict]:
        @wraps(check)
        def checked(answer: object, *arguments: object, **options: object) -> Verdict:
            if answer is ...:
                return Verdict(None, "put your answer in place of the dots")
            if expected is not None and not fits(answer):
                return wrong(f"expected {expected}, got {answer!r}")
            try:
                return check(answer, *arguments, **options)
            except Wrong as error:
                return wrong(str(error))

        return checked

    return decorate


def checker_of_each(letters: str) -> Callable[[Callable], Callable]:
    """`checker` for an answer with a value for each letter, such as {"A": 1, "B": 2}."""
    expected = f"a dict with the keys {', '.join(letters[:-1])} and {letters[-1]}"
    return checker(
        expected, lambda answer: isinstance(answer, dict) and set(answer) == set(letters)
    )


def matched(
    answer: Mapping[str, object],
    truth: Mapping[str, object],
    choices: Collection,
    clue: Callable[[str], str],
    says: str,
) -> Verdict:
    """Whether each letter has its right choice. The first one that hasn't gets its clue."""
    for letter, value in truth.items():
        if answer[letter] not in choices:
            raise Wrong(f"{letter}: expected one of {', '.join(choices)}, got {answer[letter]!r}")
        if answer[letter] != value:
            raise Wrong(f"{letter}: not {answer[letter]!r}; {clue(letter)}")
    return right(says)


@contextmanager
def readers_code(said: str = "your function raised") -> Iterator[None]:
    """A context for the reader's code. Whatever the code raises becomes the verdict, after the
    words `said`.
    """
    try:
        yield
    except Exception as error:
        raise Wrong(f"{said} {type(error).__name__}: {error}") from None


@contextmanager
def told(where: str = "", *errors: type[Exception], after: str = "") -> Iterator[None]:
    """A context that turns `Wrong` and these errors into the verdict, with `where` before their
    words and `after` behind them.
    """
    try:
        yield
    except (Wrong, *errors) as error:
        raise Wrong(f"{where}{error}{after}") from None


@checker()
def number(
    answer: object,
    expected: float,
    why: str,
    *,
    traps: Mapping[float, str] | None = None,
    tolerance: float = 1e-3,
    digits: int = 3,
) -> Verdict:
    """Check a number: an int exactly, a float to a relative tolerance, or as the reader has rounded
    it.

    Rounded means that the expected number, to as many significant digits as the answer has, and at
    least to `digits`, is the answer. `traps` explains wrong answers that people give. For a count,
    the verdict doesn't tell whether the answer is too high or too low, unless it is far off,
    because a reader could find the number by asking again and again.
    """
    if isinstance(answer, str) and isinstance(answer := _value(answer.strip()), str):
        return wrong(f"expected a number, got the text {answer!r}: write it without quotes")
    if isinstance(answer, bool) or not isinstance(answer, Real):
        return wrong(f"expected a number, got {answer!r}")
    if _same(answer, expected, tolerance, digits):
        return right(why)
    for trap, explanation in (traps or {}).items():
        if _same(answer, trap, tolerance, digits):
            return wrong(explanation)
    if not isinstance(expected, int) and 0 < expected <= 1 and _near(answer, 100 * expected, 0.02):
        return wrong("that is in per cent: give it as a share of 1")
    direction = "smaller" if answer > expected else "larger"
    if isinstance(expected, int):
        far = not expected / 2 <= answer <= 2 * expected
        return wrong(
            f"{answer:g} isn't it; "
            + (f"the number is much {direction}" if far else "the hint may help")
        )
    if _near(answer, expected, 0.02):
        if _significant(answer) < digits:
            return wrong(f"{answer:g} is near: give {digits} digits")
        return wrong(f"{answer:g} is near; the number is a little {direction}")
    return wrong(f"{answer:g} isn't it; the number is {direction}")


@checker()
def numbers(
    answer: object,
    expected: Iterable[float],
    why: str,
    names: Iterable[str],
    *,
    traps: Iterable[Mapping[float, str]] | None = None,
    digits: int = 3,
) -> Verdict:
    """Check several numbers, each with a name, and perhaps with traps. The verdict is about the
    first wrong one.
    """
    expected, names = tuple(expected), tuple(names)
    traps = tuple(traps or ({},) * len(names))
    if isinstance(answer, (Mapping, Set)) or not isinstance(answer, Iterable):
        return wrong(
            f"expected {len(expected)} numbers in a row ({', '.join(names)}), got {answer!r}"
        )
    answer = values_of(answer)
    if len(answer) != len(expected):
        return wrong(f"expected {len(expected)} numbers ({', '.join(names)}), got {len(answer)}")
    if _in_another_order(answer, expected, digits):
        order = "swapped" if len(names) == 2 else "in another order"
        return wrong(f"these are the right numbers, {order}: expected {', then '.join(names)}")
    for name, given, value, known in zip(names, answer, expected, traps, strict=True):
        verdict = number(given, value, why, traps=known, digits=digits)
        if not verdict:
            return wrong(f"{name}: {verdict.says}")
    return right(why)


def _in_another_order(answer: tuple, expected: tuple[float, ...], digits: int) -> bool:
    """Whether these are the expected numbers in a different order."""

    def are_right(given: tuple) -> bool:
        return all(_same(x, value, 1e-3, digits) for x, value in zip(given, expected, strict=True))

    if not all(isinstance(x, Real) for x in answer) or are_right(answer):
        return False
    return any(map(are_right, islice(permutations(answer), MOST_ORDERS)))


def _same(answer: Real, value: float, tolerance: float, digits: int) -> bool:
    """Whether the answer is the value: a count exactly, any other number to the tolerance or
    rounded.
    """
    if isinstance(value, int):
        return _near(answer, value, 1e-9)
    if _near(answer, value, tolerance):
        return True
    if not (found := _significant(answer)):
        return False
    # the place of the last digit
    last = Decimal(repr(float(answer))).adjusted() - max(found, digits) + 1
    # a half may be rounded up or down
    return abs(float(answer) - value) <= 0.5 * 10.0**last * (1 + 1e-9)


def _significant(answer: Real) -> int:
    """How many digits a number has from its first to its last that isn't 0."""
    return (
        len(Decimal(repr(float(answer))).normalize().as_tuple().digits)
        if answer and isfinite(answer)
        else 0
    )


def _near(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(b), 1e-12)
