"""Cut transformers' models into stages: the class of each family, where its layers are, and what
comes before and after them.

A stage is transformers' own model, in which `Elsewhere` replaces what other stages have. So
transformers itself makes masks, positions and rotary embeddings from what every rank has (attention
mask, position ids), and weights keep the names of the original model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ._cutting import layer_ranges

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Stack:
    """A list of layers in a model, by the names of its modules."""

    layers: str
    before: tuple[str, ...]  # what goes with its first layer
    after: tuple[str, ...]  # what goes with its last one
    outputs: int = 1  # of a layer; the hidden states come first
    shared: str = ""  # in the first layer, what every stage of the stack needs a copy of
    dropout: str = ""  # what is called before the first layer, and again after the last


@dataclass(frozen=True)
class Family:
    """One kind of model: its class, what it is trained for, and its stacks in order."""

    model: str
    task: str  # "causal", "classification" or "seq2seq"
    stacks: tuple[Stack, ...]
    # what a batch may have beside input ids and labels; every stage gets it
    context: tuple[str, ...]


def _decoder(model: str) -> Family:
    stack = Stack("model.layers", ("model.embed_tokens",), ("model.norm", "lm_head"))
    return Family(model, "causal", (stack,), ("attention_mask", "position_ids"))


def _t5(part: str, before: Sequence[str], after: Sequence[str]) -> Stack:
    inner = (f"{part}.embed_tokens", f"{part}.final_layer_norm", f"{part}.dropout")
    bias = "layer.0.SelfAttention.relative_attention_bias"
    return Stack(f"{part}.block", (*before, inner[0]), (inner[1], *after), 3, bias, inner[2])


_GPT2 = Stack(
    "transformer.h",
    ("transformer.wte", "transformer.wpe", "transformer.drop"),
    ("transformer.ln_f", "lm_head"),
)
_BERT = Stack("bert.encoder.layer", ("bert.embeddings",), ("bert.pooler", "dropout", "classifier"))
_DISTILBERT = Stack(
    "distilbert.transformer.layer",
    ("distilbert.embeddings",),
    ("pre_classifier", "dropout", "classifier"),
)
_BATCH = ("attention_mask", "position_ids")

FAMILIES = {  # by the model_type of a config
    "llama": _decoder("LlamaForCausalLM"),
    "mistral": _decoder("MistralForCausalLM"),
    "qwen2": _decoder("Qwen2ForCausalLM"),
    "qwen3": _decoder("Qwen3ForCausalLM"),
    "gpt2": Family("GPT2LMHeadModel", "causal", (_GPT2,), _BATCH),
    "bert": Family(
        "BertForSequenceClassification", "classification", (_BERT,), (*_BATCH, "token_type_ids")
    ),
    "distilbert": Family(
        "DistilBertForSequenceClassification", "classification", (_DISTILBERT,), _BATCH
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "seq2seq",
        (_t5("encoder", ["shared"], []), _t5("decoder", [], ["lm_head"])),
        ("attention_mask", "decoder_input_ids", "decoder_attention_mask"),
    ),
}


def family_of(model_type: object) -> Family:
    """The family of a config's `model_type`. Raises ValueError, which lists the known ones, for any
    other.
    """
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    raise ValueError(
        f"don't know where a model of type {model_type!r} can be cut: known types: "
        f"{', '.join(FAMILIES)}. For another one make the stages yourself: pass "
        "models.Modules([stage0, stage1, ...]), or write a runtime.Workload"
    )


class Elsewhere(nn.Module):
    """Replaces a module that is on a different stage, and passes on the hidden states: the first
    real-valued tensor among its arguments. Without one, as for an embedding of positions, there is
    nothing to add.
    """

    def __init__(self, outputs: int = 1):
        super().__init__()
        self.outputs = outputs

    def forward(self, *given: object, **named: object) -> Tensor | tuple[Tensor | None, ...]:
        """The hidden states (B, T, C), and None for a layer's other outputs."""
        tensors = [x for x in (*given, *named.values()) if isinstance(x, Tensor)]
        hidden = next((x for x in tensors if x.is_floating_point()), None)
        if hidden is None:
            hidden = torch.zeros((), device=tensors[0].device)
        return hidden if self.outputs == 1 else (hidden, *[None] * (self.outputs - 1))


