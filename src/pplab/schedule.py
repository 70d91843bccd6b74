"""A schedule: what each rank does, in which order. No times, no communication, no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise
from operator import gt, itemgetter
from typing import Any

from . import text
from .actions import COMPUTE, Action, B, F, I, Kind, Overlap, W
from .errors import ScheduleError, expect, shown
from .footprint import Memory

NOBODY = -1  # in place of an id or an entry
FEW = 100_000  # stages times microbatches that are looked through whatever the number of actions


@dataclass(frozen=True, repr=False)
class Schedule:
    """Rows of actions: `rows[rank]` is what that rank runs, in order.

    `rows` takes actions or their text form. Where each stage lives, and how many ranks, stages and
    microbatches there are, follows from the rows. Only the form is checked here (ValueError);
    `pplab.validate` checks the meaning.

    >>> Schedule([["0F0", "0B0"], ["1F0", "1B0"]], name="two ranks")
    <Schedule two ranks: 2 ranks, 2 stages, 1 microbatch, 4 actions>
    """

    rows: tuple[tuple[Action | Overlap, ...], ...]
    name: str = field(compare=False)
    columns: Columns = field(init=False, compare=False)

    def __init__(self, rows: Iterable[Iterable[Action | Overlap | str]], name: str = "custom"):
        expect(str, name=name)
        plain = isinstance(rows, list | tuple) and all(
            isinstance(row, list | tuple) for row in rows
        )
        made = plain and {*map(type, chain.from_iterable(rows))} == {Action}  # by a builder
        rows = tuple(map(tuple, rows)) if made else text.checked(rows)
        if not any(rows):
            raise ValueError("a schedule needs at least one action")
        vars(self).update(rows=rows, name=name, columns=Columns.of(rows))

    @cached_property
    def graph(self) -> Graph:
        """What every item waits for, in integers (computed once)."""
        return Graph.of(self.columns)

    @property
    def num_ranks(self) -> int:
        """Processes in the pipeline (P)."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """Pieces of the model (S)."""
        return self.columns.num_stages

    @property
    def num_microbatches(self) -> int:
        """Slices of the batch (M)."""
        return self.columns.num_microbatches

    @cached_property
    def placement(self) -> tuple[int | Any, ...]:
        """Which rank holds each stage: `placement[stage]` is a rank.

        A bidirectional schedule keeps two copies of every stage, replicas one each: there it is all
        their ranks.
        """
        return tuple(
            place[0] if len(place) == 1 else tuple(place) for place in self.columns.holders
        )

    @property
    def copies(self) -> int:
        """Copies of the model's parameters: as many as ranks hold a stage. 2 when the schedule is
        bidirectional.
        """
        return max(len(place) if isinstance(place, tuple) else 1 for place in self.placement)

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every pipeline that shares no microbatch with another one: more than one
        under data parallelism.

        >>> Schedule([["0F0", "0B0"], ["0F1", "0B1"]]).replicas
        ((0,), (1,))
        """
        if self.copies == 1:
            return (tuple(range(self.num_ranks)),)
        found: list[
            tuple[list[int], set[int]]
        ] = []  # ranks, and the microbatches that they work on
        for rank in range(self.num_ranks):
            ranks, microbatches = [rank], set(self.columns.of_rank(rank, self.columns.microbatches))
            for other in [other for other in found if not other[1].isdisjoint(microbatches)]:
                found.remove(other)
                ranks, microbatches = other[0] + ranks, other[1] | microbatches
            found.append((ranks, microbatches))
        return tuple(sorted(tuple(sorted(ranks)) for ranks, _ in found))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, lowest first."""
        return tuple(sorted(set(self.columns.of_rank(rank, self.columns.stages))))

    def home(self) -> dict[tuple[int, int], int]:
        """The rank of every (stage, microbatch)."""
        columns = self.columns
        return dict(
            zip(zip(columns.stages, columns.microbatches, strict=True), columns.ranks, strict=True)
        )

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank, the most forwards whose activations are held at once.

        A forward's activations are held from F until B, or until W when the backward is split: that
        depends on the order alone, not on time. The unit is one stage's activations for one
        microbatch.
        """
        return self.peak_held(Memory())

    def peak_held(self, memory: Memory | Sequence[float]) -> tuple[float, ...]:
        """Per rank, the most that is held at once, in the unit of `memory`: sizes by stage, or a
        `pplab.Memory`.
        """
        memory = memory if isinstance(memory, Memory) else Memory(activation=memory)
        memory.check(self.num_stages)
        return tuple(max(during for during, _ in memory.levels(row)) for row in self.rows)

    def __repr__(self) -> str:
        counts = self.num_ranks, self.num_stages, self.num_microbatches, self.columns.bounds[-1]
        named = map(plural, counts, ("rank", "stage", "microbatch", "action"))
        return f"<Schedule {self.name}: {', '.join(named)}>"

    def __str__(self) -> str:
        """A text grid: one line per rank, actions in order, aligned by their place in the row."""
        return "\n".join([repr(self)[10:-1], *text.grid(self.rows)])


