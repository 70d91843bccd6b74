"""A language model of equal layers, from its shape alone: the short form of a Model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...errors import expect, positive_int
from .expert_layers import ExpertLayers
from .kinds import Kind, attention, mlp
from .layers import Ends, Model
from .state import State


@dataclass(frozen=True)
class Transformer(Ends):
    """A decoder of equal layers. With a `vocabulary` it has an embedding and a head, of a matrix
    each, or if `tied` of the same one, of which a first and a last stage then have a copy each.

    `heads` share `kv_heads` of keys and values (grouped-query attention; each has its own when left
    out), and each is `head_width` wide, the width over the heads when left out. The MLP is
    `mlp_width` wide, four times the width when left out, and has a third matrix when it is `gated`
    (SwiGLU). Weights, gradients and activations take `bytes_each` per number. Norms and biases
    aren't counted. An attention that isn't FlashAttention `keeps_scores`, its weights of every pair
    of tokens. Layers that differ are a `Model`, and `long` makes this one.

    >>> sizes = dict(heads=32, kv_heads=8, mlp_width=14336, vocabulary=128256)
    >>> llama = Transformer(32, 4096, 8192, gated=True, **sizes)
    >>> round(llama.parameters / 1e9, 2), llama.layer_bytes(1) / llama.sequence / llama.width
    (8.03, 34.0)
    """

    num_layers: int
    width: int
    sequence: int
    bytes_each: int = 2
    heads: int = 1
    kv_heads: int | None = None
    mlp_width: int | None = None
    gated: bool = False
    vocabulary: int = 0
    keeps_scores: bool = False
    head_width: int | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        sizes = "num_layers width sequence bytes_each heads kv_heads mlp_width head_width"
        for name in sizes.split():
            if (value := getattr(self, name)) is not None:
                positive_int(name, value)
        positive_int("vocabulary", self.vocabulary, 0)
        if (not self.head_width and self.width % self.heads) or self.heads % (self.kv_heads or 1):
            raise ValueError(
                "width must be a multiple of heads, unless head_width is given, and heads of "
                "kv_heads, got "
                f"{self.width}, {self.heads} and {self.kv_heads}"
            )

    experts = None  # it says none

    @cached_property
    def kind(self) -> Kind:
        """What each of its layers is.

        It keeps inputs and outputs of two norms, queries, keys, values and what they give, and what
        the MLP's function and last matrix read; without a gate, two dropout masks of a byte each.
        That is 34 bytes per token and width for GPT, with scores before and after their dropout and
        its mask 5 a s / h more for `heads` a, tokens s and width h (Korthikanti et al. 2022,
        section 4.1), and 34 for Llama-3-8B with a fused SwiGLU.
        """
        dropout = 0 if self.gated else self.width
        scores = (
            self.keeps_scores
            * self.heads
            * self.sequence
            * (self.bytes_each if self.gated else 2 * self.bytes_each + 1)
        )
        head_width = self.head_width or self.width // self.heads
        attends = attention(
            self.width,
            self.heads,
            self.kv_heads or self.heads,
            head_width,
            scores,
            masks=dropout + scores,
        )
        return Kind(
            "layer",
            (attends, mlp(self.width, self.mlp_width or 4 * self.width, self.gated, masks=dropout)),
        )

    def long(self, experts: ExpertLayers | None = None) -> Model:
        """This as a Model, with these experts in place of every layer's MLP."""
        kind = self.kind
        if experts:
            attends, forward = kind.parts
            kind = Kind("layer", (attends, experts.in_place_of(forward, self.width)))
        ends = {
            name: getattr(self, name)
            for name in "width sequence vocabulary tied bytes_each".split()
        }
        return Model((kind,) * self.num_layers, **ends)

    @property
    def kv_width(self) -> int:
        """Of a layer's keys, and of its values."""
        return self.kind.total("passed") // 2

    @property
    def layer_parameters(self) -> int:
        """Of a layer: queries and output, keys and values, the MLP. 12 C^2 when nothing but the
        width C is given.
        """
        return self.kind.total("parameters")

    @property
    def parameters(self) -> int:
        """Of all layers, the embedding and the head."""
        return self.num_layers * self.layer_parameters + (2 - self.tied) * self.table_parameters

    def layer_flops(self, samples: int) -> float:
        """Of a layer's forward, two per weight and token, and attention's; a backward takes twice
        as many.
        """
        return self.kind.flops(self.sequence) * samples

    def attention_flops(self, samples: int) -> int:
        """Of attention's two products of every two tokens, of which the causal mask leaves half."""
        return self.kind.pair_flops(self.sequence) * samples

    def layer_bytes(self, samples: int) -> int:
        """What a layer keeps for its backward (`kind` says what), in bytes; attention's scores only
        if it `keeps_scores`, since FlashAttention computes them again.
        """
        return samples * self.sequence * self.kind.kept_bytes(self.bytes_each)


def checked(model: Any, experts: Any, state: Any) -> tuple[ExpertLayers | None, State]:
    """A plan's experts, those that its model says when left out, and its state, `State()` when left
    out. ValueError for a model, experts or a state that isn't one.
    """
    if not isinstance(model, Model):
        expect(Transformer, model=model)
    experts = experts or model.experts
    if experts is not None:
        expect(ExpertLayers, experts=experts)
    state = State() if state is None else state
    expect(State, state=state)
    return experts, state
