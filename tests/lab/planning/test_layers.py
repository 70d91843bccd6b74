"""Models whose layers aren't alike: what stages take and hold, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pplab as pp
from pplab import lab
from pplab.actions import B
from pplab.lab import Kind, Model, kinds
from pplab.lab.planning.formulas import ring_all_reduce_time
from pplab.lab.planning.kinds import Part, Routed
from pplab.lab.planning.ways import Task

NODE = lab.Machine(8, pp.Link(5e-6, 400e9), pp.Link(10e-6, 50e9), flops=1e14, memory=80e9)
WIDTH, TOKENS, WORDS = 1024, 2048, 32_000
ATTENTION = kinds.attention(WIDTH, heads=8, kv_heads=2, head_width=128, whole=WIDTH, looked_up=WIDTH, window=512)
DENSE = Kind("dense", (ATTENTION, kinds.mlp(WIDTH, 4096, gated=True)))
SPREAD = Part("experts", divided=100, whole=64 * WIDTH, kept=6000, sums=0, routed=Routed(64, 8, 3 * WIDTH * 256))
ROUTED = Kind("routed", (ATTENTION, SPREAD))
MODEL = Model((DENSE,) * 2 + (ROUTED,) * 6, WIDTH, TOKENS, WORDS, predictors=(ROUTED,), beside=5000)
TP, EP = 2, 4
FOUND = lab.plan(
    MODEL, NODE, lab.Layout(tp=TP, pp=2, dp=4), 32, cut=[3, 5], recompute=[3, 0],
    experts=lab.ExpertLayers(64, 8, EP, whole=True), state=lab.State(2, 2, 12),
)  # fmt: skip
OWN = 2 * WIDTH * (1024 + 256)  # attention's matrices
TABLE, EXPERT = WORDS * WIDTH, 3 * WIDTH * 256


def test_what_a_layer_computes_keeps_and_has():
    assert ATTENTION.used == OWN and ATTENTION.parameters == OWN + WIDTH
    pairs = sum(min(token + 1, 512) for token in range(TOKENS))
    assert ATTENTION.flops(TOKENS) == pytest.approx(2 * OWN * TOKENS + 4 * 1024 * pairs, rel=2e-4)
    assert ROUTED.routed == (64, 8, EXPERT) and DENSE.routed is None
    assert MODEL.parameters == 2 * DENSE.total("parameters") + 7 * ROUTED.total("parameters") + 2 * TABLE + 5000
    assert MODEL.used == 9 * OWN + 2 * 3 * WIDTH * 4096 + 7 * (100 + 64 * WIDTH + 8 * EXPERT) + 2 * TABLE
    assert MODEL.pattern == "dense*2 routed*7" and MODEL.num_layers == 8 and MODEL.heads == 8


def test_stages_are_sums_of_their_layers():
    """Two dense layers and one with experts; five with experts, a predictor and its pass through the head, the head."""
    boundary = WIDTH * TOKENS * 2
    dense, routed = (
        kind.flops(TOKENS) / TP / 1e14 + sums * ring_all_reduce_time(TP, boundary, 5e-6, 400e9)
        for kind, sums in ((DENSE, 2), (ROUTED, 1))  # whole experts share nothing
    )
    routed += 2 * (5e-6 + boundary / TP * 8 * 3 / 4 / 400e9)
    head = 2 * TABLE * TOKENS / TP / 1e14
    assert FOUND.costs.forward == pytest.approx([2 * dense + routed, 6 * routed + 2 * head])
    assert FOUND.costs.of(B, 0) - FOUND.costs.backward_input[0] - FOUND.costs.backward_weight[0] == pytest.approx(
        FOUND.costs.forward[0]
    )
    layer = [TOKENS * 2 * kind.total("kept") / TP for kind in (DENSE, ROUTED)]
    given = boundary / TP
    assert FOUND.memory.activation == pytest.approx([3 * given, 6 * layer[1]])
    assert FOUND.memory.recomputed == pytest.approx([max(layer) - given, 0])
    shared = [OWN / TP + WIDTH + each / TP for each in (3 * WIDTH * 4096, 100)]
    shared[1] += 64 * WIDTH
    first = 2 * shared[0] + shared[1] + (TABLE + 5000) / TP
    last = 6 * shared[1] + 2 * TABLE / TP  # predictors embed, too
    own = 64 * EXPERT / EP
    assert FOUND.memory.parameters == pytest.approx([16 * (first + own), 16 * (last + 6 * own)])
    passes = 8 * (2 * 6)
    assert FOUND.sent_bytes["ep"] == pytest.approx(passes * 2 * boundary / TP * 8 * 3 / 4)
    assert FOUND.ep_s == pytest.approx(passes * 2 * (5e-6 + boundary / TP * 8 * 3 / 4 / 400e9))


def test_in_fp8_pairs_scans_and_the_head_stay_at_their_own_rate():
    """Transformer Engine's linear layers alone are faster; estimates and cuts know it."""
    machine = replace(NODE, flops=2e14, flops_bf16=1e14)
    found = lab.plan(MODEL, machine, lab.Layout(), 4)
    layers = [(DENSE, 2), (ROUTED, 7)]
    plain = sum(n * kind.pair_flops(TOKENS) for kind, n in layers) + 2 * 2 * TABLE * TOKENS
    matrices = sum(n * 2 * kind.total("used") * TOKENS for kind, n in layers)
    assert found.costs.forward == pytest.approx([matrices / 2e14 + plain / 1e14])
    slow, scan = lab.Model((Kind("scan", (Part("delta", scan=500),)),), WIDTH, TOKENS), 500 * TOKENS / 1e14
    assert lab.plan(slow, machine, lab.Layout(), 4).costs.forward == pytest.approx([scan])
    deep = lab.Transformer(80, 8192, 8192, heads=64, kv_heads=8, mlp_width=28672, gated=True, vocabulary=128256)
    for model in (deep, deep.long()):
        task = Task(model, replace(machine, memory=1e12, flops_bf16=4e13), 64, 128, lab.State())
        ((estimate, way),) = task.ways(([4], [1], [1], [2], [1]), ["1F1B"], None)
        assert estimate == pytest.approx((found := way(True)).step_s, rel=0.05)
        assert max(found.timeline.busy) < 1.05 * sum(found.timeline.busy) / 8


