"""What a trace explains: causes and changes that were put there, and runs of what was predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import pplab as pp
from pplab import lab
from pplab.__main__ import main

P, M = 4, 8


def traced(*timelines: pp.Timeline, notes=()) -> SimpleNamespace:
    return SimpleNamespace(timelines=timelines, notes=notes)


def step(name: str, costs: pp.Costs, microbatches: int = M, **options) -> pp.Timeline:
    schedule = pp.build(name, num_ranks=P, num_microbatches=microbatches, **options)
    return replace(pp.simulate(schedule, replace(costs, unit="ms")), how="measured")


def rows(found: lab.Explained) -> dict[str, lab.WhatIf]:
    return {row.what: row for row in found.what_ifs}


def test_what_differs_takes_as_long_as_its_closed_form():
    """Equal stages, F = 10 and B = 20: (M + P - 1)(F + B) by 1F1B and GPipe, M P (F + B) one microbatch at a time."""
    found = lab.explain(traced(step("1F1B", pp.Costs(10, 10, 10))))
    seen = {what: row.timeline.makespan for what, row in rows(found).items()}
    assert seen == pytest.approx(
        {
            "nothing (replay)": 330,
            "stages equally long": 330,
            "messages at once": 330,
            "1F1B, 16 microbatches": 19 * 30,
            "1F1B, 4 microbatches": 7 * 30,
            "naive": 32 * 30,
            "GPipe": 330,
            "eager-1F1B": 330,
        }
    )
    assert rows(found)["1F1B, 16 microbatches"].change == pytest.approx(19 * 30 / 2 / 330 - 1)
    assert rows(found)["GPipe"].timeline.peak_in_flight == (8, 8, 8, 8)
    assert all(row.error == pytest.approx(0, abs=1e-9) for row in found.what_ifs)


def test_a_slow_stage_and_a_slow_link_cost_what_they_cost():
    slow = lab.explain(traced(step("1F1B", pp.Costs([10, 10, 20, 10], 10, 10))))
    assert rows(slow)["stages equally long"].timeline.makespan == pytest.approx((M + P - 1) * 32.5)
    assert rows(slow)["messages at once"].change == pytest.approx(0)
    assert max(("imbalance", "communication"), key=slow.where.mean.get) == "imbalance"
    late = {(1, 2): pp.Link(latency=20), (2, 1): pp.Link(latency=20)}
    far = lab.explain(traced(step("1F1B", pp.Costs(10, 10, 10, links=late))))
    assert rows(far)["messages at once"].timeline.makespan == pytest.approx(330)
    assert rows(far)["stages equally long"].change == pytest.approx(0)
    assert max(("imbalance", "communication"), key=far.where.mean.get) == "communication"


def test_only_what_the_stages_and_the_durations_allow():
    """No order that splits backwards where none was split, none on other stages, no rows twice, no sliced sequences."""
    plain = [*rows(lab.explain(traced(step("GPipe", pp.Costs(10, 10, 10)))))]
    assert plain[-3:] == ["naive", "1F1B", "eager-1F1B"]
    split = [*rows(lab.explain(traced(step("ZB-H1", pp.Costs(10, 12, 8)))))]
    assert {"1F1B", "GPipe", "ZB-H2", "ZB-2P"} <= {*split} and not {"ZB-V", "Interleaved1F1B"} & {*split}
    loop = [*rows(lab.explain(traced(step("Interleaved1F1B", pp.Costs(10, 10, 10), stages_per_rank=2))))]
    assert {"Interleaved1F1B, 16 microbatches", "LoopedBFS"} <= {*loop} and "1F1B" not in loop
    assert not [what for what in loop if "Seq" in what]
    v = {*rows(lab.explain(traced(step("ZBVZeroBubble", pp.Costs(10, 10, 10)))))}
    assert {"V-Half", "V-Min"} <= v and "LoopedBFS" not in v
    for built in (step("GPipe", pp.Costs()), step("Interleaved1F1B", pp.Costs(), stages_per_rank=2)):
        found = [row.timeline.schedule.rows for row in lab.explain(traced(built)).what_ifs if row.change]
        assert len(found) == len({*found})


def test_rows_that_nobody_has_registered():
    own = pp.Schedule([["0F0", "0F1", "0B1", "0B0"], ["1F0", "1F1", "1B1", "1B0"]])
    found = lab.explain(traced(pp.simulate(own, pp.Costs(1, 1, 1))))
    assert not [what for what in rows(found) if "microbatches" in what] and "GPipe" in rows(found)


def test_a_step_of_one_rank_is_told_too():
    own = pp.build("1F1B", num_ranks=1, num_microbatches=2)
    assert lab.explain(traced(pp.simulate(own, pp.Costs(1, 1, 1)))).replay.makespan == 6


def test_who_waits_for_sends_is_found():
    """1F1B whose ranks wait for what they send: 33 + (2 (M + P) - 5) c, as 1F1B's closed form for waiting says."""
    costs = pp.Costs(1, 1, 1, latency=1)
    own = pp.build("1F1B", num_ranks=P, num_microbatches=M)
    waiting = lab.simulate_sends(own, costs, "both wait")
    assert waiting.makespan == 33 + 2 * (M + P) - 5
    found = lab.explain(traced(waiting))
    assert "nobody waits for sends" in rows(found)
    assert rows(found)["nobody waits for sends"].change < 0 < rows(found)["GPipe"].error
    assert "nobody waits for sends" not in rows(lab.explain(traced(pp.simulate(own, costs))))


