"""The simulator against closed forms, published figures, and a second simulator; and what a timeline says of itself."""

import json
import random
from dataclasses import fields, replace
from fractions import Fraction
from itertools import product

import pytest

import pplab as pp
import pplab.costs as costs_module
from all_orders import is_possible
from conftest import random_costs, random_schedule, slow_simulate
from pplab import lab, simulator
from pplab.lab import formulas
from pplab.lab.shell.cli import summary
from pplab_course import dualpipe as exercise
from pplab_course import figures

F, B, I, W = pp.Kind.F, pp.Kind.B, pp.Kind.I, pp.Kind.W  # noqa: E741


def run(name: str, P: int, M: int, under: pp.Costs | None = None, /, **options) -> pp.Timeline:
    return pp.simulate(pp.build(name, num_ranks=P, num_microbatches=M, **options), under)


# P=4, M=8, F=I=W=1 in units of the whole model: makespan, bubble fraction, longest span, makespan at F,I,W = 3,4,2,
# peaks in stages
TABLE = {
    "naive": (96, Fraction(3, 4), None, None, (1, 1, 1, 1)),
    "GPipe": (33, Fraction(3, 11), 33, 99, (8, 8, 8, 8)),
    "1F1B": (33, Fraction(3, 11), 33, 99, (4, 3, 2, 1)),
    "eager-1F1B": (33, Fraction(3, 11), 33, 99, (7, 5, 3, 1)),
    "Interleaved1F1B": (28.5, Fraction(3, 19), 28.5, 85.5, (11, 9, 7, 5)),
    "LoopedBFS": (28.5, Fraction(3, 19), 28.5, 85.5, (16, 16, 16, 16)),
    "ZB-H1": (27, Fraction(1, 9), 27, 87, (4, 4, 4, 4)),
    "ZB-H2": (27, Fraction(1, 9), 24, None, (7, 7, 7, 7)),
    "InterleavedZeroBubble": (25.5, Fraction(1, 17), 25.5, 79.5, (8, 8, 8, 8)),
    "ZBVZeroBubble": (25.5, Fraction(1, 17), 24, 78, (8, 8, 8, 8)),
    "DualPipeV": (27, Fraction(1, 9), 27, 84, (9, 9, 9, 9)),
    "DualPipe": (26, Fraction(1, 13), 26, 80, (5, 5, 5, 5)),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_reference_table(name):
    makespan, bubble, span, other, peaks = TABLE[name]
    s = pp.build(name, num_ranks=4, num_microbatches=8)
    depth = s.num_stages // s.num_ranks
    t = pp.simulate(s, pp.Costs().finer(depth))
    assert t.makespan == makespan
    assert t.bubble_fraction == pytest.approx(float(bubble), abs=1e-15)
    assert t.bubble_ratio == pytest.approx(float(bubble / (1 - bubble)), abs=1e-15)
    assert t.peak_in_flight == peaks
    if span is not None:
        assert max(t.spans_per_rank) == span
        assert t.span_bubble_fraction == pytest.approx(1 - 24 / span, abs=1e-15)
    if other is not None:
        assert pp.simulate(s, pp.Costs(3, 4, 2).finer(depth)).makespan == other


# Qi et al. 2023, table 5, the model of 1.5B on 8 ranks: profiled F, I, W and latency in ms, and the published rates.
PROFILED = {
    24: ((18.522, 18.086, 9.337, 0.601), {"1F1B": 0.2431, "ZB-H1": 0.1585, "ZB-H2": 0.1083, "ZB-1P": 0.1585}),
    32: ((18.513, 18.086, 9.331, 0.626), {"1F1B": 0.1985, "ZB-H1": 0.1242, "ZB-H2": 0.0837, "ZB-1P": 0.1242}),
    64: ((18.546, 18.097, 9.321, 0.762), {"1F1B": 0.1240, "ZB-H1": 0.0674, "ZB-H2": 0.0444, "ZB-1P": 0.0674}),
}
# What the search finds in twice the memory, where an input gradient frees what the paper's table 1 says: of a layer's
# sbh(34 + 5as/h) bytes, 32sbh stay for the weight gradient (a=24 heads, s=1024 tokens, h=2304).
ZB_2P = {24: 0.0433, 32: 0.0034, 64: 0.0022}
TRANSFORMER = pp.Memory(activation=34 + 5 * 24 * 1024 / 2304, weight_input=32)


@pytest.mark.parametrize("M", PROFILED)
def test_the_zero_bubble_papers_table(M):
    (F, I, W, c), rates = PROFILED[M]  # noqa: E741
    costs = pp.Costs(F, I, W, latency=c, unit="ms")
    for name, rate in rates.items():
        options = {"costs": costs} if name == "ZB-1P" else {}
        t = run(name, 8, M, costs, **options)
        assert round(t.span_bubble_fraction, 4) == rate, name
    t = run("ZB-2P", 8, M, costs, costs=costs, memory=TRANSFORMER)
    assert round(t.span_bubble_fraction, 4) == ZB_2P[M]
    limit = 16 * TRANSFORMER.activation
    lab.check_memory(t.schedule, limit, TRANSFORMER)
    assert max(t.schedule.peak_held(TRANSFORMER)) > limit - TRANSFORMER.activation


def test_what_a_span_bubble_must_be_when_nothing_is_freed_before_the_weight_gradient():
    """A bound that the search reaches: the last rank has to leave its weight gradients to the end, and can keep 16."""
    (F, I, W, c), _ = PROFILED[24]  # noqa: E741
    costs = pp.Costs(F, I, W, latency=c)
    P, M, work = 8, 24, 24 * (F + I + W)
    bound = work - (2 * P - 1) * W + (P - 1) * (F + I + 2 * c)
    span = max(run("ZB-2P", P, M, costs, costs=costs).spans_per_rank)
    assert span == pytest.approx(bound)


@pytest.mark.parametrize(("P", "M"), [(1, 3), (2, 2), (3, 5), (4, 8), (4, 12)])
@pytest.mark.parametrize("times", [(1, 1, 1, 0), (3, 4, 2, 0), (2, 2, 3, 1)])
def test_the_search_keeps_its_limit_and_never_loses_to_the_fixed_orders(P, M, times):
    F, I, W, c = times  # noqa: E741
    costs = pp.Costs(F, I, W, latency=c)
    for name, limit, fixed in (("ZB-1P", P, "ZB-H1"), ("ZB-2P", 2 * P, "ZB-H2")):
        t = run(name, P, M, costs, costs=costs)
        lab.check_memory(t.schedule, limit)
        assert t.span_bubble_fraction <= run(fixed, P, M, costs).span_bubble_fraction + 1e-12
    for limit in (1, P + 1):
        lab.check_memory(run("ZB-1P", P, M, costs, costs=costs, limit=limit).schedule, limit)


def test_the_loop_alone():
    """Two ranks, three microbatches, GPipe's order, and half a unit of latency: items 0 to 5 are rank 0's."""
    rows, needs = [range(6), range(6, 12)], [None, None, None, 9, 10, 11, 0, 1, 2, None, None, None]
    lags = [0.5 * (need is not None) for need in needs]
    starts, ends = simulator.run(rows, needs, [1, 1, 1, 2, 2, 2] * 2, lags)
    assert starts == [0, 1, 2, 7, 9, 11, 1.5, 2.5, 3.5, 4.5, 6.5, 8.5] and ends[5] == 13
    link = range(12, 15)  # the forwards' messages take turns, two units each
    linked = [None if need is None else 12 + need if need < 3 else need for need in needs] + [0, 1, 2]
    starts, _ = simulator.run([*rows, link], linked, [1, 1, 1, 2, 2, 2] * 2 + [2] * 3, lags + [0] * 3)
    assert starts[6:9] == [3.5, 5.5, 7.5] and starts[12:] == [1, 3, 5]
    needs[0] = 6  # a circle: what never runs has no times, and so has all that comes after it
    assert simulator.run(rows, needs, [1] * 12, [0] * 12) == ([None] * 12, [None] * 12)


def test_latency_tells_the_schedules_apart():
    makespans = {name: run(name, 4, 8, pp.Costs(latency=1)).makespan for name in ("GPipe", "1F1B", "eager-1F1B")}
    assert makespans == {"GPipe": 39, "1F1B": 49, "eager-1F1B": 39}
    assert run("eager-1F1B", 4, 8, pp.Costs(latency=2)).makespan == 48


def test_a_warm_up_one_forward_short():
    assert run("1F1B", 4, 8, in_flight=(3, 2, 1, 1)).makespan == 54
    for M in (1, 2, 8):
        assert run("1F1B", 2, M, in_flight=(1, 1)).makespan == run("naive", 2, M).makespan


def test_a_slow_rank_costs_1f1b_by_its_place_and_gpipe_always_the_same():
    def slow(rank):
        return pp.Costs(*[[2 * x if r == rank else x for r in range(4)] for x in (1, 1, 1)])

    assert [run("1F1B", 4, 8, slow(rank)).makespan for rank in range(4)] == [51, 53, 55, 57]
    assert [run("GPipe", 4, 8, slow(rank)).makespan for rank in range(4)] == [57] * 4


def test_overhead_per_action_sets_a_best_number_of_microbatches():
    """The same batch in 4, 8 and 32 microbatches, each action 0.3 longer than its work."""
    made = [run("1F1B", 4, M, pp.Costs(8 / M, 8 / M, 8 / M, overhead=0.3)).makespan for M in (4, 8, 32)]
    assert made == pytest.approx([46.2, 39.6, 47.25], rel=1e-12)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize("P", [1, 2, 4, 7])
def test_thin_microbatches_make_the_closed_u_curve(name, P):
    """(M + P - 1) (w / M + o), where an overhead of a half falls on each of a microbatch's two actions; the least is
    where sqrt((P - 1) w / o) says."""
    for work, overhead in ((24, 0.6), (180, 0.25), (7, 3)):
        found = {}
        for M in range(1, 65):
            costs = pp.Costs(work / 3 / M, work / 3 / M, work / 3 / M, overhead=overhead / 2)
            found[M] = run(name, P, M, costs).makespan
            assert found[M] == pytest.approx((M + P - 1) * (work / M + overhead))
        best = ((P - 1) * work / overhead) ** 0.5
        assert min(found, key=found.get) in {max(1, min(64, round(best + d))) for d in (-0.5, 0, 0.5)}


def test_a_split_backward_has_two_overheads_and_finer_stages_one_each():
    costs = pp.Costs(overhead=[0.25, 0.5])
    assert [costs.of(kind, 0) for kind in pp.Kind if kind in "FBIW"] == [1.25, 2.25, 1.25, 1.25]
    assert [costs.of(kind, 1) for kind in (F, B)] == [1.5, 2.5]
    assert [costs.finer(2).of(kind, 0) for kind in (F, B, I, W)] == [0.75, 1.25, 0.75, 0.75]
    again = pp.Costs(recompute=1, overhead=0.25)
    assert [again.of(kind, 0) for kind in (F, B, I, W)] == [1.25, 3.25, 2.25, 1.25]
    assert pp.Costs(backward=5, recompute=1, overhead=0.25).of(B, 0) == 6.25


def test_two_actions_at_once_have_one_overhead():
    pair = pp.parse("(0F1;1B0)OVERLAP_F_B")
    for overlap, takes in (("sum", 3.5), ("max", 2.5), (2.75, 3.25), ({("0F", "1B"): 2}, 2.5)):
        assert pp.Costs(overlap=overlap, overhead=[0.25, 0.5]).of_item(pair) == takes


def test_an_overhead_is_no_work_that_all_ranks_share():
    """In passes of a head over all ranks."""
    found = lab.VocabularyParallel(1, 2).simulate(2, 4, pp.Costs(overhead=[0.25, 0.5]))
    lasts = {(s.rank, s.action): s.end - s.start for s in found.others}
    assert lasts == {(0, "S"): 1.25, (1, "S"): 1.5, (0, "T"): 2.25, (1, "T"): 2.5}


def test_microbatches_of_their_own_lengths():
    """Four sequences of lengths 1, 2, 1 and 3, by hand: rank 1 gets the third when it has done the second."""
    costs = pp.Costs([[1, 2, 1, 3]] * 2, [[1, 2, 1, 3]] * 2, 0)
    t = run("GPipe", 2, 4, costs)
    assert [(s.start, s.end) for s in t.spans_of(1)[:4]] == [(1, 2), (3, 5), (5, 6), (7, 10)]
    assert t.makespan == 10 + 1 + 2 + 1 + 3 + 3 and costs.by_microbatch
    assert not pp.Costs([1, 2]).by_microbatch
    alike = pp.Costs([[2] * 4, 3], message=[[1] * 4, 1], bandwidth=0.5)
    assert run("1F1B", 2, 4, alike).ends == run("1F1B", 2, 4, pp.Costs([2, 3], bandwidth=0.5)).ends
    wide = pp.Costs(message=[[1, 5, 1, 1], 0], bandwidth=1)
    arrived = [s.start for s in run("GPipe", 2, 4, wide).spans_of(1)[:4]]
    assert arrived == [2, 7, 8, 9]


@pytest.mark.parametrize(
    "takes",
    [
        lambda costs: lab.Problem(2, 4, costs=costs),
        lambda costs: lab.search(2, 4, costs=costs),
        lambda costs: pp.build("ZB-1P", num_ranks=2, num_microbatches=4, costs=costs),
        lambda costs: lab.Block({"0F": 0, "0B": 1}, [0, 1], 3, costs),
        lambda costs: lab.Slices.even(2).costs(pp.build("Seq1F1B", num_ranks=2, num_microbatches=4), costs),
        lambda costs: lab.VocabularyParallel(1, 1).simulate(2, 4, costs),
        lambda costs: costs.of(F, 0),
    ],
)
def test_what_takes_all_microbatches_alike_says_so(takes):
    with pytest.raises(ValueError, match="differ by microbatch, and here all microbatches take the same: give one per"):
        takes(pp.Costs([[1, 2, 1, 3], 1]))


def test_full_recomputation_keeps_the_fraction_and_costs_a_third():
    t = run("1F1B", 4, 8, pp.Costs(1, 2, 1))
    assert (t.makespan, round(t.bubble_fraction, 4)) == (44, 0.2727)


GRID = [(P, M) for P in (1, 2, 3, 4, 5, 8) for M in (1, 2, 3, 4, 8, 9, 24)]
TIMES = [(1, 1, 1, 0), (3, 4, 2, 0), (1, 1, 1, 1), (5, 3, 8, 2), (2, 7, 1, 4)]


@pytest.mark.parametrize(("F", "I", "W", "c"), TIMES)
@pytest.mark.parametrize(("P", "M"), GRID)
def test_closed_forms(P, M, F, I, W, c):  # noqa: E741
    B, costs = I + W, pp.Costs(F, I, W, latency=c)
    assert run("naive", P, M, costs).makespan == formulas.naive_makespan(P, M, F, B, c)
    assert run("GPipe", P, M, costs).makespan == formulas.gpipe_makespan(P, M, F, B, c)
    if not c or M % P == 0:
        assert run("1F1B", P, M, costs).makespan == formulas.one_f_one_b_makespan(P, M, F, B, c)
    if 2 * c <= F + B:
        assert run("eager-1F1B", P, M, costs).makespan == formulas.eager_one_f_one_b_makespan(P, M, F, B, c)
    if not c:
        for name in ("GPipe", "1F1B", "eager-1F1B"):
            t = run(name, P, M, costs)
            assert t.makespan == formulas.floor_makespan(P, M, F, B)
            assert t.bubble_fraction == pytest.approx(formulas.bubble_fraction(P, M))
            assert t.bubble_ratio == pytest.approx(formulas.bubble_ratio(P, M))
        assert run("naive", P, M, costs).bubble_fraction == pytest.approx(1 - 1 / P)
    assert run("GPipe", P, M, costs).makespan == run("GPipe", P, M, costs, reverse_backward=True).makespan


@pytest.mark.parametrize(("F", "I", "W"), [(1, 1, 1), (3, 4, 2), (5, 3, 2), (3, 3, 2), (4, 6, 1)])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 8])
def test_closed_forms_of_several_stages_and_split_backwards(P, F, I, W):  # noqa: E741
    costs = pp.Costs(F, I, W)
    for M in (P, 2 * P - 1, 2 * P, 2 * P + 1, 3 * P, 3 * P + 2, 4 * P):
        work = M * (F + I + W)
        assert run("ZB-H1", P, M, costs).makespan == work + formulas.zb_h1_bubble(P, F, I, W)
        assert run("ZB-H1", P, M, costs).peak_in_flight == (P,) * P
        if M >= 2 * P:
            t = run("ZB-H2", P, M, costs)
            assert max(t.spans_per_rank) == work + (P - 1) * (F + I - 2 * W)
            assert t.makespan == formulas.zb_h2_makespan(P, M, F, I, W)
            assert t.peak_in_flight == (2 * P - 1,) * P
        for V in (1, 2, 3):
            t = run("Interleaved1F1B", P, M, costs, stages_per_rank=V)
            assert t.makespan == formulas.sliced_makespan(P, M, 1, F, I + W, V)
            if M % P:
                continue
            assert t.peak_in_flight == tuple(min(2 * (P - 1 - r) + (V - 1) * P + 1, M * V) for r in range(P))
            assert t.bubble_fraction == pytest.approx(formulas.bubble_fraction(P, M, V))
            assert t.bubble_ratio == pytest.approx(formulas.bubble_ratio(P, M, V))
            assert run("LoopedBFS", P, M, costs, stages_per_rank=V).makespan == t.makespan
            t = run("InterleavedZeroBubble", P, M, costs, stages_per_rank=V)
            assert t.makespan == V * work + (P - 1) * (F + I - W)


