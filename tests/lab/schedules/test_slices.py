"""Slices of a sequence: orders of rows, times under causal attention, and what ranks hold, each counted another way."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest

import pplab as pp
from conftest import random_schedule
from pplab import Action, Costs, Kind, Memory, Schedule, lab
from pplab.actions import parts
from pplab.deps import needs
from pplab.lab import Slices, formulas
from pplab.lab.schedules.sliced_schedules import slice_needs

B, F, I, W = Kind.B, Kind.F, Kind.I, Kind.W  # noqa: E741


def seq(P: int, M: int, k: int, **options: object) -> Schedule:
    return pp.build("Seq1F1B", num_ranks=P, num_microbatches=M * k, slices=k, **options)


@pytest.mark.parametrize(("k", "makespan", "held"), [(1, 33, 4), (2, 28.5, 2.5), (4, 26.25, 1.75), (8, 25.125, 1.375)])
def test_four_ranks_and_eight_microbatches(k, makespan, held):
    """F = I = W = 1; interleaved 1F1B takes 28.5 and holds 5.5."""
    s = seq(4, 8, k)
    assert Slices.even(k).simulate(s).makespan == makespan
    assert max(s.peak_held(Slices.even(k).memory())) == held
    assert Slices.even(k).simulate(pp.build("TeraPipe", num_ranks=4, num_microbatches=8 * k, slices=k)).makespan == (
        makespan
    )


def test_the_closed_forms_on_a_grid():
    for P, M, k, V in product(range(1, 6), range(1, 6), range(1, 5), (1, 2, 3)):
        s = seq(P, M, k, stages_per_rank=V)
        lab.check_slices(s, k)
        if V == 1:
            assert s.peak_held(Slices.even(k).memory()) == pytest.approx(formulas.sliced_peak_in_flight(P, M, k))
        elif M * k < P:
            with pytest.raises(ValueError, match="at least P slices"):
                formulas.sliced_makespan(P, M, k, 1, 2, V)
            continue
        for f, b in ((1, 2), (3, 3), (5, 2)):
            made = Slices.even(k).simulate(s, Costs(f, b, 0)).makespan
            assert made == pytest.approx(formulas.sliced_makespan(P, M, k, f, b, V)), (P, M, k, V, f, b)


def test_one_slice_is_the_schedule_without_slices():
    assert seq(4, 8, 1).rows == pp.build("1F1B", num_ranks=4, num_microbatches=8).rows
    assert seq(4, 8, 1, split=True).rows == pp.build("ZB-H1", num_ranks=4, num_microbatches=8).rows
    eager = pp.build("eager-1F1B", num_ranks=4, num_microbatches=8)
    assert seq(4, 8, 1, warmup_per_rank=2).rows == eager.rows


def sliced_at_random(rng: random.Random) -> tuple[Schedule, int]:
    P, M, k = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 4)
    options = {"stages_per_rank": rng.randint(1, 2), "warmup_per_rank": rng.randint(1, 2), "split": rng.random() < 0.5}
    return seq(P, M, k, **options), k


def lasts(action: Action, lengths: list[int], share: float, costs: Costs) -> float:
    """Of a slice, with an overhead of 1: its tokens' part of what isn't attention, its triangle's of what is."""
    T, j = sum(lengths), action.microbatch % len(lengths)
    first = sum(lengths[:j])
    width, triangle = lengths[j] / T, ((first + lengths[j]) ** 2 - first**2) / T**2
    part, weights = (1 - share) * width + share * triangle, costs.backward_weight * width
    if action.kind is W:
        return 1 + weights
    if action.kind is F:
        return 1 + costs.forward * part
    whole = (costs.backward_input + costs.backward_weight + costs.recompute) * part
    return 1 + whole - (weights if action.kind is I else 0)


