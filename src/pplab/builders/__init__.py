"""The schedules, in the order in which they are listed: a new one is a file here and a line below. Those that are
searched for, or chosen by simulating several, come with `pplab.lab`."""

from ._naive import naive
from ._gpipe import gpipe
from ._one_f_one_b import eager_one_f_one_b, one_f_one_b
from ._interleaved import in_groups, interleaved, interleaved_zero_bubble, looped_bfs, looped_rows
from ._zero_bubble import zb_h1, zb_h2
from ._v_shape import zb_v
from ._dualpipe import dualpipe, dualpipe_row, dualpipe_v
from ._weave import phases, split_backwards
from .registry import ALL, Builder, build, find, register

__all__ = [name for name in globals() if not name.startswith("_") and name != "registry"]
