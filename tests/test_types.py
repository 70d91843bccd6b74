"""What an editor and a type checker know of the package: all names, all signatures, and what is wrong in a script.

The package itself is checked by `make check`, which runs mypy as pyproject.toml says.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import get_type_hints
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HOUSE = ROOT / "src" / "pplab"
STUBS = sorted(HOUSE.rglob("*.pyi"))

# The start of the README's script.
FINE = """
import pplab as pp
from pplab import lab

s = pp.build("1F1B", num_ranks=4, num_microbatches=8)
t = pp.simulate(s, pp.Costs(forward=1, backward_input=[1, 1, 1, 2], latency=0.5))
print(lab.table([t]), lab.Case().row(s).dollars / 2, t.makespan)

class Counter(pp.runtime.Listener):
    events = frozenset(("send",))

    def __init__(self) -> None:
        self.sends = 0

    def begin(self, event: str, what: pp.Action) -> None:
        self.sends += what.microbatch

class Sends(pp.runtime.Extra):
    name = "sends"

    def listen(self, rank: object) -> Counter:
        return Counter()

    def lines(self, found: int) -> list[str]:
        return [f"{found} sends"]

@pp.register("mine", rules="any", source="none")
def mine(num_ranks: int, num_microbatches: int, *, late: bool = False) -> list[list[pp.Action]]:
    return [[pp.Action(rank, pp.Kind.F, m) for m in range(num_microbatches)] for rank in range(num_ranks)]

if __name__ == "__main__":
    with pp.runtime.Pool(2) as pool:
        s = pp.Schedule([["0F0", "0B0"], ["1F0", "1B0"]], name="by hand")
        run = pool.train(s, lab.models.gpt(batch_size=32), lab.Clip(1.0), Sends(), steps=5, check_gradients=True)
        print(run, run.gradients.equal, run.extras["sends"])
        pp.compare([pp.simulate(s, run.costs), run.timeline])
        print(lab.where(run.timeline))
