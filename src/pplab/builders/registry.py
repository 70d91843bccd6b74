"""What a schedule builder is, and what it says of itself."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import positive_int, unknown
from ..schedule import Schedule


@dataclass(frozen=True)
class Builder:
    """A named function from (num_ranks, num_microbatches, options) to rows of actions."""

    name: str
    rows: Callable[..., Iterable]
    rules: str  # which ranks, microbatches and options it accepts
    source: str
    placement: (
        str  # "one stage per rank"; "loop": stage s on rank s mod P; "V": on s or 2P-1-s; "bidirectional": on both
    )
    aliases: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """The keyword options of this schedule."""
        parameters = inspect.signature(self.rows).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)

    @property
    def summary(self) -> str:
        """The first line of the builder's docstring."""
        return (inspect.getdoc(self.rows) or "").partition("\n")[0]

    def __call__(self, num_ranks: int, num_microbatches: int, **options: object) -> Schedule:
        """Build the schedule; ValueError names an argument that it can't take."""
        for option in options:
            if option not in self.options:
                raise unknown(f"option of {self.name}", option, self.options or ["none: it takes no options"])
        num_ranks, num_microbatches = (
            positive_int("num_ranks", num_ranks),
            positive_int("num_microbatches", num_microbatches),
        )
        with _collection_paused():
            return Schedule(self.rows(num_ranks, num_microbatches, **options), self.name)


@contextmanager
def _collection_paused() -> Iterator[None]:
    """No garbage collection: it would look again and again at millions of new actions, none of them garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def builder(
    name: str, *, rules: str, source: str, placement: str = "one stage per rank", aliases: tuple[str, ...] = ()
) -> Callable[[Callable], Builder]:
    """Decorate a function that returns rows, so that it joins the registry with one line in `builders/__init__.py`."""
    return lambda rows: Builder(name, rows, rules, source, placement, aliases)
