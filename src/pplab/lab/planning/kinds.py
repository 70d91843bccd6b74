"""What a layer is made of: parts, which are a few numbers per token, per pair of tokens or per
sequence, and their makers. Nothing else in planning asks what a layer is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class Routed(NamedTuple):
    """The experts of a part that a router chooses from."""

    count: int
    used: int  # by a token
    each: float  # parameters of one


@dataclass(frozen=True)
class Part:
    """Half a layer, such as its attention. FLOPs are those of a forward. A backward takes twice as
    many.
    """

    name: str  # of its maker
    divided: float = 0  # parameters that tensor ranks share out
    # parameters that every tensor rank has: norms, routers, the way down to latent keys
    whole: float = 0
    looked_up: float = 0  # of both, those that multiply nothing: norms and biases
    pairs: int = 0  # FLOPs for each pair of tokens
    window: int | None = None  # tokens that a token sees at most
    chunked: int | None = None  # tokens of a chunk, of which a token sees no other (Llama 4)
    scan: int = 0  # FLOPs for each token beside the matrices: states, short convolutions
    kept: int = 0  # numbers kept of each token until the backward
    masks: int = 0  # bytes kept besides
    less_in_fp8: int = 0  # bytes of each token that FP8 keeps less
    passed: int = 0  # numbers of each token that go around context ranks: keys and values
    handed: int = 0  # numbers of each sequence that a context rank hands to the next: a state
    sums: int = 1  # outputs that tensor ranks add up in a forward, beside those of routed experts
    heads: int = 0  # that tensor ranks share out
    routed: Routed | None = None
    said: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)  # to its maker
    # what a backward can compute again without the rest, by Megatron-LM's names of modules: of it
    # `kept` is what needn't be kept then
    again: Mapping[str, Part] = field(default_factory=dict, hash=False, repr=False)

    @property
    def parameters(self) -> float:
        """All of them."""
        return (
            self.divided + self.whole + (self.routed.count * self.routed.each if self.routed else 0)
        )

    @property
    def used(self) -> float:
        """The parameters that a token is multiplied by."""
        chosen = self.routed.used * self.routed.each if self.routed else 0
        return self.divided + self.whole - self.looked_up + chosen

    def pair_flops(self, sequence: int) -> int:
        """Of a sequence's pairs of tokens, of which the causal mask leaves half, and a window or
        chunks fewer.
        """
        chunk = self.chunked or sequence
        whole, rest = divmod(sequence, chunk)
        pairs = 0
        for length, times in ((chunk, whole), (rest, 1)):
            unseen = max(length - (self.window or length), 0)
            pairs += times * (length**2 - unseen**2)
        return self.pairs * pairs // 2

    def flops(self, sequence: int) -> float:
        """Of a sequence."""
        return (2 * self.used + self.scan) * sequence + self.pair_flops(sequence)


@dataclass(frozen=True)
class Kind:
    """A kind of layer: a name, and parts that run one after the other."""

    name: str
    parts: tuple[Part, ...]

    def total(self, what: str) -> Any:
        """The sum of one of its parts' numbers, such as their `parameters`."""
        return sum(getattr(part, what) for part in self.parts)

    def flops(self, sequence: int) -> float:
        """Of a sequence's forward."""
        return sum(part.flops(sequence) for part in self.parts)

    def pair_flops(self, sequence: int) -> int:
        """Of these, those of pairs of tokens."""
        return sum(part.pair_flops(sequence) for part in self.parts)

    def plain_flops(self, sequence: int) -> int:
        """Of these, those of no matrix: of pairs of tokens and scans."""
        return self.pair_flops(sequence) + self.total("scan") * sequence

    def kept_bytes(self, bytes_each: int) -> int:
        """Of a token until the backward, where a number takes so many."""
        return self.total("kept") * bytes_each + self.total("masks")

    def again(self, modules: Collection[str]) -> Kind:
        """What of it a backward computes again where these modules do."""
        parts = (part.again[name] for part in self.parts for name in modules if name in part.again)
        return Kind(f"{self.name} again", tuple(parts))

    @property
    def routed(self) -> Routed | None:
        """Its experts, where it has some."""
        return next((part.routed for part in self.parts if part.routed), None)


# A norm's output, which its input gives again, is "layernorm" only before latent attention and
# experts: elsewhere Transformer Engine has the norm in the matrix after it, and nothing is freed
# (Megatron-LM's gpt_layer_specs.py)


# In FP8 Transformer Engine keeps a byte of each number that a matrix reads (d0067d0d,
# linear.py:616, layernorm_linear.py:487), in place of the number unless something else reads it,
# too. Attention's backward reads what attention gives, so there the matrix keeps no copy, except
# under the recipe `delayed` (Megatron-LM's attention.py:428). Scans are counted as in bfloat16


def _core(part: Part, scores: int = 0) -> dict[str, Part]:
    """Its products of pairs, once more also where FlashAttention keeps no scores: Megatron-LM
    checkpoints the call (attention.py:1555).
    """
    return {
        "core_attn": Part(
            "core_attn",
            pairs=part.pairs,
            window=part.window,
            chunked=part.chunked,
            masks=scores,
            passed=part.passed,
            sums=0,
        )
    }


