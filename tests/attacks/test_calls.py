"""Calls and texts with nonsense in them: each is refused by a ValueError in few words, or gives sound figures."""

from __future__ import annotations

import json
import math
import random
import signal
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import pplab as pp
from pplab import Action, Costs, Kind, Link, Memory, Overlap, Schedule, Timeline, lab
from pplab.lab import partition, replicate
from pplab.runtime import check_divides

SLOWEST_S = 10  # of a call that takes milliseconds: a machine may be busy
LONGEST = 1_000  # characters of an error

DEEP: list = []
for _ in range(5_000):
    DEEP = [DEEP]

VALUES: dict[str, object] = {
    **dict(nan=math.nan, inf=math.inf, negative=-1, zero=0, yes=True, none=None, big=10**400, bigger=10**5000),
    **dict(tiny=1e-320, huge=1e308, minus_zero=-0.0, complex=1j, fraction=Fraction(1, 3), decimal=Decimal("1.5")),
    **dict(
        text="1", bytes=b"12", empty="", list=[1, 2], three=[1, 2, 3], nothing=[], texts=["1", "2"], nested=[[1], [2]]
    ),
    **dict(nan_inside=[1, math.nan], bool_inside=[True, False], dict={0: 1, 1: 2}, set={1, 2}),
    **dict(nested=[[1], [2]], range=range(1, 3)),
    **dict(int64=np.int64(2), int8=np.int8(100), float32=np.float32(1.5), numpy_nan=np.float64("nan")),
    **dict(array=np.array([1.0, 2.0]), scalar=np.array(1.0), matrix=np.ones((2, 2)), tensor=torch.tensor(1.0)),
    **dict(bool_=np.True_, tensors=torch.tensor([1.0, 2.0]), object=object(), type=int, function=len, deep=DEEP),
}
SMALL = pp.build("1F1B", num_ranks=2, num_microbatches=2)
RUN = pp.simulate(SMALL)


def figures(timeline: Timeline) -> Timeline:
    """A timeline of which everything can be asked, all of it finite and fit for JSON."""
    found = [timeline.makespan, timeline.bubble_fraction, timeline.bubble_ratio, *timeline.busy, *timeline.idle]
    assert all(map(math.isfinite, found)), f"a figure is not finite: {found}"
    assert all(type(x) in (int, float) for x in found), f"a figure is no number of Python's: {found}"
    json.dumps(lab.timeline_to_dict(timeline))
    return timeline


def judged(rows: object) -> None:
    figures(pp.simulate(Schedule(rows)))


def calls() -> Iterator[tuple[str, str, Callable[[], object]]]:
    """The family, the call in words, and the call: every entry with every value."""
    F, B = Kind.F, Kind.B
    entries: dict[str, Callable[[object], object]] = {
        **{
            f"Costs({name}=...)": lambda v, name=name: figures(pp.simulate(SMALL, Costs(**{name: v})))
            for name in ("forward", "backward_input", "backward_weight", "backward", "recompute", "overlap", "message")
            + ("latency", "bandwidth", "links", "unit")
        },
        "Link(latency)": lambda v: figures(pp.simulate(SMALL, Costs(links={(0, 1): Link(v)}))),
        "Costs(links={(0, 1): ...})": lambda v: pp.simulate(SMALL, Costs(links={(0, 1): v})),
        "Costs(overlap={(0, 1): ...})": lambda v: pp.simulate(SMALL, Costs(overlap={(0, 1): v})),
        "Costs(1, bandwidth, message)": lambda v: figures(pp.simulate(SMALL, Costs(bandwidth=v, message=v))),
        "simulate(...)": pp.simulate,
        "simulate(schedule, ...)": lambda v: figures(pp.simulate(SMALL, v)),
        "validate(...)": pp.validate,
        "check_memory(limit)": lambda v: lab.check_memory(SMALL, v),
        "check_memory(memory=...)": lambda v: lab.check_memory(SMALL, 9, v),
        **{
            f"Memory({name}=...)": lambda v, name=name: lab.check_memory(SMALL, 9, Memory(**{name: v}))
            for name in ("activation", "weight_input", "recomputed", "parameters", "while_input_gradient", "unit")
        },
        "peak_held(...)": SMALL.peak_held,
        "build(num_ranks=...)": lambda v: pp.build("1F1B", num_ranks=v, num_microbatches=2),
        "build(num_microbatches=...)": lambda v: pp.build("GPipe", num_ranks=2, num_microbatches=v),
        "build(stages_per_rank=...)": lambda v: pp.build(
            "Interleaved1F1B", num_ranks=2, num_microbatches=2, stages_per_rank=v
        ),
        "build(name)": lambda v: pp.build(v, num_ranks=2, num_microbatches=2),
        "Schedule(...)": judged,
        "Schedule([...])": lambda v: judged([v]),
        "Schedule([[...]])": lambda v: judged([[v]]),
        "Schedule(name=...)": lambda v: repr(Schedule(SMALL.rows, v)),
        "Action(..., F, 0)": lambda v: judged([[Action(v, F, 0), Action(v, B, 0)]]),
        "Action(0, ..., 0)": lambda v: judged([[Action(0, v, 0), Action(0, B, 0)]]),
        "Action(0, F, ...)": lambda v: judged([[Action(0, F, v), Action(0, B, v)]]),
        "Overlap(..., B)": lambda v: judged([[Overlap(v, Action(0, B, 0))]]),
        "Overlap(F, ...)": lambda v: judged([[Overlap(Action(0, F, 0), v)]]),
        "from_csv(...)": lab.read_csv,
        "parse(...)": pp.parse,
        "check_divides(..., 3)": lambda v: check_divides(v, 3),
        "partition(...)": lambda v: partition([1, 2, 3], v),
        "replicate(...)": lambda v: replicate(SMALL, v),
        "timeline_from_dict(...)": lab.timeline_from_dict,
    }
    for entry, act in entries.items():
        for name, value in VALUES.items():
            yield "calls", f"{entry} with {name}", lambda act=act, value=value: act(value)


