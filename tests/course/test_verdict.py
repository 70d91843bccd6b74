"""What checkers answer: rounded numbers are right, and a verdict reads well."""

from __future__ import annotations

import pytest

import pplab as pp
from pplab_course import answers
from pplab_course.verdict import Verdict, number, numbers


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


def test_numbers_in_another_order_are_recognised():
    two, three = ("first bill", "second bill"), ("stage", "rank", "messages")
    swapped = numbers((90.5, 88.7), (88.66, 90.506), "", two)
    assert swapped.says == "these are the right numbers, swapped: expected first bill, then second bill"
    assert (
        "in another order: expected stage, then rank, then messages" in numbers([11, 8, 0], (8, 0, 11), "", three).says
    )
    assert numbers((8, 8), (8, 8), "", two) and numbers((88.7, 90.5), (88.66, 90.506), "", two)
    for other in ((90.5, 88.2), (90.5, 90.5), (True, 8), ("90.5 $", "88.7 $")):
        assert "right numbers" not in numbers(other, (88.66, 90.506), "", two).says


ROWS = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
PAIR = "(0F1;1B0)OVERLAP_F_B"


@pytest.mark.parametrize(
    "given",
    [
        ROWS,
        tuple(map(tuple, ROWS)),
        [" ".join(row) for row in ROWS],
        [",".join(row) for row in ROWS],
        [[" ".join(row)] for row in ROWS],
        str(ROWS),
        str(ROWS).replace("'", "").replace(",", ""),
        str(tuple(map(tuple, ROWS))),
        "\n\n".join(", ".join(row) for row in ROWS),
        "\n  " + "\n  ".join(" ".join(row) for row in ROWS) + "\n",
        "\n".join(str(row) for row in ROWS),
        "\n".join(str(pp.Schedule(ROWS)).splitlines()[1:]),
        pp.Schedule(ROWS),
        pp.Schedule(ROWS).rows,
    ],
    ids=str,
)
def test_rows_are_taken_in_every_form(given):
    assert [list(map(str, row)) for row in answers.rows_of(given)] == ROWS
    assert answers.schedule_of(given) == pp.Schedule(ROWS)


def test_overlaps_keep_their_brackets():
    for row in (f"0F0 {PAIR} 1B1", f"[0F0, {PAIR}, 1B1]", ["0F0", PAIR.replace(";", "; "), "1B1"]):
        assert answers.actions_of(row) == ["0F0", PAIR, "1B1"]
    assert answers.rows_of(f"[[{PAIR}, 1B1], [0F0]]") == [[PAIR, "1B1"], ["0F0"]]
