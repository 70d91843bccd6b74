"""Simulate activations that are copied to the host's memory while they wait for their backward, on
streams next to compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from ...actions import INPUT_GRADIENT, Action, F, Overlap, parts
from ...costs import Costs, PerStage, check_length, of_stage, per_stage
from ...errors import accept, expect, number, positive_int
from ...footprint import Memory
from ...links import with_links
from ...schedule import Schedule
from ...simulator import durations_of, validate
from ...timeline import Span, Timeline, total
from ..planning import Case, Entry
from .items import Items

Changes = list[tuple[float, float]]  # when, and by how much
Places = dict[tuple[int, int], int]  # (stage, microbatch) -> place in a row


@dataclass(frozen=True)
class Offload:
    """How long copies to the host and back take, and which are made.

    - `out`: time of a copy to the host of what a stage keeps of a microbatch, in the unit of the
      costs, or one value per stage. `back`: time of the copy back, by default the same.
    - `share`: how much of it is copied, from 0 to 1, or one value per stage. `out` and `back` are
      for that share.
    - `pieces`: the number of equal pieces in which a stage's activations leave and come back, for
      example one per layer. A piece leaves as soon as its part of the forward is done, and its part
      of the backward frees it.
    - `ahead`: how many pieces of its rank's backwards before its own a copy back may begin.

    A rank has an engine for each direction. Each makes one copy at a time, out in the order of
    forwards and back in the order of backwards. What a rank's next action already needs isn't
    copied. Copies are named like actions: `0O3` after `0F3`, and `0R3` before `0B3` or `0I3`.

    >>> from pplab import build
    >>> rows = build("GPipe", num_ranks=4, num_microbatches=8)
    >>> found = Offload(out=1).simulate(rows)
    >>> found.timeline.makespan, found.peak_held(), found.peak_on_host()
    (33.0, (3.0, 3.0, 3.0, 3.0), (7.0, 7.0, 7.0, 7.0))
    >>> Offload(out=1, pieces=2).simulate(rows).peak_held()
    (1.5, 1.5, 1.5, 1.5)
    """

    out: PerStage
    back: PerStage | None = None
    share: PerStage = 1
    ahead: int = 1
    pieces: int = 1

    def __post_init__(self) -> None:
        given = {"out": self.out, "back": self.out if self.back is None else self.back}
        copies = {name: per_stage(name, value) for name, value in given.items()}
        accept(self, **copies, share=per_stage("share", self.share, 1))
        for name in ("ahead", "pieces"):
            positive_int(name, getattr(self, name))

    def simulate(self, schedule: Schedule, costs: Costs | None = None) -> Offloaded:
        """Predict when everything happens, by `pplab.simulate`'s loop.

        A rank's two engines are two more rows. A backward waits for its copy in an item before it,
        and a copy back waits in the same way for the start of an earlier backward. Raises
        ScheduleError and ValueError like `pplab.simulate`.
        """
        expect(Schedule, schedule=schedule)
        costs = Costs() if costs is None else costs
        expect(Costs, costs=costs)
        costs.check(schedule.num_stages, schedule.num_ranks, schedule.num_microbatches)
        for name in ("out", "back", "share"):
            check_length(name, getattr(self, name), schedule.num_stages)
        validate(schedule)
        engines = _Engines(self, schedule, costs)
        for rank in range(schedule.num_ranks):
            engines.add(rank)
        starts, ends = engines.items.run(engines.rows)
        copies = tuple(engines.copies)
        spans = tuple(Span(c.rank, c.name, starts[c.item], ends[c.item]) for c in copies)
        pieces = tuple(tuple((starts[x], ends[x]) for x in each) for each in engines.pieces)
        begins, stops = [each[0][0] for each in pieces], [each[-1][1] for each in pieces]
        timeline = Timeline(schedule, begins, stops, costs.unit, others=spans)
        return Offloaded(timeline, self, pieces, copies)


class Copy(NamedTuple):
    """A copy of a piece: on which rank, of which activations, which way, and its item."""

    rank: int
    stage: int
    microbatch: int
    is_out: bool
    item: int

    @property
    def name(self) -> str:
        """As an action's: 0O3 out, 0R3 back."""
        return f"{self.stage}{'O' if self.is_out else 'R'}{self.microbatch}"


