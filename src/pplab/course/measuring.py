"""Checkers of chapter 10, the runs that its exercises are about, and a hook that makes a stage pause once."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ..builders import build
from ..lab.attribution import calibrate
from ..lab.json_form import timeline_from_dict
from ..schedule import Schedule
from ..simulator import simulate
from ..timeline import Timeline
from .verdict import Verdict, checker, checker_of_each, number, readers_code, right, wrong

CAUSES = ("slow stage", "slow link", "late rank", "one pause")

_TRUTH = {"A": ("slow stage", 2), "B": ("slow link", (1, 2)), "C": ("late rank", 1), "D": ("one pause", 3)}

_CLUES = {
    "A": "the part that stands out is imbalance, forward and backward of one rank last longer in every microbatch",
    "B": "the part that stands out is communication: print `lab.calibrate(run).links`",
    "C": "the part that stands out is overhead: nothing lasts longer, every action of one rank starts late",
    "D": "compare each action with the others of its kind on its stage: one lasts several times as long",
}

_RUNS = Path(__file__).parent / "slow_runs.json"  # in ms, as `lab.timeline_to_dict` writes them
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


def share_of_imbalance(answer: object) -> Verdict:
    """Replays of a 60 ms step: 44 with mean durations, 50 with each stage's, 56 with links: imbalance's share?"""
    traps = {
        50 / 60: "that is the second replay's share: subtract what the first one had already",
        44 / 60: "that is work and bubble",
        6 / 44: "the denominator is the step, 60",
        6 / 50: "the denominator is the step, 60",
        10: "give it as a share, between 0 and 1",
    }
    return number(answer, 6 / 60, "50 - 44 = 6 of 60 ms: what the second replay adds", traps=traps)


def clock_offset(answer: object) -> Verdict:
    """Host 2 receives 7.3 ms after host 1 made it, by their clocks; host 1 -6.1 ms after host 2: host 2's lead?"""
    traps = {
        7.3: "part of the 7.3 ms is the way",
        6.1: "part of it is the way",
        13.4: "both ways together hold the offset twice",
        0.6: "that is the latency, half the sum",
        -6.7: "the other way: host 2's clock is ahead",
        1.2: "the sum is twice the latency",
    }
    return number(answer, 6.7, "half the difference, (7.3 + 6.1) / 2; the latency is half the sum, 0.6", traps=traps)


@checker_of_each("ABCD")
def diagnose(answer: object) -> Verdict:
    """For each of the four runs, its cause and where it is: {"A": ("slow stage", 0), ...}."""
    for name, (cause, place) in _TRUTH.items():
        given = answer[name]
        if not isinstance(given, (tuple, list)) or len(given) != 2 or given[0] not in CAUSES:
            return wrong(f"{name}: expected a pair of one of {', '.join(CAUSES)} and a place, got {given!r}")
        if given[0] != cause:
            return wrong(f"{name}: not a {given[0]}; {_CLUES[name]}")
        if _place(given[1]) != _place(place):
            return wrong(f"{name}: a {cause} it is, elsewhere; {_CLUES[name]}")
    return right("the four causes, each where it is")


def on_the_way(answer: object) -> Verdict:
    """Run A: of the time that rank 3 waits in receives, how many milliseconds were its messages on the way?"""
    run = runs()["A"]
    expected = 8 * calibrate(run).links[2, 3].latency
    waited = sum(span.end - span.start for span in run.others if span.rank == 3)
    traps = {
        waited: "that is the whole time in receives: from it goes what passed before rank 2 had made the message",
        waited - expected: "that is the time before the messages were made",
        expected / 8: "that is one message; rank 3 receives 8",
    }
    why = f"about {expected:.1f} of {waited:.1f} ms: the link is fast, rank 2 is slow"
    return number(answer, expected, why, traps=traps, tolerance=0.05)


@checker_of_each("ABC")
def better_schedule(answer: object) -> Verdict:
    """For runs A, B and C: the schedule that would save more than 5 % of the step (GPipe, eager-1F1B), or "none"."""
    found = runs()
    for name, given in sorted(answer.items()):
        run = found[name]
        shares = {other: _predicted(run, other) / run.makespan for other in ("1F1B", "GPipe", "eager-1F1B")}
        if given != "none" and given not in shares:
            return wrong(f'{name}: expected GPipe, eager-1F1B or "none", got {given!r}')
        best = min(shares, key=shares.__getitem__)
        if given == "none" and shares[best] < _GAIN:
            return wrong(f"{name}: {best} is predicted at {shares[best]:.0%} of the run's time")
        if given != "none" and shares[given] >= _GAIN:
            return wrong(f"{name}: {given} is predicted at {shares[given]:.0%} of the run's time")
    return right("slack hides a slow link and a late rank; no order makes a slow stage faster")


@checker("a function of (timeline, name)")
def predictor(answer: object) -> Verdict:
    """Write `predict(timeline, name)`: the makespan of another schedule of the same stages."""
    for run, timeline in runs().items():
        for name in ("GPipe", "1F1B", "eager-1F1B"):
            expected = _predicted(timeline, name)
            with readers_code(f"run {run}, {name}: your function raised"):
                given = answer(timeline, name)
            verdict = number(given, expected, "", traps={timeline.makespan: "that is what the run itself took"})
            if not verdict:
                return wrong(f"run {run}, {name}: {verdict.says}")
    return right("the predictions of lab.calibrate, for four runs and three schedules")


def _predicted(timeline: Timeline, name: str) -> float:
    schedule: Schedule = timeline.schedule
    other = build(name, num_ranks=schedule.num_ranks, num_microbatches=schedule.num_microbatches)
    return simulate(other, calibrate(timeline)).makespan


def _place(place: object) -> object:
    """A rank or stage as it is; a link without its direction: both directions of the slow one are slow."""
    return frozenset(place) if isinstance(place, (tuple, list, set, frozenset)) else place
