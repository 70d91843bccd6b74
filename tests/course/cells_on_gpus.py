"""Executes what a notebook does on the machine's GPUs, as it stands there: `python cells_on_gpus.py NOTEBOOK ...`.

That is every cell that makes a pool without saying where, or uses such a pool, and what these need of others.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from pplab import lab
from pplab.runtime import Pool


def parsed(path: Path) -> list[ast.Module]:
    """A notebook's cells of code, without their lines for IPython."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = ["".join(cell["source"]).splitlines() for cell in cells]
    return [ast.parse("\n".join("" if each[:1] in ("%", "!") else each for each in cell)) for cell in lines]


def bound(part: ast.AST) -> set[str]:
    """The names that a part of the code binds outside of functions and comprehensions."""
    match part:
        case ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
        case ast.FunctionDef() | ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return set()
    return set().union(*map(bound, ast.iter_child_nodes(part)))


def used(part: object) -> set[str]:
    """The names that a part of the code takes from before, not those that it binds for itself."""
    match part:
        case list():
            taken, there = set(), set()
            for each in part:
                taken |= used(each) - there
                there |= bound(each) if isinstance(each, ast.AST) else set()
            return taken
        case ast.Name(id=name, ctx=ast.Load()):
            return {name}
        case ast.AugAssign(target=ast.Name(id=name), value=value):
            return used(value) | {name}
    own = set()
    match part:
        case ast.For(target=target):
            own = bound(target)
        case ast.With(items=items):
            own = set().union(*map(bound, items))
        case ast.FunctionDef(args=names) | ast.Lambda(args=names):
            own = {each.arg for each in ast.walk(names) if isinstance(each, ast.arg)}
        case ast.ListComp(generators=parts) | ast.SetComp(generators=parts) | ast.GeneratorExp(generators=parts):
            own = set().union(*(bound(each.target) for each in parts))
        case ast.DictComp(generators=parts):
            own = set().union(*(bound(each.target) for each in parts))
        case ast.ExceptHandler(name=name):
            own = {name}
    fields = [value for _, value in ast.iter_fields(part)] if isinstance(part, ast.AST) else []
    return set().union(*map(used, fields)) - own


def changed(part: ast.AST) -> set[str]:
    """The names of what it sets an item or an attribute of, or appends something to."""
    found = set()
    for node in ast.walk(part):
        stored = isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store)
        if stored or (isinstance(node, ast.Attribute) and node.attr in ("append", "update")):
            found |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    return found


def pools(part: ast.AST) -> list[tuple[int, bool]]:
    """The pools that are made in a part of the code: how many ranks, and whether they take the machine's devices."""
    calls = [node for node in ast.walk(part) if isinstance(node, ast.Call)]
    made = [call for call in calls if getattr(call.func, "id", "") == "Pool"]
    return [(ast.literal_eval(call.args[0]), all(each.arg != "device" for each in call.keywords)) for call in made]


def commands(cell: ast.Module) -> list[str]:
    """Commands that train on the machine's devices."""
    words = [node.value for node in ast.walk(cell) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [each for each in words if "pplab train" in each and "--device" not in each]


def on_devices(cells: list[ast.Module]) -> dict[int, list[ast.stmt]]:
    """What is executed of which cell."""
    there: set[str] = set()  # names of pools on the machine's devices
    whole: set[int] = set()
    for number, cell in enumerate(cells):
        for node in ast.walk(cell):
            if isinstance(node, ast.Assign) and pools(node.value):
                names = bound(ast.Module([node], []))
                there = there | names if any(free for _, free in pools(node.value)) else there - names
        if any(free for _, free in pools(cell)) or commands(cell) or there & set().union(*map(used, cell.body)):
            whole.add(number)
    found, wanted = {}, set()
    for number in reversed(range(len(cells))):
        for statement in reversed(cells[number].body):
            if number in whole or (bound(statement) | changed(statement)) & wanted:
                found.setdefault(number, []).insert(0, statement)
                wanted = wanted - bound(statement) | used(statement)
    return dict(sorted(found.items()))


def main(path: Path) -> None:
    """Execute a notebook's."""
    space = {"__name__": "__main__"}
    for number, statements in on_devices(parsed(path)).items():
        try:
            exec(compile(ast.Module(statements, []), f"cell {number} of {path.name}", "exec"), space)
        except BaseException as error:
            error.add_note("\n".join(map(ast.unparse, statements)))
            raise
    for each in space.values():
        if isinstance(each, Pool):
            each.close()


if __name__ == "__main__":
    lab.long_enough.__kwdefaults__["least_ms"] = 0.1  # since GPUs that are played are slow
    for name in sys.argv[1:]:
        main(Path(name))
