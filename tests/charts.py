"""Draws charts of the chapters' cells, with the matplotlib that comes first on the path, and prints them as JSON.

`tests/pages/test_charts.py` runs it twice: with the page's matplotlib and no numpy, and with the real one.
"""

import ast
import contextlib
import io
import json
import re
import sys
from pathlib import Path

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
# What only charts of measured values call, which no quick cell draws.
OWN = """
import matplotlib.pyplot as plt
fig, ax = plt.subplots(figsize=(6, 3), layout="constrained")
ax.loglog([10, 1000, 30000], [900, 20, 3], "o-.", color="tab:red", label="measured")
ax.axhline(30, color="gray", lw=0.8, ls=":")
ax.text(1.01, 30, "a network", fontsize=8, va="center", transform=ax.get_yaxis_transform())
ax.annotate("here", (1000, 20), xytext=(4, 6), textcoords="offset points", ha="center")
ax.set(xlabel="bytes", ylabel="two\\nlines", ylim=(1.5, 1400), title="an own chart")
ax.legend(frameon=False, loc=(0.02, 0.17), fontsize=8)
"""


def bound_and_used(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """Names that a statement binds for others, or puts an item into, and names that it has from elsewhere."""
    bound, used, own = set(), set(), set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            bound.add(node.value.id)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.comprehension):
            own |= {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}, used - bound - own
    return bound - own, used - own


def needed(above: list[ast.stmt], cell: list[ast.stmt]) -> list[ast.stmt]:
    """The statements above a cell that bind what it uses: the rest may want what isn't there, such as torch."""
    chosen, needs = [], {name for statement in cell for name in bound_and_used(statement)[1]}
    for statement in reversed(above):
        bound, used = bound_and_used(statement)
        if bound & needs:
            chosen.append(statement)
            needs = needs - bound | used
    return chosen[::-1]


def drawn(chapter: str, wanted: str) -> list[str]:
    """The SVG of the figures that a cell leaves open, or shows itself."""
    import matplotlib.pyplot as plt

    from pplab.lab.forms import LINES, figure_html
    from pplab_course import figures

    if hasattr(plt, "rcParams"):  # the real one: as pplab_course.notebook sets it, and the page's has it
        plt.rcParams["axes.prop_cycle"] = plt.cycler(color=LINES)
    figures.figure_picture = figures.bundle = lambda *_: None
    if chapter == "own":
        exec(OWN, {})
        return [figure_html(plt.gcf())]
    notebook = json.loads((NOTEBOOKS / f"{chapter}.ipynb").read_text("utf-8"))
    above: list[ast.stmt] = []
    for cell in (each for each in notebook["cells"] if each["cell_type"] == "code"):
        source = "".join(cell["source"])
        if source.startswith("%%writefile"):
            continue
        statements = ast.parse(re.sub("^%.*$", "", source, flags=re.M)).body
        if cell["id"] == wanted:
            break
        above += statements
    space: dict = {"__name__": "__main__"}
    exec(compile(ast.Module(needed(above, statements), []), chapter, "exec"), space)
    plt.close("all")
    *lines, last = statements
    if isinstance(last, ast.Expr):
        last = ast.Assign([ast.Name("shown", ast.Store())], last.value)
    exec(compile(ast.fix_missing_locations(ast.Module([*lines, last], [])), wanted, "exec"), space)
    shown = space.get("shown")
    views = getattr(shown, "views", {}).values()
    found = getattr(shown, "_frames", []) + [view._chart for view in views]
    return found + [figure_html(plt.figure(number)) for number in plt.get_fignums()]


def main() -> None:
    for name in sys.argv[1].split():
        sys.modules[name] = None  # as in the page, where it can't be imported
    with contextlib.redirect_stdout(io.StringIO()):
        found = {place: drawn(*place.split(":")) for place in sys.argv[2:]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
