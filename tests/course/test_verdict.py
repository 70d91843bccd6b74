"""What checkers answer: rounded numbers are right, and a verdict reads well."""

from __future__ import annotations

from pplab.course.verdict import Verdict, number


def test_rounded_answers_are_right():
    """To three digits or more, of numbers that aren't counts."""
    for answer, expected, same in (
        (105, 105.4, True),
        (120, 120.3, True),  # its 0 may be a digit
        (100, 100.4, True),
        (100.4, 100, False),  # a count
        (100.0, 100, True),
        (1.05, 1.0549, True),
        (1.050, 1.0551, False),
        (-0.0313, -0.03125, True),
        (0.0, 0.001, False),
    ):
        assert bool(number(answer, expected, "")) is same, (answer, expected)


def test_a_verdict_reads_well():
    assert repr(Verdict(True, "so it is")) == "✓ right: so it is"
    assert repr(Verdict(False, "no")) == "✗ not yet: no"
