"""Executes what a notebook does on the machine's GPUs, as it stands there: `python cells_on_gpus.py NOTEBOOK ...`.

That is every cell that takes the GPUs, by a pool or by whatever makes one, or that uses what does; those that assert
something of what they found; and what all these need of other cells.
"""

from __future__ import annotations

import ast
import dis
import json
import os
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from types import CodeType

import pplab
from pplab.lab import models
from pplab.runtime import Pool

SOURCE = Path(pplab.__file__).parents[1]
KEPT = {"Pool", "partial"}  # what they make is used later
SMALL = {"width": 128, "context": 64, "num_heads": 4}


def parsed(path: Path) -> list[ast.Module]:
    """A notebook's cells of code, without their lines for IPython."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = ["".join(cell["source"]).splitlines() for cell in cells]
    return [ast.parse("\n".join("" if each.startswith("%") else each for each in cell)) for cell in lines]


def flow(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """The names that a statement takes from before, and those that it binds: as Python's compiler has them."""
    taken, bound = set(), set()
    for step in dis.get_instructions(compile(ast.Module([statement], []), "cell", "exec")):
        if step.opname == "STORE_NAME":
            bound.add(step.argval)
        elif step.opname == "LOAD_NAME":
            taken |= {step.argval} - bound
        elif isinstance(step.argval, CodeType):  # of a function or a comprehension
            taken |= taken_within(step.argval) - bound
    return taken, bound


def taken_within(code: CodeType) -> set[str]:
    """The names that a function's code takes from outside."""
    steps = list(dis.get_instructions(code))
    inner = [taken_within(step.argval) for step in steps if isinstance(step.argval, CodeType)]
    return {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}.union(*inner)


def changed(part: ast.AST) -> set[str]:
    """The names of what it sets an item or an attribute of, or appends something to."""
    found = set()
    for node in ast.walk(part):
        stored = isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store)
        if stored or (isinstance(node, ast.Attribute) and node.attr in ("append", "update")):
            found |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    return found


def functions(tree: ast.AST) -> Iterator[tuple[str, ast.FunctionDef]]:
    """All functions in a file, each by the name it is called by: a class's for its __init__."""
    for node in ast.walk(tree):
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.FunctionDef):
                yield (node.name if each.name == "__init__" else each.name), each


def defaults(function: ast.FunctionDef) -> dict[str, object]:
    """Those of a function's parameters that are constants."""
    takes = function.args
    last = takes.args[len(takes.args) - len(takes.defaults) :]
    both = [*zip(last, takes.defaults, strict=True), *zip(takes.kwonlyargs, takes.kw_defaults, strict=True)]
    return {each.arg: value.value for each, value in both if isinstance(value, ast.Constant)}


@cache
def takers() -> frozenset[str]:
    """What takes the machine's GPUs unless it is told otherwise: the package's functions with device="auto"."""
    files = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")]
    return frozenset(name for tree in files for name, each in functions(tree) if defaults(each).get("device") == "auto")


def named(node: ast.AST) -> str:
    """The last part of a name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def takes_gpus(part: ast.AST, scripts: Collection[str] = ()) -> bool:
    """Whether a part of the code does so by a call without `device`, by a command, or by a script that it starts."""
    if isinstance(part, ast.Call) and getattr(getattr(part.func, "value", None), "id", "") == "spine":
        return False  # which hides the GPUs from what it starts
    if isinstance(part, ast.Constant) and isinstance(part.value, str):
        trains = "pplab train" in part.value and "--device" not in part.value
        return trains or (" " in part.value and not set(scripts).isdisjoint(part.value.split()))
    told = isinstance(part, ast.Call) and any(each.arg == "device" for each in part.keywords)
    if named(part) in takers():
        return True
    inner = [*part.args, *part.keywords] if told else ast.iter_child_nodes(part)
    return any(takes_gpus(each, scripts) for each in inner)


def is_kept(statement: ast.stmt) -> bool:
    """Whether it gives a name to what can be used later: to a pool, or a function."""
    calls = {named(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)}
    makes = any(isinstance(node, ast.Lambda) for node in ast.walk(statement)) or not calls.isdisjoint(KEPT)
    return isinstance(statement, ast.FunctionDef) or (isinstance(statement, ast.Assign) and makes)


def on_devices(cells: list[ast.Module], scripts: Collection[str] = ()) -> dict[int, list[ast.stmt]]:
    """What is executed of which cell. `scripts` are the files that take GPUs when they are started."""
    there: set[str] = set()  # names of what takes GPUs when it is used: of pools, and of functions that use one
    found: set[str] = set()  # of what came from there
    chosen: set[ast.stmt] = set()
    for cell in cells:
        whole = False
        for statement in cell.body:
            taken, bound = flow(statement)
            takes = takes_gpus(statement, scripts) or bool(there & taken)
            there -= bound
            if takes and is_kept(statement):
                there |= bound
            if takes or found & taken:
                found |= bound | changed(statement)
                whole |= takes or any(isinstance(node, ast.Assert) for node in ast.walk(statement))
            else:
                found -= bound
        chosen |= set(cell.body) if whole else set()
    executed, wanted = {}, set()
    for number in reversed(range(len(cells))):
        for statement in reversed(cells[number].body):
            taken, bound = flow(statement)
            if statement in chosen or (bound | changed(statement)) & wanted:
                executed.setdefault(number, []).insert(0, statement)
                wanted = wanted - bound | taken
    return dict(sorted(executed.items()))


def of_notebook(path: Path) -> dict[int, list[ast.stmt]]:
    """What is executed of a notebook."""
    scripts = [each.name for each in path.parent.glob("*.py") if "cuda" in each.read_text()]
    return on_devices(parsed(path), scripts)


def main(path: Path) -> None:
    """Execute a notebook's, in its folder. Models of a GPU's size are made as small as a CPU's, which has to train
    them."""
    space = {"__name__": "__main__"}
    gpt = models.gpt
    models.gpt = lambda **options: gpt(**{name: min(size, SMALL.get(name, size)) for name, size in options.items()})
    os.chdir(path.parent)
    sys.path.insert(0, str(path.parent))
    for number, statements in of_notebook(path).items():
        try:
            exec(compile(ast.Module(statements, []), f"cell {number} of {path.name}", "exec"), space)
        except BaseException as error:
            error.add_note("\n".join(map(ast.unparse, statements)))
            raise
    for each in space.values():
        if isinstance(each, Pool):
            each.close()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(Path(name).resolve())
