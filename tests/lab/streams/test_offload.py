"""Copies to the host: held against a longest path through what waits for what, which knows nothing of pplab's loop."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest

import pplab as pp
from conftest import random_schedule
from pplab import lab


def edges_of(schedule, costs, offload):
    """(from, to, how long after its start) for everything that waits: pieces of actions, "0F3/1", and of copies, and
    how long each lasts."""
    S, n, home, lasts = schedule.num_stages, offload.pieces, {}, {}
    for rank, row in enumerate(schedule.rows):
        for a in row:
            home[str(a)] = rank
            lasts |= {f"{a}/{k}": costs.of(a.kind, a.stage) / n for k in range(n)}
    edges = []

    def after(first, then, late=0.0):
        edges.append((first, then, lasts[first] + late))

    for row in schedule.rows:
        names = [f"{a}/{k}" for a in row for k in range(n)]
        for one, other in zip(names, names[1:], strict=False):
            after(one, other)
        back = {(a.stage, a.microbatch): str(a) for a in row if str(a.kind) in "BI"}
        turns = [f"{own}/{k}" for own in back.values() for k in range(n)]
        actions, before_out, before_back = list(map(str, row)), None, None
        for a in (a for a in row if str(a.kind) == "F"):
            own = back[a.stage, a.microbatch]
            if actions.index(own) == actions.index(str(a)) + 1:
                continue
            for k in range(n):
                out, copied = f"{a.stage}O{a.microbatch}/{k}", f"{a.stage}R{a.microbatch}/{n - 1 - k}"
                lasts[out] = (offload.out if isinstance(offload.out, (int, float)) else offload.out[a.stage]) / n
                lasts[copied] = (offload.back if isinstance(offload.back, (int, float)) else offload.back[a.stage]) / n
                after(f"{a}/{k}", out)
                after(out, copied)
                if before_out:
                    after(before_out, out)
                before_out = out
        for j, own in enumerate(turns):
            copied = own.replace("B", "R").replace("I", "R")
            if copied not in lasts:
                continue
            if before_back:
                after(before_back, copied)
            if j >= offload.ahead:
                edges.append((turns[j - offload.ahead], copied, 0.0))
            after(copied, own)
            before_back = copied
    for name in home:
        stage, kind, m = pp.parse(name)
        if str(kind) == "F" and stage + 1 < S:
            after(f"{name}/{n - 1}", f"{stage + 1}F{m}/0", costs.latency * (home[name] != home[f"{stage + 1}F{m}"]))
        if str(kind) in "BI" and stage:
            then = next(each for each in (f"{stage - 1}B{m}", f"{stage - 1}I{m}") if each in home)
            after(f"{name}/{n - 1}", f"{then}/0", costs.latency * (home[name] != home[then]))
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


def spans_of(found):
    """When every piece of an action, and of a copy, starts and ends."""
    at = {
        f"{span.action}/{k}": each
        for span, pieces in zip(found.timeline.spans, found.pieces, strict=True)
        for k, each in enumerate(pieces)
    }
    made = Counter()
    for copy in found.timeline.others:  # those of one name in their order, since an engine makes one after the other
        at[f"{copy.action}/{made[copy.action]}"] = copy.start, copy.end
        made[copy.action] += 1
    return at


@pytest.mark.parametrize("seed", range(60))
def test_copies_and_actions_start_as_soon_as_they_can(seed):
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    each = lambda low, high: [12 * rng.randint(low, high) for _ in range(schedule.num_stages)]  # noqa: E731
    costs = pp.Costs(each(1, 5), each(1, 5), each(1, 5), latency=rng.choice([0, 24]))
    offload = lab.Offload(each(1, 9), each(1, 9), ahead=rng.randint(1, 3), pieces=rng.choice([1, 2, 3, 4]))
    found = offload.simulate(schedule, costs)
    edges, lasts = edges_of(schedule, costs, offload)
    assert {name: start for name, (start, _) in spans_of(found).items()} == longest(edges, lasts)
    assert all(end == start + lasts[name] for name, (start, end) in spans_of(found).items())
    for span, pieces in zip(found.timeline.spans, found.pieces, strict=True):
        assert (span.start, span.end) == (pieces[0][0], pieces[-1][1])


@pytest.mark.parametrize("seed", range(20))
def test_what_is_held_is_counted(seed):
    """At every moment, from the spans: a piece of a forward's activations is on the GPU, on the host, or on both."""
    rng = random.Random(seed)
    schedule, n = random_schedule(rng), rng.choice([1, 2, 4])
    memory = pp.Memory([rng.randint(1, 4) for _ in range(schedule.num_stages)], parameters=3)
    found = lab.Offload(2, 3, ahead=2, pieces=n).simulate(schedule)
    at = spans_of(found)
    moments = sorted({t for span in at.values() for t in span})
    gpu, host = defaultdict(float), defaultdict(float)
    for rank, row in enumerate(schedule.rows):
        constant = 3 * len(schedule.stages_of(rank))
        for now in moments:
            here = there = 0
            for a in (a for a in row if str(a.kind) == "F"):
                for k in range(n):
                    name = lambda kind, k: f"{a.stage}{kind}{a.microbatch}/{k}"  # noqa: B023, E731
                    lasts = at.get(name("W", n - 1 - k)) or at[name("B", n - 1 - k)]
                    out, back = at.get(name("O", k)), at.get(name("R", n - 1 - k))
                    held = at[name("F", k)][0] <= now < lasts[1]
                    here += memory.activation[a.stage] / n * (held and not (out and out[1] <= now < back[0]))
                    there += memory.activation[a.stage] / n * bool(out and out[0] <= now < back[1])
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
    quick = lab.Offload(0, pieces=4).simulate(schedule)
    assert quick.timeline.makespan == plain
    assert all(a <= b for a, b in zip(quick.peak_held(), lab.Offload(0).simulate(schedule).peak_held(), strict=True))
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
    with pytest.raises(ValueError, match="pieces must be an integer of at least 1, got 0"):
        lab.Offload(1, pieces=0)
    with pytest.raises(ValueError, match=r"out has 3 values for 4 stages"):
        lab.Offload([1, 2, 3]).simulate(schedule)
    with pytest.raises(pp.ScheduleError):
        lab.Offload(1).simulate(pp.Schedule([["0B0", "0F0"]]))
    with pytest.raises(ValueError, match="gb_per_s"):
        lab.offloaded_row(lab.Case(), "1F1B", 8, 0)
    for row in (lab.offloaded_row, lambda case, name, *asked, **options: lab.vocabulary_row(case, 8, **options)):
        with pytest.raises(ValueError, match="simulated where nobody waits, got sends='both wait': leave it out"):
            row(lab.Case(), "1F1B", 8, sends="both wait")
    with pytest.raises(ValueError, match="'a perfect pipeline' is no schedule"):
        lab.offloaded_row(lab.Case(), "a perfect pipeline", 8)