@pytest.mark.parametrize(("F", "I", "W"), [(1, 1, 1), (3, 4, 2), (3, 3, 2), (4, 6, 1), (10, 11, 9)])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 8])
def test_closed_forms_of_zb_v(P, F, I, W):  # noqa: E741
    costs = pp.Costs(F, I, W)
    for M in (2 * P - 1, 2 * P, 3 * P + 1):
        t = run("ZB-V", P, M, costs)
        assert t.makespan == 2 * M * (F + I + W) + (P - 1) * max(I, 2 * (I - W))
        assert max(t.spans_per_rank) == 2 * M * (F + I + W) + 2 * (P - 1) * (I - W)
        assert t.peak_in_flight == (2 * P,) * P


def test_zb_v_at_the_profile_of_the_zero_bubble_paper():
    """In 1F1B's memory it leaves less than ZB-H2 in twice that; the paper's own profile, a stage cut in two."""
    (F, I, W, c), rates = PROFILED[24]  # noqa: E741
    t = run("ZB-V", 8, 24, pp.Costs(F, I, W, latency=c).finer(2))
    assert round(t.span_bubble_fraction, 3) == 0.073 < rates["ZB-H2"] < rates["ZB-H1"]
    assert t.peak_in_flight == (16,) * 8  # half-size: eight


