"""Checkers of the chapter on profiles, the runs for its exercises, two small models, and a hook
that pauses once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from pplab.builders import build
from pplab.costs import Costs
from pplab.lab import Case, Entry, calibrate, timeline_from_dict
from pplab.schedule import Schedule
from pplab.simulator import simulate
from pplab.timeline import Timeline

from .answers import row_of
from .verdict import (
    Verdict,
    Wrong,
    checker,
    checker_of_each,
    number,
    numbers,
    one_or_several,
    right,
    told,
    wrong,
)

if TYPE_CHECKING:
    from pplab.runtime import Workload

CAUSES = ("slow stage", "slow link", "late rank", "one pause")

_TRUTH = {
    "A": ("slow stage", 2),
    "B": ("slow link", (1, 2)),
    "C": ("late rank", 1),
    "D": ("one pause", 3),
}

_CLUES = {
    "A": "the part that stands out is imbalance, forward and backward of one rank last longer in "
    "every microbatch",
    "B": "the part that stands out is communication: print `lab.calibrate(run).links`",
    "C": "the part that stands out is overhead: nothing lasts longer, every action of one rank "
    "starts late",
    "D": "compare each action with the others of its kind on its stage: one lasts several times as "
    "long",
}

_RUNS = files(__package__) / "slow_runs.json"  # in ms, as `lab.timeline_to_dict` writes them
_GAIN = 0.95  # what counts as faster: less than this share of the run's time


class Nap:
    """A hook for a module: sleeps for `seconds` in one of its calls, counted from 0."""

    def __init__(self, seconds: float, call: int):
        self.seconds, self.call, self.calls = seconds, call, 0

    def __call__(self, *_: object) -> None:
        if self.calls == self.call:
            time.sleep(self.seconds)
        self.calls += 1


def runs() -> dict[str, Timeline]:
    """Four runs of 1F1B with 4 ranks and 8 microbatches, each slow for one reason."""
    return {name: timeline_from_dict(data) for name, data in json.loads(_RUNS.read_text()).items()}


def two_faults() -> Path:
    """A folder with the traces of a job of two pipelines, into which `planted.py` of the tests has
    put two faults.
    """
    folder = Path(mkdtemp())
    for trace in (files(__package__) / "two_faults").iterdir():
        (folder / trace.name).write_bytes(trace.read_bytes())
    return folder


def four_layers(hook: Callable | None = None) -> Workload:
    """A model of four small layers, to be paced. `hook` is called before each forward of stage
    2.
    """
    import torch
    from torch import nn

    from pplab.lab import models
    from pplab.runtime import Batch

    layers = [nn.Linear(6, 6) for _ in range(4)]
    if hook:
        layers[2].register_forward_pre_hook(hook)
    return models.Modules(
        layers, Batch((torch.ones(8, 6),), torch.zeros(8, 6)), nn.functional.mse_loss
    )


def light() -> Workload:
    """Two stages that compute little and keep much."""
    import torch
    from torch import nn

    from pplab.lab import models
    from pplab.runtime import Batch

    stages = [nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)) for _ in range(2)]
    return models.Modules(
        stages, Batch((torch.ones(8192, 16),), torch.zeros(8192, 16)), nn.functional.mse_loss
    )


@checker_of_each("ABCD")
def diagnose(answer: object) -> Verdict:
    """Find the cause of each of the four runs and where it is: {"A": ("slow stage", 0), ...}."""
    for name, (cause, place) in _TRUTH.items():
        given = answer[name]
        if not isinstance(given, (tuple, list)) or len(given) != 2 or given[0] not in CAUSES:
            return wrong(
                f"{name}: expected a pair of one of {', '.join(CAUSES)} and a place, got {given!r}"
            )
        if given[0] != cause:
            return wrong(f"{name}: not a {given[0]}; {_CLUES[name]}")
        if _place(given[1]) != _place(place):
            return wrong(
                f"{name}: the cause is a {cause}, but at a different place; {_CLUES[name]}"
            )
    return right("the four causes, each where it is")


def on_the_way(answer: object) -> Verdict:
    """Find for how many milliseconds of rank 3's wait in receives, in run A, its messages were on
    the way.
    """
    run = runs()["A"]
    expected = 8 * calibrate(run).links[2, 3].latency
    waited = sum(span.end - span.start for span in run.others if span.rank == 3)
    traps = {
        waited: "that is the whole time in receives: subtract what passed before rank 2 had made "
        "the message",
        waited - expected: "that is the time before the messages were made",
        expected / 8: "that is one message; rank 3 receives 8",
    }
    why = f"about {expected:.1f} of {waited:.1f} ms: the link is fast, rank 2 is slow"
    return number(answer, expected, why, traps=traps, tolerance=0.05)


@checker_of_each("ABC")
def better_schedule(answer: object) -> Verdict:
    """Name, for runs A, B and C, the schedule that would save more than 5 % of the step (GPipe,
    eager-1F1B), or "none".
    """
    found = runs()
    for name, given in sorted(answer.items()):
        run = found[name]
        shares = {
            other: _predicted(run, other) / run.makespan
            for other in ("1F1B", "GPipe", "eager-1F1B")
        }
        if given != "none" and given not in shares:
            return wrong(f'{name}: expected GPipe, eager-1F1B or "none", got {given!r}')
        best = min(shares, key=shares.__getitem__)
        if given == "none" and shares[best] < _GAIN:
            return wrong(f"{name}: {best} is predicted at {shares[best]:.0%} of the run's time")
        if given != "none" and shares[given] >= _GAIN:
            return wrong(f"{name}: {given} is predicted at {shares[given]:.0%} of the run's time")
    return right("slack hides a slow link and a late rank; no order makes a slow stage faster")


_SECOND, _LEAD = 1, 6.5  # the first rank on the second host, and the lead of its clock in ms


def two_hosts() -> Timeline:
    """A run of 1F1B on 4 ranks and two hosts, each span by its own host's clock."""
    run = simulate(
        build("1F1B", num_ranks=4, num_microbatches=8),
        Costs([10, 11, 9, 10], 10, 10, latency=1, unit="ms"),
    )
    lead = [_LEAD * (span.rank >= _SECOND) for span in run.spans]
    return replace(
        run,
        starts=[start + more for start, more in zip(run.starts, lead, strict=True)],
        ends=[end + more for end, more in zip(run.ends, lead, strict=True)],
    )