class _Engines:
    """A schedule's rows, and two more for each rank: its engine out, and its engine back."""

    def __init__(self, offload: Offload, schedule: Schedule, costs: Costs):
        self.offload, self.schedule = offload, schedule
        rows, *columns = with_links(schedule.graph, costs, durations_of(schedule, costs))
        self.rows, self.items = rows[:], Items(*(column[:] for column in columns))
        self.copies: list[Copy] = []
        # an action's pieces; the last one is the action's item
        count = schedule.columns.bounds[-1]
        self.pieces = [self.items.split(i, offload.pieces) for i in range(count)]

    def add(self, rank: int) -> None:
        """Add a rank's engines, and to its row the items that wait for them."""
        leaving, turns = leaving_of(self.schedule.rows[rank], self.offload.share)
        first = self.schedule.columns.bounds[rank]
        out = {key: self._out(rank, key, self.pieces[first + i]) for key, i in leaving.items()}
        backwards = [
            (key, nth, item)
            for key, i in turns.items()
            for nth, item in enumerate(self.pieces[first + i])
        ]
        back, before = self._back(rank, backwards, out)
        row = []
        for item in self.rows[rank]:
            for piece in self.pieces[item] if item < len(self.pieces) else [item]:
                row += [*before[piece], piece]
        self.rows[rank] = row
        self.rows += [list(chain(*out.values())), back]

    def _out(self, rank: int, key: tuple[int, int], forward: Sequence[int]) -> list[int]:
        """A copy for each piece of a forward, once that is done."""
        takes = of_stage(self.offload.out, key[0]) / self.offload.pieces
        made = [self.items.new(takes, piece) for piece in forward]
        self.copies += [Copy(rank, *key, True, item) for item in made]
        return made

    def _back(
        self,
        rank: int,
        backwards: Sequence[tuple[tuple[int, int], int, int]],
        out: Mapping[tuple[int, int], Sequence[int]],
    ) -> tuple[list[int], dict[int, list[int]]]:
        """The row of the engine back, and what stands before items of the rank's row. `backwards`
        are their pieces in order: key, place among those of the backward, item.
        """
        engine: list[int] = []
        before: dict[int, list[int]] = defaultdict(list)
        for turn, (key, nth, item) in enumerate(backwards):
            if key not in out:
                continue
            if turn >= self.offload.ahead:
                # an item that waits as an earlier backward does ends when that begins
                *_, earlier = backwards[turn - self.offload.ahead]
                begun = self.items.new(0, self.items.needs[earlier], self.items.lags[earlier])
                before[earlier].append(begun)
                engine.append(self.items.new(0, begun))
            takes = of_stage(self.offload.back, key[0]) / self.offload.pieces
            copy = self.items.new(takes, out[key][-1 - nth])  # a backward begins at the end
            engine.append(copy)
            before[item].append(self.items.new(0, copy))
            self.copies.append(Copy(rank, *key, False, copy))
        return engine, before


def leaving_of(row: Sequence[Action | Overlap], share: PerStage) -> tuple[Places, Places]:
    """The activations that leave, in the order of forwards, and all turns to come back, in the
    order of backwards, by stage and microbatch, with their places in the row. What the next action
    already needs stays.
    """
    at = [(part, i) for i, item in enumerate(row) for part in parts(item)]
    forwards = {(part.stage, part.microbatch): i for part, i in at if part.kind is F}
    turns = {(part.stage, part.microbatch): i for part, i in at if part.kind in INPUT_GRADIENT}
    return {
        key: i for key, i in forwards.items() if turns[key] > i + 1 and of_stage(share, key[0])
    }, turns


