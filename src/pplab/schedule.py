"""A schedule: what each rank does, in which order. It has no times, no communication and no
torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import Any

from . import text
from .actions import COMPUTE, Action, B, F, I, Kind, Overlap, W
from .errors import ScheduleError, accept, expect, shown
from .footprint import Memory

Rows = list[Sequence[int]]  # of everything that takes turns: its items, in order
Needs = list[int | None]  # of every item: the one that it needs
FEW = 100_000  # stages times microbatches that are looked through whatever the number of actions


@dataclass(frozen=True, repr=False)
class Schedule:
    """Rows of actions: `rows[rank]` lists what that rank runs, in order.

    `rows` takes actions or their text form. The placement of stages and the numbers of ranks,
    stages and microbatches follow from the rows. This class checks the form only (ValueError), and
    `pplab.validate` checks the meaning.

    >>> Schedule([["0F0", "0B0"], ["1F0", "1B0"]], name="two ranks")
    <Schedule two ranks: 2 ranks, 2 stages, 1 microbatch, 4 actions>
    """

    rows: tuple[tuple[Action | Overlap, ...], ...]
    name: str = field(compare=False)
    columns: Columns = field(init=False, compare=False)

    def __init__(self, rows: Iterable[Iterable[Action | Overlap | str]], name: str = "custom"):
        expect(str, name=name)
        plain = type(rows) is list and set(map(type, rows)) == {list}
        made = plain and set(map(type, chain.from_iterable(rows))) == {Action}  # by a builder
        items = tuple(map(tuple, rows)) if made else text.checked(rows)
        if not any(items):
            raise ValueError("a schedule needs at least one action, such as 0F0")
        accept(self, rows=items, name=name, columns=Columns.of(items))

    @cached_property
    def graph(self) -> Graph:
        """What every item waits for, in integers (computed once)."""
        return Graph.of(self.columns)

    @property
    def num_ranks(self) -> int:
        """Number of processes in the pipeline (P)."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """Number of pieces of the model (S)."""
        return self.columns.num_stages

    @property
    def num_microbatches(self) -> int:
        """Number of slices of the batch (M)."""
        return self.columns.num_microbatches

    @cached_property
    def placement(self) -> tuple[int | Any, ...]:
        """Which rank holds each stage: `placement[stage]` is a rank.

        Where several ranks hold a stage, it is a tuple of them. A bidirectional schedule keeps two
        copies of every stage, and replicas keep one each.
        """
        return tuple(
            place[0] if len(place) == 1 else tuple(place) for place in self.columns.holders
        )

    @property
    def copies(self) -> int:
        """How many ranks hold each stage, which is the number of copies of the model's parameters.
        It is 2 for a bidirectional schedule.
        """
        return max(map(len, self.columns.holders))

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every pipeline that shares no microbatch with the others. Under data
        parallelism there is more than one.

        >>> Schedule([["0F0", "0B0"], ["0F1", "0B1"]]).replicas
        ((0,), (1,))
        """
        if self.copies == 1:
            return (tuple(range(self.num_ranks)),)
        found: list[tuple[list[int], set[int]]] = []  # ranks, and their microbatches
        for rank in range(self.num_ranks):
            ranks, microbatches = [rank], set(self.columns.of_rank(rank, self.columns.microbatches))
            for other in found[:]:
                if not other[1].isdisjoint(microbatches):
                    found.remove(other)
                    ranks, microbatches = ranks + other[0], microbatches | other[1]
            found.append((ranks, microbatches))
        return tuple(sorted(tuple(sorted(ranks)) for ranks, _ in found))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, lowest first."""
        return self.columns.stages_of[rank]

    def home(self) -> dict[tuple[int, int], int]:
        """The rank that runs each (stage, microbatch)."""
        columns = self.columns
        each = zip(columns.stages, columns.microbatches, columns.ranks, strict=True)
        return {(stage, m): rank for stage, m, rank in each}

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank, the largest number of forwards whose activations are held at once.

        A rank holds them from F until B, or until W when the backward is split. So the number
        depends on the order alone, not on time. The unit is the activations of one stage for one
        microbatch.
        """
        return self.peak_held(Memory())

    def peak_held(self, memory: Memory | Sequence[float]) -> tuple[Any, ...]:
        """Per rank, the most that it holds at once, in the unit of `memory`, which is a list of
        sizes by stage or a `pplab.Memory`.
        """
        memory = memory if isinstance(memory, Memory) else Memory(activation=memory)
        memory.check(self.num_stages)
        return tuple(max(during for during, _ in memory.levels(row)) for row in self.rows)

    def __repr__(self) -> str:
        counts = self.num_ranks, self.num_stages, self.num_microbatches, self.columns.bounds[-1]
        named = map(plural, counts, ("rank", "stage", "microbatch", "action"))
        return f"<Schedule {self.name}: {', '.join(named)}>"

    def __str__(self) -> str:
        """A text grid with one line per rank, whose actions are aligned by their place in the
        row.
        """
        return "\n".join([repr(self)[10:-1], *text.grid(self.rows)])