"""
BEGIN = """
import pplab as pp
from pplab import lab
s = pp.build("1F1B", num_ranks=4, num_microbatches=8)
t = pp.simulate(s)
pool = pp.runtime.Pool(2)
gpt = lab.models.gpt()
"""
MISTAKES = {  # what somebody types: what the checker must say of it
    'pp.build("1F1B", ranks=4, num_microbatches=8)': 'Missing named argument "num_ranks"',
    'pp.build("1F1B", 4, 8)': "Too many positional arguments",
    'pp.Costs(forward="x")': 'incompatible type "str"',
    "pp.Costs(forwards=1)": 'Unexpected keyword argument "forwards"',
    "pp.simulate(t)": 'incompatible type "Timeline"; expected "Schedule"',
    "pp.validate(s.rows)": 'expected "Schedule"',
    "pp.gantt(s)": 'incompatible type "Schedule"; expected "Timeline"',
    "pp.Schedule([0])": 'expected "Iterable[Action | Overlap | str]"',
    "pp.simulat(s)": 'Module has no attribute "simulat"',
    "t.makespam": '"Timeline" has no attribute "makespam"',
    "pool.train(s)": 'Missing positional argument "workload"',
    "pool.train(s, t)": 'incompatible type "Timeline"; expected "Workload"',
    "pool.train(s, gpt, lab.Clip)": 'expected "Extra"',
    "pool.train(s, gpt, step=3)": 'Unexpected keyword argument "step"',
    "pool.train(s, gpt, steps=3).loss": '"Run" has no attribute "loss"',
    "pool.train(s, gpt).gradients.equals": 'has no attribute "equals"',
    'lab.Clip("x")': 'incompatible type "str"; expected "float"',
    "lab.nothing": 'Module has no attribute "nothing"',
    "lab.models.gtp()": 'Module has no attribute "gtp"',
    "lab.Case(gigabit=100)": 'Unexpected keyword argument "gigabit"',
    "lab.table(t)": 'incompatible type "Timeline"',
    'lab.Meter("all")': "Too many arguments",
}


def script(path: Path) -> str:
    """A notebook's code, without magics and without cells that are files."""
    cells = [cell["source"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    texts = [text for text in map("".join, cells) if not text.startswith("%%writefile")]
    return re.sub(r"^(\s*)[%!].*$", r"\1pass", "\n".join(texts), flags=re.M)


def errors(files: list[Path]) -> dict[str, list[str]]:
    """What mypy finds in these files, by their stems."""
    command = [sys.executable, "-m", "mypy", "--scripts-are-modules", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode in (0, 1) and not done.stderr, done.stdout + done.stderr
    found, texts = defaultdict(list), {file.stem: file.read_text().splitlines() for file in files}
    for path, line, said in re.findall(r"^(\S+?):(\d+): error: (.*)$", done.stdout, re.M):
        name = Path(path).stem  # its folder may be that of an earlier run: mypy keeps what it said of the same text
        if name in texts:
            found[name].append(f"{texts[name][int(line) - 1].strip()}: {said}")
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[str]]:
    """What is found in the scripts of this file and in the chapters, in one go."""
    folder = tmp_path_factory.mktemp("scripts")
    scripts = {"fine": FINE}
    scripts |= {f"mistake_{i}": BEGIN + line for i, line in enumerate(MISTAKES)}
    scripts |= {f"chapter_{path.stem}": script(path) for path in NOTEBOOKS}
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    return errors(sorted(folder.glob("*.py")))


def test_a_script_without_mistakes_has_no_errors(found):
    assert found["fine"] == []


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_found(found, line):
    """Alone: what stands around it is fine."""
    said = found[f"mistake_{list(MISTAKES).index(line)}"]
    assert len(said) == 1 and MISTAKES[line] in said[0], said


# Chapters use a name for several things, one after the other. And a checker follows neither keywords in a dict nor
# `max(found, key=found.get)`.
REUSED = "no-redef|var-annotated|assignment|index|valid-type|call-overload|misc|str-unpack"
UNSEEN = rf"\*\*dict\[|after \*\* must|type overloaded function|not callable|\[({REUSED})\]$"
KNOWN = (  # what only a reader knows
    "c = gpt.config",  # which workload found its batch
    "of_pairs.overlap.items()",  # that pairs have times of their own there
    'action.kind == "B"',  # that 1F1B has no overlaps
    "a.kind.value if a.stage == r",  # nor ZB-V
    "zip(row.held_gb, row.memory.parameters)",  # that a row has these by rank
    "your_",  # that these files lie beside the chapter
)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_has_no_errors(found, path):
    """Else a signature says something else than what it takes, or returns."""
    wrong = [said for said in found[f"chapter_{path.stem}"] if not re.search(UNSEEN, said)]
    assert [said for said in wrong if not any(line in said for line in KNOWN)] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.parent.name)
def test_the_stubs_say_what_packages_give(path):
    package = importlib.import_module(".".join(path.parent.relative_to(HOUSE.parent).parts))
    found = set(re.findall(r"^from \S+ import (\w+) as", path.read_text(), re.M))
    assert set(package.__all__) <= found  # pplab.runtime has more, for lab
    assert [name for name in found if not hasattr(package, name)] == []


@pytest.mark.slow
def test_what_a_run_can_be_asked_for_are_its_options():
    from pplab.runtime.options import Asked, Options

    assert get_type_hints(Asked) == get_type_hints(Options)


@pytest.mark.slow
def test_a_wheel_has_what_editors_read(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(HOUSE, tmp_path / "src" / "pplab", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "book" / "_live", tmp_path / "book" / "_live")
    code = "from setuptools import build_meta; build_meta.build_wheel('.'); build_meta.build_sdist('.')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(ZipFile(wheel).namelist())
    wanted = {path.relative_to(HOUSE.parent).as_posix() for path in [HOUSE / "py.typed", *STUBS]}
    assert len(wanted) > 15 and wanted <= packed
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as given:  # Python for the page, 6 MB, is the book's
        assert not [name for name in [*packed, *given.getnames()] if "_live" in name]
