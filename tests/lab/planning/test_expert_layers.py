"""The running case with experts: its figures worked out by hand, its pairs by two streams that know no schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from pplab import lab
from pplab.actions import B, F, I, W
from pplab.lab.planning.case import LLAMA_3_8B
from pplab.lab.planning.formulas import ring_all_reduce_time
from pplab_course.pictures import streams

CASE = lab.Case(gigabits=100, experts=lab.ExpertLayers(), state=lab.State(2, 2, 12))
DENSE = replace(CASE, experts=None)
ATTENTION, MLP, TABLE = 4096 * (4096 + 1024 + 1024 + 4096), 3 * 4096 * 14336, 128256 * 4096


def test_the_case_by_hand():
    """Four experts of half an MLP, two on each of two GPUs; a token's two copies, of which one leaves."""
    assert CASE.experts.parameters(LLAMA_3_8B) == 32 * (ATTENTION + 2 * MLP) + 2 * TABLE
    sent = 8192 * 2 / 2 * 4096 * 2
    assert CASE.experts.all_to_all_bytes(LLAMA_3_8B) == sent == CASE.message_mb * 1e6
    assert CASE.all_to_all_ms == pytest.approx(sent / 12.5e9 * 1e3) and DENSE.all_to_all_ms == 0
    assert CASE.state_gb() == pytest.approx(DENSE.state_gb())
    assert CASE.sequence_gb() == pytest.approx([8 * 38 * 8192 * 4096 / 1e9] * 4)

    row, dense = (case.row("naive", 1) for case in (CASE, DENSE))
    waits = 4 * 32 * CASE.all_to_all_ms / 1e3
    both_have = 2 * (8 * ATTENTION + TABLE)  # bytes of rank 0's gradients, which come last; its experts are there alone
    assert row.timeline.makespan == pytest.approx(dense.timeline.makespan + waits)
    assert row.step_s - row.timeline.makespan == pytest.approx(ring_all_reduce_time(2, both_have, 0, 12.5e9))
    assert row.busy * row.step_s == pytest.approx(dense.busy * dense.step_s)
    assert row.dollars / dense.dollars == pytest.approx(row.step_s / dense.step_s)
    assert row.hours / dense.hours == pytest.approx(row.step_s / dense.step_s / 2) and CASE.num_gpus == 8

    wide = lab.ExpertLayers(8, used=2, gpus=4)
    assert wide.all_to_all_bytes(LLAMA_3_8B, 3) == 3 * 8192 * 2 * 3 / 4 * 4096 * 2 and wide.mlp_share() == 1
    alone = replace(CASE, experts=lab.ExpertLayers(gpus=1))
    assert alone.all_to_all_ms == 0 and alone.row("1F1B", 8).step_s == pytest.approx(DENSE.row("1F1B", 8).step_s)
    assert max(alone.state_gb()) == pytest.approx(16e-9 * (8 * (ATTENTION + 2 * MLP) + TABLE))
    one, perfect = CASE.row("one GPU", 16), CASE.row("a perfect pipeline", 16)
    assert one.held_gb == pytest.approx([16e-9 * CASE.experts.parameters(LLAMA_3_8B)]) and not one.fits
    assert perfect.dollars == pytest.approx(DENSE.row("a perfect pipeline", 16).dollars)


@pytest.mark.parametrize("gigabits", [25, 50, 100, 200, 800])
def test_a_pair_takes_what_two_streams_take(gigabits):
    """Every piece runs when its stream is free and the piece before it is done, layer by layer."""
    case = replace(CASE, gigabits=gigabits)
    costs = case.plan("DualPipeV", 8).costs
    experts = 2 * MLP * 8192 / 400e9
    for stage in (0, 3):
        pieces = streams("a pair", case.layer_ms - experts, case.all_to_all_ms, experts, 4)
        assert costs.of_overlap(stage, stage) * 1e3 == pytest.approx(
            max(start + length for *_, start, length in pieces)
        )
        apart = 4 * (3 * case.layer_ms + 4 * case.all_to_all_ms)
        assert (costs.of(F, stage) + costs.of(B, stage)) * 1e3 == pytest.approx(apart)


def test_pairs_of_all_stages_are_made_of_their_own_pieces():
    """A head, layers that run again and numbers of layers that differ: pieces add up to what actions take, and a pair
    lies between its longer half and both together. Frozen weights have a backward without W."""
    cut, again = [3, 4, 4, 5, 3, 4, 5, 4], [2, 1, 0, 0, 3, 0, 0, 1]
    costs = CASE.plan("DualPipeV", 8, cut=cut, recompute=again).costs
    pieces, head = CASE.experts.pieces(CASE.model, CASE.machine), CASE.head_ms
    halves = {(s, kind): (kind, cut[s], again[s], head * (s == 7)) for s in range(8) for kind in (F, B, I, W)}
    for (s, kind), half in halves.items():
        assert costs.of(kind, s) * 1e3 == pytest.approx(sum(length for *_, length in pieces.of(*half)))
    for (a, one), (b, other) in combinations(halves, 2):
        pair, alone = costs.of_overlap(a, b, one, other), (costs.of(one, a), costs.of(other, b))
        assert pair * 1e3 == pytest.approx(pieces.at_best(halves[a, one], halves[b, other]))
        assert max(alone) - 1e-9 < pair < sum(alone) + 1e-9
    frozen = replace(CASE, state=lab.State(2, 0, 0)).plan("DualPipeV", 8).costs
    assert frozen.of_overlap(0, 7) == frozen.of_overlap(0, 7, F, I) < CASE.plan("DualPipeV", 8).costs.of_overlap(0, 7)


def test_memory_and_time_of_what_is_recomputed():
    """A layer run again has its all-to-alls again; what is kept of it is its input."""
    plain, again = CASE.row("1F1B", 16), CASE.row("1F1B", 16, recompute=[3, 0, 0, 0])
    layer, given = 38 * 8192 * 4096 / 1e9, 2 * 8192 * 4096 / 1e9
    assert plain.held_gb[0] == pytest.approx(CASE.state_gb()[0] + 4 * 8 * layer)
    assert again.held_gb[0] == pytest.approx(CASE.state_gb()[0] + 4 * (5 * layer + 3 * given) + layer - given)
    more = 16 * 3 * (CASE.layer_ms + 2 * CASE.all_to_all_ms) / 1e3
    assert again.timeline.busy[0] == pytest.approx(plain.timeline.busy[0] + more)
    split = CASE.row("ZB-H1", 16, recompute=True)
    assert split.held_gb[3] == pytest.approx(CASE.state_gb()[3] + 4 * 8 * layer)  # until W, whole


def test_two_copies_add_up_everything_and_four_what_all_have():
    row = CASE.row("DualPipe", 8)
    shared, own = 2 * (16 * ATTENTION + 2 * TABLE), 2 * 16 * MLP  # rank 0: the first and the last stage
    sums = ring_all_reduce_time(4, shared, 0, 12.5e9) + ring_all_reduce_time(2, own, 0, 12.5e9)
    assert row.step_s - row.timeline.makespan == pytest.approx(sums)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"used": 5}, "a token uses some of the experts, and each GPU has as many as the next, got 5 used of 4 on 2"),
        ({"gpus": 3}, "got 2 used of 4 on 3 GPUs"),
        ({"count": 0}, "count must be an integer of at least 1, got 0"),
    ],
)
def test_experts_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        lab.ExpertLayers(**given)
    with pytest.raises(ValueError, match="experts must be"):
        lab.Case(experts=4)