@dataclass(frozen=True)
class Columns:
    """The actions of all rows as flat lists, so that a pass over millions of actions is fast.

    Items have ids, counted along rank 0's row, then rank 1's, and so on. An overlap has one id,
    like any action. The lists have one entry per id with the item's action (the first one of an
    overlap). The second actions of the overlaps follow after those.
    """

    bounds: tuple[int, ...]  # rank r's ids are range(bounds[r], bounds[r + 1])
    stages: list[int]  # of every entry
    kinds: list[Kind]
    microbatches: list[int]
    overlaps: list[int]  # their ids; the second half of the k-th is entry bounds[-1] + k
    num_stages: int
    num_microbatches: int

    @classmethod
    def of(cls, rows: Sequence[Sequence]) -> Columns:
        """Lay out `rows`. Raises ValueError for a stage or microbatch that isn't a whole number of
        at least 0, or that is so large that most numbers below it are missing. It raises before it
        makes anything of that size.
        """
        items, overlaps = list(chain.from_iterable(rows)), []
        if Overlap in set(map(type, items)):
            overlaps = [i for i, item in enumerate(items) if type(item) is Overlap]
            items += [items[i].second for i in overlaps]
            for i in overlaps:
                items[i] = items[i].first
        stages, kinds, microbatches = ([*map(itemgetter(k), items)] for k in range(3))
        if strange := set(map(type, kinds)) - {Kind}:
            got = strange.pop().__name__
            raise ValueError(f"an action's kind must be a pplab.Kind, such as Kind.F, not a {got}")
        S, M = _count("stage", stages), _count("microbatch", microbatches)
        if S * M > max(FEW, len(stages)):
            sizes = f"{plural(S, 'stage')} and {plural(M, 'microbatch')}"
            sizes += f" need more than {plural(len(stages), 'action')}"
            raise ScheduleError(sizes, "number stages and microbatches from 0, without a gap")
        bounds = 0, *accumulate(map(len, rows))
        return cls(bounds, stages, kinds, microbatches, overlaps, S, M)

    @cached_property
    def ids(self) -> list[int]:
        """For every entry, the id of its item."""
        return [*range(self.bounds[-1]), *self.overlaps]

    @cached_property
    def ranks(self) -> list[int]:
        """For every entry, its rank."""
        ranks = []
        for rank, (first, end) in enumerate(pairwise(self.bounds)):
            ranks += [rank] * (end - first)
        return ranks + [ranks[i] for i in self.overlaps]

    @cached_property
    def stages_of(self) -> list[tuple[int, ...]]:
        """For every rank, the stages of which it runs something, lowest first."""
        ranks = range(len(self.bounds) - 1)
        return [tuple(sorted(set(self.of_rank(rank, self.stages)))) for rank in ranks]

    @cached_property
    def holders(self) -> list[list[int]]:
        """For every stage, the ranks that run something of it."""
        holders: list[list[int]] = [[] for _ in range(self.num_stages)]
        for rank, stages in enumerate(self.stages_of):
            for stage in stages:
                holders[stage].append(rank)
        return holders

    def of_rank(self, rank: int, column: list) -> list:
        """What a rank's entries have in a column."""
        first, end = self.bounds[rank : rank + 2]
        behind = slice(*(self.bounds[-1] + bisect_left(self.overlaps, i) for i in (first, end)))
        return column[first:end] + column[behind]


def _count(name: str, column: list[int]) -> int:
    """One more than the largest value of a column. Raises ValueError unless all are whole and at
    least 0.
    """
    values = set(column) if set(map(type, column)) <= {int} else {-1}
    if min(values, default=0) >= 0:
        return max(values, default=-1) + 1
    wrong = next(x for x in column if type(x) is not int or x < 0)
    raise ValueError(f"an action's {name} must be a whole number of at least 0, got {shown(wrong)}")


