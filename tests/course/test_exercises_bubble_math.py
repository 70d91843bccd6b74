"""The checkers of the chapter on bubble math accept what is right, refuse what is wrong and say why."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from checkers import table_tests

import pplab as pp
from pplab import lab
from pplab_course import bubble_math as exercise

GPIPE_3 = pp.build("GPipe", num_ranks=3, num_microbatches=3)
ONE_RANK_ONLY = "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2\n2F0 2B0 2F1 2B1 2F2 2B2"
ONE_SHORT = "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n2F0 2B0 2F1 2B1 2F2 2B2"
LATE_UP = ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2", "2F0 2F1 2B0 2B1 2F2 2B2"]

WRONG = [
    (exercise.slow_middle, (12, 30), "makespan: that would be three equal ranks"),
    (exercise.slow_middle, (24, 30), "as slow as rank 1"),
    (exercise.slow_middle, (17, 30), "has to wait for rank 2's"),
    (exercise.slow_middle, (18, 24), "idle cells: those are the busy cells"),
    (exercise.slow_middle, (18, 12), "that is rank 0's"),
    (exercise.slow_middle, (18, 29), "count all three ranks"),
    (exercise.slow_middle, (18, 10), "count all three ranks"),
    (exercise.slow_middle, (15, 21), "as if rank 1 never waited"),
    (exercise.slow_middle, (20, 30), "makespan: rank 1's forwards should end at 5"),
    (exercise.slow_middle, (18, 300), "300 isn't it; the number is much smaller"),
    (exercise.slow_middle, (), "expected 2 numbers"),
    (exercise.slow_middle, (float("nan"), 30), "makespan: nan isn't it"),
    (exercise.slow_middle, ("18 units", "30"), "makespan: expected a number, got the text '18 units'"),
    (exercise.slow_middle, ("18/1", "30"), "write it without quotes"),
    (exercise.slow_middle, 18, "expected 2 numbers"),
    (exercise.slow_middle, (30, 18), "the right numbers, swapped: expected makespan, then idle cells"),
    (
        exercise.tokens_per_second,
        (0.901, 2.13, 246000),
        "in another order: expected step, then efficiency, then tokens",
    ),
    (exercise.tokens_per_second, (1.92, 0.901, 246000), "step: that leaves out the bubble"),
    (exercise.tokens_per_second, (2130, 0.901, 246000), "that is in ms; the question asks for s"),
    (exercise.tokens_per_second, (2.13, 0.0986, 246000), "efficiency: that is the bubble fraction"),
    (exercise.tokens_per_second, (2.13, 90.14, 246000), "efficiency: that is in per cent"),
    (exercise.tokens_per_second, (2.13, 0.901, 61500), "a microbatch has 4 sequences"),
    (exercise.chart_at_the_floor, GPIPE_3, "rank 1 runs all its forwards before its first backward"),
    (exercise.chart_at_the_floor, ONE_RANK_ONLY, "rank 1 runs all its forwards before its first backward"),
    (
        exercise.chart_at_the_floor,
        pp.build("naive", num_ranks=3, num_microbatches=3),
        "it is legal and takes 27, the floor is 15; rank 2 is idle from",
    ),
    (exercise.chart_at_the_floor, ONE_SHORT, "it is legal and takes 21, the floor is 15; rank 2 is idle from"),
    (exercise.chart_at_the_floor, LATE_UP, "takes 16, the floor is 15; rank 2 is idle from 8 to 9: it waits for 1F2"),
    (exercise.chart_at_the_floor, ["0F0 0B0", "1F0 1B0"], "the chart must have 3 ranks"),
    (exercise.chart_at_the_floor, [["0F0"], ["1F0"], ["2F0"]], "0B0"),
    (
        exercise.chart_at_the_floor,
        ["2F0 2F1 2F2 2B0 2B1 2B2", "1F0 1F1 1F2 1B0 1B1 1B2", "0F0 0F1 0F2 0B0 0B1 0B2"],
        "stage 0 belongs on rank 0",
    ),
    (exercise.chart_at_the_floor, 15, "expected a row of actions for each rank"),
    (exercise.chart_at_the_floor, ["0F0 hello", "1F0", "2F0"], "'hello' is not an action"),
    (exercise.repair, exercise.BROKEN_CHART, "1B2 is missing"),
    (exercise.repair, exercise.BROKEN_CHART.split(), "1B2 is missing"),
    (
        exercise.repair,
        exercise.BROKEN_CHART.replace("1B1,1B3", "1B1,1B2,1B3"),
        "deadlock: rank 0 waits at 0B0 for 1B0; rank 1 waits at 1F3 for 0F3",
    ),
    (exercise.repair, pp.build("GPipe", num_ranks=3, num_microbatches=4), "the line of rank 0 is right: leave it"),
    (exercise.repair, "1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3", "rank 1 waits at 1F3 for 0F3"),
    (exercise.repair, "1F0 1F1 1B0 1F2 1F3 1B1 1B3", "1B2 is missing: rank 1 has to run every microbatch"),
    (exercise.repair, "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3", "it runs, in "),
    (exercise.repair, "0F0,0B0\n", "must keep 3 ranks"),
    (exercise.repair, "0F0 0B0\n1F0 1B0\n", "your schedule has 2 ranks, 2 stages (on rank 0, 1) and 1 microbatch"),
    (exercise.repair, "F0,F1,B0,F2,F3,B1,B2,B3", "it runs, in 19, but with a different line for rank 1 it takes 18"),
    (exercise.repair, "f0 f1 b0 f2 f3 b1 b3", "1B2 is missing: rank 1 has to run every microbatch"),
    (exercise.repair, ["0F0 0F1", "1F0 1F1 0B0"], "a stage has one rank)"),
    (exercise.repair, 18, "expected a row of actions for each rank"),
    (exercise.repair, "missing.csv", "missing.csv"),
    (exercise.too_early, "0B0", "name two actions"),
    (exercise.too_early, ("0B0", "1B0", "2B0"), "it should wait for; got 3"),
    (exercise.too_early, ("3F5", "2F5"), "3F5 needs 2F5 and starts at 8, when 2F5 has ended"),
    (exercise.too_early, ("7B0", "7F0"), "7B0 needs 7F0 and starts at 39, when 7F0 has ended"),
    (exercise.too_early, ("0B0", "0F0"), "0B0 needs 0F0 and starts at 32, when 0F0 has ended"),
    (exercise.too_early, ("0B0", "7F0"), "it doesn't need 7F0 directly: which of the three rules"),
    (exercise.too_early, ("1B0", "0B0"), "it doesn't need 0B0"),
    (exercise.too_early, ("0F0", "1F0"), "0F0 starts at 0, and it doesn't need 1F0"),
    (exercise.too_early, ("8F0", "7F0"), "8F0 isn't an action of this schedule"),
    (exercise.too_early, ("1B0", "0B0"), "1B0 starts at 33, and it doesn't need 0B0: is it the other way round?"),
    (exercise.too_early, "0F0, 1F0", "it doesn't need 1F0 directly"),
    (
        exercise.too_early,
        ("F0", "F1"),
        "'F0' is not an action: expected a forward such as 0F3 or a backward such as 0B3",
    ),
    (exercise.too_early, "hello", "'hello' is not an action"),
    (exercise.too_early, 71, "expected an action"),
    (exercise.too_early, (71, 78), "expected an action"),
    (exercise.too_early, ["0B0"], "name two actions"),
    (exercise.six_hours, [8, 8, 8, 8], "too late: 4 machines, 11.04 hours"),
    (exercise.six_hours, [4] * 8, "rank 7 is the slowest: its forward takes 63 ms, the fastest one's 41"),
    (exercise.six_hours, [6, 6, 6, 6, 5, 3], "too late: 6 machines, 6.87 hours"),
    (exercise.six_hours, [5, 5, 5, 5, 5, 4, 3], "5.95 hours, $83.2, which is 1.5 % more than the cheapest"),
    (exercise.six_hours, [4] * 7 + [3, 1], "4.87 hours, $87.6, which is 6.9 % more than the cheapest"),
    (exercise.six_hours, [32], "rank 0 can't even hold its state: 144.5 of 80 GB"),
    (exercise.six_hours, [8, 8, 8, 7], "these are 31 layers, and the model has 32"),
    (exercise.six_hours, [5, 5, 5, 5, 5, 5, 2.0], "expected whole layers, one at least on each rank, got 2.0"),
    (exercise.six_hours, [16, 0, 16], "one at least on each rank, got 0"),
    (exercise.six_hours, [31, True], "got True"),
    (exercise.six_hours, [float("nan")] * 4, "got nan"),
    (exercise.six_hours, 7, "expected the layers of each rank"),
    (exercise.six_hours, "5552", "these are 5552 layers, and the model has 32"),
    (exercise.six_hours, [], "these are 0 layers"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG, later=False)


def test_right_answers_in_other_words():
    """What the chapter's solutions don't show."""
    assert exercise.slow_middle([18.0, 30]) and exercise.slow_middle(18, 30)
    assert exercise.tokens_per_second(2.13, 0.901, 246000)
    assert exercise.tokens_per_second((2.13, Fraction(64, 71), 2.46e5))
    assert exercise.chart_at_the_floor(pp.build("1F1B", num_ranks=3, num_microbatches=3))
    assert exercise.repair(pp.build("1F1B", num_ranks=3, num_microbatches=4))
    lines = exercise.BROKEN_CHART.splitlines()
    lines[1] = "1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3"
    for whole in (lines[1], lines[1].replace(",", " "), "\n".join(lines), lines, lab.read_csv("\n".join(lines))):
        assert exercise.repair(whole)
    assert all(exercise.too_early(f"{rank}B{m}", f"{rank + 1}B{m}") for rank in range(7) for m in (0, 13, 31))
    assert exercise.too_early(("3B7", "4B7")) and exercise.too_early("3B7 4B7")
    assert exercise.six_hours((5, 5, 5, 5, 5, 5, 2))


def test_several_arguments_are_a_row():
    assert exercise.chart_at_the_floor(*pp.build("1F1B", num_ranks=3, num_microbatches=3).rows)
    line = "1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3"
    first, _, last = exercise.BROKEN_CHART.splitlines()
    assert exercise.repair(first, line, last)
    assert exercise.six_hours(5, 5, 5, 5, 5, 5, 2)
    for check in (exercise.chart_at_the_floor, exercise.repair, exercise.six_hours):
        for answer in ((), (1, 2), ("0F0", 3)):
            assert check(*answer).right is False, (check, answer)


def test_the_slow_middle_is_what_a_simulation_says():
    times = [1, 2, 1]
    t = pp.simulate(pp.build("GPipe", num_ranks=3, num_microbatches=2), pp.Costs(times, times, times))
    assert exercise.slow_middle((t.makespan, sum(t.idle)))


def test_the_count_is_that_of_a_simulator_without_the_third_rule():
    """Every backward needs its own forward only: so the colleague's ranks start and end as the exercise says."""
    P, M = exercise.COUNTED_RANKS, exercise.COUNTED_MICROBATCHES
    ends, said = {}, []
    for rank in range(P):
        now = 0
        spans = {"F": [], "B": []}
        for kind in "FB":
            for m in range(M):
                need = ends.get((rank - 1, "F", m), 0) if kind == "F" else ends[rank, "F", m]
                start = max(now, need)
                ends[rank, kind, m] = now = start + 1
                spans[kind] += [start, now]
        (f, *_, f_end), (b, *_, b_end) = spans["F"], spans["B"]
        said.append(f"rank {rank}: forwards {f} to {f_end}, backwards {b} to {b_end}")
    assert exercise.COUNTED.splitlines() == said and max(ends.values()) == 71
    early = [(rank, m) for rank in range(P - 1) for m in range(M) if ends[rank, "B", m] - 1 < ends[rank + 1, "B", m]]
    assert len(early) == (P - 1) * M, "every backward above the last rank starts too early"


