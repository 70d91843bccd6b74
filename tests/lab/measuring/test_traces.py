"""Traces of torch's own classes, recorded from real runs by `tests/record_traces.py`, and what else is given as one."""

import gzip
import json
import re
from pathlib import Path

import pytest

import pplab as pp
from pplab import lab
from record_traces import CASES

TRACES = Path(__file__).parent / "traces"
TRAINED = sorted(set(CASES) - {"unnamed", "evaluation"})


def load(case: str, rank: int = 0) -> dict:
    return json.loads(gzip.decompress((TRACES / case / f"rank{rank}.json.gz").read_bytes()))


def save(folder: Path, *traces: dict) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, trace in enumerate(traces):
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))
    return folder


def torch_rows(case: str) -> list[list[str]]:
    """What torch says that its class runs. It runs the halves of an overlap in turn. Its list for 1F1B numbers the
    forwards of later ranks from their rank on; the class's loop numbers them from 0."""
    rows = json.loads((TRACES / case / "rows.txt").read_text())
    rows = [re.findall(r"\d+[FBIW]\d+", " ".join(row)) for row in rows]
    if CASES[case]["name"] == "1F1B":
        firsts = [min(int(action.split("F")[1]) for action in row if "F" in action) for row in rows]
        rows = [
            [re.sub(r"F(\d+)", lambda found, first=first: f"F{int(found[1]) - first}", action) for action in row]
            for row, first in zip(rows, firsts, strict=True)
        ]
    return rows


@pytest.mark.parametrize("case", TRAINED)
def test_rows_are_torchs_and_the_times_add_up(case):
    traced = lab.read_traces(TRACES / case)
    assert len(traced.timelines) == (2 if CASES[case].get("titan") else CASES[case].get("steps", 1))
    for timeline in traced.timelines:
        assert [[*map(str, row)] for row in timeline.schedule.rows] == torch_rows(case)
        assert (timeline.unit, timeline.how) == ("ms", "measured") and min(timeline.starts) == 0
        for rank in range(timeline.schedule.num_ranks):
            spans = timeline.spans_of(rank)
            assert all(a.end <= b.start + 1e-3 for a, b in zip(spans, spans[1:], strict=False))
            assert all(span.start <= span.end for span in spans)
        where = lab.where(timeline)
        for parts in where.by_rank:
            assert sum(parts.values()) == pytest.approx(where.step_time)
        assert pp.simulate(timeline.schedule, lab.calibrate(timeline)).makespan < 1.2 * timeline.makespan
