"""What the book's recording keeps for the page: values that cells measured, as JSON and back."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import pplab as pp
from pplab import lab

ROOT = Path(__file__).parents[2]
LIVE = ROOT / "book" / "_live"


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.syspath_prepend(str(LIVE))
    import measured

    return measured


ONE = pp.simulate(pp.build("1F1B", num_ranks=2, num_microbatches=2))
PAIRS = pp.build("DualPipe", num_ranks=4, num_microbatches=8)
COSTS = pp.Costs([1, 2, 3], 1, 1, overlap={("0F", "1I"): 4}, links={(0, 1): pp.Link(1, 2)})
WAITING = pp.Timeline(
    ONE.schedule,
    ONE.starts,
    ONE.ends,
    "ms",
    "measured",
    (pp.Span(1, pp.parse("1RECV_F0"), 0, 1.5), pp.Span(0, "w", 2, 3)),
)
VALUES = {
    "numbers and words": [1, 0.1 + 0.2, math.inf, True, None, "0F3", ""],
    "containers": {(1, 2): {3}, "a": [(), {}], 2: range(1, 9, 2), None: frozenset({pp.Kind.F})},
    "actions": [pp.parse("0F3"), pp.parse("(0F7;7B3)OVERLAP_F_B"), pp.Kind.RECV_B],
    "a schedule": PAIRS,
    "timelines": [ONE, pp.simulate(PAIRS), WAITING],
    "costs": [COSTS, pp.Link(latency=2)],
    "results": [lab.where(ONE), lab.Case(), lab.Case().row("1F1B", 8)],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_equal(measured, name):
    value = VALUES[name]
    text = json.dumps(measured.to_plain(value), allow_nan=False)
    back = measured.from_plain(json.loads(text))
    assert back == value and repr(back) == repr(value) and type(back) is type(value)
    if name == "costs":
        assert back[0].of_item(pp.parse("(0F1;1I0)OVERLAP_F_I")) == 4


def test_what_needs_torch_has_what_cells_read(measured):
    from pplab.runtime import GradientReport

    report = GradientReport(1e-9, 1.0, 1e-5, "w", {"w": 1e-9}, 0.0)
    plain = json.loads(json.dumps(measured.to_plain([report], read={"equal", "relative", "train"})))
    (back,) = measured.from_plain(plain)
    assert (back.equal, back.relative, str(back)) == (True, report.relative, str(report))
    with pytest.raises(ImportError, match="lacks its worst: open the notebook"):
        _ = back.worst


def test_numbers_of_torch_become_pythons(measured):
    import torch

    assert measured.to_plain([torch.tensor(0.5), torch.tensor(3)]) == [0.5, 3]
    for without in (torch.ones(2), torch.nn.Linear(1, 1), len, lambda: 0, ONE.__class__, [open]):
        with pytest.raises(measured.NoForm):
            measured.to_plain(without)


@pytest.mark.parametrize(
    "name",
    [
        "subprocess.Popen",
        "builtins.eval",
        "pplab.costs.re",
        "pplab.nothing.Link",
        "pplab.build",
        "pplab.__main__.X",
        "x",
        "",
    ],
)
def test_a_recording_can_name_no_other_class(measured, name):
    with pytest.raises(ValueError, match="is no dataclass and no named tuple of pplab or pplab_course"):
        measured.from_plain([{name: {"args": ["true"]}}])


@pytest.mark.parametrize(
    "data", [{}, {"tuple": 3}, {"timeline": [1]}, {"pplab.costs.Link": 3}, {"a": 1, "b": 2}, {"action": "9"}]
)
def test_a_damaged_recording_is_refused(measured, data):
    with pytest.raises(ValueError):
        measured.from_plain(data)


def test_reading_needs_no_torch():
    code = "import sys; sys.modules.update(torch=None, numpy=None); import measured; measured.from_plain({'kind': 'F'})"
    subprocess.run([sys.executable, "-c", code], cwd=LIVE, check=True)