def attention(
    width: int, heads: int, kv_heads: int, head_width: int, scores: int = 0, **more: Any
) -> Part:
    """Grouped-query attention. It keeps input and output of its norm, queries, keys, values and
    what they give; without FlashAttention, which computes them again, bytes of `scores`, too, which
    are among its `masks`.
    """
    query, keys = heads * head_width, kv_heads * head_width
    said = {"heads": heads, "kv_heads": kv_heads, "head_width": head_width}
    numbers = {
        "pairs": 4 * query,
        "kept": 2 * (width + query + keys),
        "less_in_fp8": width,
        "passed": 2 * keys,
        "heads": heads,
        "said": said,
    }
    found = Part("attention", width * 2 * (query + keys), **numbers | more)
    return replace(found, again=_core(found, scores))


def mlp(width: int, wide: int, gated: bool, act: str = "", **more: Any) -> Part:
    """An MLP, with a third matrix where it is gated. It keeps input and output of its norm, which
    runs again with it, and what its function and its last matrix read.
    """
    columns, less = (2 + gated) * wide, width + wide
    numbers = {
        "kept": 2 * width + columns,
        "less_in_fp8": less,
        "said": {"wide": wide, "gated": gated, "act": act},
        "again": {"mlp": Part("mlp", width * columns, kept=width + columns, less_in_fp8=less)},
    }
    return Part("mlp", width * columns, **numbers | more)


def latent(
    width: int,
    heads: int,
    q_rank: int,
    kv_rank: int,
    nope: int,
    rope: int,
    value: int,
    index: tuple[int, ...] = (),
) -> Part:
    """Latent attention (MLA) as it is trained: keys and values are made whole, so that pairs cost
    all heads. The ways down aren't cut over tp. `index`: heads, width and top-k of a sparse indexer
    (DeepSeek-V3.2).
    """
    query, values, queries_from = heads * (nope + rope), heads * value, q_rank or width
    index_heads, index_width, seen = index or (0, 0, None)
    up = queries_from * query + kv_rank * heads * (nope + value)
    found = Part(
        "latent",
        up + values * width,
        width * (q_rank + kv_rank + rope)
        + index_width * (index_heads * queries_from + width)
        + width * index_heads,
        pairs=2 * (query + values),
        window=seen,
        kept=2 * (width + query + values) + q_rank + kv_rank + rope,
        passed=query + values,
        heads=heads,
        said=dict(
            heads=heads,
            q_rank=q_rank,
            kv_rank=kv_rank,
            nope=nope,
            rope=rope,
            value=value,
            index=index,
        ),
    )
    again = _core(found) | {
        "layernorm": Part("layernorm", kept=width, sums=0),
        "mla_up_proj": Part("mla_up_proj", up, kept=2 * query + values, sums=0),
    }
    return replace(found, again=again)


def delta(
    width: int, key_heads: int, value_heads: int, key_width: int, value_width: int, conv: int
) -> Part:
    """A gated delta net (Qwen3-Next). A scan in chunks takes about 6 FLOPs per number of its state
    and token.
    """
    keys, values, state = (
        key_heads * key_width,
        value_heads * value_width,
        value_heads * key_width * value_width,
    )
    return Part(
        "delta",
        width * (2 * keys + 3 * values + 2 * value_heads),
        scan=6 * state + 2 * (2 * keys + values) * conv,
        kept=2 * width + 4 * (keys + values),
        handed=state,
        heads=key_heads,
        said=dict(
            key_heads=key_heads,
            value_heads=value_heads,
            key=key_width,
            value=value_width,
            conv=conv,
        ),
    )


def mamba(
    width: int, inner: int, state: int, conv: int, heads: int = 0, groups: int = 1, rank: int = 0
) -> Part:
    """Mamba-2 with `heads`, or Mamba-1, whose steps have a `rank`."""
    mixed = inner + 2 * groups * state if heads else inner
    matrices = width * (inner + mixed + heads) if heads else 2 * inner * (width + rank + state)
    return Part(
        "mamba",
        matrices + inner * width,
        scan=6 * inner * state + 2 * mixed * conv,
        kept=2 * (width + inner + mixed),
        handed=inner * state,
        heads=heads,
    )


def experts(
    width: int, wide: int, count: int, used: int, shared: int, gated: bool, act: str = ""
) -> Part:
    """A router and its experts, next to those that every token uses, which are `shared` wide
    together.
    """
    columns = 2 + gated
    beside = columns * (used * wide + shared) + used * width
    found = Part(
        "experts",
        columns * width * shared,
        width * count,
        kept=2 * width + beside,
        less_in_fp8=used * (width + wide) + shared - width * (shared > 0),
        sums=shared > 0,
        routed=Routed(count, used, columns * width * wide),
        said=dict(wide=wide, shared=shared, gated=gated, act=act),
    )
    again = {
        "layernorm": Part("layernorm", kept=width, sums=0),
        "moe_act": Part("moe_act", kept=used * wide, less_in_fp8=used * wide, sums=0),
        "moe": replace(found, kept=beside),
    }
    if shared:
        both = columns * shared
        again["shared_experts"] = Part(
            "shared_experts", width * both, kept=both, less_in_fp8=shared - width
        )
    return replace(found, again=again)
