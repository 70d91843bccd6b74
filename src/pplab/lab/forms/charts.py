"""Drawings of single chapters: where a step's time went, what makes up a sum, which ranks of a
layout communicate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ... import palette
from ...optional import bring
from ...plot import BAR, LABEL_SIZE, WIDTH, dress, fill_of, idle_styles, ink, new_axes, rank_names
from ...timeline import total
from ..measuring import IDLE_PARTS, Where
from .palette import CATEGORIES, PART

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..planning import Layout, Plan
    from ..schedules import Block

_AXES = {
    "tp": ("tensor", CATEGORIES[0]),
    "cp": ("context", CATEGORIES[5]),
    "pp": ("pipeline", CATEGORIES[3]),
    "dp": ("data", CATEGORIES[2]),
}

_CENTRED = {"ha": "center", "va": "center_baseline", "fontsize": LABEL_SIZE}
_Spot = tuple[float, float]  # where a rank is drawn


def waterfall(found: Where) -> Axes:
    """Draw how the mean parts of a step add up, from compute to the measured time."""
    mean = found.mean
    work = {part: amount for part, amount in mean.items() if part not in IDLE_PARTS}
    steps = [
        ("work", total(work.values())),
        *((part, mean[part]) for part in IDLE_PARTS),
        ("step", found.step_time),
    ]
    ax = new_axes(len(steps))
    end = 0.0
    for row, (name, amount) in enumerate(steps):
        start = 0 if name in ("work", "step") else end
        end = start + amount
        for style in _styles(name, palette.IDLE):
            ax.barh(row, amount, left=start, height=BAR, **style)
        label = f" {round(amount, 9) + 0:.4g} ({amount / found.step_time:.1%})"
        ax.text(max(start, end), row, label, va="center", fontsize=LABEL_SIZE)
    _finish_parts(
        ax, found, [name for name, _ in steps], "where the step went (mean of ranks)", 1.2
    )
    return ax


def stacked(found: Where) -> Axes:
    """Draw each rank's parts one after the other. Parts that are negative on a rank are left
    out.
    """
    num_ranks = len(found.by_rank)
    ax = new_axes(num_ranks)
    names = [part for part in found.mean if any(row.get(part) for row in found.by_rank)]
    ends = [0.0] * num_ranks
    for name in names:
        amounts = [max(row.get(name, 0), 0) for row in found.by_rank]
        *under, look = _styles(name)
        for style in (*under, look | {"label": name}):
            ax.barh(range(num_ranks), amounts, left=ends, height=BAR, **style)
        ends = [end + amount for end, amount in zip(ends, amounts, strict=True)]
    _finish_parts(
        ax,
        found,
        rank_names(found.timeline),
        "where each rank's time went",
        max(ends) / found.step_time,
    )
    ax.legend(
        loc="upper left", bbox_to_anchor=(0, -0.35), ncols=4, frameon=False, fontsize=LABEL_SIZE
    )
    return ax


def _styles(part: str, other: str = "") -> list[dict]:
    """The styles in which a part is drawn, one upon the other. Its bubble looks like idle time in
    Gantt charts.
    """
    return (
        idle_styles("inner")
        if part == "bubble"
        else [{"fc": PART.get(part, other), "ec": "white", "lw": 0.6}]
    )


def _finish_parts(ax: Axes, found: Where, names: Sequence[str], what: str, reach: float) -> None:
    title = f"{found.timeline.schedule.name}, {found.timeline.how}: {what}"
    dress(ax, names, title, found.timeline.unit, found.step_time * max(reach, 1))
    ax.invert_yaxis()
    said = ", ".join(
        f"{part} {amount / found.step_time:.1%}" for part, amount in found.mean.items()
    )
    ax.set_label(
        f"Where the time of a step of {found.timeline.schedule.name} went, mean of ranks: {said}"
    )


def ranks(plan: Plan, ranks_per_node: int) -> Axes:
    """Draw a small layout's ranks in their nodes, with an edge for every two that communicate and,
    per axis, what the busiest rank sends in a step. Raises ValueError for more than 32 ranks,
    because nobody could read that.
    """
    plt = bring("matplotlib.pyplot")
    layout = plan.layout
    if layout.num_ranks > 32:
        raise ValueError(
            f"at most 32 ranks can be drawn so that they can be read, got {layout.num_ranks}"
        )
    spots = _spots(layout)
    height = max(y for _, y in spots) - min(y for _, y in spots)
    ax = plt.subplots(figsize=(WIDTH, 0.85 * height + 1.6), layout="constrained")[1]
    _draw_edges(ax, plan, spots)
    circle = {"boxstyle": "circle,pad=0.35", "facecolor": "#e3e6ea", "edgecolor": palette.IDLE}
    for rank, spot in enumerate(spots):
        ax.text(*spot, str(rank), **_CENTRED, color="#111111", zorder=3, bbox=circle)
    _draw_nodes(ax, spots, ranks_per_node)
    ax.margins(0.06, 0.12)
    ax.axis("off")
    ax.set_title(
        "who sends to whom, and how much the busiest rank sends in a step", fontsize=10, loc="left"
    )
    ax.legend(loc="upper left", bbox_to_anchor=(0, 0), ncols=3, frameon=False, fontsize=LABEL_SIZE)
    _, sent = ax.get_legend_handles_labels()
    names = {axis: name for axis, (name, _) in _AXES.items() if axis != "cp" or layout.cp > 1}
    degrees = " x ".join(str(getattr(layout, axis)) for axis in names)
    ax.set_label(
        f"{layout.num_ranks} ranks on {-(-layout.num_ranks // ranks_per_node)} nodes as "
        f"{' x '.join(names.values())} = {degrees}. The busiest rank sends per step: "
        f"{', '.join(sent)}"
    )
    return ax


def _spots(layout: Layout) -> list[_Spot]:
    """Where each rank is drawn: stages from left to right, replicas from top to bottom, and the
    ranks of one stage close together.
    """
    # a stage, and a replica
    wide, tall = layout.tp * layout.cp + 1.5, 0.35 * layout.tp + 0.6 * layout.cp + 0.3
    places = map(layout.place, range(layout.num_ranks))
    return [
        (
            p["pp"] * wide + p["cp"] * layout.tp + p["tp"],
            0.35 * p["tp"] - 0.6 * p["cp"] - p["dp"] * tall,
        )
        for p in places
    ]


def _draw_edges(ax: Axes, plan: Plan, spots: Sequence[_Spot]) -> None:
    """Draw who communicates with whom. An axis is named once, with what is sent for it."""
    for axis, (name, colour) in _AXES.items():
        sent = plan.sent_bytes[axis] / 1e6
        label = f"{name}: {sent:.0f} MB" if sent < 1e3 else f"{name}: {sent / 1e3:.1f} GB"
        groups = [group for group in plan.layout.groups(axis) if len(group) > 1]
        for number, group in enumerate(groups):
            xs, ys = zip(*(spots[rank] for rank in group), strict=True)
            ax.plot(xs, ys, color=colour, lw=2.2, zorder=1, label=label if number == 0 else None)


def _draw_nodes(ax: Axes, spots: Sequence[_Spot], ranks_per_node: int) -> None:
    """Draw a dashed box around each node's ranks, with the node's number above it."""
    from matplotlib.patches import Rectangle

    for first in range(0, len(spots), ranks_per_node):
        xs, ys = zip(*spots[first : first + ranks_per_node], strict=True)
        left, bottom = min(xs) - 0.45, min(ys) - 0.35
        wide, tall = max(xs) - min(xs) + 0.9, max(ys) - min(ys) + 0.7
        ax.add_patch(
            Rectangle(
                (left, bottom), wide, tall, facecolor="none", edgecolor=palette.IDLE, ls="--", lw=1
            )
        )
        ax.text(left, bottom + tall + 0.05, f"node {first // ranks_per_node}", fontsize=LABEL_SIZE)


def bars(
    rows: Mapping[str, Sequence[tuple[str, float]]], *, title: str, unit: str, mark: str = ""
) -> Axes:
    """Draw a bar per row from its parts, which are (kind, amount) pairs, for example a stage's
    layers or what a rank holds.

    A kind has one colour in all rows. Parts of a step have their own colours, and the bubble is
    hatched. `mark` names a line at the mean of the rows' sums. Without it there is no line.
    """
    ax = new_axes(len(rows))
    sums = [total(amount for _, amount in row) for row in rows.values()]
    kinds = list(dict.fromkeys(kind for row in rows.values() for kind, _ in row))
    looks = {kind: _styles(kind, fill) for kind, fill in zip(kinds, CATEGORIES, strict=False)}
    for place, row in enumerate(rows.values()):
        start = 0.0
        for kind, amount in row:
            for style in looks[kind]:
                ax.barh(place, amount, left=start, height=BAR, **style)
            start += amount
        ax.text(start, place, f"  {start:.3g}", va="center", fontsize=LABEL_SIZE)
    mean = total(sums) / len(sums)
    if mark:
        ax.axvline(mean, color="black", lw=1, ls="--")
        ax.text(mean, -0.55, f"{mark} {mean:.3g}", ha="center", va="bottom", fontsize=LABEL_SIZE)
    dress(ax, list(rows), title, "", 1.1 * max(sums))
    ax.set_title(title, fontsize=10, loc="left", pad=14 if mark else 6)
    ax.set_xlabel(unit)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    if len(kinds) > 1:
        from matplotlib.patches import Patch

        handles = [tuple(Patch(**style) for style in looks[kind]) for kind in kinds]
        ax.legend(
            handles,
            kinds,
            loc="upper left",
            bbox_to_anchor=(1, 1),
            frameon=False,
            fontsize=LABEL_SIZE,
        )
    said = ", ".join(f"{name} {amount:.3g}" for name, amount in zip(rows, sums, strict=True))
    ax.set_label(f"{title}: {said} {unit}{mark and f'; {mark} {mean:.3g}'}")
    return ax


def block_chart(block: Block, copies: int) -> Axes:
    """Draw a building block in colour, the next ones after it in pale colours, and the interval
    between two of them.
    """
    timeline = block.stamp(copies)
    ax = new_axes(block.num_ranks)
    title = f"{block.name}: {copies} microbatches, a new one every {block.interval:g}"
    dress(ax, rank_names(timeline), title, timeline.unit, timeline.makespan)
    ax.set_ylim(block.num_ranks - 0.5, -0.5)
    # per unit of time
    points = ax.get_window_extent().width * 72 / ax.figure.dpi / timeline.makespan
    for span in timeline.spans:
        (fill,), takes, own = (
            fill_of(timeline, span),
            span.end - span.start,
            span.action.microbatch == 0,
        )
        ax.barh(
            span.rank,
            takes,
            left=span.start,
            height=BAR,
            color=fill,
            alpha=1 if own else 0.3,
            ec="white",
            lw=0.5,
        )
        if own and takes * points > LABEL_SIZE:
            middle = span.start + takes / 2
            ax.text(middle, span.rank, span.action.kind.value, color=ink(fill), **_CENTRED)
    for m in range(copies):
        ax.axvline(
            block.starts["0F"] + m * block.interval, color="black", lw=0.8, ls=":", alpha=0.6
        )
    ax.set_label(
        f"A building block on {block.num_ranks} ranks and {copies - 1} more, each "
        f"{block.interval:g} later"
    )
    return ax
