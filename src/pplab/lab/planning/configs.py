"""A model out of its config on the Hugging Face hub."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

from ...errors import positive_int, shown
from ...optional import bring
from ..forms import printable_in
from .config_fields import by_fields
from .config_on_meta import Unread, by_meta
from .expert_layers import ExpertLayers
from .layers import Model

# of what is built one by one
_MOST = {("layers", "n_layer", "blocks"): 1024, ("experts",): 2**15}


def read_config(source: object, sequence: int) -> tuple[Model, ExpertLayers | None]:
    """The model that a config of transformers describes, for sequences of so many tokens, and its
    experts, on one GPU.

    `source` is such a config, or a dict of its fields; a config.json, or a folder with one; or
    OWNER/NAME on the Hugging Face hub. Of a model that sees or hears its language model is counted,
    and a warning says so.

    Layers are counted by the fields of the config and, where PyTorch and transformers are
    installed, also by a forward of the model without weights. Where both count, parameters that
    differ by more than 1 % are refused, and where a token uses 2 % more or less, the forward is
    believed. Without a forward, a kind of model is counted whose fields were compared with one.
    The model's `counted` says which of these it was, and what was left out.
    Raises ValueError that names the odd field or layer, and what to give instead.

    >>> model, experts = read_config({
    ...     "num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936,
    ...     "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    ...     "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    ...     "num_experts_per_tok": 8, "hidden_act": "silu", "tie_word_embeddings": False,
    ... }, sequence=4096)
    >>> print(f"{model.parameters / 1e9:.1f} billion parameters, {model.used / 1e9:.1f} in use")
    30.5 billion parameters, 3.0 in use
    """
    positive_int("sequence", sequence)
    found, kind = _fields(source), "this model"
    try:
        found = printable_in(found)
        kind = found.get("model_type", kind)
        model = _counted(json.dumps(found, default=str), sequence)
    except (
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ValueError(f"{shown(source)} isn't a language model's config: {error!r}") from None
    except ValueError as error:
        raise ValueError(f"{kind}: {error}") from None
    if found.get("text_config"):
        warnings.warn(
            f"{kind}: only its language model is counted, nothing that sees or hears", stacklevel=2
        )
    return model, model.experts


@lru_cache(maxsize=64)
def _counted(fields: str, sequence: int) -> Model:
    """The model by both ways, or by the one that there is."""
    text = json.loads(fields)
    text |= {
        name: value
        for name, value in (text.pop("text_config", None) or {}).items()
        if value is not None
    }
    for name, value in text.items():
        for endings, most in _MOST.items():
            if name.endswith(endings) and isinstance(value, int) and value > most:
                raise ValueError(f"{name} must be at most {most:,}, got {value}")
    with suppress(Exception):  # no transformers, or a kind that it doesn't know
        text = bring("transformers").AutoConfig.for_model(**text).to_dict()
    model: Model | None = None
    try:
        model = by_fields(text, sequence)
    except Unread as error:
        odd = error
    try:
        measured = by_meta(text, sequence)
    except (Unread, ImportError) as error:
        if model is None:
            raise Unread(f"{odd}; {error}") from None
        return _said(model, text, "its fields alone, since ", error)
    if model is None:
        return _said(measured, text, "a forward alone, since ", odd)
    bare = replace(model, predictors=())  # of which transformers knows nothing
    if abs(bare.parameters / measured.parameters - 1) > 0.01:
        counts = (f"{each.parameters / 1e9:.4g} billion" for each in (bare, measured))
        sizes = ([kind.total("parameters") for kind in each.layers] for each in (bare, measured))
        odd = "its layers agree, so look at vocab_size, tie_word_embeddings and their number"
        for at, (a, b) in enumerate(zip(*sizes, strict=False)):
            if abs(a / b - 1) > 0.01:
                odd = f"layer {at}, {bare.layers[at].name}, is the first odd one"
                break
        raise Unread(
            "its fields say {} parameters, and transformers builds {}; {}: give lab.Model its "
            "layers".format(*counts, odd)
        )
    if abs(bare.used / measured.used - 1) < 0.02:
        return _said(model, text, "its fields and by a forward")
    return _said(measured, text, f"a forward: its fields say {bare.used / 1e9:.4g} billion in use")


def _said(model: Model, text: Mapping[str, Any], how: str, why: object = "") -> Model:
    """The model, which says how it was counted and whether its predictors were."""
    how += str(why).removesuffix(": give lab.Model its layers")
    if text.get("num_nextn_predict_layers") or text.get("mtp_num_layers"):
        how += "; predictors by fields alone" if model.predictors else "; without predictors"
    return replace(model, counted=f"counted by {how}")


def _fields(source: object) -> dict[str, Any]:
    """What a config says, wherever it is."""
    if hasattr(source, "to_dict"):
        return source.to_dict()
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | PathLike):
        raise ValueError(
            "source must be a config, its fields, a config.json, its folder or OWNER/NAME, got "
            f"{shown(source)}"
        )
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        from ..models import data

        download, reachable = bring("huggingface_hub").hf_hub_download, data.hub_is_reachable()
        try:
            path = Path(download(str(source), "config.json", local_files_only=not reachable))
        # no network, no such model, one that needs a login, no name at all
        except Exception as error:
            why = type(error).__name__ if reachable else "it can't be reached"
            raise ValueError(
                f"{source} isn't a folder with a config.json, and the hub doesn't give one ("
                f"{why}): check the name, or fetch that file and give its folder"
            ) from None
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        found = error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} must have a config's fields, as JSON, got {shown(found)}: fetch it again"
        )
    return found
