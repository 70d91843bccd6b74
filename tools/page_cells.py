"""Find the values of a chapter that the book's page must be given, since it has no torch, no processes and the like.

python tools/page_cells.py NOTEBOOK < VALUES

runs the notebook's cells one after the other as the page does (book/_live/kernel.py), without what the page can't have,
but with these values after the cells that made them: {cell: {name: value}}, in the form of book/_live/measured.py. As
JSON, it prints which cells ran, and the values that they read. tools/execute_notebooks.py records them.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shutil
import subprocess
import symtable
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

LIVE = Path(__file__).parents[1] / "book" / "_live"
MOST = 20_000  # characters of a value
ASKS = re.compile(r"^exercise\.\w+\([^)]*\.\.\.", re.MULTILINE)  # an exercise: the page runs it for nobody else

Values = dict[str, dict[str, object]]  # by cell and name


def wanted(path: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The names that each cell which the page can't run makes or changes, if a cell below reads them, and all
    attributes that cells read."""
    ran, _ = run_as_page(path, {})
    found, below, attributes = {}, set(), set()
    for cell in reversed(code_cells(path)):
        if cell["id"] not in ran and (made := below.intersection(changed(cell))):
            found[cell["id"]] = sorted(made)
        below |= names_read(cell)
        attributes |= {node.attr for node in ast.walk(ast.parse(code_of(cell))) if isinstance(node, ast.Attribute)}
    return found, sorted(attributes)


def needed(path: Path, values: Values) -> Values:
    """Those recorded values that let cells run in the page, without those that take too much space."""
    _, values = run_as_page(path, values)
    small = {
        cell: {name: value for name, value in named.items() if len(json.dumps(value, ensure_ascii=False)) <= MOST}
        for cell, named in values.items()
    }
    return values if small == values else run_as_page(path, small)[1]


def run_as_page(path: Path, values: Values) -> tuple[set[str], Values]:
    """Run this file in a process of its own, and return the cells that ran and the values that they read."""
    command = [sys.executable, __file__, str(path.resolve())]
    found = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=300)
    if found.returncode:
        raise RuntimeError(f"{path.name} can't be run as the page would:\n{found.stderr[-2000:]}")
    ran, values = json.loads(found.stdout)
    return set(ran), values


def code_cells(path: Path) -> list[dict]:
    """The code cells of a notebook, each as one text, without exercises."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    texts = [cell | {"source": "".join(cell["source"])} for cell in cells]
    return [cell for cell in texts if not ASKS.search(cell["source"])]


def code_of(cell: dict) -> str:
    """A cell's code without its magics, or nothing if the cell is a file."""
    return "" if cell["source"].startswith("%%writefile") else re.sub(r"^%.*$", "", cell["source"], flags=re.MULTILINE)


def names_read(cell: dict) -> set[str]:
    """Names that a cell reads, also in its functions, and doesn't assign."""
    top = symtable.symtable(code_of(cell), "cell", "exec")
    scopes = [top]
    for scope in scopes:
        scopes += scope.get_children()
    used = [(scope, symbol) for scope in scopes for symbol in scope.get_symbols() if symbol.is_referenced()]
    read = {symbol.get_name() for scope, symbol in used if scope is top or symbol.is_global()}
    return read - {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}


def changed(cell: dict) -> Iterator[str]:
    """Names that a cell assigns, and names of things that it changes in place: rows[0] = 1, rows.append(1)."""
    for node in ast.walk(ast.parse(code_of(cell))):
        place = None
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            place = node
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            place = node.value.func if isinstance(node.value.func, ast.Attribute) else None
        while isinstance(place, (ast.Attribute, ast.Subscript, ast.Call)):
            place = place.func if isinstance(place, ast.Call) else place.value
        if isinstance(place, ast.Name):
            yield place.id


def main(path: Path, values: Values) -> tuple[list[str], Values]:
    """Run the cells here, where what the page can't have must already be out of reach."""
    import kernel
    import measured

    watched = []

    class Watched(measured.Seen):
        """Notes which attributes of a value are read, and whether its text is."""

        def __getattribute__(self, name: str) -> object:
            if not name.startswith("_") or name == "_text":
                vars(self)["_read"].add(name)
            return super().__getattribute__(name)

    def read(content: list) -> Watched:
        kind, text, found = content
        made = Watched(
            kind, text, {"_read": set(), **{name: measured.from_plain(each) for name, each in found.items()}}
        )
        watched.append((vars(made)["_read"], content))
        return made

    measured.READERS["seen"] = read
    kernel.prepare()
    cells, ran = code_cells(path), []
    for cell in cells:
        if kernel.run(cell["source"], lambda *event: None) == "ok":
            ran.append(cell["id"])
        else:
            made = values.get(cell["id"], {})  # not by `recall`, whose copies couldn't be watched
            kernel.space.update({name: measured.from_plain(value) for name, value in made.items()})
    for names, content in watched:
        content[1] = content[1] if "_text" in names else ""
        content[2] = {name: each for name, each in content[2].items() if name in names}
    return ran, used(cells, ran, values)


def used(cells: list[dict], ran: list[str], values: Values) -> Values:
    """The values of cells that didn't run, if a cell below that did run reads their names."""
    found, below = {}, set()
    for cell in reversed(cells):
        if cell["id"] in ran:
            below |= names_read(cell)
            continue
        named = values.get(cell["id"], {}).items()
        if kept := {name: value for name, value in named if name in below and not is_nothing(value)}:
            found[cell["id"]] = kept
    return dict(reversed(found.items()))


def is_nothing(value: object) -> bool:
    """Whether nothing was read from an object that can't be made without torch."""
    match value:
        case {"seen": [_, "", found]}:
            return not found
    return False


def write(path: Path, values: Values) -> None:
    """Write what a notebook measured for the page into measured/ next to it, one value on each line."""
    place = path.parent / "measured" / f"{path.stem}.json"
    if not values:
        place.unlink(missing_ok=True)
        return
    cells = []
    for cell, named in values.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in named.items()]
        cells.append(f" {json.dumps(cell)}: {{\n" + ",\n".join(lines) + "\n }")
    place.parent.mkdir(exist_ok=True)
    place.write_text("{\n" + ",\n".join(cells) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(LIVE))  # with the page's matplotlib
    sys.path.append(str(LIVE.parent / "_ext"))  # with pplab_drawings, which the page has beside kernel.py
    from kernel import ABSENT

    sys.modules.update(dict.fromkeys(ABSENT))  # None there: it can't be imported
    notebook = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # cells write files
        for script in notebook.parent.glob("*.py"):
            shutil.copy(script, folder)
        print(json.dumps(main(notebook, json.load(sys.stdin))))