def test_pairs_are_estimated_without_the_copies_that_they_hide():
    task = Task(lab.Transformer(8, 1024, 2048, heads=16), NODE, 16, 64, lab.State())
    for estimate, way in task.ways(([1], [1], [8], [8], [1]), ["DualPipeV", "1F1B"], lab.ExpertLayers(8, 2)):
        assert 0.95 < estimate / way(True).step_s < 1


def test_a_state_is_handed_from_one_context_rank_to_the_next():
    scanning = Kind(
        "scanning", (Part("delta", divided=10**6, scan=500, handed=8192), kinds.mlp(WIDTH, 4096, gated=True))
    )
    model = Model((scanning,) * 4, WIDTH, TOKENS)
    one, four = (lab.plan(model, NODE, lab.Layout(cp=cp), 4).costs.forward[0] for cp in (1, 4))
    assert one == pytest.approx(4 * TOKENS * (2e6 + 500 + 2 * 3 * WIDTH * 4096) / 1e14)
    assert four - one / 4 == pytest.approx(4 * 3 * (5e-6 + 4 * 8192 / 400e9))


def test_everything_follows():
    """A cut by work, choose, FSDP, and no pairs."""
    heavy = replace(MODEL, layers=(DENSE,) * 12 + (ROUTED,) * 4, vocabulary=0, predictors=())
    assert heavy.cut(2) == lab.partition(heavy.work(1), 2) == lab.plan(heavy, NODE, lab.Layout(pp=2), 8).layers
    for ep in (1, 4):
        chosen = lab.choose(heavy, replace(NODE, memory=2.5e9), 8, 16, ep=ep, tp=(1, 2))
        assert chosen.best.plan.fits and {row.plan.experts.gpus for row in chosen.rows} == {ep}
    sharded = lab.fsdp_plan(heavy, NODE, lab.Layout(dp=8), 16, 1, zero=3)
    whole = lab.fsdp_plan(heavy, NODE, lab.Layout(dp=8), 16, 1, zero=0)
    gathered = 2 * 2 * max(kind.total("parameters") for kind in (DENSE, ROUTED))
    assert sharded.memory.parameters[0] == pytest.approx(whole.memory.parameters[0] / 8 + gathered)
    machine, _ = lab.profiled(MODEL, NODE, pp.Costs([2.0, 3.0], [2.0, 3.0], [2.0, 3.0], unit="s"), 1, cut=[3, 5])
    assert machine.flops == pytest.approx((sum(MODEL.work(1)) + MODEL.ends_work(1)) / 5)
    case = lab.Case(model=heavy)
    assert case.row("1F1B", 8, cut=[4] * 4).step_s > 0 and case.layer_ms == pytest.approx(
        sum(case.stage_ms([4] * 4)) / 16
    )
    with pytest.raises(ValueError, match="model must be a Transformer, got Model"):
        lab.sliced_row(case, 2, 8)
    with pytest.raises(ValueError, match=r"layers of one kind, got dense\*2 routed\*7: take a schedule without pairs"):
        lab.plan(MODEL, NODE, lab.Layout(pp=2, dp=4), 32, schedule="DualPipeV", cut=[2, 2, 2, 2])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "a model has layers, and each is a Kind, got ()"),
        ((DENSE, "dense"), "each is a Kind"),
        ((DENSE, Kind("dense", (ATTENTION,))), r"kinds that differ need names that differ, got dense\*2"),
    ],
)
def test_models_that_cannot_be_are_refused(layers, message):
    with pytest.raises(ValueError, match=message if "\\" in message else message.replace("()", r"\(\)")):
        Model(layers, WIDTH, TOKENS)
    with pytest.raises(ValueError, match="a token uses 8 of 64, got ExpertLayers"):
        lab.plan(MODEL, NODE, lab.Layout(), 8, experts=lab.ExpertLayers(8, 2))
    fewer = Kind("fewer", (ATTENTION, replace(SPREAD, routed=Routed(32, 8, EXPERT))))
    with pytest.raises(ValueError, match="kinds that route to experts must have as many, .* got"):
        lab.plan(Model((ROUTED, fewer), WIDTH, TOKENS), NODE, lab.Layout(), 8)