def test_times_are_those_of_the_longest_path(rng):
    """Every action starts after the one before it in its row, what other stages send, and the slices that it needs:
    found by going over all of them until nothing changes."""
    for _ in range(8):
        s, k = sliced_at_random(rng)
        lengths, share, lag = [rng.randint(1, 9) for _ in range(k)], rng.choice([0, 0.3, 0.5]), rng.choice([0, 2])
        costs = Costs(rng.randint(1, 5), 5, rng.randint(1, 4), latency=lag, recompute=rng.randint(0, 3))
        rank_of = {a: rank for rank, row in enumerate(s.rows) for a in row}
        end, before = dict.fromkeys(rank_of, 0.0), None
        while end != before:
            before = dict(end)
            for row in s.rows:
                for last, a in pairwise((None, *row)):
                    wanted = [*needs(a, s.num_stages), *filter(None, [slice_needs(a, k)])]
                    made = [Action(n.stage, kind, n.microbatch) for n in wanted for kind in n.kinds]
                    there = [end[x] + lag * (rank_of[x] != rank_of[a]) for x in made if x in end]
                    end[a] = max([end.get(last, 0), *there]) + lasts(a, lengths, share, costs)
        t = Slices(lengths, share).simulate(s, replace(costs, overhead=1))
        assert {span.action: span.end for span in t.spans} == pytest.approx(end)


def test_equal_slices_without_attention_are_small_microbatches(rng):
    """Narrow links, too: a message is as large as its slice."""
    for _ in range(8):
        s, k = sliced_at_random(rng)
        whole = Costs(k * rng.randint(1, 5), k * 2, k, latency=rng.choice([0, 1]), bandwidth=0.5, message=3 * k)
        small = replace(whole, forward=whole.forward / k, backward_input=2, backward_weight=1, message=3)
        assert Slices.even(k).simulate(s, whole).ends == pytest.approx(pp.simulate(s, small).ends)


def test_shares_are_those_of_the_keys_that_queries_see():
    tokens = 5000
    for lengths in ((2000, 1700, 1300), (1250,) * 4):
        seen, first = [], 0
        for length in lengths:
            seen.append(sum(range(first + 1, first + length + 1)))
            first += length
        made = [part / sum(seen) for part in seen]
        assert Slices(lengths, attention=1).shares == pytest.approx(made, abs=1 / tokens)
    assert Slices.even(4, attention=[0, 1]).shares[0] == (0.25,) * 4


@pytest.mark.parametrize("share", [0, 0.13, 0.5, 1])
def test_balanced_slices_take_equal_times(share):
    found = Slices.balanced(5, share)
    assert found.shares == pytest.approx([0.2] * 5) and sum(found.lengths) == pytest.approx(1)
    rounded = Slices.balanced(5, share, tokens=8192, multiple=64)
    assert sum(rounded.lengths) == 8192 and all(length % 64 == 0 for length in rounded.lengths)
    assert rounded.widths == pytest.approx(found.widths, abs=64 / 8192)
    s = seq(4, 3, 5)
    even, balanced = (each.simulate(s).makespan for each in (Slices.even(5, share), found))
    assert balanced == pytest.approx(formulas.sliced_makespan(4, 3, 5, 1, 2)) and even >= balanced - 1e-9


def test_what_is_held_is_what_a_list_of_things_holds(rng):
    for _ in range(10):
        s, k = sliced_at_random(rng)
        lengths = [rng.randint(1, 9) for _ in range(k)]
        slices = Slices(lengths)
        memory = Memory(activation=sum(lengths), parameters=7, unit="B")
        for row, peak in zip(s.rows, s.peak_held(slices.memory(memory, carried=2 * sum(lengths))), strict=True):
            held, most, stages = {}, 0, len({a.stage for a in row})
            for a in row:
                m, j = divmod(a.microbatch, k)
                if a.kind is F:
                    held["slice", a.stage, m, j] = lengths[j]
                most = max(most, sum(held.values()) + 7 * stages)
                if a.kind in (B, I):
                    held.pop(("gradients", a.stage, m, j), None)
                    if j == k - 1:
                        held |= {("gradients", a.stage, m, i): 2 * lengths[i] for i in range(k - 1)}
                if a.kind in (B, W):
                    del held["slice", a.stage, m, j]
            assert not held and peak == pytest.approx(most)