def slowest_ms(case: lab.Case, ranks: int, last: int) -> float | None:
    """The slowest stage's forward where the last rank has so many layers and the others share the rest evenly."""
    rest, layer = case.model.num_layers - last, case.layer_ms
    if ranks == 1 or rest < ranks - 1:
        return None
    return max(-(-rest // (ranks - 1)) * layer, last * layer + case.head_ms)


def test_no_cut_that_is_in_time_is_cheaper():
    """A step of GPipe is a pass through everything, M-1 turns of the slowest stage, and the messages of the ramps."""
    case, M = lab.Case(), exercise.SEQUENCES
    once = 3 * (case.model.num_layers * case.layer_ms + case.head_ms)

    def hours(ranks, slowest):
        step_ms = once + 3 * (M - 1) * slowest + 2 * (ranks - 1) * case.message_ms
        return case.tokens / (case.model.sequence * M) * step_ms / 3.6e6

    for cut in ([5, 5, 5, 5, 5, 5, 2], [4] * 8, [1, 9, 2, 7, 3, 10], [31, 1], [2] * 16):
        row = replace(case, num_ranks=len(cut)).row("GPipe", num_microbatches=M, cut=cut)
        assert row.hours == pytest.approx(hours(len(cut), max(row.case.stage_ms(cut))))
    bills = {}
    for ranks in range(2, case.model.num_layers + 1):
        for last in range(1, case.model.num_layers):
            if (slowest := slowest_ms(case, ranks, last)) and (took := hours(ranks, slowest)) <= exercise.DEADLINE_H:
                bills[ranks, last] = took * ranks * case.dollars_per_hour
    best = min(bills, key=bills.get)
    assert best == (len(exercise.CHEAPEST), exercise.CHEAPEST[-1]) and bills[best] == pytest.approx(81.98, abs=0.01)
    cheapest, second = sorted(bills.values())[:2]
    assert second > 1.01 * cheapest, "so that only the best is as good as the best"


def test_the_repaired_line_may_be_a_list_of_its_actions():
    line = "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3".split()
    rows = exercise.BROKEN_CHART.splitlines()
    for answer in (line, tuple(line), " ".join(line), ", ".join(line), str(line), [line], [rows[0], line, rows[2]]):
        assert exercise.repair(answer), answer
