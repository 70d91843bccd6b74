"""Models of transformers as workloads: from a config or a checkpoint, built a stage at a time."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from ...errors import positive_int
from ...runtime import Batch
from . import data as reviews
from ._batches import IGNORED, as_batch, check_rows, columns_of, find_tokenizer, review_rows
from ._by_step import Batches
from ._configs import checked_config, config_in
from ._cutting import LayeredModel
from ._families import Family, Share, depths, family_of, names_held, part, shares
from ._weights import (
    TOKENIZER,
    Weights,
    find_checkpoint,
    materialise,
    names_of,
    skeleton,
    tensors_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Rows = Mapping[str, Tensor]  # by transformers' names; each (rows, ...)


@dataclass(frozen=True)
class TransformersModel(LayeredModel):
    """A model of transformers that is cut by layers. `from_transformers` makes it, and explains its
    arguments.

    No rank holds more than its stages, because weights are made, or read from the checkpoint, a
    stage at a time. The whole model is built only where it is needed, for example by
    `check_gradients`.
    """

    config: PreTrainedConfig = field(repr=False)
    data: Rows | Batches = field(repr=False)
    batch_size: int
    length: int  # tokens of a sample, in the first batch
    stacks: tuple[int, ...]  # layers of each: one stack, or the encoder's and the decoder's
    checkpoint: str | None = None  # a folder; random weights when None
    untied: tuple[str, ...] = ()  # what transformers ties, and the checkpoint doesn't
    attention: str = "sdpa"
    dropout: float | None = 0.0
    seed: int = 0
    notes: tuple[str, ...] = ()
    cut: tuple[int, ...] | None = None  # layers of each stage; evenly when None

    @property
    def family(self) -> Family:
        """Where this kind of model can be cut."""
        return family_of(self.config.model_type)

    @property
    def num_layers(self) -> int:
        """The number of layers in all stacks."""
        return sum(self.stacks)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The names of the layers, in order."""
        names = ("layer",) if len(self.stacks) == 1 else ("encoder", "decoder")
        return tuple(
            f"{name} {n}"
            for name, depth in zip(names, self.stacks, strict=True)
            for n in range(depth)
        )

    @property
    def name(self) -> str:
        """The model's size in words."""
        size = (
            f"{self.family.model} with {'+'.join(map(str, self.stacks))} layers{self.cut_in_words}"
        )
        return f"{size}, batch {self.batch_size} x {self.length} tokens"

    def skeleton(self) -> PreTrainedModel:
        """The whole model on the meta device, with names and shapes but without memory."""
        return skeleton(self.config, self.attention, self.dropout, self.untied)

    def stage_bytes(self, num_stages: int) -> tuple[int, ...]:
        """Bytes of every stage's weights, before anything is built."""
        model = self.skeleton()
        weights = dict(model.named_parameters(remove_duplicate=False))
        own = (
            {weights[name] for name in names_held(self._shares(n, num_stages), weights)}
            for n in range(num_stages)
        )
        return tuple(sum(p.nbytes for p in parameters) for parameters in own)

    def tied(self, num_stages: int) -> dict[str, tuple[tuple[int, str], ...]]:
        """The weights that several stages keep, by name, with their places as (stage, name in that
        stage).
        """
        weights = dict(self.skeleton().named_parameters(remove_duplicate=False))
        names = names_of(weights.items())
        places: dict[str, dict[int, str]] = {}
        for stage in range(num_stages):
            for name in names_held(self._shares(stage, num_stages), weights):
                places.setdefault(names[id(weights[name])][0], {}).setdefault(stage, name)
        return {name: tuple(found.items()) for name, found in places.items() if len(found) > 1}

    def _shares(self, stage: int, num_stages: int) -> list[Share]:
        return shares(self.family, self.stacks, stage, num_stages, self.cut)

    def build_stage(self, stage: int, num_stages: int) -> nn.Module:
        """Build one stage, with the weights that the whole model has there, and no others."""
        model, found = self.skeleton(), self._shares(stage, num_stages)
        self._fill(model, names_held(found, dict(tensors_of(model))))
        return part(model, found)

    def build_whole(self) -> PreTrainedModel:
        """Build transformers' model in one piece, with the same weights at every call, including
        those of a new head.
        """
        model = self.skeleton()
        self._fill(model, list(dict(tensors_of(model))))
        return model

    def _fill(self, model: PreTrainedModel, held: Sequence[str]) -> None:
        materialise(
            model, held, self.seed, Weights(self.checkpoint, model) if self.checkpoint else None
        )

    def batch(self, step: int) -> Batch:
        """The batch of a step: token ids (B, T), labels as target, and for every stage the mask and
        the other fields.
        """
        if isinstance(self.data, Batches):
            return self.data(step)
        first, rows = step * self.batch_size, len(next(iter(self.data.values())))
        taken = [i % rows for i in range(first, first + self.batch_size)]
        return self.as_batch({name: t[taken] for name, t in self.data.items()})

    def as_batch(self, found: Rows | Batch, step: int = 0) -> Batch:
        """Turn transformers' fields into a batch."""
        return (
            found
            if isinstance(found, Batch)
            else as_batch(found, step, family=self.family, config=self.config)
        )

    @property
    def num_batches(self) -> int | None:
        """The number of steps for which there are batches. Rows begin again at their end."""
        return self.data.count if isinstance(self.data, Batches) else None

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy of the labels that count, which are all but -100. `output` is scores,
        (B, T, vocabulary) or (B, classes), or transformers' output with them. A decoder's scores
        are for the next token.
        """
        scores, target = getattr(output, "logits", output), self._counted(target)
        total = functional.cross_entropy(
            scores.flatten(0, -2), target.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total / (target != IGNORED).sum().clamp(min=1)

    def weight(self, batch: Batch) -> int:
        """The number of labels that count, which is the weight of a microbatch's mean loss in that
        of the batch.
        """
        return int((self._counted(batch.target) != IGNORED).sum())

    def _counted(self, labels: Tensor) -> Tensor:
        """The label of every score. A decoder's is the next token, and the last token has none."""
        return (
            functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            if self.family.task == "causal"
            else labels
        )

    def export(
        self,
        checkpoint: str | os.PathLike,
        folder: str | os.PathLike,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Write the weights of a checkpoint, which `lab.Save` made, as a folder for transformers'
        from_pretrained and for `from_transformers`.

        Weights are written in the config's dtype, as they were given. The tokenizer is copied from
        a folder that was given, unless you give `tokenizer`. This process holds the whole model
        meanwhile.
        """
        from ..checkpoints import Checkpoint

        found = Checkpoint.open(checkpoint)
        found.check_fits(self)
        model = found.load(self.build_whole()).to(self.config.dtype or torch.float32)
        model.config = copy.deepcopy(self.config)  # with its rates of dropout
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        elif self.checkpoint and not Path(self.checkpoint).samefile(folder):
            for path in (path for name in TOKENIZER for path in Path(self.checkpoint).glob(name)):
                shutil.copyfile(path, Path(folder, path.name))


def from_transformers(
    model: PreTrainedConfig | str | os.PathLike,
    data: Rows | Callable[[int], Rows] | Iterable[Rows] | None = None,
    *,
    batch_size: int = 32,
    length: int = 64,
    tokenizer: str | PreTrainedTokenizerBase = "auto",
    source: str = "auto",
    revision: str | None = None,
    attention: str = "sdpa",
    dropout: float | None = 0.0,
    seed: int = 0,
    cut: Sequence[int] | None = None,
) -> TransformersModel:
    """A model of transformers as a workload: decoders (Llama, Mistral, Qwen2, Qwen3, GPT-2) predict
    the next token, encoders (BERT, DistilBERT) classify, and T5 continues.

    `model` is a config, whose weights are drawn from `seed`, or a checkpoint with weights in
    safetensors, which is a folder, or a name on the hub with its `revision`. `data` is one of
    these:

    - rows by transformers' names (input_ids, attention_mask, labels ...), of which every step takes
      the next `batch_size`, or a Dataset of `datasets` with such columns, padded to one length,
    - an importable function that returns the rows of a step,
    - a DataLoader of such dicts, as for `Modules`,
    - None, for reviews of `length` tokens from `source`, as `pplab.lab.data.reviews` takes it.

    `tokenizer` is a tokenizer, its name or folder, "bytes", or "auto", which is a checkpoint's own
    one and bytes for a config. `dropout` replaces the config's rates, unless it is None. `cut`
    gives the number of layers of each stage (evenly when left out).

    Raises ValueError for a model that it can't cut, and for data or weights of a different model,
    and OSError where a folder, the hub or a tokenizer isn't there.

    >>> from transformers import LlamaConfig
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4)
    >>> config = LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes)
    >>> llama = from_transformers(config, batch_size=8, length=16, source="sample")
    >>> print(llama.name)
    LlamaForCausalLM with 4 layers, batch 8 x 16 tokens
    >>> llama.stage_bytes(2)
    (115200, 115328)
    """
    checkpoint = None
    if isinstance(model, (str, os.PathLike)):
        checkpoint, said = find_checkpoint(os.fspath(model), revision)
        checkpoint = os.path.abspath(checkpoint)  # ranks may run elsewhere
        config = config_in(checkpoint)
    else:
        said, config = "random weights", checked_config(model)
    family = family_of(config.model_type)
    config, notes = copy.deepcopy(config), []
    if data is None:
        found = reviews.reviews(source=source, limit=512)
        data = review_rows(
            found,
            family.task,
            positive_int("length", length),
            find_tokenizer(tokenizer, checkpoint),
        )
        notes.append(f"reviews: {found.source}")
        if family.task == "classification":
            config.num_labels = 5  # stars
    if hasattr(data, "with_format") and hasattr(data, "__len__"):
        data = columns_of(data, family)
    if isinstance(data, Mapping):
        check_rows(data)
    else:
        data = Batches(data, partial(as_batch, family=family, config=config))
        notes += data.notes
    outline, new, untied = skeleton(config, attention, dropout), [], ()
    if checkpoint:
        weights = Weights(checkpoint, outline)
        new, untied = weights.check(outline), weights.untied(outline)
    notes += [f"model: {said}", *[f"drawn at random: {', '.join(new)}"] * bool(new)]
    made = TransformersModel(
        *(
            config,
            data,
            positive_int("batch_size", batch_size),
            0,
            depths(outline, family),
            checkpoint,
            untied,
        ),
        *(attention, dropout, seed, tuple(notes), None if cut is None else tuple(cut)),
    )
    (first,) = made.batch(0).inputs  # what is wrong with the data shows here, and not on the ranks
    return replace(made, batch_size=len(first), length=first.shape[1])