def test_layers_that_one_flag_cannot_say_are_refused_and_so_is_what_nobody_has():
    attention = kinds.attention(256, heads=4, kv_heads=4, head_width=64)
    narrow, wide = (Kind(str(n), (attention, kinds.mlp(256, n, gated=True))) for n in (512, 1024))
    machine = lab.Machine(8, pp.Link(), pp.Link(), flops=1e12, memory=80e9)
    unlike = lab.plan(Model((narrow, wide), 256, 128, 1000), machine, lab.Layout(pp=2), batch=2)
    with pytest.raises(ValueError, match="one size of mlp, and this model's layers have several: torchtitan"):
        lab.flags(unlike, "Megatron-LM")
    assert "pipeline_parallel_degree" in lab.flags(unlike, "torchtitan")
    with pytest.raises(ValueError, match="unknown schedule of torch 'interleaved1f1b': did you mean Interleaved1F1B"):
        lab.torch_refuses("interleaved1f1b", 4, 5)
    depth = "--pipeline_parallel_degree 4 --pipeline_parallel_layers_per_stage 2"
    assert "num_layers" in str(lab.check(depth, num_layers=-2, gpus=4))
    for wrong in ({"experts": 3}, {"state": "x"}):
        with pytest.raises(ValueError, match=f"{[*wrong][0]} must be"):
            lab.choose(lab.Transformer(4, 64, 64), machine, 2, 8, **wrong)
    with pytest.raises(ValueError, match="give them to fsdp_plan"):
        lab.fsdp_row(lab.Case(experts=lab.ExpertLayers(8, 2, 8, 512)), 8)
