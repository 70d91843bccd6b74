"""Shapes out of configs: parameters counted by transformers itself, without memory for them, and files as they are on
the hub."""

from __future__ import annotations

import json
import re
import sys
import warnings
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest

import pplab as pp
from pplab import lab
from pplab.lab import ExpertLayers, Model, Transformer, read_config
from pplab.lab.models import data
from pplab.lab.planning import configs
from pplab.lab.planning.config_fields import CHECKED, by_fields
from pplab.lab.shell import choice

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def fields(layers: int, width: int, heads: int, mlp: int, words: int, **more: object) -> dict[str, object]:
    """By the names that most configs have."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    return dict(zip(names, (layers, width, heads, mlp, words), strict=True)) | more


def mixture(count: int, used: int, width: int, **more: object) -> dict[str, object]:
    return {"num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": width} | more


LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
ROUTED = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1}
AIR = {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1}
FEW = {"num_local_experts": 32, "num_experts_per_tok": 4}
UNTIED = {"tie_word_embeddings": False}
# by their config.json on the hub, with the billions of parameters that their cards say
MODELS = {
    "llama 8.03": fields(32, 4096, 32, 14336, 128256, num_key_value_heads=8, **UNTIED),
    "mistral 7.24": fields(32, 4096, 32, 14336, 32000, num_key_value_heads=8, sliding_window=None, **UNTIED),
    "qwen2 0.49": fields(24, 896, 14, 4864, 151936, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3 8.19": fields(36, 4096, 32, 12288, 151936, num_key_value_heads=8, head_dim=128, **UNTIED),
    "qwen3 0.60": fields(28, 1024, 16, 3072, 151936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True),
    "gpt2 0.124": {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257},
    "gpt_neox 20.6": fields(44, 6144, 64, 24576, 50432, **UNTIED),
    "gemma 8.54": fields(28, 3072, 16, 24576, 256000, num_key_value_heads=16, head_dim=256),
    "gemma2 2.61": fields(26, 2304, 8, 9216, 256000, num_key_value_heads=4, head_dim=256),
    "gemma3_text 1.00": fields(26, 1152, 4, 6912, 262144, num_key_value_heads=1, head_dim=256, sliding_window=512),
    "phi 2.78": fields(32, 2560, 32, 10240, 51200, **UNTIED),
    "phi3 3.82": fields(32, 3072, 32, 8192, 32064, num_key_value_heads=32, pad_token_id=0, **UNTIED),
    "olmo2 7.30": fields(32, 4096, 32, 11008, 100352, num_key_value_heads=32, **UNTIED),
    "starcoder2 3.03": fields(30, 3072, 24, 12288, 49152, num_key_value_heads=2, tie_word_embeddings=True),
    "granite 8.17": fields(40, 4096, 32, 12800, 49155, num_key_value_heads=8, tie_word_embeddings=True),
    "cohere 35.0": fields(40, 8192, 64, 22528, 256000, num_key_value_heads=64, tie_word_embeddings=True),
    "mixtral 46.7": fields(
        32, 4096, 32, 14336, 32000, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2
    )
    | UNTIED,
    "qwen3_moe 30.5": fields(48, 2048, 32, 6144, 151936, num_key_value_heads=4, head_dim=128, **mixture(128, 8, 768))
    | UNTIED,
    "qwen2_moe 14.3": fields(24, 2048, 16, 5632, 151936, num_key_value_heads=16, **mixture(60, 4, 1408))
    | {"shared_expert_intermediate_size": 5632}
    | UNTIED,
    "olmoe 6.92": fields(16, 2048, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8, **UNTIED),
    "gpt_oss 20.9": fields(24, 2880, 64, 2880, 201088, num_key_value_heads=8, head_dim=64, sliding_window=128)
    | FEW
    | UNTIED,
    "glm4_moe 106": fields(46, 4096, 96, 10944, 151552, num_key_value_heads=8, head_dim=128, first_k_dense_replace=1)
    | AIR
    | UNTIED,
    "deepseek_v3 671": fields(61, 7168, 128, 18432, 129280, num_key_value_heads=128, first_k_dense_replace=3)
    | LATENT
    | ROUTED
    | UNTIED,
}


DEEPSEEK = MODELS["deepseek_v3 671"]
KIMI = {"num_attention_heads": 64, "n_routed_experts": 384, "vocab_size": 163840, "first_k_dense_replace": 1}
QWEN_235B = fields(94, 4096, 64, 12288, 151936, moe_intermediate_size=1536)
LLAMA_70B, LLAMA_405B = fields(80, 8192, 64, 28672, 128256), fields(126, 16384, 128, 53248, 128256)


def read(source: object, sequence: int = 4096) -> tuple[Model, ExpertLayers | None, list[str]]:
    """What is read, and what is said of it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, experts = read_config(source, sequence)
    return model, experts, [str(each.message) for each in said]


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_transformers_counts(name):
    kind, billions = name.split()
    config = transformers.AutoConfig.for_model(kind, **MODELS[name])
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(config)
    theirs = sum(p.numel() for p in whole.parameters())
    assert theirs == pytest.approx(float(billions) * 1e9, rel=0.02)  # the right model
    acts = {at: said for at, said in config.to_dict().items() if at in ("hidden_act", "hidden_activation")}
    for fields in (MODELS[name] | {"model_type": kind} | acts, config.to_dict()):  # as in the file, with all defaults
        model = replace(by_fields(fields, 4096), predictors=())  # which transformers leaves out
        assert model.parameters == pytest.approx(theirs, rel=0.01), fields
    assert model.long(model.experts) is model


