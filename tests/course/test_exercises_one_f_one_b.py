"""The checkers of the chapter on 1F1B refuse wrong answers and say what is wrong; what is right, its solutions show."""

from __future__ import annotations

import inspect
import json
import re
from itertools import permutations, product
from pathlib import Path

import pytest
from checkers import raises, table_tests

import pplab as pp
from pplab_course import one_f_one_b as exercise
from pplab_course import spine

NAN = float("nan")
FIRST, SECOND, LAST = "F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"
BY_HAND = "\n".join([FIRST] * 3 + [SECOND, LAST])


def order(rank, P, M):
    ahead = min(P - 1 - rank, M)
    row = [f"F{m}" for m in range(ahead)]
    for m in range(ahead, M):
        row += [f"F{m}", f"B{m - ahead}"]
    return row + [f"B{m}" for m in range(M - ahead, M)]


def one_short(rank, P, M):
    """Backward first in the steady state."""
    ahead = min(max(P - 1 - rank, 1), M)
    row = [f"F{m}" for m in range(ahead)]
    for m in range(ahead, M):
        row += [f"B{m - ahead}", f"F{m}"]
    return row + [f"B{m}" for m in range(M - ahead, M)]


def no_small_batches(rank, P, M):
    ahead = P - 1 - rank
    row = [f"F{m}" for m in range(ahead)]
    for m in range(ahead, M):
        row += [f"F{m}", f"B{m - ahead}"]
    return row + [f"B{m}" for m in range(M - ahead, M)]


def gpipe(rank, P, M):
    return [f"{kind}{m}" for kind in "FB" for m in range(M)]


def two_by_two(rank, P, M):
    """1F1B's memory, where the last rank's neighbour runs two forwards and two backwards in turn."""
    row = order(rank, P, M)
    if (rank, P, M) == (2, 4, 8):
        row = [action for m in range(0, M, 2) for action in (f"F{m}", f"F{m + 1}", f"B{m}", f"B{m + 1}")]
    return row


def screws(**changes):
    return {**exercise.BEST_LONGER, **changes}


ONE_ROW_OF_1 = exercise.STUCK_ROWS.replace("1F0,1F1,1F2,1B0,1B1,1B2", "1F0,1F1,1B0,1F2,1B1,1B2")
ONE_ROW_OF_0 = exercise.STUCK_ROWS.replace("0F0,0F1,0B0,0F2,0B1,0B2", "0F0,0F1,0F2,0B1,0B0,0B2")
WHOLE = "expected a whole number for each of four ranks"

