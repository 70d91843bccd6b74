"""Figures that are open; and what axes can do, for those that are current."""

from __future__ import annotations

from ._style import lacking, told
from .axes import Axes
from .figure import Figure

_open: dict[int, Figure] = {}


@told
def figure(num: int | None = None, *, figsize: tuple[float, float] = (6.4, 4.8), layout: str | None = None) -> Figure:
    if num in _open:
        return _open[num]
    made = Figure(figsize, layout)
    made.number = max(_open, default=0) + 1
    _open[made.number] = made
    return made


class Grid(list):
    """Axes by row; takes `[:, 0]`, as an array does."""

    def __getitem__(self, key: object) -> object:
        if not isinstance(key, tuple):
            return super().__getitem__(key)
        rows, column = key
        found = super().__getitem__(rows)
        return Grid(row[column] for row in found) if isinstance(rows, slice) else found[column]

    @property
    def flat(self) -> list[Axes]:
        return [ax for row in self for ax in (row if isinstance(row, list) else [row])]


@told
def subplots(
    nrows: int = 1,
    ncols: int = 1,
    *,
    figsize: tuple[float, float] = (6.4, 4.8),
    layout: str | None = None,
    squeeze: bool = True,
    sharex: bool = False,
    sharey: bool = False,
    height_ratios: list | None = None,
    width_ratios: list | None = None,
) -> tuple[Figure, object]:
    made = figure(figsize=figsize, layout=layout)
    made.rows, made.columns = nrows, ncols
    made.heights, made.widths = list(height_ratios or [1] * nrows), list(width_ratios or [1] * ncols)
    grid = Grid(Grid(made._add(made._in_cell(row, column)) for column in range(ncols)) for row in range(nrows))
    for at, shared in enumerate((sharex, sharey)):
        if shared:
            _share(made, at)
    if not squeeze:
        return made, grid
    if nrows == ncols == 1:
        return made, grid[0][0]
    return made, grid[0] if nrows == 1 else grid[:, 0] if ncols == 1 else grid


def _share(figure: Figure, at: int) -> None:
    """One view for all axes, whose names only the outer ones have."""
    view = figure.axes[0].axes_[at].view
    view.axes = figure.axes
    for ax in figure.axes:
        ax.axes_[at].view = view
        ax.axes_[at].labelled = ax.cell[0] == figure.rows - 1 if at == 0 else ax.cell[1] == 0


def get_fignums() -> list[int]:
    return sorted(_open)


def gcf() -> Figure:
    return _open[max(_open)] if _open else figure()


def gca() -> Axes:
    return gcf().gca()


def close(fig: object = None) -> None:
    """Forget a figure, the current one, or "all"."""
    for number, each in list(_open.items()):
        if fig in ("all", number, each) or fig is None and number == max(_open):
            del _open[number]


def show() -> None:
    """The page shows what a cell leaves open."""


def __getattr__(name: str) -> object:
    """`plt.plot`, `plt.xlabel` and the like are those of the current axes."""
    for method in (name, f"set_{name}"):
        if not name.startswith("_") and hasattr(Axes, method):
            return getattr(gca(), method)
    raise lacking(f"plt.{name}")
