"""Copies to the host: held against a longest path through what waits for what, which knows nothing of pplab's loop."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

import pplab as pp
from conftest import random_schedule
from pplab import lab


def edges_of(schedule, costs, offload):
    """(from, to, how long after its start) for everything that waits: actions in their text form, and copies."""
    S, home, lasts = schedule.num_stages, {}, {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            home[str(action)], lasts[str(action)] = rank, costs.of(action.kind, action.stage)
    edges = []

    def after(first, then, late=0.0):
        edges.append((first, then, lasts[first] + late))

    for row in schedule.rows:
        names = list(map(str, row))
        for one, other in zip(names, names[1:], strict=False):
            after(one, other)
        back = {(a.stage, a.microbatch): str(a) for a in row if str(a.kind) in "BI"}
        turns = list(back.values())
        before_out = before_back = None
        for a in (a for a in row if str(a.kind) == "F"):
            own = back[a.stage, a.microbatch]
            if names.index(own) == names.index(str(a)) + 1:
                continue
            out, copied = f"{a.stage}O{a.microbatch}", f"{a.stage}R{a.microbatch}"
            lasts[out] = offload.out if isinstance(offload.out, (int, float)) else offload.out[a.stage]
            lasts[copied] = offload.back if isinstance(offload.back, (int, float)) else offload.back[a.stage]
            after(str(a), out)
            if before_out:
                after(before_out, out)
            before_out = out
        for j, own in enumerate(turns):
            copied = own.replace("B", "R").replace("I", "R")
            if (out := copied.replace("R", "O")) not in lasts:
                continue
            after(out, copied)
            if before_back:
                after(before_back, copied)
            if j >= offload.ahead:
                edges.append((turns[j - offload.ahead], copied, 0.0))
            after(copied, own)
            before_back = copied
    for name in home:
        stage, kind, m = pp.parse(name)
        if str(kind) == "F" and stage + 1 < S:
            after(name, f"{stage + 1}F{m}", costs.latency * (home[name] != home[f"{stage + 1}F{m}"]))
        if str(kind) in "BI" and stage:
            then = next(each for each in (f"{stage - 1}B{m}", f"{stage - 1}I{m}") if each in home)
            after(name, then, costs.latency * (home[name] != home[then]))
    return edges, lasts


def longest(edges, names):
    starts = dict.fromkeys(names, 0.0)
    for _ in names:
        moved = False
        for one, other, late in edges:
            if starts[one] + late > starts[other] + 1e-12:
                starts[other], moved = starts[one] + late, True
        if not moved:
            return starts
    raise AssertionError("it goes round")


@pytest.mark.parametrize("seed", range(40))
def test_copies_and_actions_start_as_soon_as_they_can(seed):
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    each = lambda low, high: [rng.randint(low, high) for _ in range(schedule.num_stages)]  # noqa: E731
    costs = pp.Costs(each(1, 5), each(1, 5), each(1, 5), latency=rng.choice([0, 2]))
    offload = lab.Offload(each(1, 9), each(1, 9), ahead=rng.randint(1, 3))
    found = offload.simulate(schedule, costs)
    edges, lasts = edges_of(schedule, costs, offload)
    starts = longest(edges, lasts)
    spans = [*found.timeline.spans, *found.timeline.others]
    assert {str(span.action): span.start for span in spans} == starts
    assert all(span.end == span.start + lasts[str(span.action)] for span in spans)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_held_is_counted(seed):
    """At every moment, from the spans: a forward's activations are on the GPU, on the host, or on both."""
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    memory = pp.Memory([rng.randint(1, 4) for _ in range(schedule.num_stages)], parameters=3)
    found = lab.Offload(2, 3, ahead=2).simulate(schedule)
    moments = sorted({t for span in [*found.timeline.spans, *found.timeline.others] for t in (span.start, span.end)})
    at = {str(span.action): span for span in [*found.timeline.spans, *found.timeline.others]}
    gpu, host = defaultdict(float), defaultdict(float)
    for rank, row in enumerate(schedule.rows):
        constant = 3 * len(schedule.stages_of(rank))
        for now in moments:
            here = there = 0
            for a in (a for a in row if str(a.kind) == "F"):
                size, key = memory.activation[a.stage], (a.stage, a.microbatch)
                last = next(at[n] for n in ("{}W{}".format(*key), "{}B{}".format(*key)) if n in at)
                out, back = at.get("{}O{}".format(*key)), at.get("{}R{}".format(*key))
                held = at[str(a)].start <= now < last.end
                here += size * (held and not (out and out.end <= now < back.start))
                there += size * bool(out and out.start <= now < back.end)
            gpu[rank], host[rank] = max(gpu[rank], constant + here), max(host[rank], there)
    assert found.peak_held(memory) == tuple(gpu[r] for r in range(schedule.num_ranks))
    assert found.peak_on_host(memory) == tuple(host[r] for r in range(schedule.num_ranks))


