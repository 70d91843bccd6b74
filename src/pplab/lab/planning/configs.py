"""A model's shape out of its config on the Hugging Face hub."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd
from os import PathLike
from pathlib import Path
from typing import Any

from ...errors import positive_int, shown
from ...optional import bring
from ..forms import printable_in
from .expert_layers import ExpertLayers
from .transformer import Transformer

_NEEDED = (  # each by the names that it has
    "num_hidden_layers n_layer",
    "hidden_size n_embd",
    "num_attention_heads n_head",
    "intermediate_size n_inner",
    "vocab_size",
    "hidden_act hidden_activation activation_function",
)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OTHERS = re.compile("mamba|ssm_|linear_num|block_type|full_attention_interval|attn_layer_period|moe_num_experts")
_CHECKED = (
    "cohere deepseek_v3 gemma gemma2 gemma3_text glm4_moe gpt2 gpt_neox gpt_oss granite llama mistral mixtral olmo2 "
    "olmoe phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe starcoder2"
).split()


def read_config(source: object, sequence: int) -> tuple[Transformer, ExpertLayers | None]:
    """The shape that a config of transformers says, for sequences of so many tokens, and its experts, on one GPU.

    `source` is such a config, or a dict of its fields; a config.json, or a folder with one; or OWNER/NAME on the
    Hugging Face hub. Embedding and head are one matrix unless the config says otherwise, as in transformers.

    What a Transformer can't say is counted as something near it, and a warning says so: attention within a window as
    attention to everything, latent attention (MLA) as heads with few keys and values, a few layers without experts as
    layers with them, and of a model that sees or hears its language model. So does a kind of model whose parameters
    weren't compared with transformers' own. Raises ValueError for fields that are missing and for other layers.

    >>> model, experts = read_config({
    ...     "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    ...     "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    ...     "num_experts_per_tok": 8, "vocab_size": 151936, "hidden_act": "silu", "tie_word_embeddings": False,
    ... }, sequence=4096)
    >>> print(f"{experts.parameters(model) / 1e9:.1f} billion parameters, {model.parameters / 1e9:.1f} in use")
    30.5 billion parameters, 3.3 in use
    """
    positive_int("sequence", sequence)
    found = printable_in(_fields(source))
    try:
        text = found | (found.get("text_config") or {})
        if _missing(text) and "model_type" in text:
            text = _with_defaults(text)
        if missing := _missing(text):
            raise ValueError(
                f"a config of a language model has {', '.join(missing)}, and this has only {', '.join(text)}"
            )
        model, experts = _shape(text, sequence)
        said = [*_approximations(text, sequence, model)]
        model = replace(model, lacks=tuple(_lacks(text, sequence, model)))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{shown(source)} isn't a language model's config: {error!r}") from None
    if found.get("text_config"):
        said.append("only its language model is counted, nothing that sees or hears")
    for each in said:
        warnings.warn(f"{found.get('model_type', 'this model')}: {each}", stacklevel=2)
    return model, experts


def _missing(found: Mapping[str, Any]) -> list[str]:
    """What isn't there under any name."""
    needed = [*_NEEDED, *["num_experts_per_tok"] * any(map(found.get, _COUNTS))]
    return [names.split()[0] for names in needed if not {*names.split()} & {*found}]


