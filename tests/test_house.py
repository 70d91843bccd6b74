"""The pure part stays pure: it imports, builds, simulates and draws itself without torch or matplotlib."""

import subprocess
import sys

PURE = """
import sys
import pplab as pp
from pplab import builders, cli, errors, formulas, lower, metrics, palette, plot, text
from pplab.lab import results
t = pp.simulate(pp.build("1F1B", num_ranks=4, num_microbatches=8))
t.schedule._repr_html_(), pp.table([t])._repr_html_(), t.to_dict()
heavy = {"torch", "matplotlib", "numpy", "transformers", "datasets"} & sys.modules.keys()
assert not heavy, heavy
"""

DRAWING = """
import sys
import pplab as pp
pp.simulate(pp.build("1F1B", num_ranks=4, num_microbatches=8))._repr_mimebundle_()
assert "torch" not in sys.modules
"""


def run(code: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_pure_part_loads_neither_torch_nor_matplotlib():
    run(PURE)


def test_drawing_does_not_load_torch():
    run(DRAWING)


def test_what_is_loaded_late_is_found():
    run("import pplab as pp; pp.gantt; pp.compare; pp.runtime.Pool; pp.models.gpt; pp.data.reviews")


def test_an_unknown_attribute_is_refused():
    run("import pplab, pytest\nwith pytest.raises(AttributeError, match='nothing'):\n    pplab.nothing")