def test_copies_make_room_in_the_case():
    case = lab.Case()
    plain = case.row("Interleaved1F1B", 16)
    copied = lab.offloaded_row(case, "Interleaved1F1B", 16, 50, share=0.3, pieces=4)
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


def test_layer_by_layer_as_a_stage_for_every_layer():
    """The case's stages as eight stages each, copied whole: 21.7 GB for 36.5, and 42.2 for 73.0, the step no longer."""
    case, kept, layers = lab.Case(), lab.Case().sequence_gb()[0], 8
    forward = case.layer_ms * layers
    for name, count, expected in (("1F1B", 16, (36.5, 21.7)), ("GPipe", 8, (73.0, 42.2))):
        whole = pp.build(name, num_ranks=4, num_microbatches=count)
        rows = [
            [
                f"{a.stage * layers + n}{a.kind}{a.microbatch}"
                for a in row
                for n in (range(layers) if str(a.kind) == "F" else reversed(range(layers)))
            ]
            for row in whole.rows
        ]
        copies, costs = kept / 50 * 1e3 / 2, pp.Costs(*[forward] * 3)
        fine = lab.Offload(copies / layers, share=0.5).simulate(pp.Schedule(rows), costs.finer(layers))
        found = lab.Offload(copies, share=0.5, pieces=layers).simulate(whole, costs)
        plain = pp.simulate(whole, costs).makespan
        assert found.timeline.makespan == pytest.approx(plain) == pytest.approx(fine.timeline.makespan)
        held = max(found.peak_held()) * kept
        assert held == pytest.approx(max(fine.peak_held()) * kept / layers)
        assert (round(max(whole.peak_in_flight) * kept, 1), round(held, 1)) == expected
