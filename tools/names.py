"""Say statically what a package gives by asking: an editor and a type checker read `__init__.pyi`, and run nothing.

python tools/names.py

writes that file beside each `__init__.py` that lists names: of `pplab`, of what lies in it, of lab and its rooms. The
tables in these files stay the only place where names are kept.
"""

from __future__ import annotations

import ast
from pathlib import Path

HOUSE = Path(__file__).parents[1] / "src" / "pplab"
HEAD = "# Written by tools/names.py from __init__.py, for editors and type checkers.\n"


def homes(init: Path) -> dict[str, str]:
    """The public names of a package, each with the module that has it, as an import writes it: `.case`, or `.` for a
    module of the package itself.

    They are those that the file imports, those of the table that it hands to `lazily`, and modules in its `__all__`.
    """
    tree = ast.parse(init.read_text())
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f".{node.module}" for alias in node.names if node.level == 1}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.List):  # `__all__`
            names = {text.value for text in ast.walk(node.value) if isinstance(text, ast.Constant)}
            found |= {name: "." for name in names if (init.parent / name).is_dir()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            for home, names in ast.literal_eval(node).items():
                found |= {name: "." if name == home else f".{home}" for name in names.split()}
    return {name: home for name, home in found.items() if not name.startswith("_")}


def order(name: str) -> tuple[int, str]:
    """Constants, classes, the rest, as ruff wants imports."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2), name


def stub(init: Path) -> str:
    """The text of `__init__.pyi`."""
    found = homes(init)
    lines = [
        f"from {home} import {name} as {name}\n"
        for name, home in sorted(found.items(), key=lambda item: (item[1], *order(item[0])))
    ]
    version = "\n__version__: str\n" if "\n__version__ = " in init.read_text() else ""
    return f"{HEAD}\n{''.join(lines)}{version}"


def packages() -> list[Path]:
    """The files of the packages that list names."""
    return [init for init in sorted(HOUSE.rglob("__init__.py")) if "__all__" in init.read_text()]


if __name__ == "__main__":
    for init in packages():
        init.with_suffix(".pyi").write_text(stub(init))
