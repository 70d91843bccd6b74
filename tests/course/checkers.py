"""What the tests of the chapters' checkers share: two tests for a table of wrong answers, and readers' functions."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import pplab as pp
from conftest import assert_explained
from pplab_course.verdict import Verdict

Row = tuple[Callable[[object], Verdict], object, str]  # a checker, a wrong answer, and words of what it says


LATER = re.compile(r"\d[IW]\d|\b[IW]\b|OVERLAP|bidirectional|replica")  # words of chapters from 7 on


def table_tests(wrong: list[Row], later: bool = True) -> tuple[Callable, Callable]:
    """Two tests: every wrong answer is refused, in the words beside it; and to every checker, dots are no answer.

    Unless it is `later` than chapter 6, no verdict speaks of what comes in a later chapter.
    """
    names = {"ids": lambda x: getattr(x, "__name__", "")}
    checkers = list(dict.fromkeys(getattr(row, "values", row)[0] for row in wrong))

    @pytest.mark.parametrize(("check", "answer", "says"), wrong, **names)
    def test_a_wrong_answer_is_explained(check: Callable, answer: object, says: str) -> None:
        assert_explained(check, answer, says)
        assert later or not LATER.search(check(answer).says), check(answer)

    @pytest.mark.parametrize("check", checkers, **names)
    def test_dots_are_no_answer(check: Callable) -> None:
        assert check(...).right is None

    return test_a_wrong_answer_is_explained, test_dots_are_no_answer


def slow(*row: object) -> object:
    """A row of the table whose checker loads torch."""
    return pytest.param(*row, marks=pytest.mark.slow)


def builds(name: str, **options: object) -> Callable[[int, int], pp.Schedule]:
    """A function from sizes to a schedule, as a reader may write one."""
    return lambda P, M: pp.build(name, num_ranks=P, num_microbatches=M, **options)


def raises(*anything: object) -> None:
    """A reader's function that fails."""
    raise IndexError("list index out of range")