FAMILIES = json.loads(Path(__file__).with_name("families.json").read_text())


def test_fields_say_what_a_forward_says():
    """Of 188 families with the configs that transformers gives them by default: record_families.py ran them."""
    checked = {each["kind"]: each for each in FAMILIES[1:] if "fields" in each}
    assert set(CHECKED) - {*checked} == {"kimi_k2", "nemotron"}  # unknown there, and without a config that it builds
    for kind, each in checked.items():
        model = replace(by_fields(each["fields"] | {"model_type": kind}, 2048), predictors=())
        assert model.parameters == pytest.approx(each["parameters"], rel=0.01), kind
        assert model.used == pytest.approx(each["used"], rel=0.02), kind
    assert sum("parameters" in each for each in FAMILIES[1:]) == 137


@pytest.mark.skipif(transformers.__version__ != FAMILIES[0]["transformers"], reason="its default configs may differ")
@pytest.mark.parametrize("kind", ["afmoe", "gemma3n_text", "blt", "trocr", "xlm"])
def test_a_forward_without_weights_counts_or_refuses(kind):
    recorded = next(each for each in FAMILIES[1:] if each["kind"] == kind)
    source = {"model_type": kind}
    if "refused" in recorded:
        with pytest.raises(ValueError, match=re.escape(recorded["refused"])):
            read_config(source, 2048)
    else:
        model, _, said = read(source, 2048)
        assert (int(model.parameters), int(model.used), said) == (recorded["parameters"], recorded["used"], [])


# The quotients of TFLOP/s and tokens/s in NVIDIA's tables (Megatron-Bridge's performance summaries), in GFLOP
PUBLISHED = {
    "deepseek-v3": (249.4, 4096, DEEPSEEK),
    "deepseek-v3 with a predictor": (260.2, 4096, DEEPSEEK | {"num_nextn_predict_layers": 1}),
    "kimi-k2": (204.4, 4096, DEEPSEEK | KIMI),
    "gpt-oss-120b": (32.6, 4096, MODELS["gpt_oss 20.9"] | {"num_hidden_layers": 36, "num_local_experts": 128}),
    "qwen3-235b": (148.0, 4096, MODELS["qwen3_moe 30.5"] | QWEN_235B),
    "qwen3-30b": (23.0, 4096, MODELS["qwen3_moe 30.5"]),
    "llama-3-8b": (51.5, 8192, MODELS["llama 8.03"]),
    "llama-3-70b": (449.0, 8192, MODELS["llama 8.03"] | LLAMA_70B),
    "llama-3.1-405b": (2524.0, 8192, MODELS["llama 8.03"] | LLAMA_405B),
}