def in_order(s: Schedule, k: int) -> bool:
    """Whether each stage's forwards of a microbatch come first slice first, its backwards last slice first, all on one
    rank: from the places of the actions alone."""
    places = {a: (rank, i) for rank, row in enumerate(s.rows) for i, item in enumerate(row) for a in parts(item)}
    for stage, m in product(range(s.num_stages), range(0, s.num_microbatches, k)):
        forwards = [places[stage, F, n] for n in range(m, m + k)]
        backwards = [places.get((stage, B, n), places.get((stage, I, n))) for n in range(m, m + k)]
        if len({rank for rank, _ in forwards}) > 1 or any(a >= b for a, b in pairwise(forwards)):
            return False
        if any(a <= b for a, b in pairwise(backwards)):
            return False
    return True


def test_the_order_of_slices_is_checked(rng):
    """Legal schedules of microbatches, taken as slices: refused exactly where some slice comes in the wrong order."""
    verdicts = []
    while len(verdicts) < 40:
        if rng.random() < 0.3:
            s = random_schedule(rng, overlap_share=0.2, bidirectional=rng.random() < 0.3)
            k = rng.choice([k for k in range(1, 7) if s.num_microbatches % k == 0])
        else:  # two neighbours change places
            s, k = sliced_at_random(rng)
            rows = [list(row) for row in s.rows]
            i = rng.randrange(len(row := rng.choice(rows)) - 1)
            row[i : i + 2] = reversed(row[i : i + 2])
            s = Schedule(rows)
        try:
            pp.validate(s)
        except pp.ScheduleError:
            continue
        verdicts.append(in_order(s, k))
        if verdicts[-1]:
            lab.check_slices(s, k)
            continue
        with pytest.raises(pp.ScheduleError, match="keys and values") as caught:
            lab.check_slices(s, k)
        assert caught.value.action in [a for item in s.rows[caught.value.rank] for a in parts(item)]
    assert {*verdicts} == {True, False}


def test_what_does_not_fit_is_refused():
    plain = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    said = "rank 0 runs 0B0 before 0B/I1; 0B/I1 has gradients for its keys and values that it needs: they are slices of"
    with pytest.raises(pp.ScheduleError, match=f"{said} microbatch 0; move 0B/I1 in front of it"):
        Slices.even(2).simulate(plain)
    both = Schedule([["0F0", "1F1", "1B1", "0B0"], ["1F0", "1B0", "0F1", "0B1"]])
    with pytest.raises(pp.ScheduleError, match="rank 0 runs 1F1, and 1F0 has keys and values.*put 1F0 on rank 0"):
        lab.check_slices(both, 2)
    with pytest.raises(pp.ScheduleError, match="1F1B has 4 microbatches, which don't make whole sequences of 3 slices"):
        lab.check_slices(plain, 3)
    paired = Schedule([["0F0", "0B0", "0F1", "(0B1;0F2)OVERLAP_B_F", "0B2"]])
    with pytest.raises(pp.ScheduleError, match="two slices take together"):
        Slices.even(1).simulate(paired)
    with pytest.raises(ValueError, match="multiple of slices = 2 microbatches.*got 7"):
        pp.build("Seq1F1B", num_ranks=2, num_microbatches=7)
    with pytest.raises(ValueError, match="0.6 of 2, is more than its input gradient takes, 1"):
        Slices.even(2, attention=0.6).simulate(seq(2, 2, 2, split=True))
    for wrong, says in (((), "lengths"), ((1, 0), "each above 0"), (3, "lengths"), ((1, "2"), "lengths")):
        with pytest.raises(ValueError, match=says):
            Slices(wrong)
    with pytest.raises(ValueError, match="attention must be a number from 0 to 1"):
        Slices.even(2, attention=1.5)
    with pytest.raises(ValueError, match="attention has 3 values for 2 stages"):
        Slices.even(2, attention=[0.1, 0.1, 0.1]).simulate(seq(2, 2, 2))
    with pytest.raises(ValueError, match="carried has 3 values for 2 stages"):
        seq(2, 2, 2).peak_held(Slices.even(2).memory(carried=[1, 1, 1]))
    with pytest.raises(ValueError, match="9 slices of 8 tokens leave one without 1 tokens"):
        Slices.balanced(9, 0.1, tokens=8)
    with pytest.raises(ValueError, match="isn't a multiple of 3"):
        Slices.balanced(2, 0.1, tokens=8, multiple=3)


