"""The schedule builders: what a builder is, what it tells about itself, and which builders there
are.
"""

import functools
import gc
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..actions import Item
from ..errors import expect, positive_int, unknown
from ..optional import bring
from ..schedule import Schedule

MOST_FORWARDS = 2**24  # of a schedule: tens of GB
Rows = Sequence[Sequence[Item]]  # row r: what rank r runs, in order


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected: the search for it would look at millions of new objects again and
    again.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(eq=False)
class Builder:
    """A named function from (num_ranks, num_microbatches, options) to rows of actions."""

    name: str
    rows: Callable[..., Rows]
    rules: str  # which ranks, microbatches and options it accepts
    source: str
    # "one stage per rank", "loop": stage s on rank s mod P, "V": on s or 2P-1-s, "bidirectional":
    # on both
    placement: str
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Help on a builder (`gpipe?` in a notebook), and doctest, see the function.
        functools.update_wrapper(self, self.rows)

    @property
    def names(self) -> frozenset[str]:
        """The names under which it is found, which are its name and its aliases in plain form."""
        return frozenset(map(_plain, (self.name, *self.aliases)))

    @property
    def options(self) -> tuple[str, ...]:
        """The keyword options of this schedule."""
        parameters = inspect.signature(self.rows).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)

    def __call__(self, num_ranks: int, num_microbatches: int, **options: object) -> Schedule:
        """Build the schedule. Raises ValueError, which names the argument, for one that it can't
        take.
        """
        for option in options:
            if option not in self.options:
                what = f"option of {self.name}"
                raise unknown(what, option, self.options or ["none: it takes no options"])
        P = positive_int("num_ranks", num_ranks)
        M = positive_int("num_microbatches", num_microbatches)
        each = positive_int("stages_per_rank", options.get("stages_per_rank", 1))
        if P * M * each > MOST_FORWARDS:
            raise ValueError(
                f"{self.name} with {P} ranks, {M} microbatches and {each} stages per rank has more "
                f"than {MOST_FORWARDS:,} forwards: take fewer of these"
            )
        with uncollected():
            return Schedule(self.rows(P, M, **options), self.name)


ALL: list[Builder] = []  # that are registered so far: `known` has all
LAB = {  # whose schedules each of these files of `pplab.lab` registers, once it is opened
    "schedules.v_shape": ["ZBVZeroBubble", "ZB-V"],
    "schedules.dual_pipe": ["DualPipe", "DualPipeV"],
    "schedules.more_schedules": ["eager-1F1B", "InterleavedZeroBubble", "LoopedBFS"],
    "schedules.pairs": ["paired-1F1B"],
    "searches.searching": ["ZB-1P", "ZB-2P"],
    "schedules.controllable": ["V-Half", "V-Min"],
    "schedules.sliced_schedules": ["Seq1F1B", "TeraPipe"],
}


_ELSEWHERE = {"1f1bv": "which is OLMo-core's 1F1B on stages in a V"}


def _plain(name: str) -> str:
    """A name in lower case, without dashes, and without the beginning of torch's classes."""
    return re.sub("^schedule|[-_ ]", "", name.lower())


def _open(names: Iterable[str]) -> None:
    for file, theirs in LAB.items():
        if any(_plain(name) in names for name in theirs):
            bring(f"pplab.lab.{file}")


def known() -> list[Builder]:
    """All schedules: those of the small package, those of lab, and those registered in this
    session.
    """
    for file in LAB:
        bring(f"pplab.lab.{file}")
    return list(ALL)


def find(name: str) -> Builder:
    """The builder of that name, in any case, as papers, torch or Megatron-LM spell it. Raises
    ValueError with the nearest names when there is none.
    """
    expect(str, name=name)
    _open([_plain(name)])
    for builder in ALL:
        if _plain(name) in builder.names:
            return builder
    if story := _ELSEWHERE.get(_plain(name)):
        raise ValueError(f"unknown schedule {name!r}, {story}: write its rows, and register them")
    raise unknown("schedule", name, [builder.name for builder in known()])


def build(name: str, *, num_ranks: int, num_microbatches: int, **options: object) -> Schedule:
    """Build the schedule `name` for `num_ranks` ranks and `num_microbatches` microbatches.

    `pplab schedules` lists the names with their options and rules. Raises ValueError, which names
    what was given and what was expected.

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
    """Decorate a function of ranks, microbatches and keyword options, so that `build` finds its
    schedule by name.

    The function returns one row per rank, of actions or of their text form. `pplab schedules`
    prints `rules`, `source` and `placement`. `aliases` are further names. A registration lasts as
    long as the session, and a cell that you run again replaces what it registered. Raises
    ValueError for a name or alias of one of pplab's own schedules.

    >>> @register("all forward")
    ... def all_forward(num_ranks, num_microbatches):
    ...     order = range(num_microbatches)
    ...     forwards_first = [f"F{m}" for m in order] + [f"B{m}" for m in order]
    ...     return [[f"{rank}{action}" for action in forwards_first] for rank in range(num_ranks)]
    >>> print(build("all forward", num_ranks=1, num_microbatches=2))
    all forward: 1 rank, 1 stage, 2 microbatches, 4 actions
    rank 0  0F0 0F1 0B0 0B1
    >>> ALL.remove(all_forward)  # forgotten again
    """

    def add(rows: Callable) -> Builder:
        made = Builder(name, rows, rules, source, placement, aliases)
        _open(made.names)
        taken = [each for each in ALL if made.names & each.names]
        for own in taken:
            if own.__module__.startswith("pplab.") and own.__module__ != made.__module__:
                raise ValueError(
                    f"{name!r} can't be registered: {min(made.names & own.names)!r} is a name of "
                    f"pplab's own {own.name}, which others rely on. Register yours under a "
                    "different name"
                )
        ALL[:] = [each for each in ALL if each not in taken] + [made]
        return made

    return add
