"""A schedule that a cell registers is like any other: built by name, checked, simulated, drawn, run, compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pplab as pp
from pplab import lab
from pplab.builders import find, known
from pplab.builders.registry import ALL, LAB

CELL = '''
import pplab as pp

@pp.register("patient", rules="any number of ranks and microbatches", source="a cell", aliases=("1F1B+",))
def patient(num_ranks, num_microbatches, *, extra: int = 1):
    """1F1B with `extra` forwards more before the first backward."""
    def row(rank):
        ahead = min(num_ranks - rank + extra, num_microbatches)
        forwards = [f"{rank}F{m}" for m in range(ahead)]
        steady = [f"{rank}{kind}{m - ahead * (kind == 'B')}" for m in range(ahead, num_microbatches) for kind in "BF"]
        return forwards + steady + [f"{rank}B{m}" for m in range(num_microbatches - ahead, num_microbatches)]
    return [row(rank) for rank in range(num_ranks)]
'''


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    """What a test registers is forgotten when it ends."""
    before = known()
    yield
    ALL[:] = before


def execute(cell: str) -> dict:
    """What a notebook does with a cell: its functions belong to `__main__`, and its source is in no file."""
    names = {"__name__": "__main__"}
    exec(compile(cell, "<cell>", "exec"), names)
    return names


def test_it_is_built_by_name_validated_simulated_and_compared():
    names = execute(CELL)
    s = pp.build("patient", num_ranks=2, num_microbatches=4)
    assert str(s).splitlines()[1:] == [
        "rank 0  0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "rank 1  1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
    ]
    assert s.name == "patient" and s == names["patient"](2, 4) == pp.build("1f1b+", num_ranks=2, num_microbatches=4)
    pp.validate(s)
    ours, plain = (pp.simulate(pp.build(name, num_ranks=4, num_microbatches=8)) for name in ("patient", "1F1B"))
    assert ours.makespan == plain.makespan and ours.peak_in_flight == (5, 4, 3, 2)
    assert [row for row in str(lab.table([ours, plain])).splitlines() if row.startswith("patient")]


def test_its_options_are_known_and_others_refused():
    execute(CELL)
    assert find("patient").options == ("extra",) and find("patient").__doc__.startswith("1F1B with `extra`")
    exact = pp.build("patient", num_ranks=3, num_microbatches=6, extra=0)
    assert exact.rows == pp.build("1F1B", num_ranks=3, num_microbatches=6).rows
    with pytest.raises(ValueError, match="'more'.*extra"):
        pp.build("patient", num_ranks=3, num_microbatches=6, more=1)
    with pytest.raises(ValueError, match="num_ranks"):
        pp.build("patient", num_ranks=0, num_microbatches=6)


def test_it_is_drawn():
    execute(CELL)
    timelines = [pp.simulate(pp.build(name, num_ranks=2, num_microbatches=4)) for name in ("patient", "1F1B")]
    assert "patient" in pp.gantt(timelines[0]).get_title(loc="left")
    assert len(pp.compare(timelines)) == 2


def test_a_cell_that_is_run_again_replaces_it():
    count = len(ALL)
    execute(CELL)
    execute(CELL.replace("extra: int = 1", "extra: int = 2"))
    assert len(ALL) == count + 1
    assert pp.build("patient", num_ranks=2, num_microbatches=8).peak_in_flight == (4, 3)


@pytest.mark.parametrize(
    ("name", "aliases", "taken"),
    [("1F1B", (), "'1f1b'"), ("gpipe", (), "'gpipe'"), ("zb_v", (), "'zbv'"), ("mine", ("GPipe",), "'gpipe'")],
)
def test_a_name_or_alias_of_the_packages_own_is_refused(name, aliases, taken):
    execute(CELL)
    before = list(ALL)
    with pytest.raises(ValueError, match=f"{taken} is a name of pplab's own .*a different name"):
        pp.register(name, aliases=("patient", *aliases))(lambda num_ranks, num_microbatches: [])
    assert ALL == before, "what a refusal leaves behind"


def test_what_can_not_run_is_said_with_its_place():
    execute(CELL.replace("forwards + steady", "steady + forwards"))
    with pytest.raises(pp.ScheduleError, match="rank 0"):
        pp.validate(pp.build("patient", num_ranks=2, num_microbatches=4))


@pytest.mark.slow
def test_two_processes_run_it_with_the_gradients_of_one():
    """From a session as a notebook's, whose `__main__` is in no file, so that the ranks can't know the function."""
    run = """
