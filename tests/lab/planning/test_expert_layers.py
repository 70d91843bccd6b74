"""The running case with experts: its figures worked out by hand, its pairs by two streams that know no schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

import pplab as pp
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
    assert wide.all_to_all_bytes(LLAMA_3_8B, 3) == 3 * 8192 * 2 * 3 / 4 * 4096 * 2
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


# Qwen3-30B-A3B: 128 experts of width 768, of which a token uses 8; of a layer, attention and one expert
QWEN = lab.Transformer(48, 2048, 4096, 2, 32, 4, 6144, True, 151936, head_width=128)
HEADS, ONE, WORDS = 2048 * (4096 + 512 + 512 + 4096), 3 * 2048 * 768, 151936 * 2048
H100 = lab.Machine(8, pp.Link(5e-6, 450e9), pp.Link(10e-6, 50e9), flops=300e12, memory=80e9)


def test_experts_on_nodes_of_eight_by_hand():
    """32 GPUs: tp 2, cp 2, dp 4, pp 2. Ranks 0, 2, 4, 6, 8, ... share or repeat experts: four of them in a node."""
    layout = lab.Layout(tp=2, pp=2, dp=4, cp=2)
    tokens = 4096 / 2 / 2  # that a rank has between tensor sums
    copies = tokens * 8 * 2048 * 2  # bytes of them
    for gpus, wait in ((4, 5e-6 + 3 / 4 * copies / 450e9), (8, 10e-6 + 4 / 8 * copies / 50e9)):
        experts = lab.ExpertLayers(128, used=8, gpus=gpus)
        found = lab.plan(QWEN, H100, layout, 64, experts=experts)
        dense = lab.plan(QWEN, H100, layout, 64)
        sums = 7 * 2 * (4096 / 2 * 2048 * 2) / 2 / 450e9  # over two tensor ranks, of 8 outputs and not one
        more = found.costs.forward[0] - dense.costs.forward[0]
        assert more == pytest.approx(24 * (2 * wait + sums))
        assert found.ep_s == pytest.approx(16 * 24 * 4 * wait) and found.compute_s == pytest.approx(dense.compute_s)
        assert found.sent_bytes["ep"] == 16 * 24 * 4 * copies * (gpus - 1) / gpus

        own, shared = 24 * 128 / gpus * ONE / 2, (24 * HEADS + WORDS) / 2  # halves of tensor ranks
        activations = found.memory.activation[0]
        assert activations == pytest.approx(24 * (QWEN.layer_bytes(1) / 4 + copies))
        assert found.held_bytes[0] == pytest.approx(18 * (own + shared) + 2 * activations)
        zero = lab.plan(QWEN, H100, layout, 64, experts=experts, shard_optimizer=True)
        assert zero.held_bytes[0] == pytest.approx(
            (6 + 12 / 8) * shared + (6 + 12 / (8 / gpus)) * own + 2 * activations
        )
        repeated = 8 // gpus  # ranks that have the same experts: one in each node, or none
        assert found.dp_s == pytest.approx(
            ring_all_reduce_time(8, 4 * shared, 10e-6, 50e9) + ring_all_reduce_time(repeated, 4 * own, 10e-6, 50e9)
        )
        again = lab.plan(QWEN, H100, layout, 64, experts=experts, recompute=[3, 0])
        once_more = again.costs.of(B, 0) - found.costs.of(B, 0)
        assert once_more == pytest.approx(found.costs.forward[0] * 3 / 24)
    with pytest.raises(ValueError, match="3 GPUs .* ranks of cp x dp, and don't divide these 8: change"):
        lab.plan(QWEN, H100, layout, 64, experts=lab.ExpertLayers(126, used=6, gpus=3))
    with pytest.raises(ValueError, match="experts must be an ExpertLayers, got 8"):
        lab.plan(QWEN, H100, layout, 64, experts=8)


def test_some_experts_may_be_shared():
    """Of nine experts that a token uses, one is everybody's: as in DeepSeek-V3, nine times 2,048 wide."""
    model = lab.Transformer(1, 7168, 4096, mlp_width=9 * 2048, gated=True)
    one = 3 * 7168 * 2048
    experts = lab.ExpertLayers(256, used=8, gpus=64, shared=1)
    assert experts.parameters(model) == 4 * 7168**2 + 257 * one
    found = lab.plan(model, H100, lab.Layout(dp=64), 64, experts=experts, state=lab.State(2, 2, 12))
    assert found.memory.parameters == pytest.approx([16 * (4 * 7168**2 + (1 + 4) * one)])
    pieces = experts.pieces(model, H100)
    assert pieces.experts == pytest.approx(2e3 * 8 * one * 4096 / 300e12)
    assert pieces.attention + pieces.experts == pytest.approx(1e3 * model.layer_flops(1) / 300e12)


def test_a_node_gets_a_token_once():
    """Eight copies to two of 128 experts' nodes: some of them are in the other one, but for one token in 323."""
    experts = lab.ExpertLayers(128, used=8, gpus=16, once_per_node=True)
    none = 1.0
    for chosen in range(8):
        none *= (64 - chosen) / (128 - chosen)
    token = 4096 * 2048 * 2
    assert 1 / none == pytest.approx(323, abs=0.5)
    far, near = token * (1 - none) / 50e9, 8 * token * 7 / 8 / 450e9
    assert experts.all_to_all_time(QWEN, H100) == pytest.approx(10e-6 + max(far, near))
    assert replace(experts, gpus=8).all_to_all_time(QWEN, H100) == pytest.approx(5e-6 + near)


def test_published_steps_of_a_mixture():
    """Qwen3-30B-A3B on 16 H100: NVIDIA's Megatron-Bridge, with experts in a node and two stages, and over both nodes.
    FLOP/s are fitted to the first, whose precision isn't stated; the second is without overlap, in bfloat16."""
    first = lab.plan(
        QWEN, H100, lab.Layout(pp=2, dp=8), 512, 2, schedule="Interleaved1F1B", stages_per_rank=24,
        experts=lab.ExpertLayers(128, used=8, gpus=8, once_per_node=True), shard_optimizer=True,
    )  # fmt: skip
    assert first.step_s == pytest.approx(12.4902, rel=0.02)
    second = lab.ExpertLayers(128, used=8, gpus=16, once_per_node=True)
    found = lab.plan(QWEN, H100, lab.Layout(dp=16), 1024, experts=second, shard_optimizer=True)
    assert found.step_s == pytest.approx(24.7138, rel=0.03)
    assert found.step_s - found.ep_s < 21.0725  # measured with overlap
    one_by_one = lab.plan(
        QWEN, H100, lab.Layout(dp=16), 1024, experts=replace(second, once_per_node=False), shard_optimizer=True
    )
    assert one_by_one.step_s > 1.4 * 24.7138  # what copies one by one would take


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
