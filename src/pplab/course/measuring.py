"""Checkers of chapter 9, the runs that its exercises are about, and a hook that makes a stage pause once."""

from __future__ import annotations

import json
import time

from ..builders import build
from ..lab.attribution import calibrate
from ..schedule import Schedule
from ..simulator import simulate
from ..timeline import Timeline
from .verdict import Verdict, number, right, unanswered, wrong

CAUSES = ("slow stage", "slow link", "late rank", "one pause")

_TRUTH = {"A": ("slow stage", 2), "B": ("slow link", (1, 2)), "C": ("late rank", 1), "D": ("one pause", 3)}

_CLUES = {
    "A": "the part that stands out is imbalance, forward and backward of one rank last longer in every microbatch",
    "B": "the part that stands out is communication: print `pp.calibrate(run).links`",
    "C": "the part that stands out is overhead: nothing lasts longer, every action of one rank starts late",
    "D": "compare each action with the others of its kind on its stage: one lasts several times as long",
}

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
    return {name: Timeline.from_dict(data) for name, data in json.loads(_RUNS).items()}


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


def diagnose(answer: object) -> Verdict:
    """For each of the four runs, its cause and where it is: {"A": ("slow stage", 0), ...}."""
    if (verdict := unanswered(answer)) is not None:
        return verdict
    if not isinstance(answer, dict) or set(answer) != set(_TRUTH):
        return wrong(f"expected a dict with the keys A, B, C and D, got {answer!r}")
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


def better_schedule(answer: object) -> Verdict:
    """For runs A, B and C: the schedule that would save more than 5 % of the step (GPipe, eager-1F1B), or "none"."""
    if (verdict := unanswered(answer)) is not None:
        return verdict
    if not isinstance(answer, dict) or set(answer) != set("ABC"):
        return wrong(f"expected a dict with the keys A, B and C, got {answer!r}")
    found = runs()
    for name, given in sorted(answer.items()):
        shares = {
            other: _predicted(found[name], other) / found[name].makespan for other in ("1F1B", "GPipe", "eager-1F1B")
        }
        if given != "none" and given not in shares:
            return wrong(f'{name}: expected GPipe, eager-1F1B or "none", got {given!r}')
        best = min(shares, key=shares.__getitem__)
        if given == "none" and shares[best] < _GAIN:
            return wrong(f"{name}: {best} is predicted at {shares[best]:.0%} of the run's time")
        if given != "none" and shares[given] >= _GAIN:
            return wrong(f"{name}: {given} is predicted at {shares[given]:.0%} of the run's time")
    return right("slack hides a slow link and a late rank; no order makes a slow stage faster")


def predictor(answer: object) -> Verdict:
    """Write `predict(timeline, name)`: the makespan of another schedule of the same stages."""
    if (verdict := unanswered(answer)) is not None:
        return verdict
    if not callable(answer):
        return wrong(f"expected a function of (timeline, name), got {answer!r}")
    for run, timeline in runs().items():
        for name in ("GPipe", "1F1B", "eager-1F1B"):
            expected = _predicted(timeline, name)
            try:
                given = answer(timeline, name)
            except Exception as error:  # the reader's code: whatever it raises is the answer to show
                return wrong(f"run {run}, {name}: your function raised {type(error).__name__}: {error}")
            verdict = number(given, expected, "", traps={timeline.makespan: "that is what the run itself took"})
            if not verdict:
                return wrong(f"run {run}, {name}: {verdict.says}")
    return right("the predictions of pp.calibrate, for four runs and three schedules")


def _predicted(timeline: Timeline, name: str) -> float:
    schedule: Schedule = timeline.schedule
    other = build(name, num_ranks=schedule.num_ranks, num_microbatches=schedule.num_microbatches)
    return simulate(other, calibrate(timeline)).makespan


def _place(place: object) -> object:
    """A rank or stage as it is; a link without its direction: both directions of the slow one are slow."""
    return frozenset(place) if isinstance(place, (tuple, list, set, frozenset)) else place