@pytest.mark.parametrize(
    "name", ["naive", "GPipe", "1F1B", "ZB-H2", "Interleaved1F1B", "ZB-V", "DualPipe", "DualPipeV"]
)
def test_quick_copies_cost_nothing_and_slow_ones_never_help(name):
    schedule = pp.build(name, num_ranks=4, num_microbatches=8)
    plain, steps = pp.simulate(schedule).makespan, []
    for out in (0, 0.5, 1, 2, 4, 8):
        found = lab.Offload(out).simulate(schedule)
        steps.append(found.timeline.makespan)
        assert all(a <= b for a, b in zip(found.peak_held(), schedule.peak_held(pp.Memory()), strict=True))
    assert steps[:2] == [plain, plain] and steps == sorted(steps)
    nothing = lab.Offload(5, share=0).simulate(schedule)
    assert nothing.timeline.makespan == plain and nothing.timeline.others == () and set(nothing.peak_on_host()) == {0}


@pytest.mark.parametrize("copy", [1, 2, 3, 5])
def test_slow_copies_set_the_beat_of_backwards(copy):
    """One rank, M forwards, then M backwards of 2: a copy back begins with the backward before its own."""
    schedule = pp.build("GPipe", num_ranks=1, num_microbatches=12)
    assert lab.Offload(copy).simulate(schedule).timeline.makespan == 12 + 11 * max(2, copy) + 2


def test_bad_input_is_named():
    schedule = pp.build("1F1B", num_ranks=4, num_microbatches=8)
    with pytest.raises(ValueError, match="out"):
        lab.Offload(-1)
    with pytest.raises(ValueError, match="share"):
        lab.Offload(1, share=1.5)
    with pytest.raises(ValueError, match="ahead"):
        lab.Offload(1, ahead=0)
    with pytest.raises(ValueError, match=r"out has 3 values for 4 stages"):
        lab.Offload([1, 2, 3]).simulate(schedule)
    with pytest.raises(pp.ScheduleError):
        lab.Offload(1).simulate(pp.Schedule([["0B0", "0F0"]]))
    with pytest.raises(ValueError, match="gb_per_s"):
        lab.offloaded_row(lab.Case(), "1F1B", 8, 0)
    with pytest.raises(ValueError, match="'a perfect pipeline' is no schedule"):
        lab.offloaded_row(lab.Case(), "a perfect pipeline", 8)


def test_copies_make_room_in_the_case():
    case = lab.Case(state=lab.State(2, 2, 12))
    plain = case.row("Interleaved1F1B", 16)
    copied = lab.offloaded_row(case, "Interleaved1F1B", 16, 50, share=0.3)
    assert not plain.fits and copied.fits and copied.step_s == pytest.approx(plain.step_s, rel=1e-9)
    two = [make(case, "1F1B", 4, microbatch=2) for make in (lab.Case.row, lab.offloaded_row)]
    assert two[1].step_s >= two[0].step_s > 1.5 * case.row("1F1B", 4).step_s  # of two sequences each
    slow = lab.offloaded_row(case, "1F1B", 16, 25, cut=[8, 9, 8, 7])
    assert slow.step_s > case.row("1F1B", 16, cut=[8, 9, 8, 7]).step_s


def test_a_share_per_stage_may_be_a_list():
    case, share = lab.Case(), [1, 1, 1, 1, 0, 0, 0, 0]  # the first of every rank's two stages
    rows = [lab.offloaded_row(case, "Interleaved1F1B", 16, 50, share=kind(share)) for kind in (list, tuple)]
    assert repr(rows[0]) == repr(rows[1]) and rows[0].held_gb == rows[1].held_gb
    assert max(rows[0].held_gb) < max(case.row("Interleaved1F1B", 16).held_gb)
    with pytest.raises(ValueError, match="share has 4 values for 8 stages"):
        lab.offloaded_row(case, "Interleaved1F1B", 16, 50, share=share[:4])
    with pytest.raises(ValueError, match="share must be a number from 0 to 1, got 2"):
        lab.offloaded_row(case, "Interleaved1F1B", 16, 50, share=2)