@dataclass(frozen=True)
class Columns:
    """The actions of all rows as flat lists, which a pass over millions of actions reads.

    Items have ids, counted along rank 0's row, then rank 1's, and so on: an overlap has one, like
    any action. The lists have an entry per id, the item's action (an overlap's first), and behind
    those one per overlap, its second.
    """

    bounds: tuple[int, ...]  # rank r's ids are range(bounds[r], bounds[r + 1])
    stages: list[int]  # of every entry
    kinds: list[Kind]
    microbatches: list[int]
    overlaps: list[int]  # their ids; the second half of the k-th is entry bounds[-1] + k
    num_stages: int
    num_microbatches: int

    @classmethod
    def of(cls, rows: Sequence[Sequence[Action | Overlap]]) -> Columns:
        """Lay out `rows`. Raises ValueError for a stage or microbatch that isn't a whole number
        of at least 0, or that is so large that most are missing, before anything of that size is
        made.
        """
        items, overlaps = list(chain.from_iterable(rows)), []
        stages = [*map(itemgetter(0), items)]
        if Action in set(map(type, stages)):  # an overlap's first half stands where a stage should
            overlaps = [i for i, item in enumerate(items) if type(item) is Overlap]
            items = [x.first if type(x) is Overlap else x for x in items] + [
                items[i].second for i in overlaps
            ]
            stages = [*map(itemgetter(0), items)]
        kinds, microbatches = [*map(itemgetter(1), items)], [*map(itemgetter(2), items)]
        if strange := set(map(type, kinds)) - {Kind}:
            raise ValueError(
                f"an action's kind must be a pplab.Kind, such as Kind.F, not a {strange.pop().__name__}"
            )
        counts = _count("stage", stages), _count("microbatch", microbatches)
        if counts[0] * counts[1] > max(FEW, len(stages)):
            sizes = f"{plural(counts[0], 'stage')} and {plural(counts[1], 'microbatch')}"
            sizes += f" need more than {plural(len(stages), 'action')}"
            raise ScheduleError(sizes, "number stages and microbatches from 0, without a gap")
        return cls((0, *accumulate(map(len, rows))), stages, kinds, microbatches, overlaps, *counts)

    @cached_property
    def ranks(self) -> list[int]:
        """Of every entry."""
        ranks = list(
            chain.from_iterable(
                [rank] * (b - a) for rank, (a, b) in enumerate(pairwise(self.bounds))
            )
        )
        return ranks + [ranks[i] for i in self.overlaps]

    @cached_property
    def holders(self) -> list[list[int]]:
        """Of every stage: the ranks that run something of it."""
        holders: list[list[int]] = [[] for _ in range(self.num_stages)]
        for rank in range(len(self.bounds) - 1):
            for stage in set(self.of_rank(rank, self.stages)):
                holders[stage].append(rank)
        return holders

    def of_rank(self, rank: int, column: list) -> list:
        """What a rank's entries have in a column."""
        first, end = self.bounds[rank : rank + 2]
        behind = slice(*(self.bounds[-1] + bisect_left(self.overlaps, i) for i in (first, end)))
        return column[first:end] + column[behind]


def _count(name: str, column: list[int]) -> int:
    """One more than the largest of a column, all of whose values must be whole and at least 0."""
    values = set(column) if {*map(type, column)} <= {int} else {-1}
    if min(values, default=0) < 0:
        wrong = next(x for x in column if type(x) is not int or x < 0)
        raise ValueError(
            f"an action's {name} must be a whole number of at least 0, got {shown(wrong)}"
        )
    return max(values, default=-1) + 1


