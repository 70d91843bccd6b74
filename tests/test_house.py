"""The house's rules: rings that import one way, small files, names that can be typed, a pure part without torch."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from pplab import lab
from pplab.runtime import Extra
from size import tokens

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "src" / "pplab"
FILES = sorted(HOUSE.rglob("*.py"))
SMALL = [path for path in FILES if path.relative_to(HOUSE).parts[0] != "lab"]
COURSE = HOUSE.parent / "pplab_course"
NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}  # public, whatever they look like

PURE = """
import sys
import pplab as pp
from pplab import builders, errors, lower, palette, plot, text
from pplab import lab
from pplab.lab import formulas, results
t = pp.simulate(pp.build("1F1B", num_ranks=4, num_microbatches=8))
lab.table([t])._repr_html_(), lab.timeline_to_dict(t), lab.floor(lab.Problem(4, 8)), lab.optimum
heavy = {"torch", "matplotlib", "numpy", "transformers", "datasets", "ortools"} & sys.modules.keys()
assert not heavy, heavy
"""

DRAWING = """
import sys
import pplab as pp
pp.simulate(pp.build("1F1B", num_ranks=4, num_microbatches=8))._repr_png_()
assert "torch" not in sys.modules
"""


def run(code: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_pure_part_loads_neither_torch_nor_matplotlib():
    run(PURE)


def test_drawing_does_not_load_torch():
    run(DRAWING)


def test_what_is_loaded_late_is_found():
    run(
        "import pplab as pp; pp.gantt; pp.compare; pp.runtime.Pool\n"
        "from pplab import lab; lab.calibrate; lab.models.gpt; lab.data.reviews"
    )


def test_an_unknown_attribute_is_refused():
    run("import pplab, pytest\nwith pytest.raises(AttributeError, match='nothing'):\n    pplab.nothing")


def module_name(path: Path) -> str:
    return ".".join(
        path.relative_to(HOUSE.parent if HOUSE.parent in path.parents else ROOT).with_suffix("").parts
    ).removesuffix(".__init__")


@cache
def imports(path: Path) -> list[str]:
    """What a file imports, at its top or in a function, by full names: `pplab.lab.planning.sweep`."""
    package = module_name(path).split(".")[: None if path.name == "__init__.py" else -1]
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            found += (".".join([*base, alias.name]) for alias in node.names)
    return found


def constants(path: Path) -> list[ast.Constant]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]


def into(paths: list[Path], ring: str) -> list[str]:
    """The imports from these files into this ring, a pattern."""
    found = [(path, name) for path in paths for name in imports(path)]
    return [f"{path} imports {name}" for path, name in found if re.match(rf"{ring}(\.|$)", name)]


def test_the_small_package_imports_neither_lab_nor_exercises():
    """But for `__main__.py`, the door: it joins the rings on the command line."""
    inner = [path for path in SMALL if path.name != "__main__.py"]
    assert into(inner, r"pplab\.lab") + into(inner, "pplab_course") == []


def test_lab_imports_no_exercises():
    assert into(sorted(HOUSE.glob("lab/**/*.py")), "pplab_course") == []


def test_imports_are_seen_wherever_they_stand():
    """The tests around would see what they forbid."""
    found = into(sorted(COURSE.glob("*.py")), "pplab_course")
    assert any("verdict" in line for line in found)
    assert "matplotlib.pyplot" in set(imports(COURSE / "notebook.py"))  # in a function


def test_the_package_knows_nothing_of_the_book():
    """The book imports the package, and its extensions take what notebooks share with it from there."""
    modules = "|".join(path.stem for folder in ("_ext", "_live") for path in (ROOT / "book" / folder).glob("*.py"))
    sources = python("src")
    assert into(sources, f"({modules})") == []
    texts = [(path, node.value) for path in sources for node in constants(path) if isinstance(node.value, str)]
    assert [(path, text) for path, text in texts if re.search(r"\b_(ext|live|static)\b", text)] == []


def test_a_run_knows_no_extra_by_its_name():
    """What an extra finds is asked for by what it is, or is the runtime's own."""
    offered = [getattr(lab, name) for name in lab.__all__]
    names = {each.name for each in offered if isinstance(each, type) and issubclass(each, Extra)}
    assert {"held", "recompute", "gradient_norms"} <= names
    known = [(path.name, node.value) for path in HOUSE.glob("runtime/*.py") for node in constants(path)]
    assert [each for each in known if each[1] in names - {"torch"}] == []  # the name of a package, too


ROOMS = sorted(path.parent for path in HOUSE.glob("lab/*/__init__.py"))


def test_lab_is_twelve_rooms_at_most_and_no_loose_file():
    assert len(ROOMS) <= 12 and [path.name for path in HOUSE.glob("lab/*.py")] == ["__init__.py"]
    assert [
        room.name for room in ROOMS if len(ast.get_docstring(ast.parse((room / "__init__.py").read_text()))) < 120
    ] == []