SAYS = {  # what of a line for Megatron-LM says that layers aren't alike
    "deepseek_v3": "--multi-latent-attention --qk-layernorm --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    '--qk-pos-emb-head-dim 64 --v-head-dim 128 --moe-layer-freq "[0]*3+[1]*58" --ffn-hidden-size 18432 '
    "--moe-shared-expert-intermediate-size 2048 --moe-ffn-hidden-size 2048 --mtp-num-layers 1 t*29mL",
    "deepseek_v32": "--experimental-attention-variant dsa --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128",
    "glm_moe_dsa": '--moe-layer-freq "[0]*3+[1]*75"',
    "qwen3_next": '--experimental-attention-variant gdn --linear-attention-freq "([1]*3+[0]*1)*12"'
    " --attention-output-gate",
    "gpt_oss": '--window-size "(127,0)" --window-attn-skip-freq "([1]*1+[0]*1)*18" --num-query-groups 8',
    "llama4_text": "--num-experts 16 --moe-router-topk 1 --moe-router-pre-softmax",
    "minimax_m2": "--num-experts 256 --moe-ffn-hidden-size 1536",
    "hy_v3": '--moe-layer-freq "[0]*1+[1]*79"',
    "gemma3_text": "# MODEL: its MLP's function is gelu_pytorch_tanh",
    "jamba": "Megatron-LM's flags for mamba aren't known here: hybrids",
}


@pytest.mark.parametrize("kind", SAYS)
def test_flagships_are_planned_cut_and_written(kind):
    """All stages together take what the model computes, and hold what it has."""
    model = by_fields(
        next(each["fields"] for each in FAMILIES[1:] if each["kind"] == kind) | {"model_type": kind}, 4096
    )
    machine = lab.Machine(8, pp.Link(), pp.Link(), 400e12, 80e9)
    experts = model.experts and replace(model.experts, gpus=8, whole=True)
    found = lab.plan(model, machine, lab.Layout(tp=1, pp=2, dp=8), 64, experts=experts)
    assert sum(found.costs.forward) == pytest.approx((sum(model.work(1)) + model.ends_work(1)) / 400e12)
    routed = sum(each.routed.count * each.routed.each for each in model.every if each.routed)
    tables = (model.tied or len(model.predictors)) * model.table_parameters  # a copy
    assert sum(found.memory.parameters) == pytest.approx(18 * (model.parameters - routed * 7 / 8 + tables))
    assert max(found.costs.forward) / min(found.costs.forward) < 1.3 and sum(found.layers) == model.num_layers
    try:
        said = lab.flags(found, "Megatron-LM")
    except ValueError as error:
        said = str(error)
    assert all(part in said for part in SAYS[kind].split()), said


@pytest.mark.parametrize("name", PUBLISHED)
def test_flops_of_a_token_are_nvidias(name):
    gigaflops, sequence, fields = PUBLISHED[name]
    half = {"layer_types": ["sliding_attention", "full_attention"] * 18} if "oss" in name else {}
    model = by_fields(fields | {"hidden_act": "silu"} | half, sequence)
    assert 3 * (sum(model.work(1)) + model.ends_work(1)) / sequence / 1e9 == pytest.approx(gigaflops, rel=0.006)


LLAMA = MODELS["llama 8.03"] | {"hidden_act": "silu"}
AS_KIMI = {"model_type": "kimi_k2", "hidden_act": "silu", "num_nextn_predict_layers": 1}


def test_a_config_has_many_homes(tmp_path, monkeypatch):
    shape = lab.Case().model
    model, experts, said = read(LLAMA | {"model_type": "llama"}, 8192)
    assert (model.parameters, experts, said) == (shape.parameters, None, [])
    assert model.work(2) == [shape.layer_flops(2)] * 32 and model.kinds[0].kept_bytes(2) == shape.kind.kept_bytes(2)
    config = transformers.LlamaConfig(**LLAMA)
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    for source in (config, file, str(file), tmp_path, str(tmp_path)):
        assert read(source, 8192) == (model, None, [])

    def fetched(name: str, file: str, local_files_only: bool) -> str:
        assert file == "config.json"
        if name != "somebody/llama":
            raise OSError("Name or service not known")
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetched)
    assert read("somebody/llama", 8192) == read(tmp_path, 8192)
    for reachable, why in ((True, "OSError"), (False, "it can't be reached")):
        monkeypatch.setattr(data, "hub_is_reachable", lambda found=reachable: found)
        with pytest.raises(ValueError, match=rf"somebody/gpt isn't a folder .* \({why}\): check the name"):
            read_config("somebody/gpt", 8192)