from pplab import lab
from pplab.lab import models
from pplab.runtime import Pool

small = models.gpt(batch_size=8, num_layers=4, width=32, num_heads=2, context=16, source="sample")
s = pp.build("patient", num_ranks=2, num_microbatches=4)
with Pool(2, device="cpu", timeout_s=60) as pool:
    run = pool.train(s, small, lab.Meter(), steps=2, check_gradients=True)
assert run.gradients.equal, run
assert run.held.peak_in_flight == s.peak_in_flight == (3, 2)
assert run.timeline.schedule == s
for axes in pp.compare([pp.simulate(s, run.costs), run.timeline]):
    print(axes.get_title(loc="left"))
"""
    environment = {**os.environ, "MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, "-c", CELL + run], text=True, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["patient, simulated", "patient, measured"]


@pytest.mark.parametrize("name", [name for names in LAB.values() for name in names])
def test_a_schedule_of_lab_is_built_without_an_import_of_it(name):
    code = f"""
import sys
import pplab as pp
assert "pplab.lab" not in sys.modules
s = pp.build({name.lower()!r}, num_ranks=2, num_microbatches=4)
assert s.name.startswith({find(name).name!r}), s.name
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_table_says_what_the_files_of_lab_register():
    import pplab.lab

    home = Path(pplab.lab.__file__).parent
    found = {}
    for path in sorted(home.rglob("*.py")):
        if names := re.findall(r'^@register\(\s*"([^"]+)"', path.read_text(), flags=re.M):
            found[".".join(path.relative_to(home).with_suffix("").parts)] = " ".join(sorted(names, key=str.lower))
    theirs = [builder for builder in known() if builder.__module__.startswith("pplab.lab.")]
    aliases = {alias for builder in theirs for alias in builder.aliases}
    names = {file: sorted(set(names) - aliases, key=str.lower) for file, names in LAB.items()}
    assert found == {file: " ".join(each) for file, each in names.items()}
    listed = {name for names in LAB.values() for name in names}
    assert listed == {builder.name for builder in theirs} | aliases


def test_a_name_of_lab_is_refused_before_lab_was_opened():
    code = """
import pplab as pp
try:
    pp.register("Eager-1F1B")(lambda num_ranks, num_microbatches: [])
except ValueError as error:
    assert "pplab's own eager-1F1B" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("theirs", "name"), [
    ("VPP", "Interleaved1F1B"), ("vpp-1f1b", "Interleaved1F1B"), ("interleaved_1f1b", "Interleaved1F1B"),
    ("afab", "GPipe"), ("F-then-B", "GPipe"), ("Schedule1F1B", "1F1B"), ("PipeDream-Flush", "1F1B"),
    ("ZB1P", "ZB-1P"), ("ScheduleZBVZeroBubble", "ZBVZeroBubble"), ("zbv", "ZBVZeroBubble"),
])  # fmt: skip
def test_other_peoples_names_lead_to_the_schedule(theirs, name):
    assert find(theirs).name == name


def test_the_error_for_an_unknown_name_lists_all():
    with pytest.raises(ValueError, match="'1F1B_V', which is OLMo-core's .* write its rows"):
        find("1F1B_V")
    with pytest.raises(ValueError, match="unknown schedule 'ZB-3P': did you mean ZB-.P") as caught:
        pp.build("ZB-3P", num_ranks=2, num_microbatches=4)
    assert str(caught.value).partition("known: ")[2].split(", ") == [builder.name for builder in known()]
