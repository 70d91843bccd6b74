"""How much of the package runs, and so has to be read, from building a schedule to its chart."""

import subprocess
import sys
from pathlib import Path

from size import tokens

MOST_FILES, MOST_TOKENS = 11, 10_520  # the eleventh says what to install where matplotlib is missing

OPENED = """
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot  # noqa: F401 (its own files don't count, and tracing them is slow)

import pplab as pp

root, opened = Path(pp.__file__).parent, set()


def look(frame, event, what):
    name = frame.f_code.co_filename
    if event == "call" and frame.f_code.co_name != "<module>" and name.startswith(str(root)):
        opened.add(name)


sys.setprofile(look)
schedule = pp.build("1F1B", num_ranks=3, num_microbatches=4)
pp.validate(schedule)
timeline = pp.simulate(schedule)
pp.gantt(timeline)
sys.setprofile(None)
for name in sorted(opened):
    print(name)
"""


def test_from_building_to_the_chart_eleven_files_are_opened():
    """Whole files are counted of whatever functions run, after `import pplab`."""
    done = subprocess.run([sys.executable, "-c", OPENED], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    files = {name: tokens(Path(name)) for name in done.stdout.splitlines()}
    assert files and len(files) <= MOST_FILES and sum(files.values()) <= MOST_TOKENS, files
