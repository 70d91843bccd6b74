"""Padded batches whose microbatches are no longer than they must be."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...runtime import Batch


@dataclass(frozen=True)
class Padded(Batch):
    """A batch of padded rows, each of whose microbatches ends where its own longest row does.

    `mask` names the tensor in `context` that is 0 at padding (an attention mask), of shape (B, T). Every tensor of the
    batch whose second dimension has T places is cut, the inputs and targets among them. Padding on the left stays. The
    workload's `weight` should count what its loss is a mean over: tokens with a label, mostly.

    >>> import torch
    >>> ids = torch.tensor([[5, 6, 0, 0, 0], [7, 8, 9, 1, 0]])
    >>> batch = Padded((ids,), ids, {"attention_mask": (ids > 0).long()})
    >>> [tuple(each.target.shape) for each in batch.microbatches(2)]
    [(1, 2), (1, 4)]
    """

    mask: str = "attention_mask"

    def __post_init__(self) -> None:
        mask = self.context.get(self.mask)
        if mask is None or mask.dim() != 2:
            has = f"of shape {tuple(mask.shape)}" if mask is not None else f"not among {sorted(self.context)}"
            raise ValueError(f"mask={self.mask!r} must name a tensor (B, T) of the context, and it is {has}")

    def microbatches(self, num_microbatches: int) -> list[Batch]:
        """Equal numbers of rows, each cut to its longest; ValueError when the batch doesn't divide."""
        return [self._cut(rows) for rows in super().microbatches(num_microbatches)]

    def _cut(self, rows: Batch) -> Batch:
        mask = rows.context[self.mask]
        used = mask.ne(0).any(0).nonzero()  # the places that some row uses
        length = max(1, int(used[-1]) + 1 if len(used) else 0)

        def cut(x: Tensor) -> Tensor:
            return x[:, :length] if x.dim() > 1 and x.shape[1] == mask.shape[1] else x

        return rows.each(cut)
