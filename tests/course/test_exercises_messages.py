"""Checkers of the chapter on messages refuse wrong answers and say what is wrong; what is right, its solutions show."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest
from checkers import table_tests

from pplab.lab import Case
from pplab_course import messages as exercise
from pplab_course import spine

GOOD = {name: list(value) for name, value in exercise.BEST_KNOWN.items()}
PLAIN = {"cut": [8, 8, 8, 8], "in_flight": [4, 3, 2, 1], "recompute": [0, 0, 0, 0]}
CAUSES = exercise.CLUSTERS

WRONG = [
    (exercise.gigabits_needed, 2.08, "gigabytes a second: a byte has eight bits"),
    (exercise.gigabits_needed, 32.25, "how many milliseconds a message may take"),
    (exercise.gigabits_needed, 49.9, "each of four beats has the head's forward and backward"),
    (exercise.gigabits_needed, 12.4837, "the head is missing in the round trip"),
    (exercise.gigabits_needed, 8.32, "a boundary is crossed twice"),
    (exercise.gigabits_needed, 49.9e9, "the number is smaller"),
    (exercise.gigabits_needed, 17.5, "17.5 isn't it; the number is smaller"),
    (exercise.gigabits_needed, float("nan"), "nan"),
    (exercise.gigabits_needed, "16.7 Gb/s", "write it without quotes"),
    (exercise.gigabits_needed, [16.7], "expected a number"),
    (exercise.least_tickets, (8, 6, 4, 1), "has a beat of 3.40, and 3 is possible: in the loop from rank 0 to rank 2"),
    (exercise.least_tickets, (9, 7, 4, 1), "from rank 0 to rank 1, which takes 10, 3 go round"),
    (exercise.least_tickets, (10, 7, 5, 1), "from rank 1 to rank 2, which takes 10, 3 go round"),
    (exercise.least_tickets, (7, 5, 3, 1), "and 3 is possible"),
    (exercise.least_tickets, (11, 7, 4, 1), "has a beat of 3 and holds 23 in all; less is enough"),
    (exercise.least_tickets, (7, 5), "in_flight has 2 values for 4 ranks"),
    (exercise.least_tickets, (4, 4, 5, 1), "deadlock: rank"),
    (exercise.least_tickets, "6531", "in_flight has 1 values for 4 ranks"),
    (exercise.least_tickets, (6.5, 5, 3, 1), "'float' object"),
    (exercise.least_tickets, 15, "expected a number for each of four ranks"),
    (
        exercise.causes,
        CAUSES | {"A": "rank 1"},
        "A: not 'rank 1'; it takes 51 with 1F1B and 57 with GPipe; with a slow rank 1 it would take 53",
    ),
    (exercise.causes, CAUSES | {"B": "network"}, "a message takes 0.5 it would take 41 and 36"),
    (exercise.causes, CAUSES | {"C": "one short"}, "with a forward short it would take 54 and 33"),
    (exercise.causes, CAUSES | {"D": "rank 3"}, "it would take 57 and 57"),
    (exercise.causes, CAUSES | {"D": 2}, "D: expected one of network, one short, rank 0"),
    (exercise.causes, ["rank 0"], "expected a dict with the keys A, B, C and D"),
    (exercise.offer, PLAIN, "it fits: 6.53 s, $99.59, which is $14.88 more than the best"),
    (exercise.offer, GOOD | {"recompute": [0, 0, 0, 0]}, "it doesn't fit: rank 0 would hold 104.8 GB"),
    (exercise.offer, GOOD | {"recompute": [3, 0, 0, 0]}, "it doesn't fit: rank 1 would hold"),
    (exercise.offer, GOOD | {"cut": [8, 8, 8, 7]}, "cut must say for each of 4 stages"),
    (exercise.offer, GOOD | {"cut": "8996"}, "cut: expected four whole numbers, one per rank, got '8996'"),
    (exercise.offer, GOOD | {"in_flight": [7, 5, 3]}, "in_flight: expected four whole numbers"),
    (exercise.offer, GOOD | {"in_flight": [7, 5, 3, 0]}, "in_flight[3]"),
    (exercise.offer, GOOD | {"in_flight": [7, 5, 3, float("nan")]}, "in_flight: expected four whole numbers"),
    (exercise.offer, GOOD | {"in_flight": [7, 5, 3, True]}, "in_flight: expected four whole numbers"),
    (exercise.offer, GOOD | {"in_flight": [1, 1, 2, 1]}, "deadlock: rank 1 waits at 1B0"),
    (exercise.offer, GOOD | {"in_flight": 7}, "in_flight: expected four whole numbers"),
    (exercise.offer, GOOD | {"recompute": [9, 0, 0, 0]}, "recompute must be True, or say how many"),
    (exercise.offer, {"cut": [8, 9, 9, 6]}, "expected the keys cut, in_flight, recompute, got cut"),
    (exercise.offer, {}, "got none"),
    (exercise.offer, [8, 9, 9, 6], "expected a dict with the keys cut, in_flight and recompute"),
]
test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG, later=False)


@pytest.mark.parametrize("answer", [16.6, 16.63, 16.65, 16.7])
def test_a_rounded_speed_is_right(answer):
    assert exercise.gigabits_needed(answer)


@pytest.mark.parametrize(("gigabits", "sets_it"), [(17, "rank"), (16.3, "network")])
def test_the_speed_is_where_the_simulated_beat_changes(gigabits, sets_it):
    rows = [Case(gigabits=gigabits).row("1F1B", M) for M in (32, 64)]
    beat_ms = (rows[1].step_s - rows[0].step_s) / 32 * 1e3
    assert (beat_ms > 3 * Case().stage_ms()[3] + 0.1) is (sets_it == "network")


def test_no_smaller_sum_of_tickets_has_a_beat_of_3_and_no_other_has_as_small_a_one():
    least = (8, 6, 4, 1)  # by the round trips
    more = [extra for extra in product(range(4), repeat=4) if sum(extra) <= 3]
    found = [tuple(map(sum, zip(least, extra, strict=True))) for extra in more]
    assert [caps for caps in found if exercise.least_tickets(caps)] == [(10, 7, 4, 1)]


def test_tickets_may_be_four_arguments():
    assert exercise.least_tickets(10, 7, 4, 1) and "has a beat of 3.4" in exercise.least_tickets(8, 6, 4, 1).says


def test_every_cause_has_times_of_its_own():
    found = [exercise.times(cause) for cause in exercise.CAUSES]
    assert found == [(41, 36), (54, 33), (51, 57), (53, 57), (55, 57), (57, 57)]


def test_what_is_near_the_best_offer_is_right_too():
    near = exercise.offer(GOOD | {"in_flight": [8, 5, 3, 1], "recompute": [5, 2, 0, 0]})
    assert near and re.search(r"\$0.\d\d above the best that we know", near.says)
    assert "$84.70, the best that we know" in exercise.offer(GOOD).says
    assert not exercise.offer({"cut": [8, 8, 9, 7], "in_flight": [6, 5, 3, 1], "recompute": [3, 0, 0, 0]})


def test_the_overwritten_buffer_stays_once_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "with a fault in it" in exercise.overwritten()
    (tmp_path / "my_buffer.py").write_text("mine")
    assert "stays as it is" in exercise.overwritten() and (tmp_path / "my_buffer.py").read_text() == "mine"


REPAIRS = {
    "none": ("", "", r"on 2 ranks with 6 microbatches: gradients of ranks? .* differ from one process's"),
    "a tensor for each message": (".copy_(tensor)", ".copy_(tensor).clone()", None),
    "wait before it is written again": (
        "        tensor = buffers",
        "        while sent:\n            sent.pop(0)[0].wait()\n        tensor = buffers",
        None,
    ),
}


def names(table: dict[str, tuple], timed: Callable[[str | None], bool], judged: int = 1) -> list:
    """The cases' names; where times are judged, the test is tried again, and all but `judged` of these at length."""
    again = [name for name, (*_, says) in table.items() if timed(says)]
    marks = {name: [pytest.mark.timed, *[pytest.mark.long] * (at >= judged)] for at, name in enumerate(again)}
    return [pytest.param(name, marks=marks.get(name, [])) for name in table]


