"""The batches of a training run by the number of the step, so that they are the same on every rank,
and in a run that goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from ...errors import shown
from ...runtime import Batch, EndOfBatches

A_FUNCTION = "give a function that makes the batch of a step from its number"


class Batches:
    """`batches(step)` from one batch, a function of the step, a list, or a loader that gives the
    same batches every time.

    Every rank has its own, and asks for the same steps. So an iterator that can be used only once,
    or that differs from rank to rank, is refused. `make(found, step)` turns what there is for a
    step into a Batch. `count` is the number of steps for which there are batches, or None where it
    can't be known. A shorter batch at the end isn't counted.

    Ranks can't have workers. Each rank does itself what a loader's workers would do, and `notes`
    mention it.
    """

    def __init__(self, given: Any, make: Callable[[Any, int], Batch] | None = None):
        self.given, self.make, self.notes = given, make or as_batch, ()
        generator = _generator(given)
        if isinstance(given, DataLoader) and given.num_workers:
            self.notes = (
                f"the DataLoader's {given.num_workers} workers aren't used: each rank loads its "
                "batches itself",
            )
            self.given = given = _without_workers(given)
        self.count = _count(given)
        self._seeded = generator and (generator, generator.get_state())
        self.restart()
        if not isinstance(given, Batch) and not callable(given):
            if not hasattr(given, "__iter__") or isinstance(given, (Tensor, str, dict)):
                raise ValueError(
                    "batches must be a Batch, a function of the step, a list of batches or a "
                    "DataLoader, got "
                    f"{shown(given)}"
                )
            if isinstance(given, Iterator):
                raise ValueError(
                    "batches is an iterator, which gives every batch once, and each rank asks for "
                    "all of them: give a list or a DataLoader, or "
                    f"{A_FUNCTION}"
                )
            if (
                isinstance(given, DataLoader)
                and isinstance(given.sampler, RandomSampler)
                and generator is None
            ):
                raise ValueError(
                    "this DataLoader shuffles in another order on every rank: pass it "
                    "generator=torch.Generator().manual_seed(0), or shuffle=False"
                )
        self.size: int | None = None  # samples of every batch, once one was there

    def __call__(self, step: int) -> Batch:
        """The batch of a step. Raises ValueError where there is none, or if its size differs from
        the first one's.
        """
        if isinstance(self.given, Batch):
            return self.given
        found = self.given(step) if callable(self.given) else self._listed(step)
        batch = self.make(found, step)
        self.size = self.size or len(batch.target)
        if self.size != len(batch.target):
            raise (ValueError if callable(self.given) else EndOfBatches)(
                f"the batch of step {step} has {len(batch.target)} samples, and that of step 0 has "
                f"{self.size}: all batches of a run are of one size (a DataLoader's drop_last=True "
                "leaves the last one out)"
            )
        return batch

    def _listed(self, step: int) -> object:
        """Batch `step` of a loader, read from its start if necessary."""
        if hasattr(self.given, "__getitem__") and hasattr(self.given, "__len__"):
            if step >= len(self.given):
                raise _no_more(step, len(self.given))
            return self.given[step]
        if step < self._at:
            self.restart()
        while self._at < step or self._iterator is None:
            if self._iterator is None:
                self._iterator = iter(self.given)
            try:
                self._last = next(self._iterator)
            except StopIteration:
                raise _no_more(step, self._at + 1) from None
            self._at += 1
            if self._at == 0:
                self._check_same()
        return self._last

    def _check_same(self) -> None:
        """Raise ValueError unless the first batch is still what it was when this was made or
        started before.
        """
        tensors = self.make(self._last, 0).tensors
        if self._first is None:
            self._first = [x.clone() for x in tensors]
        elif len(tensors) != len(self._first) or not all(map(torch.equal, tensors, self._first)):
            raise ValueError(
                "these batches are others the second time that they are gone through: don't "
                "shuffle, or "
                f"{A_FUNCTION}, from a seed and that number"
            )

    _first: list[Tensor] | None = None

    def restart(self) -> None:
        """Go back to the start, so that others who use the same loader find it as it was."""
        self._iterator: Iterator | None = None
        self._at, self._last = -1, None
        if self._seeded is not None:  # or the second time through would be in another order
            generator, state = self._seeded
            generator.set_state(state)

    def __getstate__(self) -> dict:
        self.restart()  # an iterator can't travel, and there each begins anew
        return vars(self)


def epochs(loader: DataLoader) -> Callable[[int], object]:
    """The batches of a DataLoader, over and over, in a different order in every epoch if it
    shuffles. `Modules` and `from_transformers` take it as their batches.

    The order follows from the epoch's number alone, so it is the same on every rank, and in a run
    that goes on. A shorter batch at an epoch's end is left out. Raises ValueError for a stream,
    because its length isn't known.
    """
    if (
        not isinstance(loader, DataLoader)
        or loader.batch_sampler is None
        or not (count := _count(loader))
    ):
        raise ValueError(
            "epochs takes a DataLoader of a data set that has a length, and a whole batch, got "
            f"{shown(loader)}: give a stream itself, and no more steps than it has batches"
        )
    return _Epochs(_without_workers(loader), count)


class _Epochs:
    def __init__(self, loader: DataLoader, count: int):
        self.loader, self.count, self.epoch, self.order = loader, count, None, []

    def __call__(self, step: int) -> object:
        """The loader's batch for a step."""
        epoch, place = divmod(step, self.count)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, self._order(epoch)
        return self.loader.collate_fn([self.loader.dataset[int(i)] for i in self.order[place]])

    def _order(self, epoch: int) -> list[list[int]]:
        """The samples of each batch, drawn by the epoch's number alone."""
        if (generator := _generator(self.loader)) is not None:
            generator.manual_seed(epoch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(epoch)
            return list(self.loader.batch_sampler)


def _without_workers(loader: DataLoader) -> DataLoader:
    """A loader of the same batches without workers, which loads them where it is used."""
    alone = copy.copy(loader)
    alone.num_workers, alone.timeout, alone.prefetch_factor, alone._iterator = 0, 0, None, None
    return alone


def _count(given: object) -> int | None:
    """How many batches of one size there are, if that can be known."""
    try:
        if isinstance(given, DataLoader) and given.batch_size:
            return len(given.sampler) // given.batch_size
        return len(given)
    except TypeError:  # a stream, a function
        return None


def _no_more(step: int, count: int) -> EndOfBatches:
    return EndOfBatches(f"there are {count} batches, and none for step {step}")


def as_batch(found: object, step: int) -> Batch:
    """A Batch, or one from a pair (inputs, target). Raises ValueError for anything else, such as a
    single sample.
    """
    if isinstance(found, Batch):
        return found
    if (
        isinstance(found, (tuple, list))
        and len(found) == 2
        and isinstance(found[1], Tensor)
        and found[1].ndim
    ):
        inputs = found[0] if isinstance(found[0], (tuple, list)) else (found[0],)
        if all(isinstance(x, Tensor) for x in inputs):
            return Batch(tuple(inputs), found[1])
    raise ValueError(
        f"step {step} has a {type(found).__name__} instead of a batch: expected a "
        "pplab.runtime.Batch, or a pair (inputs, target) of tensors whose first dimension is the "
        "batch's. For one pair in every step, give pplab.runtime.Batch((inputs,), target)"
    )


def _generator(given: object) -> torch.Generator | None:
    """The generator with which a loader shuffles, if it has its own."""
    return getattr(getattr(given, "sampler", None), "generator", None) or getattr(
        given, "generator", None
    )
