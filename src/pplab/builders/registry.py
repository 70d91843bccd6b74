"""What a schedule builder is, what it says of itself, and which there are."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from ..actions import Action, Overlap
from ..errors import expect, positive_int, unknown
from ..schedule import Schedule

MOST_FORWARDS = 2**24  # of a schedule: tens of GB
Rows = Sequence[Sequence[Action | Overlap]]  # row r: what rank r runs, in order


@dataclass(frozen=True)
class Builder:
    """A named function from (num_ranks, num_microbatches, options) to rows of actions."""

    name: str
    rows: Callable[..., Rows]
    rules: str  # which ranks, microbatches and options it accepts
    source: str
    # "one stage per rank"; "loop": stage s on rank s mod P; "V": on s or 2P-1-s; "bidirectional": on both
    placement: str
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Help on a builder (`gpipe?` in a notebook), and doctest, see the function: its words and its parameters.
        seen = {
            "__doc__": self.rows.__doc__,
            "__module__": self.rows.__module__,
            "__wrapped__": self.rows,
        }
        vars(self).update(
            seen, __signature__=inspect.signature(self.rows)
        )  # so, since the dataclass is frozen

    @property
    def names(self) -> frozenset[str]:
        """What it is found by: its name and its aliases, in lower case."""
        return frozenset(name.lower() for name in (self.name, *self.aliases))

    @property
    def options(self) -> tuple[str, ...]:
        """The keyword options of this schedule."""
        return tuple(
            p.name
            for p in inspect.signature(self.rows).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        )

    def __call__(self, num_ranks: int, num_microbatches: int, **options: object) -> Schedule:
        """Build the schedule; ValueError names an argument that it can't take."""
        for option in options:
            if option not in self.options:
                raise unknown(
                    f"option of {self.name}", option, self.options or ["none: it takes no options"]
                )
        sizes = (
            positive_int("num_ranks", num_ranks),
            positive_int("num_microbatches", num_microbatches),
        )
        each = positive_int("stages_per_rank", options.get("stages_per_rank", 1))
        if prod(sizes) * each > MOST_FORWARDS:
            raise ValueError(
                f"{self.name}: more than {MOST_FORWARDS:,} forwards; take fewer ranks or microbatches"
            )
        collects = gc.isenabled()
        gc.disable()  # it would look again and again at millions of new actions, none of them garbage
        try:
            return Schedule(self.rows(*sizes, **options), self.name)
        finally:
            if collects:
                gc.enable()


ALL: list[
    Builder
] = []  # in the order of the imports in `builders/__init__.py`, then the lab's, then the session's


def find(name: str) -> Builder:
    """The builder of that name, whatever its case; ValueError with the nearest names when there is
    none.
    """
    expect(str, name=name)
    if found := [builder for builder in ALL if name.lower() in builder.names]:
        return found[0]
    more = [] if "pplab.lab" in sys.modules else ["and more once pplab.lab is imported"]
    raise unknown("schedule", name, [builder.name for builder in ALL] + more)


def build(name: str, *, num_ranks: int, num_microbatches: int, **options: object) -> Schedule:
    """Build the schedule `name` for `num_ranks` ranks and `num_microbatches` microbatches.

    `pplab schedules` lists the names with their options and rules. ValueError names what was given
    and expected.

    >>> print(build("1F1B", num_ranks=2, num_microbatches=3))
    1F1B: 2 ranks, 2 stages, 3 microbatches, 12 actions
    rank 0  0F0 0F1 0B0 0F2 0B1 0B2
    rank 1  1F0 1B0 1F1 1B1 1F2 1B2
    """
    return find(name)(num_ranks, num_microbatches, **options)


def register(
    name: str,
    *,
    rules: str = "not said",
    source: str = "this session",
    placement: str = "one stage per rank",
    aliases: tuple[str, ...] = (),
) -> Callable[[Callable[..., Rows]], Builder]:
    """Decorate a function of ranks, microbatches and options by keyword, so that `build` knows its
    schedule by name.

    The function returns a row per rank, of actions or their text form. `pplab schedules` says
    `rules`, `source` and `placement`; `aliases` are further names. In a notebook a cell that is run
    again replaces what it registered, which lasts as long as the session. ValueError for a name or
    alias of one of the package's own schedules.

    >>> @register("all forward")
    ... def all_forward(num_ranks, num_microbatches):
    ...     order = range(num_microbatches)
    ...     return [[f"{r}F{m}" for m in order] + [f"{r}B{m}" for m in order] for r in range(num_ranks)]
    >>> print(build("all forward", num_ranks=1, num_microbatches=2))
    all forward: 1 rank, 1 stage, 2 microbatches, 4 actions
    rank 0  0F0 0F1 0B0 0B1
    >>> ALL.remove(all_forward)  # forgotten again
    """

    def add(rows: Callable) -> Builder:
        made = Builder(name, rows, rules, source, placement, aliases)
        for known in (taken := [known for known in ALL if made.names & known.names]):
            if known.__module__.startswith("pplab.") and known.__module__ != made.__module__:
                whose = f"{min(made.names & known.names)!r} is a name of pplab's own {known.name}, which others rely on"
                raise ValueError(
                    f"{name!r} can't be registered: {whose}. Register yours under another name"
                )
        ALL[:] = [known for known in ALL if known not in taken] + [made]
        return made

    return add
