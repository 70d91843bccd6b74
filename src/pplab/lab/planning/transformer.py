"""What a language model computes, holds and sends, from its shape alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...errors import positive_int


@dataclass(frozen=True)
class Transformer:
    """A decoder of equal layers. With a `vocabulary` it has an embedding and a head, of a matrix each, or if `tied` of
    the same one, of which a first and a last stage then have a copy each.

    `heads` share `kv_heads` of keys and values (grouped-query attention; each has its own when left out), and each is
    `head_width` wide, the width over the heads when left out. The MLP is `mlp_width` wide, four times the width when
    left out, and has a third matrix when it is `gated` (SwiGLU). Weights, gradients and activations take `bytes_each`
    per number. Norms and biases aren't counted. An attention that isn't FlashAttention `keeps_scores`, its weights of
    every pair of tokens. `lacks`: what the model of a config has and this doesn't say, as `flags` is to tell it.

    >>> llama = Transformer(32, 4096, 8192, heads=32, kv_heads=8, mlp_width=14336, gated=True, vocabulary=128256)
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
    lacks: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "sequence", "bytes_each", "heads", "kv_heads", "mlp_width", "head_width"):
            if (value := getattr(self, name)) is not None:
                positive_int(name, value)
        if self.vocabulary:
            positive_int("vocabulary", self.vocabulary)
        if (not self.head_width and self.width % self.heads) or self.heads % (self.kv_heads or 1):
            raise ValueError(
                "width must be a multiple of heads, unless head_width is given, and heads of kv_heads, got "
                f"{self.width}, {self.heads} and {self.kv_heads}"
            )

    @property
    def query_width(self) -> int:
        """Of a layer's queries, of all heads."""
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def kv_width(self) -> int:
        """Of a layer's keys, and of its values."""
        return self.query_width // self.heads * (self.kv_heads or self.heads)

    @property
    def mlp_columns(self) -> int:
        """The widths of the MLP's matrices between its input and its output, added up."""
        return (3 if self.gated else 2) * (self.mlp_width or 4 * self.width)

    @property
    def layer_parameters(self) -> int:
        """Of a layer: queries and output, keys and values, the MLP. 12 C^2 when nothing but the width C is given."""
        return self.width * (2 * self.query_width + 2 * self.kv_width + self.mlp_columns)

    @property
    def table_parameters(self) -> int:
        """Of the embedding, and as many of the head."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Of all layers, the embedding and the head."""
        return self.num_layers * self.layer_parameters + (2 - self.tied) * self.table_parameters

    def layer_flops(self, samples: int) -> int:
        """Of a layer's forward; a backward takes twice as many.

        Two per weight and token, and attention's two products, of which the causal mask leaves half.
        """
        return 2 * self.layer_parameters * samples * self.sequence + self.attention_flops(samples)

    def attention_flops(self, samples: int) -> int:
        """Of the two products of every two tokens in a layer's forward."""
        return 2 * samples * self.sequence**2 * self.query_width

    def head_flops(self, samples: int) -> int:
        """Of the head's forward. The embedding is a look-up."""
        return 2 * self.table_parameters * samples * self.sequence

    def layer_bytes(self, samples: int) -> int:
        """What a layer keeps for its backward; attention's scores only if it `keeps_scores` (FlashAttention computes
        them again).

        Inputs and outputs of two norms, queries, keys, values and what they give, and what the MLP's activation
        function and last matrix read; without a gate, two dropout masks of a byte each. That is 34 bytes per token and
        width for GPT, with scores before and after their dropout and its mask 5 a s / h more for `heads` a, tokens s
        and width h (Korthikanti et al. 2022, section 4.1), and 34 for Llama-3-8B with a fused SwiGLU.
        """
        numbers = 4 * self.width + 2 * self.query_width + 2 * self.kv_width + self.mlp_columns
        kept = self.bytes_each * numbers + (0 if self.gated else 2 * self.width)
        if self.keeps_scores:
            kept += self.heads * self.sequence * (self.bytes_each if self.gated else 2 * self.bytes_each + 1)
        return samples * self.sequence * kept

    def boundary_bytes(self, samples: int) -> int:
        """What crosses between two layers: (samples, sequence, width) numbers."""
        return samples * self.sequence * self.width * self.bytes_each
