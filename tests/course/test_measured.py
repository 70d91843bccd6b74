"""What the book's recording keeps for the page: values that cells measured, as JSON and back."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import execute_notebooks
import nbformat
import page_cells
import pytest
import quiet

import pplab as pp
from pplab import lab

ROOT = Path(__file__).parents[2]
LIVE = ROOT / "book" / "_live"
RECORDED = sorted((ROOT / "notebooks" / "measured").glob("*.json"))


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
    "results": [lab.where(ONE), lab.Case(), lab.Case().row("1F1B", 8), lab.MeasuredLayers(*[(1, 2)] * 6)],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_equal(measured, name):
    value = VALUES[name]
    text = json.dumps(measured.to_plain(value), allow_nan=False)
    back = measured.from_plain(json.loads(text))
    assert back == value and repr(back) == repr(value) and type(back) is type(value) and '"seen"' not in text
    if name == "costs":
        assert back[0].of_item(pp.parse("(0F1;1I0)OVERLAP_F_I")) == 4


def test_what_needs_torch_has_what_cells_read(measured):
    from pplab.runtime import Compared, GradientReport

    report = GradientReport(Compared(1.0, 0.0, 1e-5, 1.0), {"w": Compared(1.0, 1e-9, 1e-5, 1.0)}, 1e-5)
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


def test_a_recording_of_an_older_class_is_refused(measured):
    plain = measured.to_plain(pp.Link(1, 2))
    del plain["pplab.costs.Link"]["bandwidth"]
    with pytest.raises(ValueError, match="Link lacks bandwidth. Record the chapter anew"):
        measured.from_plain(plain)


def test_reading_needs_no_torch():
    code = "import sys; sys.modules.update(torch=None, numpy=None); import measured; measured.from_plain({'kind': 'F'})"
    subprocess.run([sys.executable, "-c", code], cwd=LIVE, check=True)


MEASURES = """
import torch
from pplab.runtime import Compared, GradientReport

same = Compared(1.0, 0.0, 1e-5, 1.0)
report, model, unread = GradientReport(same, {"w": same}, 1e-5), torch.nn.Linear(1, 1), 5
counts = [torch.tensor(3)]
"""
CELLS = {
    "pure": "start = 1",
    "measures": MEASURES,
    "adds": "counts.append(torch.ones(2).sum() + start)",
    "reads": "print(report.equal, [x + 1 for x in counts])",
    "trains": "model(torch.ones(1)), unread",
    "replaces": "counts = None",
}


@pytest.mark.slow
def test_the_values_that_cells_of_the_page_read_are_recorded_as_they_were_then(tmp_path, monkeypatch):
    monkeypatch.setattr(quiet, "check", lambda: None)
    monkeypatch.setattr(quiet, "can_tell_own", lambda: False)
    path = tmp_path / "01_some.ipynb"
    cells = [nbformat.v4.new_code_cell(code, id=name) for name, code in CELLS.items()]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    assert execute_notebooks.main([str(path)]) == 0
    recorded = json.loads((tmp_path / "measured" / "01_some.json").read_text())
    assert recorded == {
        "measures": {"counts": [3], "report": {"seen": ["GradientReport", "", {"equal": True}]}},
        "adds": {"counts": [3, 3.0]},
    }
    assert page_cells.run_as_page(path, recorded)[0] == {"pure", "reads", "replaces"}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recording_is_of_its_chapter(measured, path):
    cells = page_cells.code_cells(path.parents[1] / f"{path.stem}.ipynb")
    made = {cell["id"]: set(page_cells.changed(cell)) for cell in cells}
    values = json.loads(path.read_text())
    assert values and [cell for cell in made if cell in values] == [*values], "in the notebook's order"
    for cell, named in values.items():
        assert named.keys() <= made[cell], cell
        for value in named.values():
            measured.from_plain(value)
            assert len(json.dumps(value, ensure_ascii=False)) <= page_cells.MOST


def test_recordings_are_small():
    assert sum(path.stat().st_size for path in RECORDED) < 150_000


PRINTED = [  # chapter, the cell that measured, the cell that printed, what: made of what is recorded
    ("02_naive", "naive-14", "naive-14", lambda v: f"after 100 steps {v.falls['without'][99]:.2f}"),
    ("02_naive", "naive-27", "naive-29", lambda v: f"gradients: {v.run.gradients}"),
    ("04_1f1b", "447fc4fc", "447fc4fc", lambda v: f"{v.paced[0].timeline.makespan / 50:.1f} units, 33 are predicted"),
    ("04_1f1b", "447fc4fc", "447fc4fc", lambda v: f"{v.paced[1].timeline.makespan / 50:.1f} units, 54 are predicted"),
    ("09_dualpipev", "overlap-51", "overlap-51", lambda v: f"DualPipeV {v.quick.rows[5].simulated.makespan:35.0f}"),
    (
        "09_dualpipev",
        "overlap-51",
        "overlap-51",
        lambda v: f"DualPipeV {v.slow_links.rows[5].simulated.makespan:35.0f}",
    ),
    ("10_how_good", "how-good-018", "how-good-018", lambda v: f" 2 {v.exact[2][0]:13g} {v.exact[2][1]:8g}"),
    (
        "10_how_good",
        "how-good-039",
        "how-good-039",
        lambda v: f"V-Half  simulated {v.runs['V-Half'][2]:5.0f} ms, measured",
    ),
    ("10_how_good", "how-good-039", "how-good-039", lambda v: f"950 ms, measured {v.runs['found'][1]:5.0f}"),
    (
        "11_balance",
        "gddeb27d",
        "gddeb27d",
        lambda v: f"18 bytes a parameter, GB on each rank: {18 * v.thirteen[0]:.1f}",
    ),
    (
        "11_balance",
        "gddeb27d",
        "gddeb27d",
        lambda v: f"10 bytes a parameter, GB on each rank: {10 * v.thirteen[0]:.1f}",
    ),
    (
        "13_own_model",
        "own-27",
        "own-27",
        lambda v: f"up to {v.reports['counts rows'].relative:.1e} apart",
    ),
    ("14_profile", "code-28", "code-28", lambda v: f"step 0: {v.third.timelines[0].makespan:.0f} ms"),
    ("14_profile", "code-28", "code-28", lambda v: f"step 1: {v.third.timelines[1].makespan:.0f} ms"),
    ("14_profile", "code-20", "code-21", lambda v: f"slow stage {v.paced['slow stage'].makespan:.0f} ms"),
]
NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]\d+)?)"


@pytest.mark.parametrize(("chapter", "measuring", "printing", "made"), PRINTED)
def test_what_chapters_print_is_recorded(measured, chapter, measuring, printing, made):
    """Up to a quarter: measured times differ between executions, and one may have been recorded before the other."""
    values = json.loads((ROOT / "notebooks" / "measured" / f"{chapter}.json").read_text())[measuring]
    text = made(SimpleNamespace(**{name: measured.from_plain(value) for name, value in values.items()}))
    cells = page_cells.code_cells(ROOT / "notebooks" / f"{chapter}.ipynb")
    outputs = next(cell["outputs"] for cell in cells if cell["id"] == printing)
    said = "".join("".join(output.get("text", "")) for output in outputs)
    words = NUMBER.join(map(re.escape, re.split(NUMBER, text)[::2]))
    ways = [list(map(float, found.groups())) for found in re.finditer(words, said)]
    numbers = list(map(float, re.findall(NUMBER, text)))
    assert any(way == pytest.approx(numbers, rel=0.25) for way in ways), f"{text}\n\nisn't in\n\n{said}"
