"""What plain pplab can't do, for want of a package, says which extra brings it: from a shell and from Python.

Packages are hidden from a fresh Python, as if they had never been installed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pplab
from pplab.optional import EXTRA_OF

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
HIDE = """
import sys
from importlib.abc import MetaPathFinder

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""
PLAIN = set(EXTRA_OF)
BOX = "--schedule 1F1B --ranks 2 --microbatches 4"


def python(code: str, hidden: set[str], folder: Path) -> subprocess.CompletedProcess:
    code = HIDE.format(hidden=sorted(hidden)) + code
    return subprocess.run([sys.executable, "-W", "error", "-c", code], text=True, capture_output=True, cwd=folder)


def shell(command: str, hidden: set[str], folder: Path) -> subprocess.CompletedProcess:
    return python(f"from pplab.__main__ import main\nsys.exit(main({command.split()!r}))", hidden, folder)


def test_the_extras_are_those_of_the_package():
    """Every package of an extra is known, and one that several bring is said to come with the smallest."""
    for extra, packages in EXTRAS.items():
        for name in (re.match(r"\w+", package)[0] for package in packages):
            assert name in EXTRA_OF and (EXTRA_OF[name] == extra or name == "numpy"), name
    assert any(package.startswith("numpy") for package in EXTRAS[EXTRA_OF["numpy"]])