@pytest.mark.slow
@pytest.mark.parametrize("repair", names(REPAIRS, lambda says: says is None, judged=0))
def test_a_repaired_buffer_is_right(tmp_path, repair):
    """The chapter's solution, another right file, test_notebooks.py has judged at every commit."""
    old, new, says = REPAIRS[repair]
    file = tmp_path / "my_buffer.py"
    exercise.overwritten(file)
    file.write_text(file.read_text().replace(old, new) if old else file.read_text())
    verdict = exercise.repaired(file)
    assert verdict if says is None else verdict.right is False and re.search(says, verdict.says), verdict


ASKS = "    ask(source, m + early)  # may travel while we compute\n"
WAITS = "    time.sleep(max(0, when.result() - time.perf_counter()))\n"
ISEND = "sent.append((dist.isend(tensor, to, ways[to - rank]), tensor))"
LATE = {
    "asked for late": ('os.environ.get("EARLY", 1)', "0", "does receive ask for the next message before it waits"),
    "waits, then asks": (ASKS, "", "8 messages each way take 1[5-9] times as long as one, and 9 times is possible"),
    "sends and waits": (ISEND, "dist.send(tensor, to, ways[to - rank])", "with EARLY=0, .*Does send wait until"),
    "doesn't wait": (WAITS, "", "did you use a message before it came|differ from one process's"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", names(LATE, lambda says: "as long as one" in says))
def test_messages_that_do_not_travel_are_told(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(spine, "LIMIT_S", 6.0)  # once they have started
    old, new, says = LATE[fault]
    text = spine.located("pipe_early.py").read_text()
    assert text.count(old) == 1
    text = text.replace(old, new)
    if fault == "waits, then asks":
        text = text.replace(WAITS, WAITS + ASKS)
    (tmp_path / "my_early.py").write_text(text)
    verdict = exercise.early_file(tmp_path / "my_early.py")
    assert verdict.right is False and re.search(says, verdict.says), verdict
