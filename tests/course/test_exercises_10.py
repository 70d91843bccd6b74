"""Chapter 10's checkers refuse wrong answers and say what is wrong; its runs have the causes they are said to."""

from __future__ import annotations

from checkers import raises, table_tests

import pplab as pp
from pplab import lab
from pplab.course import measuring as exercise

CAUSES = {"A": ("slow stage", 2), "B": ("slow link", (1, 2)), "C": ("late rank", 1), "D": ("one pause", 3)}


def the_run_itself(timeline, name):
    return timeline.makespan


WRONG = [
    (exercise.share_of_imbalance, 50 / 60, "the second replay's share"),
    (exercise.share_of_imbalance, 6 / 44, "the denominator is the step"),
    (exercise.share_of_imbalance, 0.5, "the number is smaller"),
    (exercise.clock_offset, 7.3, "part of the 7.3 ms is the way"),
    (exercise.clock_offset, 0.6, "that is the latency"),
    (exercise.clock_offset, -6.7, "host 2's clock is ahead"),
    (exercise.diagnose, "slow stage", "expected a dict with the keys A, B, C and D"),
    (exercise.diagnose, {**CAUSES, "B": "slow link"}, "B: expected a pair of one of slow stage, slow link"),
    (exercise.diagnose, {**CAUSES, "A": ("slow link", (2, 3))}, "A: not a slow link; the part that stands out is imb"),
    (exercise.diagnose, {**CAUSES, "A": ("slow stage", 3)}, "A: a slow stage it is, elsewhere"),
    (exercise.diagnose, {**CAUSES, "B": ("slow link", (0, 1))}, "B: a slow link it is, elsewhere"),
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
    (exercise.predictor, 400, "expected a function of (timeline, name)"),
    (exercise.predictor, raises, "your function raised IndexError"),
    (exercise.predictor, the_run_itself, "that is what the run itself took"),
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