WRONG = [
    (exercise.by_hand, 3, "expected five rows of actions"),
    (exercise.by_hand, "F0 B0", "expected 5 ranks with 3 microbatches, got 1 with 1"),
    (exercise.by_hand, [1, 2, 3], "expected a row of actions"),
    (exercise.by_hand, BY_HAND.replace(" B2", ""), "0B2 is missing"),
    (exercise.unstick, exercise.STUCK_ROWS.replace(",0B2", ""), "add 0B2 to rank 0's row"),
    (exercise.unstick, exercise.STUCK_ROWS.replace("0F0", "F0").lower(), "deadlock: rank 0 waits at 0B0 for 1B0"),
    (exercise.unstick, exercise.STUCK_ROWS.replace("1F0", "0F0"), "(a stage has one rank)"),
    (exercise.by_hand, "\n".join([FIRST] * 3 + [LAST, SECOND]), "deadlock"),
    (
        exercise.by_hand,
        "\n".join([SECOND] * 3 + [LAST, LAST]),
        "rank 0 holds 2 forwards at its fullest; under 1F1B it holds 3",
    ),
    (exercise.by_hand, "\n".join([FIRST] * 5), "rank 3 holds 3 forwards"),
    (exercise.by_hand, "\n".join([SECOND, FIRST, FIRST, SECOND, LAST]), "deadlock"),
    (
        exercise.by_hand,
        "\n".join([FIRST] * 3 + ["F0 F1 B0 B1 F2 B2", LAST]),
        "takes 24, and 1F1B 21; the row of rank 0 and of rank 1 and of rank 2 and of rank 4 is right",
    ),
    (
        exercise.by_hand,
        BY_HAND.replace(" F2", "").replace(" B2", ""),
        "expected 5 ranks with 3 microbatches, got 5 with 2",
    ),
    (exercise.by_hand, BY_HAND.replace("F0", "X0"), "'X0' is not an action"),
    (exercise.order, 33, "expected a function of (rank, P, M)"),
    (exercise.order, gpipe, "at 4 ranks and 8 microbatches: rank 0 holds 8 forwards at its fullest"),
    (exercise.order, one_short, "at 4 ranks and 8 microbatches: rank 0 holds 3 forwards at its fullest"),
    (exercise.order, two_by_two, "the ranks hold what they should, but it takes 42, and 1F1B 33"),
    (exercise.order, no_small_batches, "at 4 ranks and 2 microbatches: "),
    (
        exercise.order,
        lambda rank, P, M: ["F0", "B-1"],
        "'B-1' is not an action: expected a forward such as 0F3",
    ),
    (exercise.order, raises, "your function raised IndexError"),
    (exercise.order, lambda rank, P: [], "your function raised TypeError"),
    (exercise.order, lambda rank, P, M: None, "your function returned nothing"),
    (exercise.order, lambda rank, P, M: 7, "expected a row of actions"),
    (exercise.order, lambda rank, P, M: [], "at 4 ranks and 8 microbatches"),
    (exercise.order, lambda rank, P, M: order(rank, 4, 8), "at 2 ranks and 4 microbatches"),
    (exercise.twice_the_ranks, (18.3, 61.7, 29.7), "rank 0's activations: each piece is half as large"),
    (exercise.twice_the_ranks, (146.0, 168.4, 29.7), "rank 0's activations: that is GPipe's"),
    (exercise.twice_the_ranks, (36.5, 77.4, 29.7), "rank 0 with its state: the state of rank 0 gets smaller"),
    (exercise.twice_the_ranks, (36.5, 61.7, 25.2), "rank 7 with its state: rank 7 has one microbatch in flight"),
    (exercise.twice_the_ranks, 36.5, "expected 3 numbers in a row"),
    (exercise.twice_the_ranks, (NAN, 61.7, 29.7), "rank 0's activations: nan isn't it"),
    (exercise.twice_the_ranks, ("36.5GB", 61.7, 29.7), "write it without quotes"),
    (exercise.your_pipeline, "my_missing.py", "there is no file my_missing.py"),
    (exercise.unstick, exercise.STUCK_ROWS, "deadlock: rank 0 waits at 0B0 for 1B0"),
    (exercise.unstick, pp.build("naive", num_ranks=3, num_microbatches=3), "reorder one row only"),
    (exercise.unstick, ONE_ROW_OF_1, "with row 1 reordered it runs, in 18. No order of this row"),
    (exercise.unstick, ONE_ROW_OF_0, "with row 0 reordered it runs, in 16. A different order of this row takes 15"),
    (exercise.unstick, 15, "expected a row of actions for each rank"),
    (exercise.too_early, "1B99", "1B99 isn't an action of this schedule"),
    (exercise.too_early, "0B4", "rank 0's row is 1F1B's"),
    (exercise.too_early, "1F6", "it is the right rank, but a forward"),
    (exercise.too_early, "1B6", "it is the right rank, but something went wrong before 1B6"),
    (exercise.too_early, "1b2", "it is the right rank, but all is well up to 1B2"),
    (exercise.too_early, 4, "expected the text of an action"),
    (exercise.longer_sequences, 108, "expected a dict such as"),
    (exercise.longer_sequences, {"layers": (8, 8, 8, 8)}, "expected a dict such as"),
    (exercise.longer_sequences, {}, "it doesn't fit in 80 GB: rank 0 holds 113.9 GB, rank 1 holds 86.2 GB"),
    (exercise.longer_sequences, {"recompute": True}, "it fits, and a billion tokens cost $140.12, 28.6 % more"),
    (exercise.longer_sequences, {"in_flight": (2, 2, 1, 1)}, "it fits, and a billion tokens cost $192"),
    (exercise.longer_sequences, {"recompute": (6, 3, 0, 0)}, "within 4 %; rank 0 has the most to do, 11.22 of 13.48 s"),
    (exercise.longer_sequences, screws(recompute=(4, 1, 0, 0)), "it doesn't fit in 80 GB: rank 0 holds 101.0 GB"),
    (exercise.longer_sequences, screws(recompute=(4.5, 1, 0, 0)), f"recompute: {WHOLE}"),
    (exercise.longer_sequences, screws(recompute=(NAN, 1, 0, 0)), f"recompute: {WHOLE}"),
    (exercise.longer_sequences, screws(recompute=(9, 1, 0, 0)), "recompute must be True, or say how many"),
    (exercise.longer_sequences, screws(cut=(8.2, 8, 8.8, 7)), f"cut: {WHOLE}"),
    (exercise.longer_sequences, screws(cut=(8, 8, 8, 7)), "cut must say for each of 4 stages"),
    (exercise.longer_sequences, screws(cut="8897"), f"cut: {WHOLE}"),
    (exercise.longer_sequences, screws(cut=(16, 16)), f"cut: {WHOLE}"),
    (exercise.longer_sequences, screws(in_flight=4), f"in_flight: {WHOLE}"),
    (exercise.longer_sequences, screws(in_flight=True), "in_flight has 1 values for 4 ranks"),
    (exercise.longer_sequences, screws(in_flight=(0, 1, 1, 1)), "in_flight[0] must be an integer of at least 1"),
    (exercise.longer_sequences, screws(in_flight=(1, 1, 2, 2)), "deadlock"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG, later=False)


@pytest.mark.parametrize(
    "answer",
    [
        BY_HAND,
        BY_HAND.lower(),
        BY_HAND.replace(" ", ","),
        [row.split() for row in BY_HAND.splitlines()],
        [[f"{rank}{action}" for action in row.split()] for rank, row in enumerate(BY_HAND.splitlines())],
        pp.build("1F1B", num_ranks=5, num_microbatches=3).rows,
    ],
)
def test_rows_are_taken_in_every_form(answer):
    assert exercise.by_hand(answer)


def test_an_order_may_be_made_in_any_way():
    assert exercise.order(order)
    assert exercise.order(lambda rank, P, M: " ".join(order(rank, P, M)))
    assert exercise.order(lambda rank, P, M: iter(order(rank, P, M)))
    assert exercise.order(lambda rank, P, M: pp.build("1F1B", num_ranks=P, num_microbatches=M).rows[rank])


def test_rounded_gigabytes_are_right():
    assert exercise.twice_the_ranks((36.5, 61.7, 29.7)) and exercise.twice_the_ranks(36.5, 61.7, 29.7)
    assert exercise.twice_the_ranks([36.507, 61.67, 29.72])
    assert exercise.too_early(" 1b4 ") and exercise.too_early(["1B4"]) and exercise.too_early("[1B4]")


def test_only_one_row_can_be_reordered_to_the_floor():
    """What the verdict on `unstick` says of each row holds for every order of it."""
    stuck = [line.split(",") for line in exercise.STUCK_ROWS.split()]
    least = []
    for rank, row in enumerate(stuck):
        takes = []
        for each in permutations(row):
            try:
                takes.append(pp.simulate(pp.Schedule([*stuck[:rank], each, *stuck[rank + 1 :]])).makespan)
            except pp.ScheduleError:
                continue
        least.append(min(takes, default=None))
    assert least == [15, 18, None]


def test_the_trace_is_1f1b_but_for_three_forwards_of_rank_1():
    """So its text is true: 54 instead of 45, the count before the first backward is right, one action comes first."""
    traced, right = exercise.traced(), pp.build("1F1B", num_ranks=4, num_microbatches=12)
    assert traced.makespan == 54 and pp.simulate(right).makespan == 45
    rows, wanted = traced.schedule.rows, right.rows
    assert [row == want for row, want in zip(rows, wanted, strict=True)] == [True, False, True, True]
    for rank, row in enumerate(rows):
        ahead = [str(action)[1] for action in row]
        assert ahead.index("B") == 4 - rank
    first = next(a for a, b in zip(rows[1], wanted[1], strict=True) if a != b)
    assert str(first) == exercise.TOO_EARLY


def test_the_best_known_answer_fits_and_no_near_one_is_cheaper():
    """It is the cheapest of a wide search, which isn't repeated here: of all cuts near it, with all caps near it."""
    best = exercise.LONGER.row("1F1B", num_microbatches=16, **exercise.BEST_LONGER)
    assert best.fits and best.dollars == pytest.approx(108.93, abs=0.005)
    assert exercise.longer_sequences(exercise.BEST_LONGER)
    near = exercise.longer_sequences(screws(in_flight=(5, 4, 2, 1)))
    assert near and "the best known is $108.93" in near.says
    assert exercise.longer_sequences({"recompute": (5, 2, 0, 0)}), "1F1B's own caps will do"
    for changed in product((-1, 0, 1), repeat=4):
        caps = tuple(max(1, cap + by) for cap, by in zip((6, 4, 2, 1), changed, strict=True))
        for recompute in product((5, 6), (2, 3, 4), (0, 1), (0,)):
            try:
                row = exercise.LONGER.row(
                    "1F1B", num_microbatches=16, cut=(8, 8, 9, 7), in_flight=caps, recompute=recompute
                )
            except pp.ScheduleError:
                continue
            assert not row.fits or row.dollars >= best.dollars - 1e-9, (caps, recompute)


def test_the_file_that_the_page_shows_is_right(tmp_path, monkeypatch):
    """1F1B with `dist.send` and `dist.recv` alone: of two neighbours the lower one receives first."""
    monkeypatch.chdir(tmp_path)
    notebook = Path(__file__).parents[2] / "notebooks/04_1f1b.ipynb"
    cells = ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"]]
    ((shown,),) = (re.findall(r"```py\n(waiting = .*?)```", cell, flags=re.S) for cell in cells if "waiting = " in cell)
    Path("shown.py").write_text(f"{inspect.getsource(order)}\n\n{shown}")
    file = Path(spine.joined("pipe_gpipe.py", "send", "receive", "step", of="shown.py", to="my_1f1b.py"))
    flush = shown[: shown.index("def send")], shown[shown.index("def flush") : shown.index("def receive")]
    file.write_text(file.read_text().replace("def send", f"{inspect.getsource(order)}\n\n{''.join(flush)}def send", 1))
    assert "batch_isend_irecv" not in file.read_text()
    assert exercise.your_pipeline("my_1f1b.py")
