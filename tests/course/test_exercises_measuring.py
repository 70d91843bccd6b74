"""Checkers of the chapter on profiles refuse wrong answers and say what is wrong; its runs have the causes they are
said to."""

from __future__ import annotations

from checkers import table_tests

import pplab as pp
from pplab import lab
from pplab_course import measuring as exercise

CAUSES = {"A": ("slow stage", 2), "B": ("slow link", (1, 2)), "C": ("late rank", 1), "D": ("one pause", 3)}


ORDER = {"schedule": "ZB-H1"}
BOTH = {**ORDER, "cut": [8, 9, 9, 6]}
ROWS = (("1F1B", None), ("ZB-H1", None), ("1F1B", [8, 9, 8, 7]))
ALL = {**BOTH, "gigabits": 100}


WRONG = [
    (exercise.diagnose, "slow stage", "expected a dict with the keys A, B, C and D"),
    (exercise.diagnose, {**CAUSES, "B": "slow link"}, "B: expected a pair of one of slow stage, slow link"),
    (exercise.diagnose, {**CAUSES, "A": ("slow link", (2, 3))}, "A: not a slow link; the part that stands out is imb"),
    (exercise.diagnose, {**CAUSES, "A": ("slow stage", 3)}, "A: the cause is a slow stage, but at a different place"),
    (
        exercise.diagnose,
        {**CAUSES, "B": ("slow link", (0, 1))},
        "B: the cause is a slow link, but at a different place",
    ),
    (exercise.diagnose, {**CAUSES, "B": ("one pause", 1)}, "print `lab.calibrate(run).links`"),
    (exercise.diagnose, {**CAUSES, "C": ("slow stage", 1)}, "C: not a slow stage; the part that stands out is over"),
    (exercise.diagnose, {**CAUSES, "D": ("slow stage", 3)}, "one lasts several times as long"),
    (exercise.on_the_way, 127.2, "the whole time in receives"),
    (exercise.on_the_way, 0.486, "that is one message"),
    (exercise.on_the_way, 20, "the number is smaller"),
    (exercise.better_schedule, "none", "expected a dict with the keys A, B and C"),
    (exercise.better_schedule, {"A": "GPipe", "B": "none", "C": "none"}, "A: GPipe is predicted at 103% of the run's"),
    (exercise.better_schedule, {"A": "none", "B": "none", "C": "none"}, "is predicted at 87% of the run's time"),
    (exercise.better_schedule, {"A": "none", "B": "GPipe", "C": "GPipe"}, "C: GPipe is predicted at 103%"),
    (exercise.better_schedule, {"A": "none", "B": "ZB-H2", "C": "none"}, 'expected GPipe, eager-1F1B or "none"'),
    (exercise.clocks, (2, 6.5), "both ways take the same time"),
    (exercise.clocks, (1, 7.5), "part of that is the time that the message takes"),
    (exercise.clocks, (1, 13.0), "both ways together hold the offset twice"),
    (exercise.clocks, (1, -6.5), "the other way"),
    (exercise.clocks, 6.5, "expected 2 numbers"),
    (exercise.mend, ORDER, "expected a list of three dicts"),
    (exercise.mend, [ORDER, BOTH, "all"], "month 3: expected a dict"),
    (exercise.mend, [{**ORDER, "microbatch": 2}, BOTH, ALL], "month 1: microbatch isn't one of schedule, cut, gig"),
    (exercise.mend, [BOTH, ALL, ALL], "month 1: schedule, cut changes; expected one thing"),
    (exercise.mend, [ORDER, ORDER, ALL], "month 2: nothing changes"),
    (exercise.mend, [ORDER, {"schedule": "1F1B"}, ALL], "month 2: schedule changes"),
    (exercise.mend, [{"gigabits": 400}, ALL, ALL], "month 1: the faster network has 100 gigabits"),
    (exercise.mend, [{"schedule": "ZB-V"}, BOTH, ALL], "month 1: it doesn't fit: rank 0 would hold 86.8 GB"),
    (exercise.mend, [{"schedule": "ZB-Z"}, BOTH, ALL], "month 1: "),
    (exercise.mend, [{"cut": [8, 9, 9, 6]}, BOTH, ALL], "more than the best that we know"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_answers_may_differ_where_several_are_right():
    assert exercise.diagnose({**CAUSES, "B": ("slow link", (2, 1))})
    for name in ("GPipe", "eager-1F1B"):
        assert exercise.better_schedule({"A": "none", "B": name, "C": "eager-1F1B"})


def test_the_stored_runs_have_their_causes():
    stands_out = {"A": "imbalance", "B": "communication", "C": "overhead", "D": "imbalance"}
    for name, run in exercise.runs().items():
        pp.validate(run.schedule)
        mean = lab.where(run).mean
        assert max(("imbalance", "communication", "overhead", "jitter"), key=mean.get) == stands_out[name]
        assert run.how == "simulated"
    longest = max(exercise.runs()["D"].spans, key=lambda span: span.end - span.start)
    assert longest.rank == 3 and str(longest.action) == "3F4"


def test_a_nap_is_taken_once(monkeypatch):
    slept = []
    monkeypatch.setattr(exercise.time, "sleep", slept.append)
    nap = exercise.Nap(0.5, call=2)
    for _ in range(5):
        nap("module", ())
    assert slept == [0.5]


def test_what_a_mend_saves_isn_t_what_its_cause_costs():
    """These numbers stand in the solution of exercise 5."""
    assert exercise.mend([ORDER, BOTH, ALL]).says.endswith(", the best that we know")
    case = lab.Case()
    now, order, cut = (case.row(name, 16, cut=cut).dollars for name, cut in ROWS)
    assert [round(now - after, 1) for after in (order, cut)] == [9.5, 3.7] and round(now, 1) == 99.4


def test_both_models_are_what_their_runs_need():
    naps = []
    model = exercise.four_layers(lambda *_: naps.append(1))
    model.build_whole()(*model.batch(0).inputs)
    assert len(naps) == 1
    light = exercise.light()
    kept = sum(p.numel() for p in light.build_whole().parameters())
    assert kept < light.batch(0).inputs[0].numel()