@dataclass(frozen=True)
class Graph:
    """Which action waits for which: the rule of `deps.needs` in numbers, for millions of actions.

    A microbatch makes 2S hops, down through S stages and back up, and each hop needs the one before
    it:

        hop      0      1      2    ...    S         S+1     ...   2S
              (empty)  F0 --> F1 --> ... F(S-1) --> B(S-1) --> ... B0

    An I takes the hop of its B. A W waits for nothing but its turn in the row, so its hops come
    after all of these, each behind an empty one. Every hop has M places, one for each microbatch,
    and places are numbered through all hops. So an action has the place hop * M + microbatch, and
    needs the action M places before it.
    """

    columns: Columns
    entries: list[int | None]  # of every place: the entry that has it
    makers: list[int | None]  # of every entry: the one whose message it waits for

    @classmethod
    def of(cls, columns: Columns) -> Graph:
        """Find out which action waits for which, in linear time. It never raises: see `whole`."""
        S, M = columns.num_stages, columns.num_microbatches
        hops = dict.fromkeys(Kind, [4 * S + 1] * S) | _hops(S)  # at the end: communication
        first = {kind: [hop * M for hop in by_stage] for kind, by_stage in hops.items()}
        each = zip(columns.kinds, columns.stages, columns.microbatches, strict=True)
        places = [first[kind][stage] + m for kind, stage, m in each]
        entries: list[int | None] = [None] * ((4 * S + 2) * M)
        for entry, place in enumerate(places):
            entries[place] = entry
        return cls(columns, entries, [entries[place - M] for place in places])

    @cached_property
    def whole(self) -> bool:
        """Whether each stage has each microbatch's F once, and its B (or its I and later W) once,
        all on one rank.
        """
        columns, entries, M = self.columns, self.entries, self.columns.num_microbatches
        kinds, ranks, ids = columns.kinds, columns.ranks, columns.ids
        if not set(kinds) <= COMPUTE or len(entries) - entries.count(None) < len(kinds):
            return False  # communication, or two actions in one place
        hops = _hops(columns.num_stages)
        for of_stage in zip(hops[F], hops[B], hops[W], strict=True):
            of_hops = (entries[hop * M : (hop + 1) * M] for hop in of_stage)
            for f, b, w in zip(*of_hops, strict=True):
                if f is None or b is None or ranks[f] != ranks[b]:
                    return False
                if (kinds[b] is I) != (w is not None):  # a W for every I, and none for a B
                    return False
                if w is not None and (ranks[w] != ranks[b] or ids[w] < ids[b]):
                    return False
        return True

    @cached_property
    def turns(self) -> tuple[Rows, Needs]:
        """What `simulator.run` takes: the entries of every rank in turn, and what each of them
        needs.

        An overlap waits for two messages. So its second half stands before its first half and takes
        no time, and the first half takes the time of both.
        """
        rows: Rows = [range(*row) for row in pairwise(self.columns.bounds)]
        if not self.columns.overlaps:
            return rows, self.makers
        second, ids = self.second_half, self.columns.ids
        rows = [[x for i in row for x in ((second[i], i) if i in second else (i,))] for row in rows]
        return rows, [None if maker is None else ids[maker] for maker in self.makers]

    @cached_property
    def sources(self) -> list[int]:
        """For every entry, the rank from which its message comes, or its own rank if it waits for
        none.
        """
        ranks = self.columns.ranks
        each = zip(ranks, self.makers, strict=True)
        return [rank if maker is None else ranks[maker] for rank, maker in each]

    @cached_property
    def second_half(self) -> dict[int, int]:
        """For every overlap, the entry of its second half."""
        return {i: entry for entry, i in enumerate(self.columns.overlaps, self.columns.bounds[-1])}

    def awaited(self, i: int) -> list[tuple[int, int]]:
        """The messages for which an item waits, those of the first half first. Each is the entry
        that waits and the entry that produces the message.
        """
        halves = [i, self.second_half[i]] if i in self.second_half else [i]
        return [(half, maker) for half in halves if (maker := self.makers[half]) is not None]

    def id_of(self, entry: int) -> int:
        """The id of an entry's item."""
        return self.columns.ids[entry]

    def action(self, entry: int) -> Action:
        """The action of an entry."""
        columns = self.columns
        return Action(columns.stages[entry], columns.kinds[entry], columns.microbatches[entry])


def _hops(S: int) -> dict[Kind, range]:
    """For every kind, the hop of each stage."""
    back = range(2 * S, S, -1)
    return {F: range(1, S + 1), B: back, I: back, W: range(2 * S + 2, 4 * S + 2, 2)}


def plural(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 microbatches`."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")
