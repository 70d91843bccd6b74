"""Predictions of schedules that haven't run, and what becomes of them."""

import dataclasses
import json

import pytest

import modules
import pplab as pp
from pplab import lab
from pplab.lab.measuring.prediction import Predicted
from pplab.runtime import Pool

FOUND = lab.Prediction(
    (
        Predicted("ZB-H1", 90.0, 100.0, (120.0, 100.0)),
        Predicted("1F1B", 108.0, 120.0, (120.0, 121.0)),
        Predicted("GPipe", 110.0, 80.0, (80.0, 150.0)),
    ),
    pp.Costs(),
    ("a small machine",),
)
SAID = """\
the fastest of 2 steps each
schedule                predicted ms  measured ms   error   slowest
ZB-H1                           90.0        100.0  -10.0%     120.0
1F1B                           108.0        120.0  -10.0%     121.0
GPipe                          110.0         80.0   37.5%     150.0
largest error 37.5%, of GPipe: smaller differences between predictions say nothing
predicted, fastest first: ZB-H1, 1F1B, GPipe
measured, fastest first: GPipe, ZB-H1, 1F1B
note: a small machine"""


def built(name: str, ranks: int = 2, microbatches: int = 4, **options) -> pp.Schedule:
    return pp.build(name, num_ranks=ranks, num_microbatches=microbatches, **options)


def test_a_prediction_says_its_errors_and_both_orders():
    assert FOUND.errors == pytest.approx((-0.1, -0.1, 0.375))
    assert FOUND.predicted_order == ("ZB-H1", "1F1B", "GPipe")
    assert FOUND.measured_order == ("GPipe", "ZB-H1", "1F1B")
    assert str(FOUND) == repr(FOUND) == SAID
    data = json.loads(json.dumps(FOUND.to_dict()))
    assert data["notes"] == ["a small machine"]
    assert data["rows"][2] == {
        "schedule": "GPipe",
        "predicted_ms": 110.0,
        "measured_ms": 80.0,
        "steps_ms": [80.0, 150.0],
    }


def test_the_worst_error_may_be_of_what_was_slower_than_predicted():
    slow = dataclasses.replace(FOUND.rows[1], measured_ms=300.0)
    found = dataclasses.replace(FOUND, rows=(FOUND.rows[0], slow))
    assert "largest error -64.0%, of 1F1B" in str(found)


@pytest.mark.parametrize(
    ("measured", "others", "options", "says"),
    [
        (built("1F1B"), [built("ZB-H1")], {}, "1F1B splits no backward.* measure one that does"),
        (built("1F1B"), [built("GPipe"), built("Interleaved1F1B")], {}, "Interleaved1F1B cuts or places the model oth"),
        (built("1F1B"), [built("GPipe")], {"rounds": 0}, "rounds must be an integer of at least 1, got 0"),
        (built("1F1B"), [built("GPipe")], {"steps": 0}, "steps must be an integer of at least 1, got 0"),
        (built("1F1B", 4), [built("GPipe", 4)], {}, "is for 4 ranks and there are 2"),
        (built("1F1B"), [built("GPipe", microbatches=3)], {}, "doesn't divide into 3"),
    ],
)
def test_what_cant_be_predicted_is_refused_before_anything_starts(measured, others, options, says):
    with Pool(2, device="cpu") as pool:
        with pytest.raises(ValueError, match=says):
            lab.predict(pool, measured, others, modules.workload(modules.Sleeps(0), modules.Sleeps(0)), **options)
        assert pool.pids == ()


@pytest.mark.slow
def test_two_ranks_are_predicted_and_measured():
    """Stages that sleep 20 ms in the forward, so that a prediction has something to say; the machine may be busy."""
    workload = modules.workload(modules.Sleeps(0.02), modules.Sleeps(0.02))
    schedules = [built("ZB-H1"), built("1F1B"), built("naive")]
    with Pool(2, device="cpu") as pool:
        found = lab.predict(pool, schedules[0], schedules[1:], workload, steps=2, rounds=2)
    assert [row.schedule for row in found.rows] == ["ZB-H1", "1F1B", "naive"]
    assert all(len(row.steps_ms) == 4 and row.measured_ms == min(row.steps_ms) for row in found.rows)
    assert all(
        row.predicted_ms == pp.simulate(schedule, found.costs).makespan
        for row, schedule in zip(found.rows, schedules, strict=True)
    )
    assert found.costs.unit == "ms" and min(found.costs.forward) > 20
    assert found.predicted_order[-1] == found.measured_order[-1] == "naive"  # 160 ms of sleep, where others take 100
    assert abs(found.errors[2]) < 0.4
    assert found.notes[: len(workload.notes)] == workload.notes
