"""The schedules, by name. A new one is a file here and a line in `ALL`."""

from __future__ import annotations

from ..errors import unknown
from ..schedule import Schedule
from .controllable import v_half, v_min
from .dualpipe import dualpipe, dualpipe_v
from .gpipe import gpipe
from .interleaved import interleaved, interleaved_zero_bubble, looped_bfs
from .naive import naive
from .one_f_one_b import eager_one_f_one_b, one_f_one_b
from .registry import Builder
from .search import zb_1p, zb_2p
from .v_shape import zb_v
from .zero_bubble import zb_h1, zb_h2

ALL: tuple[Builder, ...] = (
    naive,
    gpipe,
    one_f_one_b,
    eager_one_f_one_b,
    interleaved,
    looped_bfs,
    zb_h1,
    zb_h2,
    zb_1p,
    zb_2p,
    interleaved_zero_bubble,
    zb_v,
    v_half,
    v_min,
    dualpipe,
    dualpipe_v,
)

_BY_NAME = {alias.lower(): builder for builder in ALL for alias in (builder.name, *builder.aliases)}


def find(name: str) -> Builder:
    """The builder of that name, whatever its case; ValueError with the nearest names when there is none."""
    found = _BY_NAME.get(str(name).lower())
    if found is None:
        raise unknown("schedule", name, [builder.name for builder in ALL])
    return found


def build(name: str, *, num_ranks: int, num_microbatches: int, **options: object) -> Schedule:
    """Build the schedule `name` for `num_ranks` ranks and `num_microbatches` microbatches.

    `pplab schedules` lists the names with their options and rules. Raises ValueError that names what was given and
    what was expected.

    >>> print(build("1F1B", num_ranks=2, num_microbatches=3))
    1F1B: 2 ranks, 2 stages, 3 microbatches, 12 actions
    rank 0  0F0 0F1 0B0 0F2 0B1 0B2
    rank 1  1F0 1B0 1F1 1B1 1F2 1B2
    """
    return find(name)(num_ranks, num_microbatches, **options)