@dataclass(frozen=True)
class Graph:
    """Who waits for whom: `deps.needs` in integers, for millions of items, found by where they
    stand in a list.

    A microbatch makes 2S hops, down through S stages and back up. The list has a block for each
    hop, with a slot for each of M microbatches. So what waits for a message stands one block, M
    slots, behind what makes it:

    block     0      1      2    ...     S         S+1     ...  2S-1    2S    2S+1
               (empty)   F0 --> F1 --> ... F(S-1) --> B(S-1) --> ... B1 --> B0  (empty)

    An I stands where the B would. A W waits for no message: its blocks lie behind, each between two
    empty ones.
    """

    columns: Columns
    slots: list[int]  # of every entry
    entries: list[int]  # of every slot, or NOBODY
    second: dict[int, int]  # of every overlap: the entry of its second half
    whole: bool  # each stage has each microbatch's F, and its B, or I and later W, once, all on one rank

    @classmethod
    def of(cls, columns: Columns) -> Graph:
        """Find who waits for whom. Linear; never raises: see `whole`."""
        S, M = columns.num_stages, columns.num_microbatches
        end = (2 * S + 1) * M  # of the hops
        first = dict.fromkeys(
            Kind, [(4 * S + 1) * M] * S
        )  # of a kind's blocks, by stage; communication has none
        first[F] = [*range(M, (S + 1) * M, M)]
        first[B] = first[I] = [*range(2 * S * M, S * M, -M)]
        first[W] = [*range(end + M, (4 * S + 2) * M, 2 * M)]
        each = zip(columns.kinds, columns.stages, columns.microbatches, strict=True)
        slots = [first[kind][stage] + m for kind, stage, m in each]
        entries = [NOBODY] * ((4 * S + 3) * M)
        for entry, slot in enumerate(slots):
            entries[slot] = entry
        each_once = (
            len(entries) - entries.count(NOBODY) == len(slots) and NOBODY not in entries[M:end]
        )
        whole = each_once and _is_paired(
            columns, *([entries[at : at + M] for at in first[k]] for k in (F, B, W))
        )
        second = dict(zip(columns.overlaps, range(columns.bounds[-1], len(slots)), strict=True))
        return cls(columns, slots, entries, second, whole)

    @cached_property
    def targets(self) -> list[int]:
        """Of every entry: the rank to which its message goes, its own where nobody waits for
        one.
        """
        ranks, users = (
            self.columns.ranks,
            (self.entries[slot + self.columns.num_microbatches] for slot in self.slots),
        )
        return [
            rank if user == NOBODY else ranks[user] for rank, user in zip(ranks, users, strict=True)
        ]

    def awaited(self, i: int) -> list[tuple[int, int]]:
        """The messages for which an item waits: the entry that does, first half first, and the
        entry that makes it.
        """
        halves = [i, self.second[i]] if i in self.second else [i]
        makers = [
            self.entries[self.slots[entry] - self.columns.num_microbatches] for entry in halves
        ]
        return [(entry, maker) for entry, maker in zip(halves, makers, strict=True) if maker >= 0]

    def id_of(self, entry: int) -> int:
        """The id of an entry's item."""
        return (
            entry
            if entry < self.columns.bounds[-1]
            else self.columns.overlaps[entry - self.columns.bounds[-1]]
        )

    def action(self, entry: int) -> Action:
        """The action of an entry."""
        return Action(
            self.columns.stages[entry], self.columns.kinds[entry], self.columns.microbatches[entry]
        )


def _is_paired(columns: Columns, *blocks: list[list[int]]) -> bool:
    """Whether a stage's work on a microbatch is on one rank, with a W after every I and none after
    a B.

    `blocks`: entries of every stage's F, of its B or I, and of its W; none doubled, and of the
    first two none missing.
    """
    kinds, found = columns.kinds, set(columns.kinds)
    alike = found == {F, B} or (found == {F, I, W} and not columns.overlaps)
    if alike and sum(map(len, columns.holders)) == columns.num_stages:  # one rank each
        return B in found or all(
            all(map(gt, weights, inputs)) for _, inputs, weights in zip(*blocks, strict=True)
        )
    ranks, ids = columns.ranks, [*range(columns.bounds[-1]), *columns.overlaps]
    for of_stage in zip(*blocks, strict=True):
        for f, b, w in zip(*of_stage, strict=True):
            follows = w >= 0 and ids[w] > ids[b] and ranks[w] == ranks[b]
            if ranks[f] != ranks[b] or (w >= 0 and not follows) or follows != (kinds[b] is I):
                return False
    return found <= COMPUTE


def plural(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 microbatches`."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")
