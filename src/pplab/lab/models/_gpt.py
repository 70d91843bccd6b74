"""A small GPT that reads bytes. A stage is a GPT that holds a part of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from ...errors import positive_int
from ...runtime import Batch
from . import data
from ._cutting import LayeredModel, check_depth


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. The defaults train on two CPU cores."""

    num_layers: int = 8
    width: int = 128  # C
    num_heads: int = 4
    context: int = 128  # T, the longest sequence
    vocabulary: int = 256  # bytes
    seed: int = 0
    tied: bool = False  # the head's weight is the token embedding's

    def __post_init__(self) -> None:
        check_depth("num_layers", self.num_layers)
        for name in ("width", "num_heads", "context", "vocabulary"):
            positive_int(name, getattr(self, name))
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} doesn't divide into {self.num_heads} heads")


class Embedding(nn.Module):
    """Tokens to vectors: the sum of a token's vector and its position's."""

    first = 0  # where the first token stands, of a slice of a sequence

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) to (B, T, C)."""
        places = torch.arange(self.first, self.first + tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(places)


class Attention(nn.Module):
    """The common part of blocks: attention to earlier tokens, and the norm of what follows it."""

    attention = staticmethod(partial(functional.scaled_dot_product_attention, is_causal=True))

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def attend(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, T, C / heads) each
        y = self.attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(Attention):
    """Attention to earlier tokens, then an MLP, each added to what comes in."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = x + self.attend(x)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    """Vectors to a score for every token of the vocabulary."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.scores = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, vocabulary)."""
        return self.scores(self.norm(x))


class GPT(nn.Module):
    """A GPT, or a part of one: its blocks, with the embedding if they are the first and the head if
    they are the last.
    """

    block = Block

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding: nn.Module | None = Embedding(config)
        self.blocks = nn.ModuleDict(
            {str(layer): self.block(config) for layer in range(config.num_layers)}
        )
        self.head: nn.Module | None = Head(config)
        if config.tied:
            # for scores of about 1
            nn.init.normal_(self.embedding.token.weight, std=config.width**-0.5)
            self.head.scores.weight = self.embedding.token.weight

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, T) or an earlier part's (B, T, C) to scores (B, T, vocabulary) or (B, T,
        C).
        """
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)

    def part(self, layers: range, is_first: bool, is_last: bool) -> GPT:
        """The stage with these layers, with the embedding if first and the head if last. It shares
        the model's parameters and keeps their names.
        """
        stage = GPT.__new__(GPT)
        nn.Module.__init__(stage)
        stage.config = self.config
        stage.embedding = self.embedding if is_first else None
        stage.blocks = nn.ModuleDict({str(layer): self.blocks[str(layer)] for layer in layers})
        stage.head = self.head if is_last else None
        return stage


@dataclass(frozen=True)
class LanguageModel(LayeredModel):
    """Next-byte prediction with a GPT on rows of bytes."""

    kind = GPT
    config: GPTConfig
    batch_size: int
    tokens: Tensor = field(repr=False)  # (rows, T + 1)
    notes: tuple[str, ...] = ()
    cut: tuple[int, ...] | None = None  # layers of each stage; evenly when None

    @property
    def name(self) -> str:
        """The model's sizes in words."""
        c = self.config
        sizes = (
            f"{c.num_layers} layers of width {c.width}{self.cut_in_words}, batch {self.batch_size} "
            f"x {c.context} bytes"
        )
        return f"GPT with {sizes}{', tied' * c.tied}"

    @property
    def num_layers(self) -> int:
        """Blocks, without embedding and head."""
        return self.config.num_layers

    def tied(self, num_stages: int) -> dict[str, tuple[tuple[int, str], ...]]:
        """The weights that several stages keep, by name, with their places as (stage, name in that
        stage).
        """
        if not self.config.tied or num_stages == 1:
            return {}
        name = "embedding.token.weight"
        return {name: ((0, name), (num_stages - 1, "head.scores.weight"))}

    def build_whole(self) -> GPT:
        """Build the whole model, with the same weights at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            return self.kind(self.config)

    def batch(self, step: int) -> Batch:
        """The rows of a step: inputs (B, T), and as target the same rows one byte later."""
        first = step * self.batch_size
        rows = self.tokens[
            [i % len(self.tokens) for i in range(first, first + self.batch_size)]
        ].long()
        return Batch((rows[:, :-1],), rows[:, 1:])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy per byte of scores (B, T, vocabulary) for `target` (B, T)."""
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def gpt(
    *, batch_size: int = 32, source: str = "auto", cut: Sequence[int] | None = None, **sizes: int
) -> LanguageModel:
    """A GPT that learns to continue reviews. `sizes` are GPTConfig's (`tied=True` shares the head's
    weight with the embedding). `source` is that of `pplab.lab.data.reviews`.

    `cut` gives the number of layers of each stage (evenly when left out). The first and the last
    may have none.

    >>> model = gpt(batch_size=4, source="sample", num_layers=4, width=32, context=16, cut=(1, 3))
    >>> print(model.name)
    GPT with 4 layers of width 32 cut 1+3, batch 4 x 16 bytes
    >>> batch = model.batch(step=0)
    >>> batch.inputs[0].shape, batch.target.shape, model.build_stage(0, 2)(*batch.inputs).shape
    (torch.Size([4, 16]), torch.Size([4, 16]), torch.Size([4, 16, 32]))
    """
    config = GPTConfig(**sizes)
    found = data.reviews(source=source, limit=512)
    text = "\n".join(found.texts).encode()
    width = config.context + 1
    rows = len(text) // width
    tokens = torch.frombuffer(bytearray(text[: rows * width]), dtype=torch.uint8).view(rows, width)
    notes = (f"text: {found.source}",)
    return LanguageModel(
        config,
        positive_int("batch_size", batch_size),
        tokens,
        notes,
        None if cut is None else tuple(cut),
    )
