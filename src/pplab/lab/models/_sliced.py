"""A GPT that is trained slice by slice: a microbatch goes through the pipeline as pieces of its
sequences.

A slice's queries look at the keys of its own tokens and of all before them. So on every stage each
block keeps a sequence's keys and values from slice to slice. Backwards come in the opposite order.
A slice's backward gives gradients to the keys and values of the slices before it, and they wait
there until those slices' own backwards take them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from ...errors import expect, positive_int, shown
from ...runtime import Batch
from ._cutting import LayeredModel
from ._gpt import GPT, LanguageModel


class Place(NamedTuple):
    """The slice and microbatch that a stage works on, and the number of tokens before it."""

    microbatch: int
    slice: int
    first: int


class Carried:
    """A block's attention to earlier tokens, and what it carries between the slices of a
    microbatch.
    """

    def __init__(self) -> None:
        self.at: Place | None = None  # None: a whole sequence
        # microbatch -> of every slice so far: keys, values
        self.kept: dict[int, list[tuple[Tensor, Tensor]]] = {}
        # microbatch -> of the slices that wait: their gradients, and `hold`'s
        self.due: dict[int, list[tuple]] = {}
        self.hold: Callable[[Tensor], object] | None = None  # see `Stage`

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """From a slice's queries, keys and values, (B, heads, t, C / heads) each, to what its
        tokens take from all.
        """
        if self.at is None:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return SliceAttention.apply(q, k, v, self, self.at)

    def keep(self, place: Place, k: Tensor, v: Tensor) -> None:
        """Add a slice's keys and values. Raises ValueError when a slice before it is missing."""
        kept = self.kept.setdefault(place.microbatch, [])
        if len(kept) < place.slice:
            raise ValueError(
                f"slice {place.slice} of microbatch {place.microbatch} runs forward before slice "
                f"{len(kept)}, whose keys and values it needs: "
                f"{_REMEDY}"
            )
        del kept[place.slice :]  # when it runs again, or what a pass without backwards has left
        kept.append((k, v))

    def so_far(self, place: Place) -> tuple[Tensor, Tensor]:
        """The keys and values of a slice and of all before it, (B, heads, T, C / heads) each."""
        keys, values = zip(*self.kept[place.microbatch][: place.slice + 1], strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def give(self, place: Place, of_keys: Tensor, of_values: Tensor) -> tuple[Tensor, Tensor]:
        """Leave the gradients that a slice's backward has for earlier slices. Returns the slice's
        own, including those left for it. Raises ValueError when those of a later slice are still
        missing.
        """
        m, kept = place.microbatch, self.kept[place.microbatch]
        if len(kept) != place.slice + 1:
            raise ValueError(
                f"slice {place.slice} of microbatch {m} runs backward before slice "
                f"{len(kept) - 1}, which has gradients for its keys and values: "
                f"{_REMEDY}"
            )
        lengths = [k.shape[2] for k, _ in kept]
        new = zip(of_keys.split(lengths, 2), of_values.split(lengths, 2), strict=True)
        if m not in self.due:  # the last slice: copies, since a part would hold the whole
            *earlier, own = new
            pairs = [tuple(x.clone() for x in pair) for pair in earlier]
            self.due[m] = [(*pair, self.hold and [self.hold(x) for x in pair]) for pair in pairs]
        else:
            for (left_k, left_v, _), (k, v) in zip(self.due[m], new, strict=True):
                left_k += k
                left_v += v
            own = self.due[m].pop()[:2]
        kept.pop()
        if not kept:
            del self.kept[m], self.due[m]
        return own


class SliceAttention(torch.autograd.Function):
    """Causal attention of a slice's queries to the keys of all tokens so far. As in FlashAttention,
    the backward computes the scores a second time. So a slice keeps only its own queries, keys and
    values.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, carried: Carried, place: Place) -> Tensor:
        carried.keep(place, k.detach(), v.detach())
        ctx.save_for_backward(q, k, v)
        ctx.carried, ctx.place = carried, place
        return _attend(q, *carried.so_far(place))

    @staticmethod
    def backward(ctx, gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, *_ = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, *ctx.carried.so_far(ctx.place))]
            of_queries, *of_others = torch.autograd.grad(_attend(*leaves), leaves, gradients)
        return of_queries, *ctx.carried.give(ctx.place, *of_others), None, None


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """From the queries of the last tokens (B, heads, t, d), and keys and values (B, heads, T, d),
    to (B, heads, t, d).

    Scores of later tokens in the slice itself are computed and masked. So a slice's work is t T,
    while a kernel that leaves them out does t (T - t / 2).
    """
    length, total = q.shape[2], keys.shape[2]
    seen = torch.ones(length, total, dtype=torch.bool, device=q.device).tril(total - length)
    return functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen)


_REMEDY = (
    'take a schedule of slices, such as pplab.build("Seq1F1B", ..., slices=k), with the k of the '
    "workload"
)


class SlicedGPT(GPT):
    """A GPT, or a part of one, whose blocks carry keys and values. Without a `place` it takes whole
    sequences.
    """

    def __init__(self, part: GPT):
        nn.Module.__init__(self)
        self.config, self.embedding, self.blocks, self.head = (
            part.config,
            part.embedding,
            part.blocks,
            part.head,
        )
        self.carried = [Carried() for _ in self.blocks]
        for block, carried in zip(self.blocks.values(), self.carried, strict=True):
            block.attention = carried

    def forward(self, x: Tensor, place: Tensor | None = None) -> Tensor:
        """Tokens (B, t) or an earlier part's (B, t, C) to scores (B, t, vocabulary) or (B, t,
        C).
        """
        at = None if place is None else Place(*place.tolist())
        for carried in self.carried:
            carried.at = at
        if self.embedding is not None:
            self.embedding.first = 0 if at is None else at.first
        return super().forward(x)


@dataclass(frozen=True)
class Slice(Batch):
    """A slice of a microbatch. The host reads its `place`."""

    def to(self, device: torch.device) -> Batch:
        """The slice on `device`. Its place stays, because the host would have to wait for a GPU to
        read it there.
        """
        return replace(super().to(device), context=self.context)


@dataclass(frozen=True)
class SlicedBatch(Batch):
    """A batch of rows (B, T), each of whose microbatches is cut into slices of so many tokens."""

    lengths: tuple[int, ...] = field(kw_only=True)

    def microbatches(self, num_microbatches: int) -> list:
        """Cut the batch: slice j of microbatch m, of k slices, is number m k + j. Raises ValueError
        unless every microbatch has all its slices.
        """
        count, rest = divmod(num_microbatches, len(self.lengths))
        if rest:
            raise ValueError(
                f"{num_microbatches} slices don't make microbatches of {len(self.lengths)} slices "
                f"each: {_REMEDY}"
            )
        bounds = [*enumerate(pairwise(accumulate(self.lengths, initial=0)))]
        found = []
        for m, rows in enumerate(super().microbatches(count)):
            for j, (a, b) in bounds:
                inputs, place = tuple(x[:, a:b] for x in rows.inputs), torch.tensor(Place(m, j, a))
                found.append(Slice(inputs, rows.target[:, a:b], {"place": place}))
        return found


@LayeredModel.register
@dataclass(frozen=True)
class Sliced:
    """A language model whose microbatches are trained in slices of `lengths` tokens (see `sliced`).
    Everything else is the model's. The whole model takes whole sequences, so the gradients that it
    is compared with don't depend on slices.
    """

    model: LanguageModel
    lengths: tuple[int, ...]

    @property
    def name(self) -> str:
        """The model's name, and its slices."""
        return f"{self.model.name}, in slices of {'+'.join(map(str, self.lengths))}"

    @property
    def batch_size(self) -> int:
        """The number of slices in a batch, because a schedule's microbatches are slices."""
        return self.model.batch_size * len(self.lengths)

    def __getattr__(self, name: str) -> Any:
        # not there yet: an instance is being unpickled
        if name == "model" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.model, name)

    def build_stage(self, stage: int, num_stages: int) -> SlicedGPT:
        """Build one stage, which keeps keys and values between slices."""
        return SlicedGPT(self.model.build_stage(stage, num_stages))

    def batch(self, step: int) -> SlicedBatch:
        """The model's batch of a step, which is then also cut along its sequences."""
        batch = self.model.batch(step)
        return SlicedBatch(batch.inputs, batch.target, batch.context, lengths=self.lengths)

    def weight(self, batch: Batch) -> float:
        """The number of tokens, which is what a slice counts for."""
        return batch.target.numel()


