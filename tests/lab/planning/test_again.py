"""What modules keep, and what they compute again: against modules of torch, NVIDIA's formula, and sums by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import pplab as pp
from pplab import lab
from pplab.lab import Kind, Layout, kinds

torch = pytest.importorskip("torch")
functional, checkpoint = torch.nn.functional, pytest.importorskip("torch.utils.checkpoint").checkpoint
FlopCounterMode = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode
TOKENS, WIDTH, HEADS = 16, 64, 4
NODE = lab.Machine(8, pp.Link(5e-6, 400e9), pp.Link(10e-6, 50e9), flops=1e14, memory=80e9)
GPT = lab.Transformer(8, 1024, 2048, heads=16, vocabulary=32_000)


class SwiGLU(torch.autograd.Function):
    """As fused kernels have it: what it read is kept, and nothing between."""

    @staticmethod
    def forward(ctx, both):
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx, given):
        (both,) = ctx.saved_tensors
        with torch.enable_grad():
            again = both.detach().requires_grad_()
            gate, up = again.chunk(2, -1)
            (functional.silu(gate) * up).backward(given)
        return again.grad


@cache
def linear(name, rows, columns):
    return torch.nn.Linear(rows, columns, bias=False)


def matrices(x, **columns):
    return tuple(linear(name, x.shape[-1], size)(x) for name, size in columns.items())


def normed(x):
    return functional.layer_norm(x, (WIDTH,))


def attend(q, k, v):
    heads = (each.view(1, TOKENS, HEADS, -1).transpose(1, 2) for each in (q, k, v))
    return functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(TOKENS, -1)


def attention(x, run):
    return linear("out", 64, 64)(attend(*matrices(normed(x), q=64, k=64, v=64)))


def latent(x, run):
    def up(q, kv, rope):
        (q,), (k, v) = matrices(q, up_q=64), matrices(kv, up_k=32, up_v=64)
        shared = rope[:, None].expand(-1, HEADS, -1)
        return attend(q, torch.cat([k.view(TOKENS, HEADS, -1), shared], -1).flatten(1), v)

    sizes = {"down_q": 48, "kv": 40, "rope": 8}
    down = run("layernorm", lambda x: matrices(normed(x), **sizes), x)
    return linear("out", 64, 64)(run("mla_up_proj", up, *down))


def mlp(x, run):
    return run("mlp", lambda x: linear("down", 96, 64)(SwiGLU.apply(linear("up", 64, 192)(x))), normed(x))


def experts(x, run):
    """Two copies of each token, in tensors of their own."""

    def whole(x):
        both = linear("up", 64, 192)(x.repeat_interleave(2, 0))
        routed = run("moe_act", lambda both: linear("down", 96, 64)(SwiGLU.apply(both)), both)
        return routed.view(TOKENS, 2, -1).sum(1) + run("shared_experts", shared, x)

    def shared(x):
        return linear("shared down", 160, 64)(SwiGLU.apply(linear("shared up", 64, 320)(x)))

    return run("moe", whole, normed(x))


def kept(net, again=""):
    """The numbers of each token that autograd keeps, every storage once, and the FLOPs of both directions. Weights
    and a few numbers for each head, such as a norm's mean, aren't counted. Where Megatron-LM drops what a module gives,
    its reader is computed again here, too, so that as much is kept."""
    found = {}

    def run(name, function, *given):
        return checkpoint(function, *given, use_reentrant=True) if name == again else function(*given)

    def pack(tensor):
        store = tensor.untyped_storage()
        if tensor.is_floating_point() and store.nbytes() // 4 > HEADS * TOKENS:
            found[store.data_ptr()] = store.nbytes() // 4 // TOKENS, tensor
        return tensor

    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = net(x, run)
        size = sum(size for size, tensor in found.values() if tensor.shape[0] in (1, TOKENS, 2 * TOKENS))
        out.sum().backward()
    return size, counter.get_total_flops()


ATTENTION = kinds.attention(WIDTH, HEADS, HEADS, 16)
LATENT = kinds.latent(WIDTH, HEADS, 48, 40, 8, 8, 16)
MLP = kinds.mlp(WIDTH, 96, gated=True)
MOE = kinds.experts(WIDTH, 96, 8, 2, 160, gated=True)
NETS = {"attention": ATTENTION, "latent": LATENT, "mlp": MLP, "experts": MOE}


@pytest.mark.parametrize(("name", "module"), [
    ("attention", ""), ("latent", "layernorm"), ("latent", "mla_up_proj"), ("mlp", "mlp"),
    ("experts", "moe_act"), ("experts", "moe"), ("experts", "shared_experts"),
])  # fmt: skip
def test_torch_keeps_as_much(name, module):
    part, net = NETS[name], globals()[name]
    runs, plain, again = Kind(name, (part,)).again((module,)), kept(net), kept(net, module)
    rope = 8 * (name == "latent")  # is counted always, and kept where it is read again
    assert again[0] == part.kept - runs.total("kept") - rope * (module == "layernorm") and plain[0] == part.kept - rope
    if module in ("mlp", "moe", "shared_experts"):
        router = 2 * WIDTH * 8 * TOKENS * (module == "moe")
        assert again[1] - plain[1] == runs.flops(TOKENS) - router > 0


@pytest.mark.parametrize("wide", [None, 2048, 5000])
def test_without_scores_a_layer_keeps_what_megatron_reports(wide):
    """theoretical_memory_usage.py with selective recomputation and sequence parallelism: s b h (18 + 4 ffn / h)."""
    model = replace(GPT, keeps_scores=True, mlp_width=wide, vocabulary=0)
    whole, found, flash = (
        lab.plan(each, NODE, Layout(tp=2), 4, 2, recompute=how)
        for each, how in ((model, False), (model, ["core_attn"]), (replace(model, keeps_scores=False), ["core_attn"]))
    )
    layer = 2048 * 2 * 1024 * (18 + 4 * (wide or 4096) / 1024) / 2
    scores = 5 * 16 * 2048**2 * 2 / 2  # 5 a s^2 b / t (Korthikanti et al. 2022, table 2)
    assert found.memory.activation == (8 * layer,) == flash.memory.activation
    assert whole.memory.activation == (8 * (layer + scores),) and found.memory.recomputed == (scores,)
    pairs = 4 * 1024 * 2048**2 / 2 * 2 / 2 / 1e14
    assert found.costs.recompute == flash.costs.recompute == pytest.approx([8 * pairs])
    assert found.modules == ("core_attn",) and found.recomputed == (0,)


def test_modules_of_stages_by_hand():
    """The MLP of each layer again, with its sum; the norm before experts again takes only what its bytes take."""
    tight = replace(NODE, hbm=1e12)
    plain, found = (
        lab.plan(GPT, tight, Layout(tp=2, pp=2), 8, schedule="1F1B", recompute=how) for how in (False, ["mlp"])
    )
    share = 2048 * 1024 * 2 / 2  # bytes of a boundary, on one of two ranks
    flops, freed = 2 * 8 * 1024**2 * 2048 / 2 / 1e14, 8 * share
    summed = lab.formulas.ring_all_reduce_time(2, 2 * share, 5e-6, 400e9)
    again = 4 * (flops + summed + 2 * freed / 1e12)
    assert found.costs.recompute == pytest.approx([again, again])
    assert found.memory.activation == pytest.approx([kept - 4 * freed for kept in plain.memory.activation])
    assert found.memory.recomputed == pytest.approx([freed, freed])
    assert found.tp_s - plain.tp_s == pytest.approx(8 * 4 * summed) and found.step_s > plain.step_s
    known = {"experts": lab.ExpertLayers(gpus=1)}
    some, norms = (lab.plan(GPT, NODE, Layout(tp=2), 8, recompute=how, **known) for how in (False, ["layernorm"]))
    assert norms.step_s == some.step_s and norms.memory.activation == (some.memory.activation[0] - 8 * share,)


def test_what_nvidia_measured_of_modules():
    """Llama 3 70B, FP8, 32 H100: 704 TFLOP/s with core_attn, 593.6 with mlp, 586.8 with both (Megatron Bridge's
    skills/nemo-mbridge-perf-activation-recompute). With one rate for all work mlp costs 3 % more."""
    model = lab.Transformer(80, 8192, 4096, heads=64, kv_heads=8, mlp_width=28672, gated=True, vocabulary=128256)
    flops = 3 * (80 * model.layer_flops(1) + 2 * 128256 * 8192 * 4096)
    how = {"schedule": "Interleaved1F1B", "stages_per_rank": 5, "shard_optimizer": True, "state": lab.State(2, 2, 12)}
    eight = lab.machine_of("h100", 8, 50e9, precision="fp8")
    one = replace(eight, flops=933.5e12, flops_bf16=None)  # 704, too
    attention, mlps, both, alike = (
        flops / lab.plan(model, machine, Layout(4, 4, 2), 32, recompute=modules, **how).step_s
        for machine, modules in (
            (eight, ["core_attn"]),
            (eight, ["mlp"]),
            (eight, ["mlp", "core_attn"]),
            (one, ["mlp"]),
        )
    )
    assert [attention, mlps, both] == pytest.approx([704e12, 593.6e12, 586.8e12], rel=0.015)
    assert attention == pytest.approx(704e12, rel=1e-3) and alike < 0.97 * mlps


def test_modules_count_once_where_layers_have_them():
    """Experts have their function and shared experts in them; what a name has no layer for, Megatron-LM ignores."""
    how = {"experts": lab.ExpertLayers(gpus=1, shared=1)}
    for given, left in ((["shared_experts", "moe", "moe", "moe_act", "mlp"], ("moe",)), (["mlp", "mla_up_proj"], ())):
        found, same = (lab.plan(GPT, NODE, Layout(), 8, recompute=names, **how) for names in (given, left or False))
        assert found.modules == left and found.memory == same.memory and found.step_s == same.step_s
        mlps = 2 * 8 * 1024**2 * 2048 / 1e14 * (3 * (4096 // 3) / 4096)  # no router
        assert found.costs.recompute == pytest.approx([8 * mlps * ("moe" in left)])
    tight = replace(NODE, memory=found.memory_bytes - 8 * 7 * 2048 * 2 * 1024)
    assert lab.fsdp_plan(GPT, tight, Layout(), 8, 1, zero=1, modules=True, **how).modules == ("layernorm", "moe")
    assert 0 < lab.Case(GPT, **how).row("1F1B", 16, recompute=["moe_act"]).busy < 1
    with pytest.raises(ValueError, match="an expert's width"):
        lab.plan(replace(GPT, mlp_width=2), NODE, Layout(), 8, **how)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["layer_norm"], "unknown module to recompute 'layer_norm': did you mean layernorm"),
        (["mlp", 1], "unknown module .* 1"),
    ],
)
def test_what_is_no_module_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        lab.plan(GPT, NODE, Layout(), 8, recompute=wrong)


def test_pairs_and_torchs_program_have_whole_layers_again():
    mixture = lab.ExpertLayers(8, 2, 2)
    with pytest.raises(ValueError, match="whole layers that run again, got moe_act: say how many"):
        lab.plan(GPT, NODE, Layout(pp=2, dp=2), 16, schedule="DualPipeV", experts=mixture, recompute=["moe_act"])
    tight = replace(NODE, memory=3e9)
    chosen = lab.choose(GPT, tight, 4, 16, ep=2, tp=1, dp=2, experts=mixture, schedules=["DualPipeV"]).best.plan
    assert any(chosen.recomputed) and not chosen.modules
    found = lab.plan(GPT, NODE, Layout(pp=2), 8, recompute=["mlp"])
    with pytest.raises(ValueError, match="runs whole layers again: take torchtitan"):
        lab.flags(found, "torch")
    told = lab.flags(found, "torchtitan")
    assert "activation_checkpoint = SelectiveAC.Config()" in told
    assert "# planned with recompute=('mlp',); here it is every second matrix and what lies between" in told


@pytest.mark.parametrize("zero", [3, 1])
def test_the_cheap_modules_come_before_whole_layers(zero):
    """With a little less memory than a plan takes, norms run again, then experts' functions, then whole layers."""
    how = {"zero": zero, "experts": lab.ExpertLayers(gpus=1)}
    roomy = lab.fsdp_plan(GPT, NODE, Layout(dp=8), 64, 8, **how)
    assert not roomy.modules and not any(roomy.recomputed)
    one = 8 * 2048 * 2 * 1024  # bytes of a microbatch and layer, of which one layer's come back
    little, more, much = (
        lab.fsdp_plan(GPT, replace(NODE, memory=roomy.memory_bytes - less), Layout(dp=8), 64, 8, modules=True, **how)
        for less in (0.99 * 7 * one, 1.01 * 7 * one, 13 * 7 * one)
    )
    assert little.modules == ("layernorm",) and little.fits and little.step_s == roomy.step_s
    assert more.modules == ("layernorm", "moe_act") and more.fits and more.step_s == roomy.step_s
    assert much.fits and much.step_s > roomy.step_s and any(much.recomputed) and not much.modules
