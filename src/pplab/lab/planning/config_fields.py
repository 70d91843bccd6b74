"""A config as a Model, by its fields alone. Norms and biases, which are less than a hundredth,
aren't counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import positive_int
from .config_on_meta import LIMITS, Unread
from .kinds import Kind, Part, attention, delta, experts, latent, mamba, mlp
from .layers import Model

CHECKED = """
apertus arcee axk1 bamba bitnet bloom codegen cohere cohere2 cohere2_moe cwm deepseek_v3
deepseek_v32 diffllama ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint gemma gemma2
gemma3_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj
granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hy_v3
hyperclovax internlm3 jais2 jamba kimi_k2 kolibri1 llama llama4_text mellum minicpm3 minimax_m2
ministral3 mistral mixtral mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe
persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
""".split()  # kinds of models whose fields give what a forward gives
_MOST = 2**24  # of any size
# whatever their function is called
_GATED = "bitnet exaone4 helium modernbert-decoder seed_oss vaultgemma".split()
_OUTPUT_GATE = re.compile("qwen3_(next|5)")  # as wide as the queries
_ODD = re.compile(
    "num_experts|_experts$|moe_k|moe_topk|mamba_d_|ssm_state|lora_rank|linear_num|latent|compress|period|lru_width|conv_L"
    "|(?<!no_rope_layer_)interval|per_layer|layer_group|index_n_heads|^block_type|zero_expert|embedding_size|embed_proj"
)
# layers of one part
_HALVES = {"-": "mlp", "mlp": "mlp", "E": "experts", "moe": "experts", "M": "mamba", "*": "full"}


class Fields:
    """A config's fields, and which of them were read."""

    def __init__(self, fields: Mapping[str, Any]):
        self.fields, self.read = fields, set()

    def get(self, names: str, default: Any = 0) -> Any:
        """The first of these fields that says something."""
        self.read |= {*names.split()}
        return next((value for name in names.split() if (value := self.fields.get(name))), default)

    def size(self, names: str, default: int | None = None) -> int:
        """The same of a whole number. ValueError for what isn't one, Unread where there is none."""
        name, value = names.split()[0], self.get(names, default)
        if value is None:
            raise Unread(
                f"a config of a language model has {name}, and this has only "
                f"{', '.join(self.fields)}"
            )
        if positive_int(name, value, 0 if value == default else 1) > _MOST:
            raise ValueError(f"{name} must be at most {_MOST:,}, got {value}")
        return value

    @property
    def unread(self) -> list[str]:
        """Those that look as if they said something about layers."""
        return [
            name
            for name in self.fields
            if self.fields[name] and _ODD.search(name) and name not in self.read
        ]


def by_fields(fields: Mapping[str, Any], sequence: int) -> Model:
    """The model that these fields describe. Unread for layers that they don't, by name."""
    config = Fields(fields)
    get, size, kind = config.get, config.size, str(fields.get("model_type", ""))
    if kind and kind not in CHECKED:
        raise Unread("its fields were compared with no model of its kind")
    if get("is_encoder_decoder add_cross_attention"):
        raise Unread("it attends to an encoder: give a model that only decodes")
    width, words = size("hidden_size n_embd d_model"), size("vocab_size")
    types = _types(config)
    act = get("hidden_act hidden_activation activation_function mlp_hidden_act", "gelu")
    gated = act in ("silu", "swish", "swiglu") or "gemma" in kind or kind in _GATED
    dense = "intermediate_size_mlp " if "llama4" in kind else ""
    wide = size(dense + "intermediate_size n_inner ffn_dim ffn_hidden_size", 4 * width)
    count = size("num_experts num_local_experts n_routed_experts moe_num_experts", 0)
    routed = None
    if count > 1:
        used = size("num_experts_per_tok num_experts_per_token experts_per_token moe_topk moe_k")
        each = size("moe_intermediate_size intermediate_size")
        shared = size(
            "shared_expert_intermediate_size moe_shared_expert_intermediate_size "
            "shared_intermediate_size",
            0,
        )
        several = size(
            "n_shared_experts num_shared_experts moe_num_shared_experts", int(bool(dense))
        )
        shared = shared or each * several
        routed = experts(width, each, count, used, shared, gated, act)
    plain, found, order = mlp(width, wide, gated, act), {}, []
    halves = any(_HALVES.get(said) in ("mlp", "experts") for said in types)
    for at, said in enumerate(types):
        said, forward = (
            _HALVES.get(said, said),
            routed if routed and _is_sparse(config, at) else plain,
        )
        if said in ("mlp", "experts"):
            parts = [plain if said == "mlp" else routed]
        else:
            parts = [_mixer(config, said, width, kind)] + [forward] * (not halves)
        name = "+".join([said.removesuffix("_attention"), *(part.name for part in parts[1:])])
        order.append(found.setdefault(name, Kind(name, tuple(parts))))
    if odd := config.unread:
        raise Unread(
            f"{', '.join(odd)} say something of its layers that isn't read: give lab.Model its "
            "layers"
        )
    predictors = ()
    if more := size("num_nextn_predict_layers mtp_num_layers", 0):
        joins = Part("joins", 2 * width * width, kept=3 * width)
        predictors = (Kind("predictor", (joins, *order[-1].parts)),) * more
    tied = fields.get("tie_word_embeddings") is not False
    return Model(tuple(order), width, sequence, words, tied, predictors=predictors)