_RUNS = """
{"A": {"schedule":"1F1B","rows":[["0F0","0F1","0F2","0F3","0B0","0F4","0B1","0F5","0B2","0F6","0B3","0F7","0B4",
"0B5","0B6","0B7"],["1F0","1F1","1F2","1B0","1F3","1B1","1F4","1B2","1F5","1B3","1F6","1B4","1F7","1B5","1B6","1B7"],
["2F0","2F1","2B0","2F2","2B1","2F3","2B2","2F4","2B3","2F5","2B4","2F6","2B5","2F7","2B6","2B7"],
["3F0","3B0","3F1","3B1","3F2","3B2","3F3","3B3","3F4","3B4","3F5","3B5","3F6","3B6","3F7","3B7"]],"placement":[0,1,
2,3],"unit":"ms","how":"simulated","spans":[[0,"0F0",0.1,10.3],[0,"0F1",10.4,20.3],[0,"0F2",20.4,30.3],
[0,"0F3",30.4,40.6],[0,"0B0",117.7,137.6],[0,"0F4",137.7,147.4],[0,"0B1",163.6,184.2],[0,"0F5",184.3,194.2],
[0,"0B2",209.6,229.4],[0,"0F6",229.5,239.5],[0,"0B3",252.7,272.3],[0,"0F7",272.4,282.2],[0,"0B4",299.4,319.4],
[0,"0B5",343.7,364.0],[0,"0B6",390.1,409.8],[0,"0B7",419.5,440.1],[1,"1F0",10.8,21.0],[1,"1F1",21.2,30.9],
[1,"1F2",31.0,40.8],[1,"1B0",96.9,117.1],[1,"1F3",117.2,127.5],[1,"1B1",143.0,163.1],[1,"1F4",163.2,173.5],
[1,"1B2",188.5,209.0],[1,"1F5",209.1,219.4],[1,"1B3",232.7,252.1],[1,"1F6",252.2,262.3],[1,"1B4",278.8,298.7],
[1,"1F7",298.8,308.6],[1,"1B5",323.4,343.1],[1,"1B6",369.3,389.5],[1,"1B7",399.1,418.9],[2,"2F0",21.7,36.3],
[2,"2F1",36.4,51.8],[2,"2B0",67.2,96.3],[2,"2F2",96.4,111.5],[2,"2B1",111.7,142.3],[2,"2F3",142.4,157.7],
[2,"2B2",157.8,187.9],[2,"2F4",188.0,202.8],[2,"2B3",202.9,232.1],[2,"2F5",232.2,247.5],[2,"2B4",247.7,278.2],
[2,"2F6",278.3,293.6],[2,"2B5",293.7,322.9],[2,"2F7",323.0,338.0],[2,"2B6",338.1,368.7],[2,"2B7",368.8,398.5],
[3,"3F0",36.9,46.8],[3,"3B0",46.9,66.6],[3,"3F1",66.7,76.5],[3,"3B1",76.6,96.3],[3,"3F2",112.1,122.2],
[3,"3B2",122.3,142.9],[3,"3F3",158.3,168.3],[3,"3B3",168.4,188.4],[3,"3F4",203.4,213.5],[3,"3B4",213.6,233.5],
[3,"3F5",248.1,258.1],[3,"3B5",258.2,278.2],[3,"3F6",294.2,304.0],[3,"3B6",304.1,324.3],[3,"3F7",338.5,348.3],
[3,"3B7",348.4,368.0]],"others":[[1,"1RECV_F0",0.0,10.8],[1,"1RECV_F1",21.0,21.1],[1,"1RECV_F2",30.9,30.9],
[2,"2RECV_F0",0.0,21.6],[2,"2RECV_F1",36.3,36.3],[3,"3RECV_F0",0.0,36.8],[3,"3RECV_F1",66.6,66.6],
[2,"2RECV_B0",51.8,67.1],[2,"2RECV_F2",96.3,96.3],[2,"2RECV_B1",111.5,111.6],[3,"3RECV_F2",96.3,112.0],
[1,"1RECV_B0",40.8,96.8],[1,"1RECV_F3",117.1,117.1],[1,"1RECV_B1",127.5,142.9],[2,"2RECV_F3",142.3,142.3],
[2,"2RECV_B2",157.7,157.7],[3,"3RECV_F3",142.9,158.2],[0,"0RECV_B0",40.6,117.6],[0,"0RECV_B1",147.4,163.5],
[1,"1RECV_F4",163.1,163.1],[1,"1RECV_B2",173.5,188.4],[1,"1RECV_F5",209.0,209.0],[2,"2RECV_F4",187.9,187.9],
[2,"2RECV_B3",202.8,202.8],[2,"2RECV_F5",232.1,232.1],[3,"3RECV_F4",188.4,203.3],[3,"3RECV_F5",233.5,248.0],
[0,"0RECV_B2",194.2,209.5],[1,"1RECV_B3",219.4,232.6],[1,"1RECV_F6",252.1,252.1],[2,"2RECV_B4",247.5,247.6],
[2,"2RECV_F6",278.2,278.2],[2,"2RECV_B5",293.6,293.6],[3,"3RECV_F6",278.2,294.1],[0,"0RECV_B3",239.5,252.6],
[1,"1RECV_B4",262.3,278.7],[1,"1RECV_F7",298.7,298.7],[1,"1RECV_B5",308.6,323.3],[2,"2RECV_F7",322.9,322.9],
[2,"2RECV_B6",338.0,338.0],[3,"3RECV_F7",324.3,338.4],[0,"0RECV_B4",282.2,299.2],[0,"0RECV_B5",319.4,343.5],
[1,"1RECV_B6",343.1,369.2],[2,"2RECV_B7",368.7,368.7],[0,"0RECV_B6",364.0,390.0],[1,"1RECV_B7",389.5,399.0],
[0,"0RECV_B7",409.8,419.5]]},
"B": {"schedule":"1F1B","rows":[["0F0","0F1","0F2","0F3","0B0","0F4","0B1","0F5","0B2","0F6","0B3","0F7","0B4","0B5",
"0B6","0B7"],["1F0","1F1","1F2","1B0","1F3","1B1","1F4","1B2","1F5","1B3","1F6","1B4","1F7","1B5","1B6","1B7"],
["2F0","2F1","2B0","2F2","2B1","2F3","2B2","2F4","2B3","2F5","2B4","2F6","2B5","2F7","2B6","2B7"],
["3F0","3B0","3F1","3B1","3F2","3B2","3F3","3B3","3F4","3B4","3F5","3B5","3F6","3B6","3F7","3B7"]],"placement":[0,1,
2,3],"unit":"ms","how":"simulated","spans":[[0,"0F0",0.1,10.4],[0,"0F1",10.5,20.2],[0,"0F2",20.3,30.5],
[0,"0F3",30.6,40.5],[0,"0B0",121.5,141.2],[0,"0F4",141.3,151.5],[0,"0B1",152.9,173.1],[0,"0F5",173.2,183.1],
[0,"0B2",201.3,221.6],[0,"0F6",221.7,231.5],[0,"0B3",233.1,253.0],[0,"0F7",253.1,263.2],[0,"0B4",278.1,298.7],
[0,"0B5",309.9,329.6],[0,"0B6",357.5,377.5],[0,"0B7",387.0,406.7],[1,"1F0",11.0,21.0],[1,"1F1",21.2,31.1],
[1,"1F2",31.2,41.5],[1,"1B0",100.8,120.9],[1,"1F3",121.0,131.0],[1,"1B1",131.9,152.3],[1,"1F4",152.4,162.7],
[1,"1B2",180.3,200.7],[1,"1F5",200.8,210.6],[1,"1B3",212.8,232.4],[1,"1F6",232.5,242.3],[1,"1B4",257.5,277.5],
[1,"1F7",277.6,287.6],[1,"1B5",289.7,309.3],[1,"1B6",336.8,356.9],[1,"1B7",366.5,386.4],[2,"2F0",30.2,40.1],
[2,"2F1",40.2,50.2],[2,"2B0",71.7,91.3],[2,"2F2",91.5,101.6],[2,"2B1",101.8,122.2],[2,"2F3",140.8,150.9],
[2,"2B2",151.0,171.0],[2,"2F4",172.2,182.3],[2,"2B3",182.7,203.1],[2,"2F5",219.0,229.2],[2,"2B4",229.3,248.8],
[2,"2F6",251.1,261.2],[2,"2B5",261.3,280.8],[2,"2F7",297.5,307.6],[2,"2B6",307.7,327.8],[2,"2B7",338.1,358.4],
[3,"3F0",40.7,50.9],[3,"3B0",51.0,71.1],[3,"3F1",71.2,81.1],[3,"3B1",81.2,101.2],[3,"3F2",102.2,112.5],
[3,"3B2",112.6,132.9],[3,"3F3",151.4,161.5],[3,"3B3",161.6,182.1],[3,"3F4",182.9,193.1],[3,"3B4",193.2,213.5],
[3,"3F5",229.8,239.6],[3,"3B5",239.7,259.2],[3,"3F6",261.8,272.0],[3,"3B6",272.1,292.4],[3,"3F7",308.2,317.9],
[3,"3B7",318.0,337.5]],"others":[[1,"1RECV_F0",0.0,10.9],[1,"1RECV_F1",21.0,21.1],[1,"1RECV_F2",31.1,31.1],
[2,"2RECV_F0",0.0,30.1],[2,"2RECV_F1",40.1,40.1],[3,"3RECV_F0",0.0,40.6],[3,"3RECV_F1",71.1,71.1],
[2,"2RECV_B0",50.2,71.6],[2,"2RECV_F2",91.3,91.4],[2,"2RECV_B1",101.6,101.7],[3,"3RECV_F2",101.2,102.1],
[1,"1RECV_B0",41.5,100.7],[1,"1RECV_F3",120.9,120.9],[1,"1RECV_B1",131.0,131.8],[2,"2RECV_F3",122.2,140.7],
[2,"2RECV_B2",150.9,150.9],[3,"3RECV_F3",132.9,151.3],[0,"0RECV_B0",40.5,121.3],[0,"0RECV_B1",151.5,152.8],
[1,"1RECV_F4",152.3,152.3],[1,"1RECV_B2",162.7,180.2],[1,"1RECV_F5",200.7,200.7],[2,"2RECV_F4",171.0,172.1],
[2,"2RECV_B3",182.3,182.6],[2,"2RECV_F5",203.1,218.9],[3,"3RECV_F4",182.1,182.8],[3,"3RECV_F5",213.5,229.7],
[0,"0RECV_B2",183.1,201.2],[1,"1RECV_B3",210.6,212.7],[1,"1RECV_F6",232.4,232.4],[2,"2RECV_B4",229.2,229.2],
[2,"2RECV_F6",248.8,251.0],[2,"2RECV_B5",261.2,261.2],[3,"3RECV_F6",259.2,261.7],[0,"0RECV_B3",231.5,233.0],
[1,"1RECV_B4",242.3,257.4],[1,"1RECV_F7",277.5,277.5],[1,"1RECV_B5",287.6,289.6],[2,"2RECV_F7",280.8,297.4],
[2,"2RECV_B6",307.6,307.6],[3,"3RECV_F7",292.4,308.1],[0,"0RECV_B4",263.2,278.0],[0,"0RECV_B5",298.7,309.8],
[1,"1RECV_B6",309.3,336.7],[2,"2RECV_B7",327.8,338.0],[0,"0RECV_B6",329.6,357.4],[1,"1RECV_B7",356.9,366.5],
[0,"0RECV_B7",377.5,386.9]]},
"C": {"schedule":"1F1B","rows":[["0F0","0F1","0F2","0F3","0B0","0F4","0B1","0F5","0B2","0F6","0B3","0F7","0B4","0B5",
"0B6","0B7"],["1F0","1F1","1F2","1B0","1F3","1B1","1F4","1B2","1F5","1B3","1F6","1B4","1F7","1B5","1B6","1B7"],
["2F0","2F1","2B0","2F2","2B1","2F3","2B2","2F4","2B3","2F5","2B4","2F6","2B5","2F7","2B6","2B7"],
["3F0","3B0","3F1","3B1","3F2","3B2","3F3","3B3","3F4","3B4","3F5","3B5","3F6","3B6","3F7","3B7"]],"placement":[0,1,
2,3],"unit":"ms","how":"simulated","spans":[[0,"0F0",0.1,10.1],[0,"0F1",10.2,20.3],[0,"0F2",20.4,30.1],
[0,"0F3",30.2,40.4],[0,"0B0",112.6,133.0],[0,"0F4",133.1,142.9],[0,"0B1",151.2,171.6],[0,"0F5",171.7,181.8],
[0,"0B2",190.0,210.2],[0,"0F6",210.3,220.2],[0,"0B3",227.6,247.7],[0,"0F7",247.8,257.7],[0,"0B4",265.5,285.1],
[0,"0B5",303.9,324.4],[0,"0B6",334.1,353.8],[0,"0B7",367.3,387.1],[1,"1F0",14.3,24.6],[1,"1F1",29.0,39.0],
[1,"1F2",42.6,52.7],[1,"1B0",91.5,112.0],[1,"1F3",116.5,126.7],[1,"1B1",131.0,150.6],[1,"1F4",154.9,164.8],
[1,"1B2",169.3,189.4],[1,"1F5",193.1,202.9],[1,"1B3",206.9,227.0],[1,"1F6",230.9,241.0],[1,"1B4",244.8,264.9],
[1,"1F7",268.8,279.0],[1,"1B5",283.1,303.4],[1,"1B6",313.9,333.5],[1,"1B7",346.4,366.8],[2,"2F0",25.2,35.4],
[2,"2F1",39.6,49.7],[2,"2B0",66.4,86.9],[2,"2F2",87.0,96.8],[2,"2B1",96.9,116.9],[2,"2F3",127.4,137.6],
[2,"2B2",137.8,157.4],[2,"2F4",165.3,175.2],[2,"2B3",175.3,194.9],[2,"2F5",203.5,213.3],[2,"2B4",213.5,233.6],
[2,"2F6",241.5,251.5],[2,"2B5",251.6,271.9],[2,"2F7",279.5,289.7],[2,"2B6",289.8,309.8],[2,"2B7",321.3,341.7],
[3,"3F0",36.0,45.7],[3,"3B0",45.8,65.8],[3,"3F1",65.9,76.0],[3,"3B1",76.1,96.0],[3,"3F2",97.4,107.4],
[3,"3B2",107.5,127.3],[3,"3F3",138.3,148.1],[3,"3B3",148.2,168.7],[3,"3F4",175.8,185.8],[3,"3B4",185.8,205.9],
[3,"3F5",214.0,224.0],[3,"3B5",224.1,244.6],[3,"3F6",252.1,261.8],[3,"3B6",262.0,282.5],[3,"3F7",290.3,300.2],
[3,"3B7",300.3,320.7]],"others":[[1,"1RECV_F0",0.0,10.6],[1,"1RECV_F1",24.6,24.6],[1,"1RECV_F2",39.0,39.0],
[2,"2RECV_F0",0.0,25.1],[2,"2RECV_F1",35.4,39.5],[3,"3RECV_F0",0.0,35.9],[3,"3RECV_F1",65.8,65.8],
[2,"2RECV_B0",49.7,66.3],[2,"2RECV_F2",86.9,86.9],[2,"2RECV_B1",96.8,96.8],[3,"3RECV_F2",96.0,97.3],
[1,"1RECV_B0",52.7,87.4],[1,"1RECV_F3",112.0,112.0],[1,"1RECV_B1",126.7,126.8],[2,"2RECV_F3",116.9,127.3],
[2,"2RECV_B2",137.6,137.7],[3,"3RECV_F3",127.3,138.2],[0,"0RECV_B0",40.4,112.6],[0,"0RECV_B1",142.9,151.1],
[1,"1RECV_F4",150.6,150.6],[1,"1RECV_B2",164.8,164.8],[1,"1RECV_F5",189.4,189.4],[2,"2RECV_F4",157.4,165.3],
[2,"2RECV_B3",175.2,175.2],[2,"2RECV_F5",194.9,203.3],[3,"3RECV_F4",168.7,175.7],[3,"3RECV_F5",205.9,213.9],
[0,"0RECV_B2",181.8,189.9],[1,"1RECV_B3",202.9,202.9],[1,"1RECV_F6",227.0,227.0],[2,"2RECV_B4",213.3,213.4],
[2,"2RECV_F6",233.6,241.4],[2,"2RECV_B5",251.5,251.5],[3,"3RECV_F6",244.6,252.0],[0,"0RECV_B3",220.2,227.5],
[1,"1RECV_B4",241.0,241.0],[1,"1RECV_F7",264.9,265.0],[1,"1RECV_B5",279.0,279.0],[2,"2RECV_F7",271.9,279.5],
[2,"2RECV_B6",289.7,289.8],[3,"3RECV_F7",282.5,290.3],[0,"0RECV_B4",257.7,265.4],[0,"0RECV_B5",285.1,303.8],
[1,"1RECV_B6",303.4,310.3],[2,"2RECV_B7",309.8,321.2],[0,"0RECV_B6",324.4,334.0],[1,"1RECV_B7",333.5,342.2],
[0,"0RECV_B7",353.8,367.2]]},
"D": {"schedule":"1F1B","rows":[["0F0","0F1","0F2","0F3","0B0","0F4","0B1","0F5","0B2","0F6","0B3","0F7","0B4","0B5",
"0B6","0B7"],["1F0","1F1","1F2","1B0","1F3","1B1","1F4","1B2","1F5","1B3","1F6","1B4","1F7","1B5","1B6","1B7"],
["2F0","2F1","2B0","2F2","2B1","2F3","2B2","2F4","2B3","2F5","2B4","2F6","2B5","2F7","2B6","2B7"],
["3F0","3B0","3F1","3B1","3F2","3B2","3F3","3B3","3F4","3B4","3F5","3B5","3F6","3B6","3F7","3B7"]],"placement":[0,1,
2,3],"unit":"ms","how":"simulated","spans":[[0,"0F0",0.1,9.9],[0,"0F1",10.0,19.7],[0,"0F2",19.8,29.8],
[0,"0F3",29.9,40.1],[0,"0B0",103.3,123.5],[0,"0F4",123.6,133.5],[0,"0B1",133.7,153.1],[0,"0F5",153.3,163.5],
[0,"0B2",165.8,185.4],[0,"0F6",185.5,195.3],[0,"0B3",196.0,215.7],[0,"0F7",215.8,225.6],[0,"0B4",287.6,307.9],
[0,"0B5",318.4,338.9],[0,"0B6",350.1,370.3],[0,"0B7",381.4,402.0],[1,"1F0",10.5,20.5],[1,"1F1",20.6,30.4],
[1,"1F2",30.5,40.7],[1,"1B0",82.6,102.7],[1,"1F3",102.9,112.9],[1,"1B1",113.5,133.1],[1,"1F4",134.1,144.4],
[1,"1B2",144.7,165.3],[1,"1F5",165.4,175.6],[1,"1B3",175.8,195.5],[1,"1F6",195.9,206.0],[1,"1B4",266.9,287.0],
[1,"1F7",287.1,297.4],[1,"1B5",297.5,317.8],[1,"1B6",329.0,349.6],[1,"1B7",360.7,380.8],[2,"2F0",21.1,30.9],
[2,"2F1",31.1,41.2],[2,"2B0",62.3,82.1],[2,"2F2",82.2,92.4],[2,"2B1",93.0,112.9],[2,"2F3",113.4,123.5],
[2,"2B2",123.9,144.2],[2,"2F4",145.0,154.9],[2,"2B3",155.0,174.6],[2,"2F5",176.2,186.1],[2,"2B4",245.8,266.4],
[2,"2F6",266.5,276.4],[2,"2B5",276.6,296.3],[2,"2F7",298.0,307.8],[2,"2B6",307.9,328.4],[2,"2B7",339.6,360.1],
[3,"3F0",31.6,41.3],[3,"3B0",41.5,61.7],[3,"3F1",61.8,71.8],[3,"3B1",71.8,92.4],[3,"3F2",93.0,102.8],
[3,"3B2",102.9,123.3],[3,"3F3",124.1,134.3],[3,"3B3",134.4,153.9],[3,"3F4",155.4,225.2],[3,"3B4",225.3,245.2],
[3,"3F5",245.3,255.6],[3,"3B5",255.7,275.3],[3,"3F6",277.1,287.1],[3,"3B6",287.2,306.9],[3,"3F7",308.4,318.6],
[3,"3B7",318.7,339.0]],"others":[[1,"1RECV_F0",0.0,10.4],[1,"1RECV_F1",20.5,20.5],[1,"1RECV_F2",30.4,30.4],
[2,"2RECV_F0",0.0,21.0],[2,"2RECV_F1",30.9,31.0],[3,"3RECV_F0",0.0,31.5],[3,"3RECV_F1",61.7,61.7],
[2,"2RECV_B0",41.2,62.2],[2,"2RECV_F2",82.1,82.1],[2,"2RECV_B1",92.4,92.9],[3,"3RECV_F2",92.4,92.9],
[1,"1RECV_B0",40.7,82.5],[1,"1RECV_F3",102.7,102.8],[1,"1RECV_B1",112.9,113.4],[2,"2RECV_F3",112.9,113.3],
[2,"2RECV_B2",123.5,123.8],[3,"3RECV_F3",123.3,124.0],[0,"0RECV_B0",40.1,103.2],[0,"0RECV_B1",133.5,133.6],
[1,"1RECV_F4",133.1,134.0],[1,"1RECV_B2",144.4,144.6],[1,"1RECV_F5",165.3,165.3],[2,"2RECV_F4",144.2,144.9],
[2,"2RECV_B3",154.9,154.9],[2,"2RECV_F5",174.6,176.1],[3,"3RECV_F4",153.9,155.3],[3,"3RECV_F5",245.2,245.2],
[0,"0RECV_B2",163.5,165.7],[1,"1RECV_B3",175.6,175.7],[1,"1RECV_F6",195.5,195.8],[2,"2RECV_B4",186.1,245.7],
[2,"2RECV_F6",266.4,266.4],[2,"2RECV_B5",276.4,276.5],[3,"3RECV_F6",275.3,277.0],[0,"0RECV_B3",195.3,195.9],
[1,"1RECV_B4",206.0,266.8],[1,"1RECV_F7",287.0,287.0],[1,"1RECV_B5",297.4,297.4],[2,"2RECV_F7",296.3,297.9],
[2,"2RECV_B6",307.8,307.8],[3,"3RECV_F7",306.9,308.3],[0,"0RECV_B4",225.6,287.5],[0,"0RECV_B5",307.9,318.3],
[1,"1RECV_B6",317.8,328.9],[2,"2RECV_B7",328.4,339.6],[0,"0RECV_B6",338.9,350.0],[1,"1RECV_B7",349.6,360.6],
[0,"0RECV_B7",370.3,381.3]]}}
"""