@dataclass(frozen=True)
class Offloaded:
    """A simulated step with copies, which are the `others` of its `timeline`, and what is left on
    the GPU.

    `pieces` has, for every span, when its pieces start and when they end. `copies` are what
    `others` show, in their order.
    """

    timeline: Timeline
    offload: Offload
    pieces: tuple[tuple[tuple[float, float], ...], ...]
    copies: tuple[Copy, ...]

    def peak_held(self, memory: Memory | None = None) -> tuple[float, ...]:
        """Per rank, the most that its GPU holds, in the unit of `memory`, or without one in stages'
        activations.
        """
        return tuple(
            map(peak_of, self._changes(memory or Memory()), self._always(memory or Memory()))
        )

    def peak_on_host(self, memory: Memory | None = None) -> tuple[float, ...]:
        """Per rank, the most that lies in its host's memory, from the start of a copy out to the
        end of the copy back.
        """
        return tuple(peak_of(each) for each in self._on_host(memory or Memory()))

    def _always(self, memory: Memory) -> list[float]:
        schedule = self.timeline.schedule
        return [memory.constant(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)]

    def _moves(self, memory: Memory) -> Iterator[tuple[Copy, Span, float]]:
        """The copies, when they are made, and how much each moves."""
        for copy, span in zip(self.copies, self.timeline.others, strict=True):
            whole = of_stage(memory.activation, copy.stage)
            yield copy, span, of_stage(self.offload.share, copy.stage) * whole / self.offload.pieces

    def _changes(self, memory: Memory) -> list[Changes]:
        """Per rank, when what its GPU holds changes, and by how much."""
        expect(Memory, memory=memory)
        memory.check(self.timeline.schedule.num_stages)
        found: list[Changes] = [[] for _ in self.timeline.schedule.rows]
        for span, pieces in zip(self.timeline.spans, self.pieces, strict=True):
            for stage, kind, _ in parts(span.action):
                came, went = memory.changes(stage)[kind]
                if kind is F:
                    found[span.rank] += [(start, came / len(pieces)) for start, _ in pieces]
                    continue
                found[span.rank] += [(span.start, came), (span.end, -came)]
                found[span.rank] += [(end, (came + went) / len(pieces)) for _, end in pieces]
        for copy, span, moved in self._moves(memory):
            found[copy.rank].append((span.end, -moved) if copy.is_out else (span.start, moved))
        return found

    def _on_host(self, memory: Memory) -> list[Changes]:
        """Per rank, when what lies on its host changes."""
        found: list[Changes] = [[] for _ in self.timeline.schedule.rows]
        for copy, span, moved in self._moves(memory):
            found[copy.rank].append((span.start, moved) if copy.is_out else (span.end, -moved))
        return found


def peak_of(changes: Changes, held: float = 0) -> float:
    """The most that is held. If something comes and something goes at one time, what goes goes
    first.
    """
    most = held
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


def check_sends(sends: object = "nobody waits", **_: object) -> None:
    """Raise ValueError if ranks would wait for what they send, because this simulation has no such
    waits.
    """
    if sends != "nobody waits":
        raise ValueError(
            f"copies and passes of all ranks are simulated where nobody waits, got {sends=}: leave "
            "it out"
        )


def offloaded_row(
    case: Case,
    schedule: str | Schedule,
    num_microbatches: int,
    gb_per_s: float = 25,
    *,
    share: PerStage = 1,
    ahead: int = 1,
    pieces: int = 1,
    **options: object,
) -> Entry:
    """A row of the case's ledger, like `Case.row`, with copies to the host at so many gigabytes a
    second each way.

    >>> offloaded_row(Case(), "1F1B", 8, 50, share=0.5, pieces=8)
                                                   M  step    busy  fullest rank  fits in 80 GB  a billion tokens
    1F1B, 50 % to the host at 50 GB/s in 8 pieces  8  3.37 s  63 %  62.5 GB       yes            $114 in 14.3 h
    """  # noqa: E501
    number("gb_per_s", gb_per_s)
    if not gb_per_s > 0:
        raise ValueError(f"gb_per_s must be more than 0, got {gb_per_s!r}")
    check_sends(**options)
    row = case.row(schedule, num_microbatches, **options)
    if row.timeline is None:
        raise ValueError(
            f"{row.what!r} is no schedule and keeps nothing that could be copied: name a "
            "schedule, such as '1F1B'"
        )
    rows, memory, share = row.timeline.schedule, row.memory, per_stage("share", share, 1)
    check_length("share", share, rows.num_stages)
    plan = case.plan(rows, num_microbatches, row.microbatch, cut=row.cut, recompute=row.recompute)
    # GB
    kept = [of_stage(share, s) * of_stage(memory.activation, s) for s in range(rows.num_stages)]
    found = Offload([gb / gb_per_s for gb in kept], None, share, ahead, pieces).simulate(
        rows, plan.costs
    )
    step = row.step_s - row.timeline.makespan + found.timeline.makespan
    busy = total(end - start for each in found.pieces for start, end in each) / (
        case.num_ranks * step
    )
    held = found.peak_held(memory)
    said = "" if isinstance(share, tuple) else f"{share:.0%} ".replace("%", " %")
    what = f"{row.what}, {said}to the host at {gb_per_s:g} GB/s" + (
        f" in {pieces} pieces" if pieces > 1 else ""
    )
    return replace(row, what=what, step_s=step, busy=busy, held_gb=held, timeline=found.timeline)
