"""Shapes out of configs: parameters counted by transformers itself, without memory for them, and files as they are on
the hub."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import pytest

from pplab import lab
from pplab.lab import ExpertLayers, Transformer, read_config
from pplab.lab.models import data

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
DENSE_LAYERS = {"glm4_moe 106": 0.03, "deepseek_v3 671": 0.06}  # some of theirs have no experts, which is said


def read(source: object, sequence: int = 4096) -> tuple[Transformer, ExpertLayers | None, list[str]]:
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
    for source in (MODELS[name] | {"model_type": kind} | acts, config):  # as in the file, and with all defaults
        model, experts, _ = read(source)
        ours = experts.parameters(model) if experts else model.parameters
        error = DENSE_LAYERS.get(name, 0.03 if experts else 0.02)
        assert ours == pytest.approx(theirs, rel=error), source
        if name in DENSE_LAYERS:
            assert ours > 1.01 * theirs


LLAMA = MODELS["llama 8.03"] | {"hidden_act": "silu"}


def test_a_config_has_many_homes(tmp_path, monkeypatch):
    shape = replace(lab.Case().model, head_width=None)
    assert read(LLAMA, 8192) == (shape, None, [])
    config = transformers.LlamaConfig(**LLAMA)
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    for source in (config, file, str(file), tmp_path, str(tmp_path)):
        assert read(source, 8192) == (replace(shape, head_width=128), None, [])

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
    model, _, said = read({"model_type": "gemma3", "vision_config": {}, "text_config": text | {"sliding_window": 1024}})
    assert (model.heads, model.kv_heads, model.head_width, model.tied) == (8, 4, 256, True)
    assert [each.split(": ")[1].split(" ")[0] for each in said] == ["attention", "only"]
    assert model.parameters == pytest.approx(3.88e9, rel=0.01)  # of 4.3 billion, 0.42 see
    monkeypatch.setattr(transformers.AutoConfig, "for_model", None)  # as without it
    with pytest.raises(
        ValueError, match="has num_attention_heads, vocab_size, hidden_act, and this has only model_type"
    ):
        read_config({"model_type": "gemma3", "text_config": text}, 4096)


def test_what_is_near_is_said():
    deepseek = MODELS["deepseek_v3 671"] | {"model_type": "deepseek_v3", "hidden_act": "silu"}
    model, experts, said = read(deepseek)
    assert (model.heads, model.head_width, model.kv_heads, model.mlp_width) == (128, 128, 4, 9 * 2048)
    assert experts == ExpertLayers(256, used=8, gpus=1, shared=1)
    assert said == [
        "deepseek_v3: latent attention is counted as 128 heads of 128, with 4 of keys and values",
        "deepseek_v3: 3 of 61 layers have no experts, and are counted as if they had",
    ]
    deepseek |= {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    model = read(deepseek | {"v_head_dim": 128, "intermediate_size": 18432})[0]
    asked = lab.plan(
        model, lab.machine_of("h100", 8, 50e9), lab.Layout(pp=8), 16, cut=[8] * 5 + [7] * 3, experts=experts
    )
    line = lab.flags(asked, "Megatron-LM")
    assert re.findall("^# MODEL: .*$", line, re.M) == [
        "# MODEL: in place of --group-query-attention, --num-query-groups and --kv-channels it has "
        "--multi-latent-attention --kv-lora-rank 512 --q-lora-rank 1536 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
        "--v-head-dim 128 --qk-layernorm",
        "# MODEL: its first layers are dense: --moe-layer-freq [0]*3+[1]*58 --ffn-hidden-size 18432",
    ]
    gemma = read(MODELS["gemma 8.54"] | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"})[0]
    assert gemma.lacks == ("its MLP's function is gelu_pytorch_tanh, which is another than the line's",)
    phi = MODELS["phi3 3.82"] | {"model_type": "phi3", "hidden_act": "silu", "sliding_window": 2047}
    assert read(phi)[2] == ["phi3: attention within 2047 tokens is counted as attention to all 4096"]
    assert read(phi, 2047)[2] == read(phi | {"use_sliding_window": False})[2] == []
    whole, partly = (
        phi | {"layer_types": 31 * ["full_attention"] + [last]} for last in ("full_attention", "sliding_attention")
    )
    assert read(whole)[2] == [] and len(read(partly)[2]) == 1
    assert "are they 8.03 billion" in read(LLAMA | {"model_type": "llama9"})[2][0]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"hidden_size": 4096}, "has num_hidden_layers, num_attention_heads, .* and this has only hidden_size"),
        (LLAMA | {"num_experts": 8}, "a config of a language model has num_experts_per_tok, and this has only"),
        (LLAMA | {"hidden_size": "wide"}, "width must be an integer of at least 1, got 'wide'"),
        (LLAMA | {"vocab_size": None}, "vocab_size must be an integer of at least 1, got None"),
        (LLAMA | {"num_attention_heads": None}, "isn't a language model's config: TypeError"),
        (LLAMA | {"kv_lora_rank": 512}, "isn't a language model's config: KeyError"),
        (LLAMA | LATENT | {"v_head_dim": 0}, "isn't a language model's config: ZeroDivisionError"),
        (LLAMA | {"layer_types": ["full_attention", "linear_attention"]}, "got full_attention, linear_attention"),
        (LLAMA | {"full_attention_interval": 4}, "and full_attention_interval says others"),
        (LLAMA | {"moe_num_experts": 64}, "one kind of experts, and moe_num_experts says others"),
        (LLAMA | {"is_encoder_decoder": True}, "got an encoder: give a Transformer instead"),
        (LLAMA | mixture(8, 2, 768) | {"decoder_sparse_step": 2}, "and 16 of 32 have no experts"),
        (7, "source must be a config, its fields, a config.json, its folder or OWNER/NAME, got 7"),
    ],
)
def test_what_cannot_be_read_is_refused(source, said):
    with pytest.raises(ValueError, match=said):
        read_config(source, 4096)


@pytest.mark.parametrize("text", ["", "[1]", "\xff", "{"])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="config.json must have a config's fields, as JSON, got .*: fetch it again"):
        read_config(tmp_path, 4096)


def test_one_matrix_is_held_once_where_one_stage_has_both_ends():
    machine = lab.Machine(8, lab.Case().machine.between, lab.Case().machine.between, 400e12, 80e9)
    tied, apart = (Transformer(4, 64, 32, vocabulary=1000, tied=tied) for tied in (True, False))
    for pp, tables in ((1, 1), (2, 0)):
        layout = lab.Layout(pp=pp)
        held = [sum(lab.plan(model, machine, layout, 4).memory.parameters) for model in (apart, tied)]
        assert held[0] - held[1] == pytest.approx(18 * tables * 64_000)
    assert apart.parameters - tied.parameters == 64_000