def test_forms_against_the_second_simulator():
    rng = random.Random(0)
    for _ in range(12):
        P, W = rng.randint(2, 5), rng.randint(1, 4)
        F, V = W + rng.randint(0, 4), rng.randint(2, 4)
        I, M = F + rng.randint(0, 4), 2 * P - 1 + rng.randint(0, 2)  # noqa: E741
        for schedule, form in (
            (
                pp.build("ZB-V", num_ranks=P, num_microbatches=M),
                2 * M * (F + I + W) + (P - 1) * max(I, 2 * (I - W)),
            ),
            (
                pp.build("InterleavedZeroBubble", num_ranks=P, num_microbatches=M, stages_per_rank=V),
                V * M * (F + I + W) + (P - 1) * (F + I - W),
            ),
        ):
            assert max(end for _, end in slow_simulate(schedule, pp.Costs(F, I, W)).values()) == form


@pytest.mark.parametrize(("F", "I", "W"), [(1, 3, 2), (2, 5, 4), (3, 4, 4)])
def test_where_the_zero_bubble_papers_closed_forms_stop(F, I, W):  # noqa: E741
    """They need W <= F, too; ZB-H1's can be mended."""
    for P, M in ((3, 6), (4, 8), (5, 15)):
        work = M * (F + I + W)
        made = run("ZB-H1", P, M, pp.Costs(F, I, W)).makespan
        assert made == work + formulas.zb_h1_bubble(P, F, I, W) > work + (P - 1) * (F + I - W)


@pytest.mark.parametrize("overlap", ["sum", "max"])
@pytest.mark.parametrize(("F", "I", "W"), [(1, 1, 1), (2, 2, 1), (3, 3, 2), (4, 4, 1)])
@pytest.mark.parametrize("P", [2, 3, 4, 6, 8])
def test_closed_forms_of_dualpipe(P, F, I, W, overlap):  # noqa: E741
    costs = pp.Costs(F, I, W, overlap=overlap)
    for M in (2 * P, 2 * P + 2, 4 * P):
        for name, PP in (("DualPipe", P), ("DualPipeV", 2 * P)):
            if name == "DualPipe" and P % 2:
                continue
            t = run(name, P, M, costs)
            idle = formulas.dualpipe_idle(PP, I + W, W, costs.of_overlap(0, 1))
            assert max(t.idle) == pytest.approx(idle)
            if overlap == "sum":
                assert t.idle == pytest.approx((idle,) * P)
            assert t.peak_in_flight == (PP + 1,) * P


TWO = {("F", "B"): 6, ("F", "I"): 4, ("I", "W"): 4}  # in pairs, of a layer whose eight pieces take a unit each
MIXTURE = pp.Costs(4, 4, 2, overlap=TWO)


