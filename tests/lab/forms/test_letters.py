"""Charts as text: letters where the simulator says, deadlocks as far as they get."""

import random

import pytest

import pplab as pp
from conftest import random_schedule
from pplab.lab.forms import spans_until_stuck, text_chart

DEADLOCK = pp.Schedule([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])


def rows(chart: str) -> list[str]:
    return [line[8:] for line in chart.splitlines() if line.startswith("rank ")]


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_letters_and_idle_columns_are_those_of_the_timeline(name):
    timeline = pp.simulate(pp.build(name, num_ranks=4, num_microbatches=8))
    chart = text_chart(timeline.schedule, timeline.spans, 120)
    drawn = rows(chart)
    per_time = len(drawn[0]) / timeline.makespan
    for rank, row in enumerate(drawn):
        assert row.count(".") == timeline.idle[rank] * per_time, row
        begun = [row[round(span.start * per_time)] for span in timeline.spans_of(rank)]
        assert sum(letter.isalpha() or letter == "&" for letter in begun) == len(timeline.schedule.rows[rank])
    assert f"A column is {1 / per_time:.4g}." in chart


def test_it_is_as_wide_as_it_may_be_and_says_where_times_are_rounded():
    timeline = pp.simulate(pp.build("1F1B", num_ranks=4, num_microbatches=64), pp.Costs(1, 0.97, 1.1, latency=0.3))
    chart = text_chart(timeline.schedule, timeline.spans, 72)
    assert {len(row) for row in rows(chart)} == {64} and "and times are rounded to columns" in chart
    with pytest.raises(ValueError, match="at least 40 columns, got 39"):
        text_chart(timeline.schedule, timeline.spans, 39)


def test_what_can_run_of_a_deadlock_is_drawn():
    with pytest.raises(pp.ScheduleError):
        pp.simulate(DEADLOCK)
    first, second = rows(text_chart(DEADLOCK, spans_until_stuck(DEADLOCK)))
    assert first.startswith("F0?") and set(second) == {"?"}
    with pytest.raises(pp.ScheduleError, match="0B0"):
        spans_until_stuck(pp.Schedule([["0F0"]]))


def test_as_far_as_it_gets_is_all_of_it_where_nothing_is_wrong():
    random.seed(5)
    for _ in range(20):
        schedule = random_schedule(random.Random(random.random()))
        costs = pp.Costs(1, 2, 1, latency=random.choice([0, 0.5]), bandwidth=random.choice([2, float("inf")]))
        assert spans_until_stuck(schedule, costs) == list(pp.simulate(schedule, costs).spans)