def test_the_case_in_one_slice_is_the_case():
    """But for the keys and values of layers that run their forward again, which one slice keeps, too."""
    case = lab.Case()
    for cut, recompute in (([8, 9, 8, 7], False), (None, True)):
        row, plain = (
            lab.sliced_row(case, 1, 8, cut=cut, recompute=recompute),
            case.row("1F1B", 8, cut=cut, recompute=recompute),
        )
        assert row.step_s == pytest.approx(plain.step_s) and row.busy == pytest.approx(plain.busy)
        kept = 2 * 1024 * 8192 * 2 / 1e9  # keys and values of a layer
        more = [min(4 - r, 8) * 8 * kept - kept for r in range(4)] if recompute else [0] * 4
        assert row.held_gb == pytest.approx([a + b for a, b in zip(plain.held_gb, more, strict=True)])


def test_the_best_cut_is_that_of_all_cuts():
    """Two ranks, so that all cuts can be tried, with a card on which the fastest doesn't fit."""
    case = replace(lab.Case(), num_ranks=2, memory_gb=88, model=replace(lab.Case().model, num_layers=16))
    for memory_gb in (40, 75, 88):
        case = replace(case, memory_gb=memory_gb)
        for entry in lab.best_slices(case, 6, (1, 4)).entries:
            k = 1 if "1 slice," in entry.what or entry.what.endswith("1 slice") else 4
            rows = [lab.sliced_row(case, k, 6, cut=[n, 16 - n]) for n in range(1, 16)]
            best = min(rows, key=lambda row: (max(0, max(row.held_gb) - memory_gb), row.step_s))
            assert entry.step_s == pytest.approx(best.step_s) and entry.fits == best.fits


def test_slices_beat_the_case_without_them():
    """The memory that slices free is room for a longer warm-up, which hides messages."""
    case = lab.Case()
    best = case.row("ZBVZeroBubble", 16, cut=[4, 4, 4, 4, 5, 5, 4, 2])
    sliced = lab.sliced_row(case, 4, 16, cut=[9, 9, 8, 6], warmup_per_rank=2)
    assert best.fits and sliced.fits
    assert sliced.what == "Seq1F1B, 4 slices, eager"
    assert sliced.step_s < 0.96 * best.step_s and max(sliced.held_gb) < max(best.held_gb)
    costly = [lab.sliced_row(case, k, 16, cut=[9, 9, 8, 6], warmup_per_rank=2, overhead_ms=2) for k in (4, 16)]
    assert costly[0].step_s < costly[1].step_s, "what every action takes beside its work ends the gain"


def test_slices_are_beyond_the_proven_optima_of_whole_microbatches():
    """4 ranks, 8 microbatches, F = I = W: nothing on the recorded frontier is as fast, on no placement, the optima that
    were proved with more than twice the memory among it."""
    s, slices = seq(4, 8, 4, split=True), Slices.even(4)
    time, held = slices.simulate(s).makespan, max(s.peak_held(slices.memory()))
    points = lab.frontiers()["equal-8"].points
    proved = [point for point in points if point.proved]
    assert (time, held) == (24.75, 1.75)
    assert {point.placement for point in proved} == {"one stage per rank", "V", "loop", "bidirectional"}
    assert min(point.bound for point in proved if point.held == 4) > time
    assert min(point.time for point in points) > time


def test_slices_are_drawn_by_name():
    """One slice per action, named as what it is; what is held is drawn, too."""
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot as plt

    s = seq(2, 3, 2)
    t = Slices.even(2, attention=0.3).simulate(s)
    drawn = sorted(text.get_text() for text in lab.sliced_gantt(t, 2).texts)
    assert drawn == sorted(f"{m}{j}" for m, j in product(range(3), "ab") for _ in range(4))
    ax = lab.memory_chart(t, of=Slices.even(2).memory(carried=1), limit=3)
    assert "peak 2" in [text.get_text() for text in ax.texts]
    plt.close("all")