def mixed(name: str, M: int, c: float = 0, **options) -> float:
    s = pp.build(name, num_ranks=4, num_microbatches=M, **options)
    return pp.simulate(s, replace(MIXTURE.finer(s.num_stages // 4), latency=c)).makespan


def test_what_pairs_take_of_a_mixture_of_experts():
    """P=4, M=8 and 64, without latency, and M=64 with 1."""
    for name, V, split, makespans in (
        ("DualPipe", None, None, [74, 410, 461]),
        ("DualPipeV", None, None, [75, 411, 515]),
        ("paired-1F1B", 1, False, [82, 418, 486]),
        ("paired-1F1B", 2, False, [73, 409, 545]),
        ("paired-1F1B", 4, False, [68.5, 404.5, 676.5]),
        ("paired-1F1B", 1, True, [64, 400, 412]),
        ("paired-1F1B", 2, True, [62, 398, 416]),
        ("paired-1F1B", 4, True, [59, 395, 548]),
    ):
        options = {} if V is None else {"stages_per_rank": V, "split": split}
        assert [mixed(name, M, c, **options) for M, c in ((8, 0), (64, 0), (64, 1))] == makespans, (name, V, split)
    for V in (1, 2, 4):
        whole, halved = (
            pp.build("paired-1F1B", num_ranks=4, num_microbatches=64, stages_per_rank=V, split=each)
            for each in (False, True)
        )
        assert max(whole.peak_in_flight) == max(halved.peak_in_flight) == {1: 8, 2: 12, 4: 20}[V]
    joined = exercise.paired(pp.build("Interleaved1F1B", num_ranks=4, num_microbatches=64).rows)  # no forward more
    assert pp.simulate(pp.Schedule(joined), MIXTURE.finer(2)).makespan == 535


@pytest.mark.parametrize("times", [(1, 1, 1), (4, 4, 2), (3, 4, 2), (5, 1, 1), (1, 3, 2)])
def test_closed_forms_of_pairs(times):
    """P divides M; where there is one stage per rank, it needn't."""
    F, I, W = times  # noqa: E741
    B = I + W
    for P, M, V in product((1, 2, 3, 4), (1, 2, 3, 4, 6, 7, 8, 12), (1, 2, 3)):
        s = pp.build("paired-1F1B", num_ranks=P, num_microbatches=M, stages_per_rank=V)
        for overlapped in (max(F, B), max(F, B) + min(F, B) / 4, F + B):
            t = pp.simulate(s, pp.Costs(*times, overlap=overlapped))
            form = V * P * (F + B) + (V * M - (V - 1) * P - 1) * overlapped
            if V == 1 or M % P == 0:
                assert t.makespan == form, (P, M, V)
                assert s.peak_in_flight == formulas.paired_peak_in_flight(P, M, V)
            elif overlapped < F + B:
                assert t.makespan != form, (P, M, V)


def test_where_dualpipes_closed_form_is_off():
    t = run("DualPipe", 4, 8, pp.Costs(3, 4, 2))
    assert t.idle[0] != formulas.dualpipe_idle(4, 6, 2, 9)


# What the authors' scheduler takes, at F = I = W = 1 per stage: (P, M) -> V-Half, V-Min. The orders that
# `schedule_from_pattern` makes in megatron/core/pipeline_parallel/zerobubble/scheduler/zbv_greedy.py, at 39f2c18 of
# github.com/sail-sg/zero-bubble-pipeline-parallelism, were run by `simulate`.
AUTHORS = {
    **{(2, 1): (10, 9), (2, 2): (15, 15), (2, 3): (19, 21), (2, 4): (25, 27), (2, 8): (49, 51)},
    **{(3, 2): (19, 19), (3, 3): (23, 26), (3, 4): (29, 29), (3, 5): (35, 35), (3, 12): (77, 77)},
    **{(4, 2): (22, 23), (4, 3): (27, 29), (4, 4): (34, 35), (4, 5): (38, 41), (4, 7): (47, 53), (4, 8): (53, 59)},
    **{
        (4, 16): (101, 107),
        (5, 2): (26, 26),
        (5, 4): (38, 39),
        (5, 5): (44, 45),
        (5, 6): (47, 51),
        (5, 20): (131, 135),
    },
    **{(6, 5): (47, 49), (6, 6): (48, 53), (6, 7): (56, 59), (6, 11): (77, 83), (6, 12): (83, 89), (6, 24): (155, 161)},
    **{
        (7, 6): (55, 59),
        (7, 7): (66, 65),
        (7, 8): (65, 71),
        (7, 13): (95, 101),
        (7, 14): (101, 107),
        (7, 28): (185, 191),
    },
    **{
        (8, 7): (59, 69),
        (8, 8): (65, 75),
        (8, 9): (71, 81),
        (8, 15): (107, 117),
        (8, 16): (113, 123),
        (8, 32): (209, 219),
    },
    **{(10, 3): (51, 52), (10, 10): (83, 95), (10, 11): (89, 101), (10, 30): (203, 215)},
    **{(12, 3): (59, 58), (12, 12): (101, 113), (12, 13): (107, 119), (12, 24): (173, 185), (12, 36): (245, 257)},
}
# Those orders at other times: (P, M, F, I, W) -> V-Half, V-Min.
AUTHORS_UNEQUAL = {
    **{
        (2, 8, 3, 4, 2): (151, 177),
        (3, 4, 3, 4, 2): (96, 108),
        (4, 8, 3, 4, 2): (173, 226),
        (4, 9, 10, 12, 8): (618, 760),
    },
    **{
        (4, 7, 3, 2, 4): (146, 151),
        (5, 5, 10, 12, 8): (488, 510),
        (6, 7, 10, 11, 9): (597, 635),
        (7, 16, 10, 11, 9): (1155, 1293),
    },
    **{(8, 20, 5, 2, 4): (548, 661), (8, 20, 10, 12, 8): (1430, 1722), (9, 12, 3, 4, 2): (318, 384)},
    **{(10, 21, 3, 4, 2): (485, 622), (11, 26, 3, 4, 2): (596, 753), (12, 25, 10, 11, 9): (1838, 2075)},
}
# What they hold at most, here in stages: twice the (p+2)//2 and (p+4)//3 of the authors' scheduler playground
# (huggingface.co/spaces/sail/pipeline-parallelism-with-controllable-memory).
V_HELD = {"V-Half": lambda P: 2 * ((P + 2) // 2), "V-Min": lambda P: 2 * ((P + 4) // 3)}


@pytest.mark.parametrize(("P", "M"), AUTHORS)
def test_v_half_and_v_min_take_no_longer_than_their_authors_orders(P, M):
    for name, theirs in zip(V_HELD, AUTHORS[P, M], strict=True):
        t = run(name, P, M)
        assert t.makespan == theirs if M >= 2 * P - 1 else t.makespan <= theirs, name
        lab.check_memory(t.schedule, V_HELD[name](P))


@pytest.mark.parametrize(("P", "M", "F", "I", "W"), AUTHORS_UNEQUAL)
def test_v_half_and_v_min_at_unequal_times(P, M, F, I, W):  # noqa: E741
    costs = pp.Costs(F, I, W)
    for name, theirs in zip(V_HELD, AUTHORS_UNEQUAL[P, M, F, I, W], strict=True):
        assert run(name, P, M, costs, costs=costs).makespan <= theirs, name


@pytest.mark.parametrize("P", range(2, 17))
def test_what_v_half_and_v_min_hold_and_take(P):
    for M in (P + 1, P + 2, 2 * P) if P < 10 else (P + 1,):
        small, half = run("V-Min", P, M), run("V-Half", P, M)
        assert small.makespan == 6 * M + 4 * P - (7 if P % 3 == 0 else 5)
        if P > 2:
            assert half.makespan == 6 * M + 6 * ((P - 1) // 2) - 1
        assert max(small.peak_in_flight) == V_HELD["V-Min"](P) and max(half.peak_in_flight) == V_HELD["V-Half"](P)


def repeated(name: str, P: int, M: int) -> pp.Schedule:
    """The paper's building block repeated and no more, written a second time: what squeezing has to improve on.

    A microbatch goes down the V, a stage every second unit for V-Half and every unit for V-Min, and up a stage a unit.
    """
    step, gap = (2, 3 * (P % 2 == 0)) if name == "V-Half" else (1, 2 * (P % 3 == 0))
    down, up = range(P), range(P, 2 * P)
    first_back = step * (P - 1) + 1 + P + gap
    starts = {("F", s): step * s for s in down} | {("F", s): step * (P - 1) + 1 + s - P for s in up}
    for hop, s in enumerate(reversed(up)):
        starts["I", s] = first_back + step * hop
        starts["I", P - 1 - hop] = first_back + step * P + hop
    rows = []
    for r in down:
        at = {t + 6 * m: f"{s}{k}{m}" for (k, s), t in starts.items() if s in (r, 2 * P - 1 - r) for m in range(M)}
        row, due = [], []
        for t in range(max(at) + 1):
            if t in at:
                row.append(at[t])
                due += [at[t].replace("I", "W")] * ("I" in at[t])
            elif due:
                row.append(due.pop(0))
        rows.append(row + due)
    return pp.Schedule(rows)


def test_v_half_and_v_min_are_never_slower_than_their_blocks_repeated_and_hold_no_more():
    rng, faster = random.Random(0), 0
    for _ in range(80):
        P, M = rng.randint(1, 12), rng.randint(1, 24)
        name = rng.choice(list(V_HELD))
        costs = rng.choice([pp.Costs(), pp.Costs(3, 4, 2), pp.Costs(*[rng.randint(1, 6) for _ in range(3)])])
        plain = pp.simulate(repeated(name, P, M), costs)
        t = run(name, P, M, costs, costs=costs)
        assert t.makespan <= plain.makespan, (name, P, M, costs)
        lab.check_memory(t.schedule, max(plain.peak_in_flight))
        faster += t.makespan < plain.makespan
    assert faster > 40


@pytest.mark.parametrize(
    ("name", "P", "M", "makespan"),
    [("V-Half", 2, 6, 37), ("V-Half", 3, 4, 29), ("V-Half", 3, 9, 59), ("V-Half", 4, 6, 41), ("V-Half", 4, 8, 53)]
    + [("V-Min", 3, 6, 41), ("V-Min", 4, 5, 41)],
)
def test_no_order_in_as_little_memory_is_faster(name, P, M, makespan):
    t = run(name, P, M)
    assert t.makespan == makespan
    assert not is_possible(P, M, max(t.peak_in_flight), makespan - 1)


def test_the_exhaustive_search_finds_what_there_is():
    assert is_possible(3, 4, 4, 29) and not is_possible(3, 4, 3, 29) and is_possible(2, 2, 4, 13)


@pytest.mark.parametrize("P", [2, 3, 4, 5])
def test_v_half_has_no_gap_in_a_period_unless_a_pass_is_far_longer_than_the_other(P):
    """The paper's condition: W + 2I >= 2F and W + 2F >= 2I. V-Min is made for equal times."""
    rng = random.Random(P)
    drawn = [rng.choices(range(1, 7), k=3) for _ in range(4)]
    for F, I, W in [(1, 1, 1), (3, 4, 2), (2, 3, 2), (1, 2, 1), (5, 3, 3), *drawn]:  # noqa: E741
        costs = pp.Costs(F, I, W)
        less, more = (min(run("V-Half", P, M, costs, costs=costs).idle) for M in (6 * P, 8 * P))
        assert (more <= less) == (W + 2 * I >= 2 * F and W + 2 * F >= 2 * I), (F, I, W)


def test_v_min_pays_for_unequal_times_in_every_period():
    """Its blocks fit at F = I = W only; then the idle time doesn't grow with M."""
    equal = [run("V-Min", 4, M).idle[0] for M in (16, 32)]
    for options in ({}, {"costs": pp.Costs(10, 12, 8)}):
        unequal = [run("V-Min", 4, M, pp.Costs(10, 12, 8), **options).idle[0] for M in (16, 32)]
        assert equal[0] == equal[1] and unequal[1] > 1.5 * unequal[0]


def test_v_half_with_three_activations_beats_zb_h1_with_four():
    """In units of the whole model, two stages per rank: 26.5 against 27, and at F, I, W = 3, 4, 2 86.5 against 87."""
    for times, half, h1 in (((1, 1, 1), 26.5, 27), ((3, 4, 2), 86.5, 87)):
        costs = pp.Costs(*times)
        t = run("V-Half", 4, 8, costs.finer(2), costs=costs.finer(2))
        assert (t.makespan, t.peak_in_flight) == (half, (6,) * 4)
        assert (run("ZB-H1", 4, 8, costs).makespan, run("ZB-H1", 4, 8).peak_in_flight) == (h1, (4,) * 4)


@pytest.mark.parametrize(("P", "M"), GRID)
def test_peaks(P, M):
    assert run("naive", P, M).peak_in_flight == (1,) * P
    assert run("GPipe", P, M).peak_in_flight == (M,) * P
    assert run("1F1B", P, M).peak_in_flight == formulas.one_f_one_b_peak_in_flight(P, M)
    assert run("eager-1F1B", P, M).peak_in_flight == formulas.eager_one_f_one_b_peak_in_flight(P, M)


@pytest.mark.parametrize(
    ("form", "arguments"),
    [(formulas.one_f_one_b_makespan, (4, 6, 1, 2, 1)), (formulas.eager_one_f_one_b_makespan, (4, 8, 1, 2, 2))],
)
def test_a_closed_form_refuses_what_it_does_not_hold_for(form, arguments):
    with pytest.raises(ValueError, match="closed form"):
        form(*arguments)


@pytest.mark.parametrize(("P", "M"), [(2, 4), (3, 2), (4, 8)])
def test_no_order_of_full_backwards_beats_the_floor(P, M, rng):
    """Random legal orders of one stage per rank never end before (M + P - 1)(F + B)."""
    from pplab.simulator import stuck_at

    for _ in range(30):
        rows = []
        for r in range(P):
            row, ready = [], []
            for a in rng.sample(range(M), M):
                row.append(f"{r}F{a}")
                ready.append(a)
                while ready and rng.random() < 0.5:
                    row.append(f"{r}B{ready.pop(rng.randrange(len(ready)))}")
            rows.append(row + [f"{r}B{a}" for a in ready])
        s = pp.Schedule(rows)
        if not stuck_at(s):
            assert pp.simulate(s, pp.Costs(3, 4, 2)).makespan >= formulas.floor_makespan(P, M, 3, 6)


@pytest.mark.parametrize("kind", ["fused and split", "overlapped", "bidirectional"])
def test_a_second_simulator_agrees(rng, kind):
    for _ in range(25):
        s = random_schedule(rng, overlap_share=0.6 * (kind != "fused and split"), bidirectional=kind == "bidirectional")
        costs = random_costs(rng, s.num_stages, s.num_ranks, num_microbatches=rng.choice([None, s.num_microbatches]))
        t = pp.simulate(s, costs)
        assert {span.action: (span.start, span.end) for span in t.spans} == slow_simulate(s, costs)


@pytest.mark.parametrize("builder", pp.builders.known(), ids=lambda builder: builder.name)
def test_a_second_simulator_agrees_on_every_schedule(builder):
    rng = random.Random(builder.name)
    for P, M in ((2, 4), (4, 8)):
        s = builder(P, M)
        for _ in range(5):
            costs = random_costs(rng, s.num_stages, P, num_microbatches=rng.choice([None, M]))
            t = pp.simulate(s, costs)
            assert {span.action: (span.start, span.end) for span in t.spans} == slow_simulate(s, costs)


def test_an_overlap_runs_both_halves_at_once():
    s = pp.Schedule([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    t = pp.simulate(s)
    assert [(str(x.action), x.start, x.end) for x in t.spans[:3]] == [
        ("0F0", 0, 1),
        ("(0F1;0B0)OVERLAP_F_B", 4, 7),
        ("0B1", 10, 12),
    ]
    assert t.busy == (6, 6)
    assert lab.timeline_from_dict(lab.timeline_to_dict(t)) == t
    assert [str(x.action) for x in pp.critical_path(t)][:4] == ["0F0", "1F0", "1B0", "(0F1;0B0)OVERLAP_F_B"]


def test_an_overlap_by_its_stages():
    s = pp.build("DualPipeV", num_ranks=2, num_microbatches=4)
    pairs = {(f, b) for f in range(4) for b in range(4)}
    same = pp.simulate(s, pp.Costs(overlap=dict.fromkeys(pairs, 2.5)))
    assert same.makespan == pp.simulate(s, pp.Costs(overlap=2.5)).makespan
    assert pp.simulate(s, pp.Costs(overlap={})).makespan == pp.simulate(s).makespan  # the sum
    assert pp.Costs(overlap={(0, 1): 3}).finer(2).overlap == {(0, 1): 1.5}


def test_each_kind_of_pair_has_its_time():
    """By hand, rank 0 of a schedule: pairs by their kinds, by their stages, and those that nothing is said of."""
    costs = pp.Costs(4, 4, 2, overlap={("F", "B"): 6, (pp.Kind.I, pp.Kind.F): 5, ("1F", "0I"): 4.5, (1, 1): 7})
    pairs = ("(0F9;0B0)OVERLAP_F_B 6", "(0B9;0F0)OVERLAP_B_F 6", "(1F9;1B0)OVERLAP_F_B 7", "(0F9;0I0)OVERLAP_F_I 5")
    pairs += (
        "(1F9;0I0)OVERLAP_F_I 4.5",
        "(0I9;1F0)OVERLAP_I_F 4.5",
        "(0W9;0I0)OVERLAP_W_I 6",
        "(0F9;0F0)OVERLAP_F_F 8",
    )
    for text, lasts in map(str.split, pairs):
        assert costs.of_item(pp.parse(text)) == float(lasts), text
    assert pp.Costs(4, 4, 2, overlap=6).of_item(pp.parse("(0W9;0I0)OVERLAP_W_I")) == 6 == 2 + 4
    assert pp.Costs(4, 4, 2, overlap=5).of_item(pp.parse("(0W9;0I0)OVERLAP_W_I")) == 6  # the 5 is of F and B
    s = pp.Schedule([["0F0", "(0F1;0I0)OVERLAP_F_I", "(0W0;0I1)OVERLAP_W_I", "0W1"]])
    assert pp.simulate(s, costs).makespan == 4 + 5 + 6 + 2


@pytest.mark.parametrize("pair", [("F", "X"), (0, "B"), ("F",), "FB", ("F", 3), (0.5, 1), None])
def test_a_pair_has_two_names(pair):
    with pytest.raises(ValueError, match="overlap must name pairs by two kinds, .* got "):
        pp.Costs(overlap={pair: 1})


def test_an_overlap_holds_what_both_halves_need():
    """A weight gradient frees what it holds when it ends, not when the forward beside it starts."""
    s = pp.Schedule([["0F0", "0I0", "(0W0;0F1)OVERLAP_W_F", "(0I1;0F2)OVERLAP_I_F", "0W1", "0B2"]])
    memory = pp.Memory(activation=10, weight_input=4)
    assert list(memory.levels(s.rows[0])) == [(10, 10), (10, 4), (14, 10), (20, 14), (14, 10), (10, 0)]
    with pytest.raises(pp.ScheduleError, match=r"holds 4 when it reaches \(0W0;0F1\)OVERLAP_W_F, which needs 10 more"):
        lab.check_memory(s, 13, memory)
    assert lab.held_over_time(pp.simulate(s), memory)[0] == ([0, 2, 4, 6, 7, 9], [10, 14, 20, 14, 10, 0])


def test_two_ranks_may_wait_for_one_overlap():
    s = pp.Schedule(
        [["0F0", "0F1", "0B0", "0B1"], ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"], ["2F0", "2B0", "2F1", "2B1"]]
    )
    pp.validate(s)
    assert pp.simulate(s).makespan == 15


def test_costs_per_stage_and_finer_stages():
    t = run("1F1B", 2, 1, pp.Costs(forward=[1, 2], backward_input=[3, 4], backward_weight=[5, 6]))
    assert t.makespan == 1 + 2 + 4 + 6 + 3 + 5
    assert pp.Costs(forward=[2, 4]).finer(2) == pp.Costs([1.0, 2.0], 0.5, 0.5)
    assert run("1F1B", 4, 8, pp.Costs().finer(2)).makespan == 33 / 2


FINER = {  # every field of Costs, and what it is in stages half as deep: links, messages, overhead stay the same
    "forward": ([2, [4, 6]], (1.0, (2.0, 3.0))),
    "backward_input": (3, 1.5),
    "backward_weight": ([5, 7], (2.5, 3.5)),
    "latency": (0.5, 0.5),
    "backward": (9, 4.5),
    "recompute": ([1, 6], (0.5, 3.0)),
    "overhead": ([0.5, 1], (0.5, 1)),
    "overlap": ({("F", "I"): 4, (0, 1): 6}, {("F", "I"): 2.0, (0, 1): 3.0}),
    "bandwidth": (8, 8),
    "message": ([2, 3], (2, 3)),
    "links": ({(0, 1): pp.Link(0.25, 4)}, {(0, 1): pp.Link(0.25, 4)}),
    "unit": ("ms", "ms"),
}


def is_finer_in_all(costs: pp.Costs) -> bool:
    finer = costs.finer(2)
    return {field.name: getattr(finer, field.name) for field in fields(pp.Costs)} == {
        name: after for name, (_, after) in FINER.items()
    }


def test_every_field_of_costs_is_divided_or_carried_by_finer(monkeypatch):
    """A new field has to be added above; a field that finer forgets, or shouldn't divide, is seen."""
    costs = pp.Costs(**{name: before for name, (before, _) in FINER.items()})
    assert is_finer_in_all(costs), "FINER has a field of Costs too few, or another value than finer"
    durations = costs_module.DURATIONS
    for name in durations:  # as if finer forgot it
        monkeypatch.setattr(costs_module, "DURATIONS", tuple(each for each in durations if each != name))
        assert not is_finer_in_all(costs), name


@pytest.mark.parametrize("name", costs_module.DURATIONS)
def test_every_duration_makes_a_step_longer(name):
    """`pplab.costs._WORK` says which kinds of actions it is a part of."""
    costs = pp.Costs(backward=3) if name == "recompute" else pp.Costs()
    longer, schedule = replace(costs, **{name: 5}), pp.build("GPipe", num_ranks=2, num_microbatches=3)
    assert pp.simulate(schedule, longer).makespan > pp.simulate(schedule, costs).makespan, (
        f"{name} has no effect: name it in pplab.costs._WORK"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": -1}, r"forward must be a number from 0 to 1e\+100, got -1"),
        ({"forward": "1"}, "forward must be a number from 0"),
        ({"backward_input": [1, None]}, r"backward_input must be a number from 0 to 1e\+100, got None"),
        ({"latency": float("nan")}, "latency must be a number from 0"),
        ({"latency": True}, "latency must be"),
        ({"bandwidth": 0}, "bandwidth must be a number above 0, of at least 1e-100, got 0"),
        ({"overlap": "half"}, 'overlap must be "sum", "max" or a duration, got \'half\''),
        ({"overlap": -1}, r"overlap must be a number from 0 to 1e\+100, got -1"),
        ({"overlap": {(0, 1): "2"}}, r"overlap must be a number from 0 to 1e\+100, got '2'"),
        ({"recompute": [-1]}, "recompute must be"),
        ({"forward": 1e308}, "forward must be a number from 0 to"),
        ({"forward": b"12"}, "forward must be a number"),
        ({"message": None}, "message must be a number"),
        ({"unit": ["ms"]}, "unit must be a str, got"),
        ({"links": None}, "links must be a Mapping, got None"),
        ({"links": {(0, "1"): pp.Link()}}, "links must map"),
        ({"links": {(0, 1): 3}}, "links must map"),
        ({"links": {0: pp.Link()}}, "links must map"),
        ({"forward": 0, "backward_input": [0, 0], "backward_weight": 0}, "give one of them a duration above 0"),
    ],
)
def test_bad_costs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        pp.Costs(**options)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda s, path: pp.compare(pp.simulate(s)), "timelines must be a Collection, got .*: give a list or a tuple"),
        (lambda s, path: pp.simulate(s.rows), r"got .*pplab.build\(.*makes one, or pplab.Schedule\(rows\)"),
        (lambda s, path: lab.where(s), r"pplab.simulate\(schedule\) makes one"),
        (lambda s, path: lab.table([s]), r"pplab.simulate\(schedule\) makes one"),
        (lambda s, path: lab.held_over_time(s), r"pplab.simulate\(schedule\) makes one"),
        (lambda s, path: lab.to_perfetto(s, path / "trace.json"), r"pplab.simulate\(schedule\) makes one"),
        (lambda s, path: lab.simulate_lowered([["0F0"]]), "got '0F0': lab.parse_lowered reads text"),
        (lambda s, path: run("1F1B", 2, 2, in_flight=4), "in_flight has 1 values for 2 ranks: give one per rank"),
    ],
)
def test_what_is_of_another_kind_is_told_what_makes_the_right_one(call, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        call(pp.build("1F1B", num_ranks=2, num_microbatches=2), tmp_path)


@pytest.mark.slow
def test_numbers_of_numpy_and_torch_become_pythons():
    """An int8 of 100 would wrap around at 128, and a float32 can't be written as JSON."""
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    for hundred in (np.int8(100), np.float32(100), np.array(100), torch.tensor(100), [np.int8(100)] * 4):
        t = run("1F1B", 4, 8, pp.Costs(forward=hundred, overlap=np.int8(3), bandwidth=np.float32(8)))
        assert t.makespan == run("1F1B", 4, 8, pp.Costs(forward=100, bandwidth=8)).makespan > 1_000
        assert type(t.makespan) in (int, float) and json.dumps(lab.timeline_to_dict(t))
    assert pp.Costs(forward=np.array([1, 2])).forward == (1, 2)
    s = pp.build("1F1B", num_ranks=np.int64(4), num_microbatches=torch.tensor(8))
    assert type(s.num_ranks) is int and s == pp.build("1F1B", num_ranks=4, num_microbatches=8)


def test_a_timeline_reads_only_what_it_wrote():
    whole = lab.timeline_to_dict(run("1F1B", 2, 2))
    assert lab.timeline_from_dict(whole).makespan == 9
    spans = whole["spans"]
    for damage in (
        *({name: None} for name in whole if name != "placement"),
        *(
            {"spans": wrong}
            for wrong in (spans[1:], [[*spans[0][:3], "1"], *spans[1:]], [[9, *spans[0][1:]], *spans[1:]])
        ),
        {"others": [[2, "step", 0, 1]]},
        {"rows": [["0F0"], ["1F0"]]},
    ):
        with pytest.raises(
            ValueError, match="this timeline is damaged.* expected what lab.timeline_to_dict has written"
        ):
            lab.timeline_from_dict({**whole, **damage})


def test_costs_must_fit_the_stages():
    with pytest.raises(ValueError, match="forward has 3 values for 4 stages"):
        run("1F1B", 4, 8, pp.Costs(forward=[1, 2, 3]))


def test_links_must_join_ranks_of_the_schedule():
    for pair in ((0, 4), (1, 1), (-1, 0)):
        with pytest.raises(ValueError, match="and the schedule has ranks 0 to 3"):
            run("1F1B", 4, 8, pp.Costs(links={pair: pp.Link(1)}))


def test_one_slow_link_is_paid_on_every_round_trip():
    """A latency of 1 between ranks 1 and 2, both ways: 1F1B waits at each of the two rounds, GPipe once each way."""
    slow = pp.Costs(links={(1, 2): pp.Link(latency=1), (2, 1): pp.Link(latency=1)})
    assert run("GPipe", 4, 8, slow).makespan == 33 + 2
    assert run("1F1B", 4, 8, slow).makespan > 33 + 2
    assert run("GPipe", 4, 8, pp.Costs(links={(1, 2): pp.Link(latency=1)})).makespan == 33 + 1


def test_messages_queue_on_a_link():
    """Two ranks, forwards of 1 whose messages pass in 3: the last of four arrives at 1 + 4*3."""
    t = run("GPipe", 2, 4, pp.Costs(1, 1, 1, message=3, links={(0, 1): pp.Link(bandwidth=1)}))
    assert [span.start for span in t.spans if span.rank == 1][:4] == [4, 7, 10, 13]
    assert str(pp.idle_intervals(t)[-1]).endswith("it has nothing left to do")
    waits = [str(idle) for idle in pp.idle_intervals(t) if idle.rank == 1]
    assert waits[0] == "rank 1 is idle from 0 to 4: it waits for what 0F0 on rank 0 has made by 1"
    fast = run("GPipe", 2, 4, pp.Costs(1, 1, 1, message=1, bandwidth=1))
    assert fast.makespan == 5 * 3 + 2  # a message passes while the next is made: one each way is seen


def test_recomputation_is_added_to_what_needs_it():
    costs = pp.Costs(1, 2, 4, recompute=[8, 0])
    assert [costs.of(kind, 0) for kind in "FBIW"] == [1, 14, 10, 4]
    assert [costs.of(kind, 1) for kind in "FBIW"] == [1, 6, 2, 4]
    assert pp.Costs(1, 2, 4, backward=5).of(pp.Kind.B, 0) == 5
    assert run("1F1B", 4, 8, pp.Costs(recompute=1)).makespan == 44


def test_an_overlap_lasts_as_told():
    s = pp.Schedule([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]])
    for overlap, lasts in (("sum", 6), ("max", 5), (5.5, 5.5)):
        assert pp.simulate(s, pp.Costs(1, 2, 3, overlap=overlap)).makespan == 1 + lasts + 5
    assert pp.Costs(overlap=5).finer(2).overlap == 2.5


def test_what_is_held():
    memory = pp.Memory(activation=[10, 20], weight_input=[4, 5], recomputed=3, parameters=[100, 200], unit="MB")
    s = pp.Schedule([["0F0", "1F0", "1I0", "0F1", "1F1", "1I1", "1W0", "0B0", "1W1", "0B1"]])
    held = [during for during, _ in memory.levels(s.rows[0])]
    assert held == [310, 330, 333, 325, 345, 348, 330, 328, 315, 313]
    assert s.peak_held(memory) == (348,)
    t = pp.simulate(s)
    times, amounts = lab.held_over_time(t, memory)[0]
    assert max(amounts) == 348 and amounts[-1] == 300 and times[0] == 0
    assert s.peak_held([1, 1]) == s.peak_in_flight
    with pytest.raises(ValueError, match="activation has 3 values for 2 stages"):
        s.peak_held([1, 2, 3])
    with pytest.raises(ValueError, match="parameters must be a number from 0"):
        pp.Memory(parameters=-1)


@pytest.mark.parametrize("builder", pp.builders.known(), ids=lambda builder: builder.name)
def test_every_schedule_is_drawn_compared_and_written(builder, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot as plt

    s = builder(2, 4)
    t = pp.simulate(s, pp.Costs(latency=0.5, unit="ms"))
    assert f"{t.bubble_fraction:.1%}" in figures.figure_html(pp.gantt(t, path=True).figure)
    lab.memory_chart(t)
    lab.memory_chart(t, of=pp.Memory(3, unit="GB"))
    plt.close("all")
    assert len(lab.table([t])) == 1
    assert lab.timeline_from_dict(json.loads(json.dumps(lab.timeline_to_dict(t)))).spans == t.spans
    lab.to_perfetto(t, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len([e for e in events if e["ph"] == "X"]) == sum(map(len, s.rows))
    arrows = {e["id"]: [e] for e in events if e["ph"] == "s"}
    for end in (e for e in events if e["ph"] == "f"):
        arrows[end["id"]].append(end)
    assert len(arrows) == lab.num_messages(s)
    assert all(start["ts"] < end["ts"] and start["tid"] != end["tid"] for start, end in arrows.values())
    assert lab.read_csv(lab.to_csv(s)) == s


def test_metrics_hang_together(rng):
    for _ in range(30):
        s = random_schedule(rng)
        t = pp.simulate(s, pp.Costs(2, 3, 1, latency=rng.choice([0, 1, 2.5])))
        idle = pp.idle_intervals(t)
        for rank in range(s.num_ranks):
            assert sum(i.end - i.start for i in idle if i.rank == rank) == pytest.approx(t.idle[rank])
        assert t.bubble_fraction == pytest.approx(sum(t.idle) / (s.num_ranks * t.makespan))
        assert t.bubble_ratio == pytest.approx(sum(t.idle) / sum(t.busy))
        assert tuple(max(counts) for _, counts in lab.held_over_time(t)) == t.peak_in_flight
        assert all(counts[-1] == 0 for _, counts in lab.held_over_time(t))
        assert tuple(max(amounts) for _, amounts in lab.held_over_time(t, pp.Memory(2))) == tuple(
            2 * p for p in t.peak_in_flight
        )
        path = pp.critical_path(t)
        assert path[0].start == 0 and path[-1].end == t.makespan
        for before, after in zip(path, path[1:], strict=False):
            assert before.end <= after.start


def test_without_latency_the_critical_path_is_as_long_as_the_step(rng):
    for _ in range(30):
        t = pp.simulate(random_schedule(rng), pp.Costs(2, 3, 1))
        assert sum(span.end - span.start for span in pp.critical_path(t)) == t.makespan


def test_an_idle_interval_says_what_it_waits_for():
    said = [str(i) for i in pp.idle_intervals(run("1F1B", 2, 2))]
    assert said == [
        "rank 0 is idle from 2 to 4: it waits for 1B0 on rank 1",
        "rank 0 is idle from 6 to 7: it waits for 1B1 on rank 1",
        "rank 1 is idle from 0 to 1: it waits for 0F0 on rank 0",
        "rank 1 is idle from 7 to 9: it has nothing left to do",
    ]


def test_the_balance_sheet():
    table = lab.table(run(name, 4, 8) for name in TABLE)
    assert str(table).splitlines()[2].split("  ")[0] == "GPipe"
    assert table[2] == ("1F1B", "33", "0.2727", "0.3750", "0.2727", "4, 3, 2, 1", "48", "1")
    assert "<td>1F1B</td><td>33</td>" in table._repr_html_()


def test_json_is_complete_enough_to_redraw(rng):
    t = pp.simulate(random_schedule(rng), pp.Costs(1, 2, 3, latency=0.5, unit="ms"))
    again = lab.timeline_from_dict(json.loads(json.dumps(lab.timeline_to_dict(t))))
    assert again.spans == t.spans and again.unit == "ms" and again.schedule == t.schedule
    json.dumps(summary(t))


def test_perfetto_has_every_action_and_an_arrow_for_every_message(tmp_path):
    t = run("1F1B", 3, 4, pp.Costs(unit="ms", latency=1))
    lab.to_perfetto(t, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = {e["name"]: e for e in events if e["ph"] == "X"}
    assert len(slices) == 24
    assert slices["0B0"]["dur"] == 2000 and slices["2F0"]["ts"] == 4000
    starts, ends = ([e for e in events if e["ph"] == ph] for ph in "sf")
    assert len(starts) == len(ends) == lab.num_messages(t.schedule) == 16
    for start, end in zip(starts, ends, strict=True):
        assert start["id"] == end["id"] and start["ts"] < end["ts"] and start["tid"] != end["tid"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"rank 0", "rank 1", "rank 2"}


def test_a_long_schedule_does_not_recurse():
    t = run("1F1B", 2, 20_000)
    assert t.makespan == 3 * 20_001
    assert run("naive", 64, 50).makespan == 64 * 50 * 3


def test_the_bubble_of_an_uncapped_depth_first_order():
    """Backward first, but no cap on forwards: at P=8, M=64 the first rank holds 22."""
    assert max(depth_first(8, 64).peak_in_flight) == 22


def depth_first(P: int, M: int) -> pp.Schedule:
    """Every rank runs a backward when one is ready, else a forward when one is ready; B takes two units, F one."""
    rows = [[] for _ in range(P)]
    f_end, b_end, free, time = {}, {}, [0] * P, 0
    while any(len(row) < 2 * M for row in rows):
        for r in range(P):
            if free[r] > time:
                continue
            m_b, m_f = sum(a[1] == "B" for a in rows[r]), sum(a[1] == "F" for a in rows[r])
            above = f_end.get((r, m_b), 1e9) if r == P - 1 else b_end.get((r + 1, m_b), 1e9)
            if m_b < M and above <= time:
                rows[r].append((r, "B", m_b))
                free[r] = b_end[r, m_b] = time + 2
            elif m_f < M and (r == 0 or f_end.get((r - 1, m_f), 1e9) <= time):
                rows[r].append((r, "F", m_f))
                free[r] = f_end[r, m_f] = time + 1
        time += 1
    return pp.Schedule([[f"{s}{k}{m}" for s, k, m in row] for row in rows])


def from_perfetto(path) -> tuple[list[list[str]], list[float], list[float]]:
    """Rows and times of a trace, in milliseconds: what a viewer shows on each track from left to right."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X" and e["cat"] == "schedule"]
    ranks = 1 + max(e["tid"] for e in events)
    rows = [sorted((e for e in events if e["tid"] == rank), key=lambda e: e["ts"]) for rank in range(ranks)]
    begins = [e["ts"] / 1e3 for row in rows for e in row]
    return [[e["name"] for e in row] for row in rows], begins, [(e["ts"] + e["dur"]) / 1e3 for row in rows for e in row]


def test_a_perfetto_trace_has_slices_overlaps_and_found_orders_whole(rng, tmp_path):
    even = lab.Slices.even(4, attention=0.5)
    made = [pp.simulate(random_schedule(rng, overlap_share=0.6), pp.Costs(2, 3, 1, latency=0.5)) for _ in range(20)]
    made += [
        even.simulate(pp.build("Seq1F1B", num_ranks=3, num_microbatches=8, slices=4), pp.Costs(8, 8, 8)),
        run("paired-1F1B", 3, 6),
        lab.search(3, 4, placement="V", limit=5, tries=50).timeline,
    ]
    for t in made:
        lab.to_perfetto(t, tmp_path / "trace.json")
        rows, begins, ends = from_perfetto(tmp_path / "trace.json")
        assert pp.Schedule(rows) == t.schedule
        assert begins == pytest.approx([s.start for s in t.spans]) and ends == pytest.approx([s.end for s in t.spans])
        arrows = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "s"]
        assert len(arrows) == lab.num_messages(t.schedule)


def test_a_perfetto_trace_says_what_two_at_once_work_on(tmp_path):
    lab.to_perfetto(pp.simulate(pp.Schedule([["0F0", "(0B0;0F1)OVERLAP_B_F", "0B1"]])), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"] for e in events if e["ph"] == "X"][1] == {
        "0B0": "stage 0, microbatch 0",
        "0F1": "stage 0, microbatch 1",
    }