def texts(tries: int, draw: random.Random) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """CSVs, and a timeline's JSON, with parts of them replaced."""
    whole, made = lab.to_csv(SMALL), json.dumps(lab.timeline_to_dict(RUN))
    cells = ["0F999999999", "99999999F0", "0F9223372036854775808", "0F" + "9" * 5_000, "x" * 200_000, '"', "\0", "\r"]
    cells += ["(0F0;0B0)OVERLAP_F_B", "(0F1;(0F1;0B1)OVERLAP_F_B)OVERLAP_F_B", "0F0" * 100, "٣F٠", "\ufeff", ",,\n,,\n"]
    cells += ["-1F0", "0.5F0", "0SEND_F0", "=1+1", "\x1b[31m", "../" * 2_000 + "x.csv", "/dev/null", "\ud800"]
    parts = ["null", "[]", "{}", "-1", "1e999", "NaN", "true", '""', '"0Q0"', "[" * 50_000, "9" * 5_000, "[[0]]", "0.5"]
    for cell in cells:
        for text in (cell, f"{cell},0B0", f"0F0,0B0\n{cell}", whole + cell, cell + whole):
            yield "CSV texts", f"from_csv with {cell[:30]!r}", lambda text=text: judged_csv(text)
    for _ in range(tries):
        at, size = draw.randrange(len(whole)), draw.randrange(4)
        text = whole[:at] + draw.choice((*"01239FBIW,;()\n \"'", *cells)) + whole[at + size :]
        yield "CSV texts", f"from_csv of {text[:200]!r}", lambda text=text: judged_csv(text)
        at, end = sorted(draw.sample(range(len(made)), 2))
        end = draw.choice((at + draw.randrange(9), end))
        text = made[:at] + draw.choice(parts) + made[end:]
        yield "timelines as JSON", f"a timeline with {text[at : at + 30]!r} at {at}", lambda text=text: read(text)
    for key in lab.timeline_to_dict(RUN):
        for name, value in VALUES.items():
            data = {**lab.timeline_to_dict(RUN), key: value}
            yield "timelines as JSON", f"{key} is {name}", lambda data=data: repr(figures(lab.timeline_from_dict(data)))


def judged_csv(text: str) -> None:
    schedule = lab.read_csv(text)
    pp.simulate(schedule)
    assert lab.read_csv(lab.to_csv(schedule)) == schedule


def read(text: str) -> None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return  # the reader's own affair
    repr(lab.timeline_from_dict(data))


def too_slow(*_: object) -> None:
    raise TimeoutError(f"nothing after {SLOWEST_S} s")


def attack(tries: int, seed: int) -> list[dict]:
    """Make all calls, and read `tries` damaged texts of each kind: a row for each family."""
    rows: dict[str, dict] = {}
    before = signal.signal(signal.SIGALRM, too_slow)
    for family, what, act in (*calls(), *texts(tries, random.Random(seed))):
        row = rows.setdefault(family, dict(what=family, tried=0, wrong=0, seen="", seconds=0))
        wrong, began = "", time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, SLOWEST_S)
        try:
            act()
        except ValueError as error:
            said = str(error)
            row["seen"] = row["seen"] or said
            if not said or len(said) > LONGEST:
                wrong = f"an error of {len(said)} characters"
        except OSError as error:  # a text that names a file, and none that is there
            wrong = "" if error.filename else repr(error)
        except Exception as error:
            wrong = repr(error)[:200]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        took = time.perf_counter() - began
        row["tried"] += 1
        row["seconds"] = round(max(row["seconds"], took), 3)
        if wrong:
            row["wrong"] += 1
            row.setdefault("wrongs", []).append(f"{what}: {wrong}")
            row["seen"] = row["wrongs"][0]
    signal.signal(signal.SIGALRM, before)
    return list(rows.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nonsense_is_refused_in_one_line():
    found = attack(400, seed=1)
    assert [row for row in found if row["wrong"]] == []
    assert [row["what"] for row in found] == ["calls", "CSV texts", "timelines as JSON"]
    assert all(row["seen"] for row in found)