def test_the_private_parts_of_others_are_listed():
    """A name with an underscore that nothing here defines is torch's, transformers' or CPython's."""
    own, used = {path.stem for path in FILES}, {}
    own |= NAMED_TUPLES | {
        "_exit",
        "_params",
        "_per_second",
        "_model_parallel_size",
        "_attention",
    }  # public, or ends of other names
    for path, node in ((file, node) for file in FILES for node in ast.walk(ast.parse(file.read_text()))):
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            mine = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
            (own.add if mine else names.append)(node.attr)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"_[a-zA-Z]\w+", str(node.value)):
            names = [node.value]  # of vars() or getattr()
        used.setdefault(path.relative_to(HOUSE), set()).update(name for name in names if re.match("_[^_]", name))
    theirs = {path: sorted(names - own) for path, names in sorted(used.items()) if names - own}
    listed = "".join(f"- `{path}`: {', '.join(f'`{name}`' for name in names)}\n" for path, names in theirs.items())
    assert listed in (ROOT / "tests" / "README.md").read_text(), listed


def test_no_two_classes_of_a_room_share_a_name():
    for room in {path.parent for path in python("src")}:
        trees = [ast.parse(path.read_text()) for path in room.glob("*.py")]
        names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        assert sorted(names) == sorted(set(names)), room.name


