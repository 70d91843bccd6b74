"""DistilBERT for review classification, from transformers, cut by layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from ...errors import positive_int
from ...optional import bring
from ...runtime import Batch
from . import data
from ._configs import config_in
from ._cutting import LayeredModel
from ._weights import check_numbers, find_checkpoint

CHECKPOINT = "distilbert/distilbert-base-uncased"
REVISION = "12040accade4e8a0f71eabdb258fecc2e7e948be"  # of CHECKPOINT: what is fetched is always the same
SMALL = {"dim": 128, "hidden_dim": 512, "n_heads": 4, "n_layers": 8, "max_position_embeddings": 128}


@dataclass(frozen=True)
class DistilBert(LayeredModel):
    """Review classification. `checkpoint` is a folder, or None for the small model with random weights."""

    checkpoint: str | None
    vocabulary: int
    batch_size: int
    input_ids: Tensor = field(repr=False)  # (reviews, T)
    attention_mask: Tensor = field(repr=False)  # (reviews, T)
    labels: Tensor = field(repr=False)  # (reviews,)
    num_layers: int = 0
    dropout: float = 0.0  # 0, so that a pipeline can be compared with one process
    attention: str = "sdpa"
    seed: int = 0
    notes: tuple[str, ...] = ()
    cut: tuple[int, ...] | None = None  # layers of each stage; evenly when None

    @property
    def name(self) -> str:
        """The model's size in words."""
        size = f"{'' if self.checkpoint else 'small '}DistilBERT with {self.num_layers} layers{self.cut_in_words}"
        return f"{size}, batch {self.batch_size} x {self.input_ids.shape[1]} tokens"

    def build_whole(self) -> nn.Module:
        """transformers' model; the same weights at every call, a new classifier's included."""
        bring("transformers")
        from transformers import DistilBertConfig, DistilBertForSequenceClassification, logging

        logging.set_verbosity_error()  # else from_pretrained warns that the classifier is new, which is the point
        rates = {"dropout": self.dropout, "attention_dropout": self.dropout, "seq_classif_dropout": self.dropout}
        options = {"num_labels": 5, "attn_implementation": self.attention, **rates}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if self.checkpoint:
                made = DistilBertForSequenceClassification.from_pretrained(self.checkpoint, **options).train()
                for name, weight in made.named_parameters():
                    check_numbers(weight.detach(), name, self.checkpoint)
                return made
            config = DistilBertConfig(vocab_size=self.vocabulary, **SMALL, **options)
            return DistilBertForSequenceClassification(config).train()

    def batch(self, step: int) -> Batch:
        """The reviews of a step: token ids (B, T), stars as target (B,), and for every stage the mask (B, T)."""
        first = step * self.batch_size
        rows = [i % len(self.labels) for i in range(first, first + self.batch_size)]
        return Batch((self.input_ids[rows],), self.labels[rows], {"attention_mask": self.attention_mask[rows]})

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy per review. `output` is logits (B, 5), or transformers' output that holds them."""
        return functional.cross_entropy(getattr(output, "logits", output), target)


def distilbert(
    *,
    batch_size: int = 32,
    length: int = 64,
    checkpoint: str = "auto",
    source: str = "auto",
    seed: int = 0,
    cut: Sequence[int] | None = None,
) -> DistilBert:
    """DistilBERT on reviews of `length` tokens.

    `checkpoint`: "auto" takes the hub's model, or the small one where the hub can't be reached; "small"; or a name on
    the hub or a folder, which must be there (OSError otherwise). `source` is that of `pplab.lab.data.reviews`.
    `cut`: how many layers each stage gets; evenly when left out.
    """
    found = data.reviews(source=source, limit=512)
    folder, said = _find_checkpoint(checkpoint)
    if folder is None:
        tokenizer, num_layers = data.small_tokenizer(), SMALL["n_layers"]
    else:
        num_layers = config_in(folder).num_hidden_layers
        tokenizer = bring("transformers").AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(
        list(found.texts),
        padding="max_length",
        truncation=True,
        max_length=positive_int("length", length),
        return_tensors="pt",
    )
    return DistilBert(
        folder,
        len(tokenizer),
        positive_int("batch_size", batch_size),
        encoded["input_ids"],
        encoded["attention_mask"],
        torch.tensor(found.labels),
        num_layers,
        seed=seed,
        notes=(f"reviews: {found.source}", f"model: {said}"),
        cut=None if cut is None else tuple(cut),
    )


def _find_checkpoint(checkpoint: str) -> tuple[str | None, str]:
    """A local folder with the checkpoint (None for the small model), and what it is in words."""
    small = "small DistilBERT with random weights"
    if checkpoint == "small":
        return None, small
    name = CHECKPOINT if checkpoint == "auto" else checkpoint
    try:
        return find_checkpoint(name, REVISION if name == CHECKPOINT else None)
    except OSError as error:
        if checkpoint == "auto":
            return None, f"{small} (the hub's {CHECKPOINT} can't be reached)"
        raise OSError(f'{error}, or use checkpoint="small" or "auto"') from error