def test_what_is_left_out_has_transformers_defaults(monkeypatch):
    """Gemma 3's configs on the hub say what differs, and that it sees."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    sees = {"model_type": "gemma3", "vision_config": {}, "text_config": text | {"sliding_window": 1024}}
    model, _, said = read(sees)
    assert model.kinds[0].parts[0].said == {"heads": 8, "kv_heads": 4, "head_width": 256} and model.tied
    assert model.pattern.startswith("sliding+mlp*5 full+mlp") and model.kinds[0].parts[0].window == 1024
    assert said == ["gemma3: only its language model is counted, nothing that sees or hears"]
    assert model.parameters == pytest.approx(3.88e9, rel=0.01)  # of 4.3 billion, 0.42 see
    configs._counted.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)  # as without it
    with pytest.raises(ValueError, match="gemma3_text: a config of a language model has vocab_size, and this has only"):
        read_config(text, 4096)
    model, _, _ = read(DEEPSEEK | {"model_type": "kimi_k2", "hidden_act": "silu"} | KIMI)
    assert model.parameters == pytest.approx(1.026e12, rel=0.001) and model.pattern == "full+mlp full+experts*60"
    with pytest.raises(ValueError, match="llama9: its fields were compared with no model of its kind; transformers is"):
        read_config(LLAMA | {"model_type": "llama9"}, 4096)


@pytest.mark.parametrize(
    ("source", "hidden", "counted"),
    [
        (LLAMA | {"model_type": "llama"}, "", "its fields and by a forward$"),
        (LLAMA | {"model_type": "llama"}, "torch", "its fields alone, since torch is missing: pip install"),
        (DEEPSEEK | AS_KIMI, "", "its fields alone, since .* identifier: kimi_k2.; predictors by fields alone$"),
        ({"model_type": "afmoe"}, "", "a forward alone, since its fields were compared with no model of its kind"),
    ],
)
def test_a_model_says_by_which_evidence_it_was_counted(source, hidden, counted, monkeypatch):
    configs._counted.cache_clear()
    if hidden:
        monkeypatch.setitem(sys.modules, hidden, None)  # as without it
    model, _, _ = read(source, 2048)
    configs._counted.cache_clear()
    assert re.match(f"counted by {counted}", model.counted) and replace(model, counted="") == model
    assumed = choice._assumed(model, lab.machine_of("h100", 8, 50e9))
    assert assumed.startswith(f"{model.parameters / 1e9:.4g} billion parameters, {model.counted}\na GPU reaches")


def test_unlike_layers_are_read_from_configs():
    """Three dense layers, a predictor; every fourth layer with attention; halves, and Mamba."""
    model = by_fields(
        DEEPSEEK | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1, "hidden_act": "silu"}, 4096
    )
    assert model.pattern == "full+mlp*3 full+experts*58 predictor" and model.experts == ExpertLayers(256, 8, 1)
    assert model.parameters == pytest.approx((671.03 + 11.6) * 1e9, rel=0.001)
    linear = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
    linear |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "full_attention_interval": 4}
    mixed = fields(48, 2048, 16, 5120, 151936, num_key_value_heads=2, head_dim=256, **mixture(512, 10, 512), **linear)
    mixed |= {"model_type": "qwen3_next", "shared_expert_intermediate_size": 512, "hidden_act": "silu"} | UNTIED
    model = by_fields(mixed, 4096)
    assert model.pattern == " ".join(["linear+experts*3 full+experts"] * 12)
    assert model.parameters == pytest.approx(79.67e9, rel=0.001)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"hidden_size": 4096}, "a config of a language model has vocab_size, and this has only hidden_size"),
        (LLAMA | {"num_experts": 8}, "a config of a language model has num_experts_per_tok, and this has only"),
        (LLAMA | {"hidden_size": "wide"}, "hidden_size must be an integer of at least 1, got 'wide'"),
        (LLAMA | {"vocab_size": None}, "a config of a language model has vocab_size"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1,024, got 1000000000"),
        (LLAMA | {"num_experts": 10**9, "num_experts_per_tok": 2}, "num_experts must be at most 32,768, got"),
        ({"model_type": "zaya", "num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1,024, got"),
        (LLAMA | {"hidden_size": 2**40}, "hidden_size must be at most 16,777,216, got"),
        (LLAMA | {"layer_types": ["full_attention"] * 3}, "3 layers have a type, and there are 32: make them equal"),
        (
            LLAMA | {"layer_types": ["compressed_attention"] * 32},
            "layers of compressed_attention aren't read: give lab",
        ),
        (LLAMA | {"lru_width": 4096}, "lru_width say something of its layers that isn't read: give lab.Model"),
        (LLAMA | {"kv_lora_rank": 512}, "a config of a language model has qk_nope_head_dim"),
        (LLAMA | LATENT | {"v_head_dim": 0}, "a config of a language model has v_head_dim"),
        (LLAMA | {"intermediate_size": [1, 2]}, "intermediate_size must be an integer of at least 1, got .1, 2."),
        (LLAMA | {"mlp_layer_types": 7} | mixture(8, 2, 768), "isn't a language model's config: TypeError"),
        (LLAMA | {"is_encoder_decoder": True}, "it attends to an encoder: give a model that only decodes"),
        (
            LLAMA | {"model_type": "llama", "num_experts": 8, "num_experts_per_tok": 2},
            "its fields say 47.49 billion parameters, and transformers builds 8.03 billion; layer 0, full.experts, is",
        ),
        (LLAMA | {"more": reduce(lambda inner, _: {"a": inner}, range(5000), 1)}, "language model's config: Recursion"),
        (7, "source must be a config, its fields, a config.json, its folder or OWNER/NAME, got 7"),
    ],
)
def test_what_cannot_be_read_is_refused(source, said):
    with pytest.raises(ValueError, match=said):
        read_config(source, 4096)


@pytest.mark.parametrize("text", ["", "[1]", "\xff", "{", "[" * 50_000])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="config.json must have a config's fields, as JSON, got .*: fetch it again"):
        read_config(tmp_path, 4096)


def test_one_matrix_is_held_once_where_one_stage_has_both_ends():
    machine = lab.Machine(8, lab.Case().machine.between, lab.Case().machine.between, 400e12, 80e9)
    tied, apart = (Transformer(4, 64, 32, vocabulary=1000, tied=tied) for tied in (True, False))
    for stages, tables in ((1, 1), (2, 0)):
        layout = lab.Layout(pp=stages)
        held = [sum(lab.plan(model, machine, layout, 4).memory.parameters) for model in (apart, tied)]
        assert held[0] - held[1] == pytest.approx(18 * tables * 64_000)
    assert apart.parameters - tied.parameters == 64_000


@pytest.mark.parametrize(("tokens", "chunk"), [(96, 32), (100, 32), (16, 32), (33, 1)])
def test_chunks_have_the_pairs_of_transformers_own_mask(tokens, chunk):
    """Every pair that its mask lets through; of a token and itself we count half, as everywhere."""
    masks = transformers.masking_utils
    allowed = masks.chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.long))
    at = torch.arange(tokens)
    pairs = int(allowed(torch.tensor(0), 0, at[:, None], at[None]).sum())
    part = lab.kinds.attention(64, 4, 4, 16, chunked=chunk)
    assert part.pair_flops(tokens) == 4 * 64 * (pairs - tokens / 2)
    window = lab.kinds.attention(64, 4, 4, 16, window=chunk)
    assert (window.pair_flops(tokens) > part.pair_flops(tokens)) == (tokens > chunk)


def test_llama_4_sees_chunks_beyond_8192_tokens():
    """By its fields and by a forward, and Megatron-LM has no flag for it."""
    shape = fields(4, 256, 4, 512, 1000, num_key_value_heads=2, head_dim=64, intermediate_size_mlp=512)
    more = {"num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 128, "model_type": "llama4_text"}
    for sequence, share in ((128, 1), (512, 1 / 4)):
        model, _ = read_config(shape | more | UNTIED, sequence)
        chunked, whole = (model.layers[at].pair_flops(sequence) for at in (0, 3))
        assert chunked == share * whole == share * 4 * 256 * sequence**2 / 2
    machine = lab.Machine(8, pp.Link(), pp.Link(), flops=1e12, memory=80e9)
    with pytest.raises(ValueError, match="Megatron-LM has no attention in chunks"):
        lab.flags(lab.plan(model, machine, lab.Layout(pp=2), 4), "Megatron-LM")