@one_or_several
def clocks(answer: object) -> Verdict:
    """Find the first rank on the second host, and how many milliseconds its clock is ahead."""
    traps = {
        _LEAD + 1: "part of that is the time that the message takes",
        _LEAD - 1: "part of it is the time that the message takes",
        2 * _LEAD: "both ways together hold the offset twice",
        -_LEAD: "the other way: which direction has messages that arrive before they are made?",
    }
    rank = {
        rank: "between that rank and the one before it, both ways take the same time"
        for rank in (2, 3)
    }
    why = "half the difference of 7.5 and -5.5; half the sum, 1 ms, is the way"
    return numbers(answer, (_SECOND, _LEAD), why, ("a rank", "milliseconds"), traps=(rank, traps))


MENDS = ("schedule", "cut", "gigabits")
_BEFORE = {"schedule": "1F1B"}
_BEST_BILLS = 253.165  # dollars, of three months: ZB-H1, then the cut 8+9+9+6, then the network
_NEAR_BILLS = 1.0


@one_or_several
@checker(
    "a list of three dicts, one for each month",
    lambda answer: isinstance(answer, Sequence) and len(answer) == 3,
)
def mend(answer: Sequence[Mapping[str, object]]) -> Verdict:
    """Give the arguments of `Case.row` in each of three months, and `gigabits`, with one thing
    improved in each, for the smallest bills.
    """
    before, bills = _BEFORE, []
    for month, given in enumerate(answer, 1):
        where = f"month {month}: "
        if not isinstance(given, Mapping):
            raise Wrong(f"{where}expected a dict of what lab.Case.row takes, got {given!r}")
        now = {**_BEFORE, **given}
        if others := sorted(set(now) - set(MENDS)):
            raise Wrong(f"{where}{others[0]} isn't one of {', '.join(MENDS)}")
        mended = [name for name in MENDS if now.get(name) != before.get(name)]
        if len(mended) != 1 or mended[0] in before and before[mended[0]] != _BEFORE.get(mended[0]):
            said = ", ".join(mended) or "nothing"
            raise Wrong(
                f"{where}{said} changes; expected one thing that wasn't mended before, and what "
                "was to stay"
            )
        if now.get("gigabits") not in (None, 100):
            raise Wrong(f"{where}the faster network has 100 gigabits")
        with told(where):
            bills.append(_billed(now))
        before = now
    each, above = " + ".join(f"${bill:.2f}" for bill in bills), sum(bills) - _BEST_BILLS
    said = f"{each} = ${sum(bills):.2f}"
    if above > _NEAR_BILLS:
        raise Wrong(f"all three fit: {said}, which is ${above:.2f} more than the best that we know")
    if above < -0.005:
        return right(f"{said}, which is ${-above:.2f} less than the best that we knew: tell us")
    return right(f"{said}, {f'${above:.2f} above ' if above > 0.005 else ''}the best that we know")


def _billed(asked: Mapping[str, object]) -> float:
    """The bill of a row that fits."""
    case = replace(Case(), gigabits=asked.get("gigabits", Case().gigabits))
    row: Entry = row_of(
        case, {name: value for name, value in asked.items() if name != "gigabits"}, 16
    )
    if not row.fits:
        full = max(range(len(row.held_gb)), key=row.held_gb.__getitem__)
        raise Wrong(f"it doesn't fit: rank {full} would hold {row.held_gb[full]:.1f} GB")
    return row.dollars


def _predicted(timeline: Timeline, name: str) -> float:
    schedule: Schedule = timeline.schedule
    other = build(name, num_ranks=schedule.num_ranks, num_microbatches=schedule.num_microbatches)
    return simulate(other, calibrate(timeline)).makespan


def _place(place: object) -> object:
    """A rank or stage as it is. A link loses its direction, because both directions of the slow one
    are slow.
    """
    return frozenset(place) if isinstance(place, (tuple, list, set, frozenset)) else place
