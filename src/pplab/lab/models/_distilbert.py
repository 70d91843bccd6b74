"""DistilBERT for review classification: the hub's, one in a folder, or a small one that reads
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...optional import bring
from ._transformers import TransformersModel, from_transformers

CHECKPOINT = "distilbert/distilbert-base-uncased"
# of CHECKPOINT: what is fetched is always the same
REVISION = "12040accade4e8a0f71eabdb258fecc2e7e948be"
SMALL = {"dim": 128, "hidden_dim": 512, "n_heads": 4, "n_layers": 8, "max_position_embeddings": 128}


def distilbert(
    *,
    batch_size: int = 32,
    length: int = 64,
    checkpoint: str = "auto",
    source: str = "auto",
    cut: Sequence[int] | None = None,
) -> TransformersModel:
    """DistilBERT on reviews of `length` tokens.

    `checkpoint` is "auto", "small", a name on the hub, or a folder. "auto" takes the hub's model,
    or the small one if the hub can't be reached. Raises OSError for a name or folder that isn't
    there. The other arguments are those of `from_transformers`.
    """
    options = {"batch_size": batch_size, "length": length, "source": source, "cut": cut}
    name, said = CHECKPOINT if checkpoint == "auto" else checkpoint, ""
    if checkpoint != "small":
        try:
            return from_transformers(
                name, revision=REVISION if name == CHECKPOINT else None, **options
            )
        except OSError as error:
            if checkpoint != "auto":
                raise OSError(f'{error}, or use checkpoint="small" or "auto"') from error
            said = f" (the hub's {CHECKPOINT} can't be reached)"
    made = from_transformers(
        bring("transformers").DistilBertConfig(vocab_size=256, **SMALL), **options
    )
    return replace(
        made, notes=(made.notes[0], f"model: small DistilBERT with random weights{said}")
    )
