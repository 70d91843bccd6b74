"""Draw README's first picture, and the one for previews of the book's pages: race.png and social_card.png.

Run it again when the charts' colours, the running case or the book's title change.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt

import pplab as pp
from pplab import lab

STATIC = Path(__file__).parents[1] / "book" / "_static"
GROUND, TEXT, MUTED = "#14202e", "#f2f5f9", "#b4c0d0"


def race() -> None:
    """A step of the running case under three schedules, to scale, as README's first sentence tells it."""
    cuts = {"naive": None, "1F1B": None, "ZBVZeroBubble": (4, 5, 5, 3, 5, 4, 4, 2)}
    rows = [lab.Case().row(name, 16, cut=cut) for name, cut in cuts.items()]
    axes = pp.compare([row.timeline for row in rows])
    for ax, name, row in zip(axes, ("The naive pipeline", "1F1B", "ZB-V"), rows, strict=True):
        ax.set_title(f"{name}: {row.step_s:.1f} s, {row.busy:.0%} of the time paid for is work", loc="left", size=10)
    axes[0].figure.set_size_inches(8, 5.2)
    axes[0].figure.savefig(STATIC / "race.png", dpi=150, metadata={"Software": None})


def card() -> None:
    """The title above a chart, 1200 by 630 pixels."""
    figure = plt.figure(figsize=(12, 6.3), dpi=100, facecolor=GROUND)
    figure.text(0.06, 0.83, "Pipeline Parallelism, Measured", color=TEXT, size=40, weight="bold")
    figure.text(
        0.06, 0.735, "Schedules built, checked, simulated, run by real processes, measured", color=MUTED, size=19
    )
    ax = figure.add_axes((0.115, 0.2, 0.825, 0.42), facecolor=GROUND)
    timeline = pp.simulate(pp.build("1F1B", num_ranks=4, num_microbatches=8), pp.Costs(1, 1, 1))
    pp.gantt(timeline, ax)
    ax.set_title(
        f"1F1B on four ranks: {timeline.bubble_fraction:.0%} of the time paid for is waiting",
        loc="left",
        color=TEXT,
        size=16,
    )
    ax.set_xlabel("")
    ax.get_legend().remove()
    for drawn in ax.collections:  # idle time is drawn in the colour of text
        for what in ("facecolor", "edgecolor"):
            if len(found := getattr(drawn, f"get_{what}")()) and not found[0][:3].any():
                getattr(drawn, f"set_{what}")((TEXT, found[0][3]))
    ax.tick_params(colors=MUTED, labelsize=15)
    for spine in ax.spines.values():
        spine.set_color(MUTED)
    for label in ax.texts:
        label.set_size(13)
    figure.text(0.06, 0.06, "pplab", color="#7f93ad", size=26, weight="bold")
    figure.savefig(STATIC / "social_card.png", facecolor=GROUND, metadata={"Software": None})


if __name__ == "__main__":
    matplotlib.use("agg")
    race()
    card()
