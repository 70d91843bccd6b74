"""The batches of a training run, by the number of the step: the same on every rank, and after a run that goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from ...errors import shown
from ...runtime import Batch

A_FUNCTION = "give a function that makes the batch of a step from its number"


class Batches:
    """`batches(step)` from one batch, a function of the step, a list, or a loader that gives the same every time.

    Every rank has its own, and asks for the same steps: so what can be gone through only once, or differs from rank to
    rank, is refused.
    """

    def __init__(self, given: Batch | Callable[[int], Batch] | Iterable[Batch]):
        self.given = given
        generator = _generator(given)
        self._seeded = generator and (generator, generator.get_state())
        self.restart()
        if not isinstance(given, Batch) and not callable(given):
            if not hasattr(given, "__iter__") or isinstance(given, (Tensor, str, dict)):
                raise ValueError(
                    "batches must be a Batch, a function of the step, a list of batches or a DataLoader, got "
                    f"{shown(given)}"
                )
            if isinstance(given, Iterator):
                raise ValueError(
                    "batches is an iterator, which gives every batch once, and each rank asks for all of them: give a "
                    f"list or a DataLoader, or {A_FUNCTION}"
                )
            if isinstance(given, DataLoader) and isinstance(given.sampler, RandomSampler) and generator is None:
                raise ValueError(
                    "this DataLoader shuffles in another order on every rank: pass it "
                    "generator=torch.Generator().manual_seed(0), or shuffle=False"
                )
        self.size: int | None = None  # samples of every batch, once one was there

    def __call__(self, step: int) -> Batch:
        """The batch of a step. ValueError where there is none, or one of another size than the first."""
        if isinstance(self.given, Batch):
            return self.given
        found = self.given(step) if callable(self.given) else self._listed(step)
        batch = as_batch(found, step)
        self.size = self.size or len(batch.target)
        if self.size != len(batch.target):
            raise ValueError(
                f"the batch of step {step} has {len(batch.target)} samples, and that of step 0 has {self.size}: all "
                "batches of a run are of one size (a DataLoader's drop_last=True leaves the last one out)"
            )
        return batch

    def _listed(self, step: int) -> object:
        """Batch `step` of something that can be gone through, from its start if it must be."""
        if hasattr(self.given, "__getitem__") and hasattr(self.given, "__len__"):
            if step >= len(self.given):
                raise self._no_more(step, len(self.given))
            return self.given[step]
        if step < self._at:
            self.restart()
        while self._at < step or self._iterator is None:
            self._iterator = self._iterator or iter(self.given)
            try:
                self._last = next(self._iterator)
            except StopIteration:
                raise self._no_more(step, self._at + 1) from None
            self._at += 1
            if self._at == 0:
                self._check_same()
        return self._last

    def _no_more(self, step: int, count: int) -> ValueError:
        return ValueError(
            f"there are {count} batches, one epoch, and the run asks for that of step {step}: take fewer steps, or "
            f"{A_FUNCTION}: of epoch step // {count}, shuffled with that number as the seed, batch step % {count}"
        )

    def _check_same(self) -> None:
        """Whether the first batch is what it was when this was made, or when it was begun before."""
        tensors = as_batch(self._last, 0).tensors
        if self._first is None:
            self._first = [x.clone() for x in tensors]
        elif len(tensors) != len(self._first) or not all(map(torch.equal, tensors, self._first)):
            raise ValueError(
                "these batches are others the second time that they are gone through: don't shuffle, or "
                f"{A_FUNCTION}, from a seed and that number"
            )

    _first: list[Tensor] | None = None

    def restart(self) -> None:
        """Go back to the start: who else goes through the same loader finds it as it was."""
        self._iterator: Iterator | None = None
        self._at, self._last = -1, None
        if self._seeded is not None:  # or the second time through would be in another order
            generator, state = self._seeded
            generator.set_state(state)

    def __getstate__(self) -> dict:
        self.restart()  # an iterator can't travel, and there each begins anew
        return vars(self)


def as_batch(found: object, step: int) -> Batch:
    """A Batch, or one of a pair (inputs, target); ValueError for anything else, such as a single sample."""
    if isinstance(found, Batch):
        return found
    if isinstance(found, (tuple, list)) and len(found) == 2 and isinstance(found[1], Tensor) and found[1].ndim:
        inputs = found[0] if isinstance(found[0], (tuple, list)) else (found[0],)
        if all(isinstance(x, Tensor) for x in inputs):
            return Batch(tuple(inputs), found[1])
    raise ValueError(
        f"step {step} has a {type(found).__name__} instead of a batch: expected a pplab.runtime.Batch, or a pair "
        "(inputs, target) of tensors whose first dimension is the batch's"
    )


def _generator(given: object) -> torch.Generator | None:
    """What a loader shuffles with, if it is its own."""
    return getattr(getattr(given, "sampler", None), "generator", None) or getattr(given, "generator", None)