def _with_defaults(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """With what transformers takes for fields that a config leaves out, where it is installed and knows the kind."""
    try:
        return bring("transformers").AutoConfig.for_model(**found).to_dict()
    except Exception:
        return found


def _shape(found: Mapping[str, Any], sequence: int) -> tuple[Transformer, ExpertLayers | None]:
    get = found.get
    layers, width, heads, mlp, words, act = (next(filter(None, map(get, names.split())), None) for names in _NEEDED)
    positive_int("vocab_size", words)
    kv_heads, head_width = get("num_key_value_heads"), get("head_dim")
    if latent := get("kv_lora_rank"):
        head_width = found["v_head_dim"]
        kv_heads = gcd(heads, latent // head_width)
    experts = None
    if count := next(filter(None, map(get, _COUNTS)), None):
        each = get("moe_intermediate_size") or mlp
        shared = get("n_shared_experts") or (get("shared_expert_intermediate_size") or 0) // each
        experts = ExpertLayers(count, found["num_experts_per_tok"], 1, shared)
        mlp = each * (experts.used + shared)
    gated = act == "silu" or "gemma" in str(get("model_type"))
    tied = get("tie_word_embeddings") is not False
    return Transformer(layers, width, sequence, 2, heads, kv_heads, mlp, gated, words, False, head_width, tied), experts


def _approximations(found: Mapping[str, Any], sequence: int, model: Transformer) -> Iterator[str]:
    """What isn't quite so; ValueError for what isn't so at all."""
    get = found.get
    kinds, layers = {*(get("layer_types") or ())}, model.num_layers
    if other := [name for name in found if _OTHERS.search(name) and found[name]]:
        raise ValueError(f"a plan is of layers with attention and one kind of experts, and {other[0]} says others")
    if get("is_encoder_decoder") or kinds - {"full_attention", "sliding_attention"}:
        other = "an encoder" if get("is_encoder_decoder") else ", ".join(sorted(kinds))
        raise ValueError(f"a plan is of a decoder whose layers have attention, got {other}: give a Transformer instead")
    window = get("sliding_window") or sequence
    if window < sequence and ("sliding_attention" in kinds if kinds else get("use_sliding_window", True)):
        yield f"attention within {window} tokens is counted as attention to all {sequence}"
    if get("kv_lora_rank"):
        yield (
            f"latent attention is counted as {model.heads} heads of {model.head_width}, with {model.kv_heads} of keys "
            "and values"
        )
    every = get("decoder_sparse_step") or get("interleave_moe_layer_step") or 1
    dense = layers - layers // every + (get("first_k_dense_replace") or 0) + len(get("mlp_only_layers") or ())
    if dense > layers / 10:
        raise ValueError(
            f"a plan is of equal layers, and {dense} of {layers} have no experts: give a Transformer instead"
        )
    if dense:
        yield f"{dense} of {layers} layers have no experts, and are counted as if they had"
    if get("model_type", _CHECKED[0]) not in _CHECKED:
        yield (
            f"its parameters weren't compared with transformers' own: are they {model.parameters / 1e9:.2f} billion, "
            "with the experts that a token uses?"
        )


def _lacks(found: Mapping[str, Any], sequence: int, model: Transformer) -> Iterator[str]:
    """What a framework has to be told of a model beside its Transformer, in Megatron-LM's flags."""
    get = found.get
    if rank := get("kv_lora_rank"):
        yield (
            "in place of --group-query-attention, --num-query-groups and --kv-channels it has --multi-latent-attention "
            f"--kv-lora-rank {rank} --q-lora-rank {get('q_lora_rank')} --qk-head-dim {get('qk_nope_head_dim')} "
            f"--qk-pos-emb-head-dim {get('qk_rope_head_dim')} --v-head-dim {get('v_head_dim')} --qk-layernorm"
        )
    if dense := get("first_k_dense_replace"):
        routed, wide = model.num_layers - dense, get("intermediate_size")
        yield f"its first layers are dense: --moe-layer-freq [0]*{dense}+[1]*{routed} --ffn-hidden-size {wide}"
    window = get("sliding_window")
    if window and window < sequence:
        yield f"--window-size {window - 1},0 in some of its layers"
    act = get("hidden_act") or get("hidden_activation") or get("activation_function")
    if "gelu" in act if model.gated else "gelu" not in act:
        yield f"its MLP's function is {act}, which is another than the line's"


def _fields(source: object) -> dict[str, Any]:
    """What a config says, wherever it is."""
    if hasattr(source, "to_dict"):
        return source.to_dict()
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | PathLike):
        raise ValueError(
            f"source must be a config, its fields, a config.json, its folder or OWNER/NAME, got {shown(source)}"
        )
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        from ..models import data

        download, reachable = bring("huggingface_hub").hf_hub_download, data.hub_is_reachable()
        try:
            path = Path(download(str(source), "config.json", local_files_only=not reachable))
        except Exception as error:  # no network, no such model, one that needs a login, no name at all
            why = type(error).__name__ if reachable else "it can't be reached"
            raise ValueError(
                f"{source} isn't a folder with a config.json, and the hub doesn't give one ({why}): check the name, or "
                "fetch that file and give its folder"
            ) from None
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        found = error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must have a config's fields, as JSON, got {shown(found)}: fetch it again")
    return found