def _types(config: Fields) -> list[str]:
    """What mixes the tokens of each layer."""
    get = config.get
    pattern = get("hybrid_override_pattern layers_block_type layer_types")
    layers = config.size(
        "num_hidden_layers n_layer num_layers n_layers", len(pattern or ()) or None
    )
    if pattern and len(pattern) != layers:
        raise Unread(f"{len(pattern)} layers have a type, and there are {layers}: make them equal")
    if pattern:
        return [*pattern]
    full, other, every, first = "full_attention", "full_attention", 1, 0
    if every_full := get("full_attention_interval"):
        other, every = "linear_attention", every_full
    elif period := get("attn_layer_period"):
        other, every, first = "mamba", period, get("attn_layer_offset") + 1
    elif get("mamba_d_state ssm_state_size state_size"):
        other, every = "mamba", layers + 1
    elif get("sliding_window") and config.fields.get("use_sliding_window", True):
        other, every = (
            "sliding_attention",
            get("sliding_window_pattern _sliding_window_pattern", layers + 1),
        )
        every = 6 if "gemma3" in str(get("model_type")) else every
    elif get("attention_chunk_size"):
        other, every = "chunked_attention", 4
    return [full if (at + 1 - first) % every == 0 else other for at in range(layers)]


def _is_sparse(config: Fields, at: int) -> bool:
    """Whether a layer has experts, in the many ways in which that is said."""
    get, size = config.get, config.size
    kinds, which = get("mlp_layer_types"), get("moe_layer_freq moe_layers")
    if kinds:
        return kinds[at] in ("sparse", "moe")
    if isinstance(which, list):
        return at in which if get("moe_layers") else bool(which[at])
    if period := get("expert_layer_period"):
        return at % period == get("expert_layer_offset")
    first = get("first_k_dense_replace num_dense_layers moe_layer_start_index")
    every = size("interleave_moe_layer_step decoder_sparse_step moe_layer_interval", 1)
    return at >= first and (at + 1) % every == 0 and at not in get("mlp_only_layers", ())


def _mixer(config: Fields, said: str, width: int, kind: str) -> Part:
    """What mixes tokens."""
    get, size = config.get, config.size
    if said == "linear_attention" and get("linear_num_value_heads"):
        sizes = (
            "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"
        )
        key_heads, value_heads, key_width, value_width = map(size, sizes.split())
        return delta(
            width, key_heads, value_heads, key_width, value_width, size("linear_conv_kernel_dim", 4)
        )
    if said in ("mamba", "linear_attention") and (
        state := size("mamba_d_state ssm_state_size state_size", 0)
    ):
        heads, each = size("mamba_n_heads mamba_num_heads", 0), get("mamba_d_head mamba_head_dim")
        inner = heads * each if heads and each != "auto" else size("mamba_expand expand", 2) * width
        groups, rank = (
            size("mamba_n_groups n_groups", 1),
            size("mamba_dt_rank time_step_rank", -(-width // 16)),
        )
        return mamba(width, inner, state, size("mamba_d_conv conv_kernel", 4), heads, groups, rank)
    window, seen = LIMITS.get(said.partition("_")[0], ("", ""))
    if not window and said not in ("full", "full_attention", "attention", "indexed_attention"):
        raise Unread(
            f"layers of {said} aren't read: give lab.Model its layers, or lab.Transformer equal "
            "ones"
        )
    heads = size("num_attention_heads n_head n_heads")
    if rank := size("kv_lora_rank", 0):
        nope, rope, value = map(size, "qk_nope_head_dim qk_rope_head_dim v_head_dim".split())
        index = tuple(size(name, 0) for name in ("index_n_heads", "index_head_dim", "index_topk"))
        return latent(
            width,
            heads,
            size("q_lora_rank", 0),
            rank,
            nope,
            rope,
            value,
            index if all(index) else (),
        )
    each = size("head_dim kv_channels", width // heads)
    kv_heads = (
        1
        if get("multi_query")
        else size("num_key_value_heads num_kv_heads num_query_groups", heads)
    )
    part = attention(width, heads, kv_heads, each, **({window: size(seen)} if window else {}))
    if _OUTPUT_GATE.match(kind):
        gated = {"divided": part.divided + width * heads * each, "kept": part.kept + heads * each}
        return replace(part, said=part.said | {"gate": True}, **gated)
    return part
