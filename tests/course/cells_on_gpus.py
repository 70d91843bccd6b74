"""Executes what a notebook does on the machine's GPUs, as it stands there: `python cells_on_gpus.py NOTEBOOK ...`.

That is every cell that makes a pool without saying where, or uses such a pool, and what these need of others.
"""

from __future__ import annotations

import ast
import dis
import json
import sys
from pathlib import Path
from types import CodeType

from pplab.runtime import Pool


def parsed(path: Path) -> list[ast.Module]:
    """A notebook's cells of code, without their lines for IPython."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = ["".join(cell["source"]).splitlines() for cell in cells]
    return [ast.parse("\n".join("" if each[:1] in ("%", "!") else each for each in cell)) for cell in lines]


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


def places(part: ast.AST) -> list[bool]:
    """Of each pool that a part of the code makes, whether it takes the machine's devices."""
    calls = [node for node in ast.walk(part) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Pool"]
    return [all(each.arg != "device" for each in call.keywords) for call in calls]


def commands(cell: ast.Module) -> bool:
    """Whether it has a command that trains on the machine's devices."""
    words = [node.value for node in ast.walk(cell) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return any("pplab train" in each and "--device" not in each for each in words)


def on_devices(cells: list[ast.Module]) -> dict[int, list[ast.stmt]]:
    """What is executed of which cell."""
    there: set[str] = set()  # names of pools on the machine's devices
    whole: set[int] = set()
    for number, cell in enumerate(cells):
        for node in ast.walk(cell):
            if isinstance(node, ast.Assign) and (found := places(node.value)):
                _, names = flow(node)
                there = there | names if any(found) else there - names
        taken = set().union(*(flow(statement)[0] for statement in cell.body))
        if any(places(cell)) or commands(cell) or there & taken:
            whole.add(number)
    executed, wanted = {}, set()
    for number in reversed(range(len(cells))):
        for statement in reversed(cells[number].body):
            taken, bound = flow(statement)
            if number in whole or (bound | changed(statement)) & wanted:
                executed.setdefault(number, []).insert(0, statement)
                wanted = wanted - bound | taken
    return dict(sorted(executed.items()))


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
    for name in sys.argv[1:]:
        main(Path(name))