def test_the_error_is_how_far_the_replay_is_off_and_steps_differ():
    even, late = step("1F1B", pp.Costs(10, 10, 10)), step("1F1B", pp.Costs(11, 11, 11))
    found = lab.explain(traced(late, even))  # the median is the shorter one
    assert found.where.timeline is even
    assert all(row.error == pytest.approx(0.1 / 2) for row in found.what_ifs)
    longer = [end + 33 * (i == len(even.ends) - 1) for i, end in enumerate(even.ends)]
    last = lab.explain(traced(replace(even, ends=longer, how="measured")))
    off = abs(last.replay.makespan / max(longer) - 1)
    assert off > 0.01 and rows(last)["nothing (replay)"].error == pytest.approx(off)


def test_the_median_step_is_taken_and_the_slowest_told():
    steps = [step("1F1B", pp.Costs(x, x, x)) for x in (30, 10, 11)]
    found = lab.explain(traced(*steps, notes=("from afar",)))
    assert found.where.timeline is steps[2]
    assert found.notes[:2] == ("3 whole steps: the median one takes 363.0 ms, the slowest 990.0", "from afar")
    assert str(found) == repr(found) and str(found.table) in str(found) and str(found.where) in str(found)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["what_ifs"][0]["timeline"]["unit"] == "ms" and data["where"]["step_time"] == 363
    assert lab.timeline_from_dict(data["what_ifs"][0]["timeline"]).makespan == pytest.approx(363)


@pytest.mark.parametrize("nothing", [traced(), 3, "trace.json", None])
def test_nothing_to_explain(nothing):
    with pytest.raises(ValueError, match="explain takes what lab.read_traces gives, with a whole step in it, got "):
        lab.explain(nothing)


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert main(["explain", str(tmp_path / "no.json")]) == 1
    assert "no.json" in capsys.readouterr().err
    (tmp_path / "text.json").write_text("hello")
    assert main(["explain", str(tmp_path / "text.json")]) == 1
    assert "expected a Chrome trace" in capsys.readouterr().err
    for flag in ("--html", "--json"):
        assert main(["explain", str(tmp_path), flag, str(tmp_path / "no" / "file")]) == 1
        assert f"{flag} {tmp_path}/no/file: there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["explain"])