class Part(nn.Module):
    """One stage of a model of transformers: a range of its layers, with what comes before and after
    them.
    """

    def __init__(self, model: PreTrainedModel, is_first: bool, is_last: bool):
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        # no child: parameters are to have the names that they have in the model
        self.__dict__["whole"] = model
        for name, child in model.named_children():
            self.add_module(name, child)

    def forward(self, x: Tensor, **context: Tensor) -> Tensor:
        """Token ids (B, T) or hidden states (B, T, C) to hidden states, or to scores on the last
        stage.
        """
        given = {"input_ids" if self.is_first else "inputs_embeds": x, **context}
        if self.is_last:
            return self.whole(**given).logits
        return self.whole.base_model(**given).last_hidden_state


class EncoderDecoderPart(Part):
    """A stage of an encoder-decoder. Stages of the encoder send its hidden states (B, T, C). From
    its last layer on, stages send the encoder's output, after the decoder's hidden states (B, U, C)
    once there are any. Every rank has the attention mask and the decoder's input ids.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        is_first: bool,
        is_last: bool,
        encodes: bool,
        begins: bool,
        decodes: bool,
    ):
        super().__init__(model, is_first, is_last)
        # whether it has something of the encoder, of the decoder
        self.encodes, self.decodes = encodes, decodes
        self.begins = begins  # whether it has the decoder's beginning

    def forward(
        self,
        *x: Tensor,
        decoder_input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """From input ids (B, T), or what the previous stage sent, to what goes to the next stage,
        or to scores.
        """
        model, encoded = self.whole, x[-1]
        if self.encodes:
            given = {"input_ids" if self.is_first else "inputs_embeds": encoded}
            encoded = model.encoder(**given, attention_mask=attention_mask).last_hidden_state
        if not self.decodes:
            return encoded
        given = {"input_ids": decoder_input_ids} if self.begins else {"inputs_embeds": x[0]}
        if self.is_last:
            given = {f"decoder_{name}": tensor for name, tensor in given.items()}
            masks = {
                "attention_mask": attention_mask,
                "decoder_attention_mask": decoder_attention_mask,
            }
            return model(encoder_outputs=(encoded,), **given, **masks).logits
        masks = {"attention_mask": decoder_attention_mask, "encoder_attention_mask": attention_mask}
        return model.decoder(
            encoder_hidden_states=encoded, **given, **masks
        ).last_hidden_state, encoded


def clone(model: PreTrainedModel) -> PreTrainedModel:
    """A second copy of the model's modules, with the same parameters and buffers."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def depths(model: PreTrainedModel, family: Family) -> tuple[int, ...]:
    """The number of layers of each stack."""
    return tuple(len(model.get_submodule(stack.layers)) for stack in family.stacks)


class Share(NamedTuple):
    """A stage's part of a stack: some of its layers, its beginning, its end."""

    stack: Stack
    depth: int
    own: range
    has_first: bool
    has_last: bool

    @property
    def borrows(self) -> bool:
        """Whether it needs what the first layer computes for all, and doesn't have that layer."""
        return bool(self.stack.shared and self.own and 0 not in self.own)

    def elsewhere(self) -> list[str]:
        """The modules that other stages have."""
        stack = self.stack
        layers = [
            f"{stack.layers}.{number}" for number in range(self.depth) if number not in self.own
        ]
        return [*layers, *stack.before * (not self.has_first), *stack.after * (not self.has_last)]


