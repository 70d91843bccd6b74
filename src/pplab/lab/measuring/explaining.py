"""Explain why a job takes as long as it does: its causes by name, each with the time that the job
would take without it.

Causes are taken one after the other: first the one that saves most, then the one that saves most of
what is left. So a fault that hides behind a different one is named, too, although it saves nothing
alone. To see what a cause costs, the whole job is replayed without it, with all ranks, replicas and
steps. What it saves is the mean over the iterations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from ...builders.registry import uncollected
from ...schedule import plural
from ..forms import Table, bars, figure_html, read_static
from .job import ACTION, OTHER, Change, Event, Message, TracedJob
from .job_reading import read_traces
from .orders import WhatIf, predict_orders, table_of
from .suspects import Seen, Suspect, find, link_times

_LEAST = 0.01  # of an iteration: what saves less is no cause
_MOST = 24  # suspects that are tried, those first from whom most time is taken
_SHOWN_RANKS, _SHOWN_LINKS = 24, 8  # printed; a page has all ranks, and `to_dict` all of both
_LARGE = 50_000  # actions of a step, from which predicting its other schedules takes minutes
_ALWAYS = 0.9  # of the iterations: what is in fewer comes and goes
_UNKNOWN = (
    "believe differences between schedules that are larger than the error; memory isn't checked",
    "other stages per rank, cuts and sizes of microbatches need a run of their own, and so do "
    "schedules that split backwards or pair actions, unless this one does",
    "a message's whole time counts as latency: over a narrow link, schedules that send ahead take "
    "longer",
)
_EXACT = 0.005
# of an iteration: twice the standard deviation of three equal runs of 4 ranks on gloo, recorded
_RUNS = 0.027
_PART = 0.2  # of the largest saving: an iteration with less hasn't got it


@dataclass(frozen=True)
class Cause:
    """Something that makes the job slow. Times are in ms an iteration."""

    kind: str
    ranks: tuple[int, ...]
    what: str
    alone: float  # what it saves if everything else stays
    saves: float  # what it saves once the causes before it are gone
    error: float | None  # of `saves`; None where it isn't in every iteration
    left: float  # what an iteration takes without it and the causes before it
    left_error: float | None  # of `left`, in this run
    between_runs: float  # what `left` may differ by besides, if the job runs again

    @property
    def short(self) -> str:
        """Its kind and where it is, in a few words."""
        if len(self.ranks) > 2:
            return self.kind
        return (
            f"{self.kind}, {'rank' if len(self.ranks) == 1 else 'ranks'} "
            f"{' and '.join(map(str, self.ranks))}"
        )


@dataclass(frozen=True, repr=False)
class ExplainedJob:
    """What `explain` found. `print` shows it, and `to_html` makes a page of it. Times are in ms."""

    job: TracedJob
    iterations: tuple[float, ...]
    causes: tuple[Cause, ...]  # that which saves most first
    doubtful: tuple[Cause, ...]  # whose saving is below its error
    # how each spends a mean iteration; that which waits least first
    ranks: tuple[dict[str, Any], ...]
    # a message's time, and whether it is an upper bound
    links: dict[tuple[int, int], tuple[float, bool]]
    orders: tuple[WhatIf, ...]  # other schedules, unless pauses or late ranks make them meaningless
    notes: tuple[str, ...]

    @property
    def table(self) -> Table:
        """A row for each rank, which shows how it spends an iteration."""
        rows = Table()
        rows.columns = tuple(dict.fromkeys(name for row in self.ranks for name in row))
        for row in self.ranks:
            cells = (row.get(name, "-") for name in rows.columns)
            rows.append(
                tuple(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells)
            )
        return rows

    @property
    def bars(self) -> dict[str, float]:
        """The mean iteration in parts that add up to it: the saving of each cause, and the rest."""
        bars = {
            f"{number}. {cause.short}": cause.saves for number, cause in enumerate(self.causes, 1)
        }
        return {**bars, "left without them": fmean(self.iterations) - sum(bars.values())}

    def to_dict(self) -> dict:
        """All fields as plain JSON values."""
        links = [
            {"source": source, "target": target, "at most" if bound else "takes": time}
            for (source, target), (time, bound) in self.links.items()
        ]
        return {
            "iterations": self.iterations,
            "pipelines": self.job.pipelines,
            "causes": [*map(vars, self.causes)],
            "doubtful": [*map(vars, self.doubtful)],
            "bars": self.bars,
            "ranks": self.ranks,
            "links": links,
            "orders": [*map(vars, self.orders)],
            "notes": self.notes,
        }

    def _head(self) -> str:
        longest = max(self.iterations)
        steps = [end for _, end in self.job.iterations] or [0]
        where = steps[self.iterations.index(longest)]
        job = (
            f"{plural(len(self.job.rows), 'rank')} in {plural(len(self.job.pipelines), 'pipeline')}"
        )
        lines = [
            f"{job}, {plural(len(self.iterations), 'iteration')}: one takes "
            f"{fmean(self.iterations):.0f} ms (median "
            f"{median(self.iterations):.0f}, longest {longest:.0f}, to the end of step "
            f"{where})"
        ]
        if not self.causes:
            lines.append(f"No cause was found that makes an iteration {_LEAST:.0%} longer.")
        for number, cause in enumerate(self.causes, 1):
            alone = "" if number == 1 else f" (fixed alone, it saves {max(0, cause.alone):.0f})"
            lines.append(f"{number}. {cause.what}.")
            left = f"{cause.left:.0f} ms" + (
                "" if cause.left_error is None else f" ±{cause.left_error:.0f}"
            )
            left += f" (between two runs: another ±{cause.between_runs:.0f})"
            lines.append(f"   Without it an iteration takes {left}, {cause.saves:.0f} less{alone}.")
        if not self.job.watched:
            lines.append(
                "Pauses, slow links and late ranks weren't looked for, since these traces can't "
                "tell them."
            )
        lines += [
            f"not certain, since it saves less than its error: {cause.what}"
            for cause in self.doubtful
        ]
        return "\n".join(lines)

    def _links(self) -> str:
        slowest = sorted(self.links.items(), key=lambda item: (-item[1][0], item[0]))
        told = [
            f"{source}->{target} {'at most ' * bound}{time:.1f}"
            for (source, target), (time, bound) in slowest[:_SHOWN_LINKS]
        ]
        more = f" (and {len(slowest) - len(told)} faster links)" * (len(slowest) > len(told))
        return f"a message takes, in ms between ranks: {', '.join(told)}{more}" if told else ""

    def __str__(self) -> str:
        usual = "F and B are its usual forward and backward. The first waits least"
        lines = str(self.table).splitlines()
        if len(lines) > _SHOWN_RANKS + 1:
            lines[_SHOWN_RANKS + 1 :] = [
                f"... and {len(self.ranks) - _SHOWN_RANKS} ranks that wait longer"
            ]
        ranks = "\n".join([f"How each rank spends an iteration, in ms. {usual}:", *lines])
        orders = (
            self.orders and f"Other schedules of the slowest pipeline:\n{table_of(self.orders)}"
        )
        notes = "\n".join(part for part in (self._links(), *self.notes) if part)
        return "\n\n".join(part for part in (self._head(), ranks, orders, notes) if part)

    __repr__ = __str__

    def to_html(self, path: str | Path) -> None:
        """Write one page that needs no other file, with the causes, the iteration in bars, and the
        ranks.

        Raises OSError where it can't be written, and ModuleNotFoundError, which names what to
        install, where matplotlib is missing.
        """
        parts = {name: [("", amount)] for name, amount in self.bars.items()}
        chart = bars(parts, title="A mean iteration in parts that add up to it", unit="ms")
        head = "".join(f"<p>{escape(line)}</p>\n" for line in self._head().splitlines())
        sections = {
            "What makes it slow": head + figure_html(chart.figure),
            "How each rank spends an iteration, in ms": self.table._repr_html_(),
        }
        if self.orders:
            sections["Other schedules of the slowest pipeline"] = table_of(
                self.orders
            )._repr_html_()
        notes = (f"<li>{escape(note)}</li>" for note in (self._links(), *self.notes) if note)
        sections["What else the traces say"] = f"<ul>{''.join(notes)}</ul>"
        body = "\n".join(f"<h2>{heading}</h2>\n{section}" for heading, section in sections.items())
        Path(path).write_text(read_static("../explained.html", body=body), "utf-8")


@uncollected()  # a third of the time would go there
def explain(*places: str | Path) -> ExplainedJob:
    """Explain why a job's iterations take as long as they do, from the traces of all its ranks,
    replicas and steps.

    The traces are files, or folders of files, as for `read_traces`. An iteration lasts from the end
    of a step to the end of the next. Raises the same ValueError and OSError as `read_traces`.
    """
    job = read_traces(*places)
    seen, lengths = Seen(job), job.lengths(job.replay())
    causes, doubtful = _causes(seen, lengths)
    notes = [*job.notes]
    if causes:
        notes.append(
            "± of a cause holds for 95 of 100 such runs. Two runs may differ by another "
            f"{_RUNS:.1%}, as three equal runs that were recorded did, or by the scatter of this "
            "job's iterations if that is more"
        )
    orders: list[WhatIf] = []
    if any(cause.kind in ("pauses", "late rank") for cause in causes):
        notes.append(
            "other schedules aren't predicted from a job that has pauses or late ranks: remove "
            "these first"
        )
    elif (count := len(job.timelines[0].spans)) > _LARGE:
        notes.append(
            f"other schedules aren't predicted from steps of more than {_LARGE:,} actions, here "
            f"{count:,}"
        )
    else:
        orders = predict_orders(job.timelines)
        notes += _UNKNOWN
    ranks = sorted(_ranks(seen, lengths), key=itemgetter("waiting"))
    if ranks[0]["waiting"] < -_LEAST * fmean(lengths):
        notes.append(
            f"what rank {ranks[0]['rank']} does overlaps, so that its waiting is below zero: don't "
            "trust its row"
        )
    return ExplainedJob(
        job,
        tuple(lengths),
        tuple(causes),
        tuple(doubtful),
        tuple(ranks),
        link_times(job),
        tuple(orders),
        tuple(notes),
    )


def _causes(seen: Seen, lengths: Sequence[float]) -> tuple[list[Cause], list[Cause]]:
    """The suspects that are causes, and those that may be."""
    found = sorted(find(seen), key=lambda suspect: -_taken_away(suspect.change))
    search = _Search(seen.job, lengths)
    while best := search.best(found[:_MOST]) or search.best(_together(found)):
        search.judge(best)
        if best in found:
            found.remove(best)
        else:  # all of its kind
            found = [suspect for suspect in found if suspect.kind != best.kind]
    return search.causes, search.doubtful


class _Search:
    """Takes causes away, one after the other. In between, a single suspect is replayed once."""

    def __init__(self, job: TracedJob, lengths: Sequence[float]):
        self.job, self.lengths = job, lengths
        self.causes: list[Cause] = []
        self.doubtful: list[Cause] = []
        self._least = _LEAST * fmean(lengths)
        self._go_on(Change(), lengths)
        self._alone = self._replayed  # the iterations without each suspect and nothing else

    def _go_on(self, change: Change, now: Sequence[float]) -> None:
        """Without what `change` takes away, the iterations take so long now."""
        self._change, self._now = change, now
        self._critical = self.job.critical(change)
        self._replayed: dict[Suspect, list[float]] = {}

    def _without(self, suspect: Suspect) -> list[float]:
        """The iterations without it and the causes found so far."""
        if suspect not in self._replayed:
            marks = self.job.replay(self._change & suspect.change)
            self._replayed[suspect] = self.job.lengths(marks)
        return self._replayed[suspect]

    def best(self, suspects: Sequence[Suspect]) -> Suspect | None:
        """The one that saves most, where that is enough for a cause."""
        now = fmean(self._now)
        best, shortest = None, now - self._least
        for suspect in suspects:
            most = sum(_taken_away(suspect.change, path) for path in self._critical)
            if now - most / len(self._now) > shortest:
                continue  # it can't save enough
            without = fmean(self._without(suspect))
            if without <= shortest:
                best, shortest = suspect, without
        return best

    def judge(self, suspect: Suspect) -> None:
        """Count it among the causes, whose times go with it, or among what is doubtful."""
        without = self._without(suspect)
        saved = [before - after for before, after in zip(self._now, without, strict=True)]
        saves, error = fmean(saved), _error(saved)
        if suspect not in self._alone:
            self._alone[suspect] = self.job.lengths(self.job.replay(suspect.change))
        alone = fmean(self.lengths) - fmean(self._alone[suspect])
        left = fmean(without), _spread(without), _between_runs(without)
        cause = Cause(suspect.kind, suspect.ranks, suspect.what, alone, saves, error, *left)
        if error is not None and error > saves:
            self.doubtful.append(cause)
        else:
            self.causes.append(cause)
            self._go_on(self._change & suspect.change, without)


def _together(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Faults that several ranks have alike, where each one's hides behind the others'. The job is
    faster only without all of them.
    """
    by_kind: dict[str, list[Suspect]] = defaultdict(list)
    for suspect in suspects:
        by_kind[suspect.kind].append(suspect)
    found = []
    for kind, alike in by_kind.items():
        if len(alike) > 1:
            ranks = tuple(sorted({rank for suspect in alike for rank in suspect.ranks}))
            told = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
            what = (
                f"{len(alike)} faults of one kind hide behind each other, on ranks {told}. The "
                f"largest: {alike[0].what}"
            )
            change = Change()
            for suspect in alike:
                change = change & suspect.change
            found.append(Suspect(kind, ranks, what, change))
    return found