def test_nobody_reaches_into_a_room():
    """What a room gives to others, its `__init__.py` lists."""
    outside = [*FILES, *COURSE.rglob("*.py"), *(ROOT / "book").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    for room in ROOMS:
        given = importlib.import_module(f"pplab.lab.{room.name}").__all__
        files = "|".join({path.stem for path in room.glob("*.py")} - {"__init__", *given})
        others = [path for path in outside if room not in path.parents]
        assert into(others, rf"pplab\.lab\.{room.name}\.({files})") == []


def python(*folders: str) -> list[Path]:
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


SCRIPTS = [path for folder in ("book", "src") for path in (ROOT / folder).rglob("*.js") if "mathjax" not in path.parts]
PLAYER = [path for path in SCRIPTS if "simulated" in path.parts]
DEBUGGER = python("src/pplab_course/simulated")
COURSE_FILES = [path for path in python("src/pplab_course") if path not in DEBUGGER]
CHAPTERS = [path for path in COURSE_FILES if "pictures" not in path.parts]
A_CHAPTER = 3_000  # tokens: a module of exercises
# What a reader has to read of each ring, in tokens or in lines, and what helps who reaches the bound.
BOUNDS = {
    "the small package": (SMALL, 39_420, "tokens", "move what single chapters need to a room of lab"),
    "lab": (python("src/pplab/lab"), 156_400, "tokens", "delete a tool that no notebook calls"),
    "pplab_course": (COURSE_FILES, 53_970, "tokens", "give two checkers one helper"),
    "pplab_course/pictures": (python("src/pplab_course/pictures"), 11_600, "tokens", "drop a picture"),
    "pplab_course/simulated": (DEBUGGER, 12_050, "tokens", "let the stand-in lack what no file of the course uses"),
    "its JavaScript": (PLAYER, 600, "lines", "let Python prepare it"),
    "book/_ext and book/_live": (python("book/_ext", "book/_live"), 37_900, "tokens", "let a library do it"),
    "JavaScript": ([path for path in SCRIPTS if path not in PLAYER], 4_200, "lines", "let Python or a library do it"),
    "tests": (python("tests"), 36_700, "lines", "delete a test that covers what another covers"),
    "benchmarks": (python("benchmarks"), 3_500, "lines", "delete a part that has answered its question"),
}


def test_what_is_hidden_in_strings_counts(tmp_path):
    """f, (, x, ), :, return, an f-string with x and x, 9, and three names."""
    (tmp_path / "code.py").write_text(
        '"""Says nothing."""\n\n\ndef f(x):  # one\n    """Two."""\n    return f"{x!r} {x:>{9}}" "b", "a b c".split()\n'
    )
    assert tokens(tmp_path / "code.py") == 7 + (1 + 3 + 1) + 1 + (3 + 4)


@pytest.mark.parametrize("ring", BOUNDS)
def test_no_ring_outgrows_its_bound(ring):
    files, most, unit, help = BOUNDS[ring]
    size = sum(tokens(path) if unit == "tokens" else len(path.read_text().splitlines()) for path in files)
    assert size <= most, (
        f"{ring} has {size} {unit}, and at most {most} are allowed: look for what can go ({help}), or divide it. Who "
        "raises a bound says why in the commit's message. Don't shorten names or put code into strings to meet it"
    )


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_no_chapters_module_outgrows_its_bound(path):
    assert tokens(path) <= A_CHAPTER, f"{path} has {tokens(path)} tokens, more than {A_CHAPTER}: divide it by subject"


def test_durations_are_listed_in_one_file():
    """Else a new knob of Costs is lost where an old list stands: `pplab.costs.DURATIONS` is that list."""
    listed = r'(?s)"forward",\s*"backward_input",\s*"backward_weight"'
    found = [path.name for path in [*FILES, *COURSE.rglob("*.py")] if re.search(listed, path.read_text())]
    assert sorted(found) == ["costs.py", "explorer.py", "vocabulary.py"]  # the page's fields; what a head takes


@pytest.mark.parametrize("path", [path for path in FILES if not path.stem.startswith("__")], ids=module_name)
def test_no_module_shares_its_name_with_what_it_or_its_package_defines(path):
    """Else `import pplab.sweep as m` gives a function, and `pplab.sweep.Sweep` can't be typed."""
    tree = ast.parse(path.read_text())
    assert path.stem not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    beside = ast.parse((path.parent / "__init__.py").read_text())
    taken = {a.asname or a.name for node in beside.body if isinstance(node, ast.ImportFrom) for a in node.names}
    taken |= {node.name for node in beside.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert path.stem not in taken
    if "__getattr__" in taken:
        package = importlib.import_module(module_name(path.parent / "__init__.py"))
        with suppress(AttributeError):
            assert isinstance(package.__getattr__(path.stem), ModuleType)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pplab", "pplab.lab", "pplab.builders", "pplab.lab.models", "pplab.runtime"])
def test_what_a_package_lists_is_there(name):
    package = importlib.import_module(name)
    assert len(set(package.__all__)) == len(package.__all__) > 5
    for each in package.__all__:
        assert not each.startswith("_") and getattr(package, each) is not None
    assert set(package.__all__) <= set(dir(package))
    if name in ("pplab", "pplab.lab"):
        assert not [each for each in dir(package) if each.startswith("_")], "TAB offers what is public"


def documented() -> list[str]:
    """What the page on the package documents: a name, or a class with one of its members."""
    found, last = [], ""
    for line in (ROOT / "book" / "api.md").read_text().splitlines():
        if match := re.match(r"\.\. auto\w+:: (\S+)$", line):
            last = match[1]
            found.append(last)
        elif match := re.match(r"   :members: (.+)$", line):
            found += [f"{last}.{member.strip()}" for member in match[1].split(",")]
    return found


@pytest.mark.slow
def test_what_the_page_documents_can_be_typed():
    names = documented()
    assert len(names) > 150 and len(set(names)) == len(names)
    for name in names:
        place: object = importlib.import_module("pplab")
        for part in name.split(".")[1:]:
            known = {*dir(place), *getattr(place, "__dataclass_fields__", {}), "lab"}  # a ring is imported by name
            assert part in known, f"{name}: no {part}"
            place = getattr(place, part, None)


@pytest.mark.slow
def test_the_page_documents_what_the_package_offers():
    """All of `pplab`, `pplab.runtime` and `pplab.lab` that isn't a module."""
    names = documented()
    for package in ("pplab", "pplab.runtime", "pplab.lab"):
        home = importlib.import_module(package)
        offered = {each for each in home.__all__ if not isinstance(getattr(home, each), ModuleType)}
        shown = {name.removeprefix(f"{package}.") for name in names} | {name.split(".")[-1] for name in names}
        assert offered - shown == set()


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def codes(path: Path) -> Iterator[ast.Module]:
    """A notebook's code cells without their magics, and the code in its text, solutions among it."""
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        blocks = [text] if cell["cell_type"] == "code" else re.findall(r"```python\n(.*?)```", text, flags=re.S)
        for block in blocks:
            yield ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", block, flags=re.M))


def private(tree: ast.Module) -> list[str]:
    """The private names that a piece of code takes from others. torch's are its own affair: chapters look into it."""
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr not in NAMED_TUPLES:
            names = [node.attr]
        hidden = [name for name in names if re.search(r"(^|\.)_(?!_)", name) and not name.startswith("torch.")]
        found += hidden
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_imports_public_names_only(path):
    assert [name for tree in codes(path) for name in private(tree)] == []


def test_private_names_are_seen():
    code = "import _x, pplab.a._b\nfrom pplab._a import b\nfrom pplab import _c\ns._rows\na._replace(b=1)\na.__doc__"
    assert private(ast.parse(code)) == ["_x", "pplab.a._b", "pplab._a.b", "pplab._c", "_rows"]


@pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", "README.md", "notebooks/README.md", "book/_ext/README.md", "tests/README.md"]
)
def test_the_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text()
    places = re.findall(r"\b(?:src|tests|book|benchmarks|tools|notebooks)/[\w./-]*\w", text)
    places += re.findall(r"\]\((?!https?:)([\w./-]+)\)", text)
    assert len(places) > 5 and [place for place in places if not (ROOT / place).exists()] == []