def shares(
    family: Family,
    deep: Sequence[int],
    stage: int,
    num_stages: int,
    layers: Sequence[int] | None = None,
) -> list[Share]:
    """A stage's share of every stack, for a model with stacks so `deep`."""
    own = layer_ranges(sum(deep), num_stages, layers)[stage]
    found, start = [], 0
    for stack, depth in zip(family.stacks, deep, strict=True):
        end = start + depth
        has_first = start in own if start else stage == 0
        has_last = end - 1 in own if end < sum(deep) else stage == num_stages - 1
        here = range(max(own.start - start, 0), min(own.stop - start, depth))
        found.append(Share(stack, depth, here, has_first, has_last))
        start = end
    return found


def names_held(found: Sequence[Share], names: Iterable[str]) -> list[str]:
    """The names of the model's tensors that a stage with these shares has."""
    lost = tuple(f"{name}." for share in found for name in share.elsewhere())
    borrowed = tuple(
        f"{share.stack.layers}.0.{share.stack.shared}." for share in found if share.borrows
    )
    return [name for name in names if name.startswith(borrowed) or not name.startswith(lost)]


def parts(
    model: PreTrainedModel, num_stages: int, layers: Sequence[int] | None = None
) -> list[Part]:
    """The stages of a model, which share its parameters and leave it as it is."""
    family = family_of(model.config.model_type)
    deep = depths(model, family)
    return [
        part(clone(model), shares(family, deep, stage, num_stages, layers))
        for stage in range(num_stages)
    ]


def part(model: PreTrainedModel, found: Sequence[Share]) -> Part:
    """The model as the stage with these shares, without the modules of other stages."""
    for share in found:
        _take_out(model, share)
    for module in model.modules():
        if hasattr(module, "config"):
            # keys and values of earlier tokens are for generating text
            module.config.use_cache = False
    is_first, is_last = found[0].has_first, found[-1].has_last
    if len(found) == 1:
        return Part(model, is_first, is_last)
    encoder, decoder = found
    encodes, decodes = is_first or bool(encoder.own), is_last or bool(decoder.own)
    return EncoderDecoderPart(model, is_first, is_last, encodes, decoder.has_first, decodes)


def _take_out(model: PreTrainedModel, share: Share) -> None:
    """Replace what other stages have of a stack by `Elsewhere`."""
    stack = share.stack
    layers = model.get_submodule(stack.layers)
    if stack.dropout:
        _move_dropout(model, stack)
    first = _lend(layers[0], layers[share.own.start], stack) if share.borrows else None
    for name in share.elsewhere():
        model.set_submodule(
            name, Elsewhere(stack.outputs if name.startswith(f"{stack.layers}.") else 1)
        )
    if first is not None:
        layers[0] = first


def _lend(first: nn.Module, borrower: nn.Module, stack: Stack) -> Elsewhere:
    """Let a different layer compute what the first one usually computes for all. Returns a stand-in
    for the first layer that keeps the weight under its name in the model.
    """
    where, _, name = stack.shared.rpartition(".")
    lent = first.get_submodule(stack.shared)
    attention = borrower.get_submodule(where)
    attention.__dict__[name] = lent  # no child: it has a name already
    setattr(attention, f"has_{name}", True)
    stands_in = inner = Elsewhere(stack.outputs)
    for step in where.split("."):
        inner.add_module(step, nn.Module())
        inner = inner.get_submodule(step)
    inner.add_module(name, lent)
    return stands_in


def _move_dropout(model: PreTrainedModel, stack: Stack) -> None:
    """Move a dropout that is called at both ends of a stack into the module at each end, because a
    stage may have only one of them.
    """
    dropout = model.get_submodule(stack.dropout)
    for end in (stack.before[-1], stack.after[0]):
        module = model.get_submodule(end)
        module.add_module("dropout", dropout)
        module.register_forward_hook(lambda module, given, made: module.dropout(made))
    model.set_submodule(stack.dropout, nn.Identity())
