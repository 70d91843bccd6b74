"""Batches for a model of transformers: under transformers' names, or made from the reviews."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import shown
from ...optional import bring
from ...runtime import Batch
from . import data
from ._families import Family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

IGNORED = -100  # as a label: transformers' mark for what doesn't count
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def as_batch(
    fields: Mapping[str, Tensor], step: int, *, family: Family, config: PreTrainedConfig
) -> Batch:
    """transformers' fields as a Batch: `input_ids` (B, T) as inputs, `labels` as target, the rest
    for every stage. It is the same for every `step`.

    Without labels a decoder learns its own inputs, except for padding. Raises ValueError for a
    field that the model lacks or can't use, or whose values it can't look up.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(
            f"a batch for {family.model} is a dict of tensors by name, got a "
            f"{type(fields).__name__}"
        )
    fields = dict(fields)
    if lists := [name for name, rows in fields.items() if not isinstance(rows, Tensor)]:
        raise ValueError(
            f"a batch for {family.model} is made of tensors, and of {', '.join(lists)} there are "
            "lists: let the tokenizer fill rows up to one length; a streamed Dataset goes into a "
            "DataLoader, "
            '.with_format("torch")'
        )
    unknown = fields.keys() - {"input_ids", "labels", *family.context}
    wanted = {"input_ids"} | ({"labels"} if family.task != "causal" else set())
    if unknown or not wanted <= fields.keys():
        raise ValueError(
            f"a batch for {family.model} has {', '.join(sorted(wanted))}, and may have labels, "
            f"{', '.join(family.context)}: got {', '.join(fields) or 'nothing'}"
        )
    ids = fields.pop("input_ids")
    mask = fields.get("attention_mask")
    if "labels" not in fields:
        fields["labels"] = ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
    labels = fields.pop("labels")
    if family.task == "seq2seq" and "decoder_input_ids" not in fields:
        fields["decoder_input_ids"] = _shifted(labels, config)
    _check(ids, labels, fields, family, config)
    return Batch((ids,), labels, fields)


def check_rows(data: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless all have the same number of rows, and at least one."""
    sizes = {name: len(rows) for name, rows in data.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise ValueError(f"data must have as many rows of each, and some, got {shown(sizes)}")


def columns_of(dataset: Any, family: Family) -> dict[str, Any]:
    """A Dataset's columns that the model takes, by name. A row is read when its step comes."""
    tensors = dataset.with_format("torch")
    return {
        name: tensors[name]
        for name in dataset.column_names
        if name in ("input_ids", "labels", *family.context)
    }


def _shifted(labels: Tensor, config: PreTrainedConfig) -> Tensor:
    """The input of a decoder that learns `labels`: a start, then all labels but the last."""
    start = torch.full_like(labels[:, :1], _id(config, "decoder_start_token_id"))
    shifted = torch.cat([start, labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == IGNORED, _id(config, "pad_token_id"))


def _id(config: PreTrainedConfig, name: str) -> int:
    return getattr(config, name, None) or 0


def _check(
    ids: Tensor,
    labels: Tensor,
    rest: Mapping[str, Tensor],
    family: Family,
    config: PreTrainedConfig,
) -> None:
    classes = config.num_labels if family.task == "classification" else config.vocab_size
    shape = {
        "causal": ids.shape,
        "classification": ids.shape[:1],
        "seq2seq": (len(ids), *labels.shape[1:2]),
    }
    for name, tensor, wanted, most in [
        ("input_ids", ids, tuple(ids.shape), config.vocab_size),
        ("labels", labels, tuple(shape[family.task]), classes),
        *((name, t, (len(ids), *t.shape[1:]), None) for name, t in rest.items()),
    ]:
        if tuple(tensor.shape) != wanted or name == "input_ids" and tensor.dim() != 2:
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)}; input_ids (B, T) have "
                f"{tuple(ids.shape)}"
            )
        counted = tensor[tensor != IGNORED] if name == "labels" else tensor
        if most is None or not counted.numel():
            continue
        if tensor.is_floating_point() or not 0 <= int(counted.min()) <= int(counted.max()) < most:
            sizes = (
                "num_labels"
                if name == "labels" and family.task == "classification"
                else "vocab_size"
            )
            raise ValueError(
                f"{name} must be whole numbers below the config's {sizes}, {most}, got "
                f"{tensor.dtype} from "
                f"{counted.min():g} to {counted.max():g}: take the tokenizer that belongs to the "
                "model, or a config with a larger "
                f"{sizes}"
            )
    longest = getattr(config, "max_position_embeddings", None)
    if longest and ids.shape[1] > longest:
        raise ValueError(
            f"sequences of {ids.shape[1]} tokens are longer than the config's {longest} positions"
        )


def find_tokenizer(tokenizer: object, checkpoint: str | None) -> PreTrainedTokenizerBase | None:
    """A tokenizer from a name, a folder or itself, or None for bytes. Raises OSError where there is
    none.
    """
    if tokenizer == "bytes" or (tokenizer == "auto" and checkpoint is None):
        return None
    if not isinstance(tokenizer, str):
        return tokenizer
    AutoTokenizer = bring("transformers").AutoTokenizer
    from ._weights import find_checkpoint

    folder = checkpoint if tokenizer == "auto" else find_checkpoint(tokenizer)[0]
    try:
        if not any((Path(folder) / name).is_file() for name in _VOCABULARIES):
            # transformers would make an empty tokenizer
            raise FileNotFoundError(f"none of {', '.join(_VOCABULARIES)}")
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of many kinds, by what is missing
        raise OSError(
            f"{folder} has no tokenizer that works here ({shown(error)}): save one there with "
            "tokenizer.save_pretrained(folder), give another one as tokenizer=..., or "
            'tokenizer="bytes"'
        ) from error


def review_rows(
    found: data.Reviews, task: str, length: int, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Tensor]:
    """The reviews as rows of `length` tokens, by transformers' names.

    A decoder reads them as one text. A classifier reads the beginning of each, and its label is the
    number of stars. An encoder-decoder reads the first half of each beginning, and learns the
    second.
    """
    if task == "causal":
        encoded = _encode("\n".join(found.texts), tokenizer, None)
        rows = len(encoded) // length
        return {"input_ids": torch.tensor(encoded[: rows * length]).view(rows, length)}
    fill = getattr(tokenizer, "pad_token_id", None) or 0
    if task == "classification":
        ids, mask = _padded(
            [_encode(text, tokenizer, length) for text in found.texts], length, fill
        )
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(found.labels)}
    encoded = [_encode(text, tokenizer, 2 * length) for text in found.texts]
    ids, mask = _padded([each[: len(each) // 2] for each in encoded], length, fill)
    labels, _ = _padded([each[len(each) // 2 :] for each in encoded], length, IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _encode(
    text: str, tokenizer: PreTrainedTokenizerBase | None, most: int | None
) -> Sequence[int]:
    if tokenizer is None:
        return list(text.encode()[:most])
    if most is None:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return tokenizer(text, truncation=True, max_length=most)["input_ids"]


def _padded(rows: Sequence[Sequence[int]], length: int, fill: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens (B, length), padded at their ends, and the mask that tells where tokens
    are.
    """
    ids = torch.tensor([[*row[:length], *[fill] * (length - len(row))] for row in rows])
    mask = torch.tensor([[1] * min(len(row), length) + [0] * (length - len(row)) for row in rows])
    return ids, mask