def _taken_away(change: Change, of: Collection[Event | Message] | None = None) -> float:
    """How much less time a change gives to what it changes, or only to those events and
    messages.
    """
    before = [
        *((event, event.duration - value) for event, value in change.durations.items()),
        *((event, event.gap - value) for event, value in change.gaps.items()),
        *((message, message.transit - value) for message, value in change.transits.items()),
    ]
    return sum(less for thing, less in before if of is None or thing in of)


def _error(saved: Sequence[float]) -> float | None:
    """How far off the mean may be. None for what isn't in every iteration, because the scatter of
    iterations tells nothing about it.
    """
    least = _PART * max(saved)
    often = sum(each > least for each in saved) >= _ALWAYS * len(saved)
    return _spread(saved) if often else None


def _spread(values: Sequence[float]) -> float | None:
    """How far off their mean may be in 95 of 100 cases, by Student's t, plus half a percent for
    what a replay doesn't know. A single value can't tell.
    """
    if more := len(values) - 1:
        return (
            _EXACT * fmean(values)
            + (1.96 + 2.37 / more + 2.8 / more**2 + 5.6 / more**3)
            * stdev(values)
            / len(values) ** 0.5
        )
    return None


def _between_runs(values: Sequence[float]) -> float:
    """By how much the mean may differ in a different run: as in three equal ones, or as the
    iterations of this one do.
    """
    return max(_RUNS * fmean(values), 1.96 * stdev(values) if len(values) > 2 else 0.0)


def _ranks(seen: Seen, lengths: Sequence[float]) -> Iterator[dict[str, Any]]:
    """How each rank spends the iterations, on average: its usual actions by kind, and four parts
    that add up.
    """
    kinds = sorted({kind for _, _, kind in seen.usual}, key="FBIW".find)
    for replica, ranks in enumerate(seen.job.pipelines):
        for rank in ranks:
            mine = [event for event in seen.job.rows[rank] if event.step in seen.counted]
            times = {
                name: sum(event.duration for event in mine if event.kind == name)
                for name in (ACTION, OTHER)
            }
            idle = sum(max(0.0, event.gap) for event in mine if event.before)
            parts = {"computing": times[ACTION], "other work": times[OTHER], "own idle": idle}
            parts = {name: value / len(seen.counted) for name, value in parts.items()}
            stages = ", ".join(map(str, seen.job.stages[rank]))
            usual = {kind: seen.pace[rank][kind] for kind in kinds if kind in seen.pace[rank]}
            waiting = fmean(lengths) - sum(parts.values())
            yield {
                "rank": rank,
                "replica": replica,
                "stage": stages,
                **usual,
                **parts,
                "waiting": waiting,
            }
