"""A config as a Model, by its forward: built by transformers and run on torch's meta device, where
tensors have shapes and no values. Two lengths tell FLOPs per token from those per pair of tokens,
and so how many experts a token uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...optional import bring
from .kinds import Kind, Part, Routed
from .layers import Model

_BESIDE = re.compile("vision|audio|visual|image|img")  # what sees or hears
_SCANS = re.compile("ssm|mamba|linear|conv|recurrent|lstm")  # work that is no matrix of the layer
# what limits the tokens that a token sees: in a `Part`, and in a config
LIMITS = {"sliding": ("window", "sliding_window"), "chunked": ("chunked", "attention_chunk_size")}


class Unread(ValueError):
    """Names what of a config can't be said as a Model, and what to give instead."""


def by_meta(fields: Mapping[str, Any], sequence: int) -> Model:
    """The model of a config's fields. Unread for a model that transformers can't build or run
    there, for several stacks of layers, and for work or parameters that its layers don't explain.
    """
    if not fields.get("model_type"):
        raise Unread("it has no model_type")
    torch, transformers = bring("torch"), bring("transformers")
    masks: Any = bring("transformers.masking_utils")
    values, masks.find_packed_sequence_indices = (
        masks.find_packed_sequence_indices,
        lambda positions: None,
    )
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        whole = transformers.AutoConfig.for_model(**fields)
        config = whole.get_text_config()
        if config.is_encoder_decoder or getattr(config, "cross_attention_hidden_size", None):
            raise Unread("it attends to an encoder: give a model that only decodes")
        known = type(config) in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
        with torch.device("meta"):
            net = transformers.AutoModelForCausalLM.from_config(
                config if known else whole, attn_implementation="eager"
            ).eval()
        if hasattr(net, "set_experts_implementation"):
            net.set_experts_implementation("batched_mm")
        return _counted(torch, net, config, sequence)
    except Unread:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).partition('. Should')[0][:90]}".splitlines()[0]
        raise Unread(
            f"transformers can't run it without weights ({why}): give lab.Model its layers"
        ) from None
    finally:
        masks.find_packed_sequence_indices = values
        transformers.logging.set_verbosity(verbosity)


def _counted(torch: Any, net: Any, config: Any, sequence: int) -> Model:
    stacks = {}
    for name, module in net.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in stacks)
        if (
            isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
            and not inside
            and not _BESIDE.search(name)
        ):
            stacks[name] = module
    sizes = {
        name: sum(each.numel() for each in module.parameters()) for name, module in stacks.items()
    }
    total = sum(each.numel() for name, each in net.named_parameters() if not _BESIDE.search(name))
    path = max(sizes, key=sizes.__getitem__)
    if others := [name for name in sizes if name != path and sizes[name] > 0.01 * total]:
        raise Unread(f"it has a second stack of layers, {others[0]}: give lab.Model all of them")
    ends = [each() for each in (net.get_input_embeddings, net.get_output_embeddings)]
    tables = {
        id(each.weight): each.weight for each in ends if getattr(each, "weight", None) is not None
    }
    beside = total - sizes[path] - sum(table.numel() for table in tables.values())
    if beside > 0.03 * total:
        raise Unread(
            f"{beside / total:.0%} of its parameters are in no layer and no table: give lab.Model "
            "its layers"
        )
    unit = max(64, *(getattr(config, name, 0) or 0 for name in ("chunk_size", "mamba_chunk_size")))
    once, twice = (_flops(torch, net, length) for length in (unit, 2 * unit))
    types = getattr(config, "layer_types", None) or [""] * len(stacks[path])
    found: dict[tuple, Kind] = {}
    order = []
    for (name, layer), said in zip(stacks[path].named_children(), types, strict=False):
        at = f"{type(net).__name__}.{path}.{name}"
        if at not in once:
            raise Unread(f"its layer {name} isn't run by itself: give lab.Model its layers")
        pairs = max(0, (twice[at] - 2 * once[at]) / (2 * unit * unit))
        line = once[at] / unit - pairs * unit
        mark = (
            *(tuple(each.shape) for each in layer.parameters()),
            round(line),
            round(pairs),
            said,
        )
        if mark not in found:
            part = _part(layer, line / 2, round(pairs), config, said)
            label = f"{said or type(layer).__name__}{' experts' * (part.routed is not None)}"
            alike = sum(kind.name.startswith(label) for kind in found.values())
            found[mark] = Kind(label + f" {alike + 1}" * (alike > 0), (part,))
        order.append(found[mark])
    words, width = (max(table.shape[at] for table in tables.values()) for at in (0, -1))
    model = Model(tuple(order), width, sequence, words, len(tables) < 2, beside=beside)
    if abs(off := model.parameters / total - 1) > 0.01:
        raise Unread(
            f"its layers share weights, or embedding and head differ ({off:+.0%}): give lab.Model "
            "its layers"
        )
    return model


def _flops(torch: Any, net: Any, length: int) -> dict[str, int]:
    """Of each module's forward."""
    counter = bring("torch.utils.flop_counter").FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        net(input_ids=torch.zeros(1, length, dtype=torch.long, device="meta"), use_cache=False)
    return {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}


def _part(layer: Any, line: float, pairs: int, config: Any, said: str) -> Part:
    """A layer as one part, of whose weights a token is multiplied by `line`."""
    width, heads = config.hidden_size, getattr(config, "num_attention_heads", 0) or 0
    spread = matrices = small = kept = 0
    count = 1
    for name, each in layer.named_parameters():
        number = re.search(r"experts\.(\d+)\.", name)
        if "shared" not in name and (number or ("experts" in name and each.dim() == 3)):
            spread += each.numel()
            count = max(count, int(number[1]) + 1 if number else each.shape[0])
        elif (
            each.dim() == 2
        ):  # it keeps what its matrices write and read, where that isn't read by several
            matrices += each.numel()
            kept += each.shape[0] + each.shape[1] * (each.shape[1] != width)
        else:
            small += each.numel()
    routed, rest = None, line - matrices
    scans = _SCANS.search(f"{said} {type(layer).__name__} {[*vars(config)]}".lower())
    if spread:
        each = spread / count
        chosen, known = (
            max(1, min(count, round(rest / each))),
            getattr(config, "num_experts_per_tok", None),
        )
        # a scan is work, too, and some families compute all experts
        if known and (scans or chosen == count):
            rest, chosen = rest if chosen < count else known * each, known
        rest -= chosen * each
        routed = Routed(count, chosen, each)
        kept += chosen * round(each / width + width)
    if rest < -0.1 * line or (rest > 0.1 * line and not scans):
        raise Unread(
            f"a layer of {type(layer).__name__} multiplies {rest / line:+.0%} beside its weights: "
            "give lab.Model its layers"
        )
    keys = 2 * (getattr(config, "num_key_value_heads", 0) or heads)
    keys *= getattr(config, "head_dim", None) or width // max(heads, 1)
    limit, field = LIMITS.get(said.partition("_")[0], ("window", ""))
    return Part(
        "layer",
        matrices,
        small,
        small - min(rest, 0),
        pairs,
        scan=round(2 * max(rest, 0)),
        kept=kept + (3 if pairs == 4 * width else 2) * width,  # outputs of norms, and of attention
        passed=min(keys, pairs // 2),
        sums=2,
        heads=heads,
        routed=routed,
        **{limit: getattr(config, field, None)},
    )
