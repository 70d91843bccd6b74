"""What notebooks show apart from figures: `%load_ext pplab_course.notebook`, sources of functions,
and views with settings.

With the extension, matplotlib's figures and timelines are kept as `figures` explains: in the text
colour for the book's page, as pictures for other viewers, and in words for readers who can't see
them. Schedules are grids of colours.
"""

from __future__ import annotations

import html
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pplab import builders, lab  # noqa: F401 (with its schedules)
from pplab.costs import DURATIONS, Costs, PerStage
from pplab.lab.forms import LINES
from pplab.schedule import Schedule
from pplab.simulator import simulate
from pplab.timeline import Timeline

from . import figures

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from matplotlib.axes import Axes

# the page's explorer and game: pplab_frames
sys.path.append(str(Path(__file__).parents[2] / "book" / "_ext"))


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Show figures, timelines and schedules by `pplab_course.figures`."""
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib_inline.config import InlineBackend

    from pplab.plot import AxesColumn

    # tqdm: a plain progress bar will do
    warnings.filterwarnings("ignore", message="IProgress not found")
    shell.run_line_magic("matplotlib", "inline")
    plt.close("all")
    plt.rcParams["axes.prop_cycle"] = plt.cycler(color=LINES)
    InlineBackend.instance(parent=shell).figure_formats = set()
    formatter = shell.display_formatter
    formatter.mimebundle_formatter.for_type(Figure, figures.figure_bundle)
    formatter.mimebundle_formatter.for_type(Timeline, figures.timeline_bundle)
    formatter.formatters["text/html"].for_type(Schedule, figures.schedule_html)
    # a cell that ends with a drawing shows the drawing, not also its Axes
    for kind in (Axes, AxesColumn):
        formatter.ipython_display_formatter.for_type(kind, lambda axes: None)


class Source:
    """The source of functions or classes, which a notebook shows as code."""

    def __init__(self, *things: Callable | type):
        self.text = "\n\n".join(
            textwrap.dedent(inspect.getsource(thing)).rstrip() for thing in things
        )

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"

    def __repr__(self) -> str:
        return self.text


class Slider:
    """Figures behind a slider on the book's page, one for every value of `name`. The first one is
    shown until you move it.

    It works there without a kernel and from the keyboard, and without scripts it shows the first
    figure. Other viewers show all figures, one above the other.
    """

    def __init__(self, name: str, drawings: Mapping[Any, Axes]):
        from matplotlib import pyplot as plt

        self.name, self.values = name, list(drawings)
        self._frames, self._pictures, self._said = [], [], []
        for value, ax in drawings.items():
            self._frames.append(figures.figure_html(ax.figure))
            self._said.append(f"{name} {value}: {figures.alternative_text(ax.figure)}")
            slides = "" if self._pictures else " (on the book's page, a slider moves it)"
            ax.figure.text(0.01, 1, f"{name}: {value}{slides}", va="bottom", fontsize=10)
            self._pictures.append(figures.figure_picture(ax.figure))
            plt.close(ax.figure)

    def _repr_mimebundle_(self, **_: object) -> figures.Bundle:
        return figures.bundle(self._page(), self._pictures, "\n".join(self._said))

    def _page(self) -> str:
        frames = "".join(
            f'<div class="pplab-frame"{" hidden" if number else ""}>{frame}</div>'
            for number, frame in enumerate(self._frames)
        )
        values = html.escape(",".join(map(str, self.values)))
        move = (
            "const p=this.closest('.pplab-slider'),v=this.dataset.values.split(',')[this.value];"
            "p.querySelectorAll('.pplab-frame').forEach((f,i)=>{f.hidden=i!=this.value});"
            "p.querySelector('output').textContent=v;this.setAttribute('aria-valuetext',v)"
        )
        return (
            '<div class="pplab-slider"><label '
            'style="display:flex;gap:.8em;align-items:center;max-width:34em">'
            f'<span>{html.escape(self.name)}</span><input type="range" style="flex:1" min="0" max="'
            f'{len(self.values) - 1}" step="1" value="0" data-values="{values}" aria-valuetext="'
            f'{self.values[0]}" oninput="{html.escape(move)}">'
            f'<output style="min-width:2em">{self.values[0]}</output></label>{frames}</div>'
        )

    def __repr__(self) -> str:
        return f"<slider over {self.name}: {', '.join(map(str, self.values))}>"


def explore(
    schedule: str = "1F1B", compare: str = "", controls: str = "", **settings: PerStage | str
) -> None:
    """Show the explorer of the book's page, with one schedule to play with, or two to compare.

    `settings` are those of `explored`, and `until`, `path`, `tickets`, `time` and `memory`, as on
    the page. `controls` are those that aren't folded away. In a notebook that isn't trusted, and on
    paper, this is a picture.
    """
    import pplab_frames

    pplab_frames.explore(schedule, compare, controls, **settings)


def play(level: str) -> None:
    """Show a level of the book's game. A notebook that isn't trusted shows the level's question."""
    import pplab_frames

    pplab_frames.play(level)


def explored(
    schedule: str = "1F1B",
    compare: str = "",
    *,
    rows: str = "",
    ranks: int = 4,
    microbatches: int = 8,
    stages_per_rank: int = 2,
    slices: int = 2,
    attention: float = 0,
    forward: PerStage = 1,
    backward_input: PerStage = 1,
    backward_weight: PerStage = 1,
    overhead: PerStage = 0,
    latency: float = 0,
    overlap: str = "sum",
    pair: float = 0,
    more_in_flight: int = 0,
    per: str = "rank",
) -> list[Timeline]:
    """The simulated timelines of the schedules named.

    The durations are for a microbatch on a rank's whole share, on a "stage", or for the whole
    "batch" on a rank, according to `per`. One value per stage is for the stages, whatever their
    ranks. Every action takes `overhead` in addition. A forward and a backward at once take `pair`,
    or as long as `overlap` gives. A schedule of slices cuts each microbatch into so many of equal
    length, and causal `attention` is that share of a forward. The schedule "own" has these `rows`:
    0F0.0B0~1F0.1B0. 1F1B's rank s has `more_in_flight` than P-s microbatches. Raises ValueError for
    what can't be.
    """

    def of_stage(stages: float) -> Costs:
        both = pair or overlap
        whole = Costs(
            forward, backward_input, backward_weight, latency, overhead=overhead, overlap=both
        )
        costs = whole.finer(microbatches if per == "batch" else 1)
        if per == "stage":
            return costs
        lists = {
            name: value for name in DURATIONS if isinstance(value := getattr(costs, name), tuple)
        }
        return replace(costs.finer(stages), **lists)

    found = []
    for name in filter(None, (schedule, compare)):
        run = simulate
        if name == "own":
            named = re.sub(r"\((\d+(.)\d+)-(\d+(.)\d+)\)", r"(\1;\3)OVERLAP_\2_\4", rows)
            built = lab.read_csv(named.replace(".", ",").replace("~", "\n"))
        else:
            builder, pieces = builders.find(name), microbatches
            if "slices" in builder.options:
                run, pieces = lab.Slices.even(slices, attention).simulate, microbatches * slices
            costs = of_stage(2 if builder.placement == "V" else 1)
            options = {
                "stages_per_rank": stages_per_rank,
                "slices": slices,
                "costs": costs,
                "in_flight": [ranks - rank + more_in_flight for rank in range(ranks)],
            }
            built = builder(
                ranks,
                pieces,
                **{key: options[key] for key in options.keys() & set(builder.options)},
            )
        found.append(run(built, of_stage(built.num_stages / built.num_ranks)))
    return found