def sliced(model: LanguageModel, slices: int | Sequence[int]) -> LayeredModel:
    """`model`, trained in slices of its sequences: a number of equal ones, or slices with these
    numbers of tokens.

    Run it under a schedule of as many slices: `pplab.build("Seq1F1B", ..., num_microbatches=M * k,
    slices=k)`, whose microbatch number m k + j is slice j of microbatch m. `pplab.lab.Slices`
    predicts times and memory. Raises ValueError for slices that don't make up the sequence.

    >>> from pplab.lab import models
    >>> gpt = models.gpt(batch_size=4, source="sample", num_layers=4, width=32, context=16)
    >>> model = sliced(gpt, 2)
    >>> [tuple(each.target.shape) for each in model.batch(0).microbatches(4)]
    [(2, 8), (2, 8), (2, 8), (2, 8)]
    """
    expect(LanguageModel, model=model)
    length = model.config.context
    if isinstance(slices, Sequence) and not isinstance(slices, str | bytes):
        lengths = tuple(positive_int(f"slices[{j}]", each) for j, each in enumerate(slices))
        if sum(lengths) != length:
            raise ValueError(
                f"slices of {shown(lengths)} tokens make {sum(lengths)}, and a sequence has "
                f"{length}"
            )
        return Sliced(model, lengths)  # type: ignore[return-value]  # it is registered
    each, rest = divmod(length, count := positive_int("slices", slices))
    if rest or not each:
        raise ValueError(
            f"a sequence of {length} tokens doesn't divide into {count} equal slices: give their "
            "lengths"
        )
    return Sliced(model, (each,) * count)  # type: ignore[return-value]  # it is registered