def test_what_is_hidden_here_is_all_that_is_imported():
    """What the package imports beside Python's own, but for what comes with matplotlib or with a notebook."""
    found = set()
    for path in (ROOT / "src" / "pplab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            found |= {name.partition(".")[0] for name in names}
    assert found - sys.stdlib_module_names - {"pplab", "IPython", "matplotlib_inline", "PIL"} <= PLAIN


@pytest.mark.parametrize(
    "command",
    [
        "--version",
        "--help",
        "schedules",
        "schedules --json",
        f"simulate {BOX} --json out.json --perfetto out.trace --csv train",
        "simulate --csv train",
        "validate train",
    ],
)
def test_plain_pplab_does(command, tmp_path):
    (tmp_path / "train").write_text("0F0,0B0\n1F0,1B0\n")  # a file with the name of a command that needs torch
    done = shell(command, PLAIN, tmp_path)
    assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr
    if command == "--version":
        assert done.stdout == f"pplab {pplab.__version__}\n"


@pytest.mark.parametrize(
    "call",
    [
        "lab.explore(pp.build('1F1B', num_ranks=4, num_microbatches=8), 'explorer.html')",
        "lab.table([pp.simulate(pp.build('ZB-2P', num_ranks=4, num_microbatches=8))])",
        "lab.Case().row('1F1B', num_microbatches=16)",
        "lab.formulas, lab.floor(lab.Problem(4, 8)), lab.frontiers",
        "pp.lower(pp.build('1F1B', num_ranks=2, num_microbatches=2))",
        "pp.validate(lab.read_csv('0F0,0B0', 'mine'))",
        "lab.Pieces().costs(pp.build('DualPipeV', num_ranks=2, num_microbatches=4), num_layers=4)",
    ],
)
def test_plain_pplab_does_in_python(call, tmp_path):
    done = python(f"import pplab as pp\nfrom pplab import lab\n{call}", PLAIN, tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (f"simulate {BOX} --png out.png", "matplotlib"),
        (f"train {BOX}", "torch"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(command, missing, tmp_path):
    done = shell(command, PLAIN, tmp_path)
    word, extra = command.split()[0], EXTRA_OF[missing]
    assert done.stderr == f"pplab {word}: {missing} is missing: pip install 'pplab[{extra}]'\n"
    assert done.returncode == 1 and not done.stdout and not [*tmp_path.iterdir()]


def test_help_shows_what_flags_it_can_and_names_the_extra_that_has_the_others(tmp_path):
    done = shell("train --help", PLAIN, tmp_path)
    assert done.returncode == 0 and not done.stderr
    assert "--schedule NAME" in done.stdout and "--layers N" in done.stdout
    missing = "These are not all of its options: torch is missing: pip install 'pplab[run]'"
    assert " ".join(done.stdout.split()).endswith(missing)


@pytest.mark.slow
@pytest.mark.parametrize(
    "needed",
    [
        {
            "--model distilbert --source sample": "transformers",
            "--model folder": "transformers",
            "--source hub": "datasets",
            "--png out.png": "matplotlib",
        },
    ],
)
def test_with_torch_alone_training_names_what_else_it_needs(needed, tmp_path):
    """One program has many options, since it takes seconds until torch is there."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text('{"model_type": "llama"}')
    commands = [f"train {BOX} {options}".split() for options in needed]
    code = f"from pplab.__main__ import main\nfor words in {commands!r}:\n    assert main(words) == 1, words"
    done = python(code, {*needed.values()}, tmp_path)
    assert done.returncode == 0 and not done.stdout, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("pplab train: ")]
    says = "pplab train: {} is missing: pip install 'pplab[{}]'"
    assert said == [says.format(name, EXTRA_OF[name]) for name in needed.values()]


DRAWN = "t = pp.simulate(pp.build('1F1B', num_ranks=4, num_microbatches=8)); "


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        (DRAWN + "pp.gantt(t)", "matplotlib"),
        (DRAWN + "pp.compare([t, t])", "matplotlib"),
        (DRAWN + "t._repr_png_()", "matplotlib"),
        (DRAWN + "lab.memory_chart(t)", "matplotlib"),
        ("lab.optimum(lab.Problem(3, 6, placement='V', limit=5), use_floor=False)", "ortools"),
        ("pp.runtime.Pool(2)", "torch"),
        ("from pplab.runtime import Pool", "torch"),
        ("lab.models.gpt()", "torch"),
        ("from pplab.lab.models import Modules", "torch"),
        ("lab.Checkpoint", "torch"),
        ("lab.Clip(1.0)", "torch"),
        ("lab.TorchEngine()", "torch"),
    ],
)
def test_a_call_names_the_extra_that_it_needs(call, missing, tmp_path):
    done = python(f"import pplab as pp\nfrom pplab import lab\n{call}", PLAIN, tmp_path)
    error = f"ModuleNotFoundError: {missing} is missing: pip install 'pplab[{EXTRA_OF[missing]}]'"
    assert done.stderr.splitlines()[-1] == error


RUN = "lab.train_here(pp.build('1F1B', num_ranks=1, num_microbatches=2), model)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "before", "call", "hidden"),
    [
        ("darwin", "from pplab.runtime import Pool", "Pool(2)", set()),
        ("darwin", "import pplab as pp; from pplab import lab; model = lab.models.gpt()", RUN, set()),
        ("win32", "import torch.multiprocessing", "from pplab.runtime import Pool", {"fcntl"}),
    ],
)
def test_without_linux_ranks_say_where_they_run(platform, before, call, hidden, tmp_path):
    """The other systems are played: the package is told their names."""
    launched = "import os; os.environ.update(RANK='0', WORLD_SIZE='1')"
    done = python(f"{launched}\n{before}\nsys.platform = {platform!r}\n{call}", hidden, tmp_path)
    assert f"Error: ranks run on Linux only, and this is {platform}: open the" in done.stderr.splitlines()[-1]


def test_every_name_of_the_lab_is_there_or_names_its_extra(tmp_path):
    """Nothing that is opened late ends in a bare error."""
    code = """
from pplab import lab
there, absent = [], []
for name in lab.__all__:
    try:
        getattr(lab, name)
        there.append(name)
    except ModuleNotFoundError as error:
        assert "is missing: pip install 'pplab[" in str(error), (name, error)
        absent.append(name)
print(len(there), len(absent))
"""
    done = python(code, PLAIN, tmp_path)
    assert done.returncode == 0, done.stderr
    there, absent = map(int, done.stdout.split())
    assert there > 60 and absent > 10
