"""The schedules, in the order in which they are listed. To add one, write a file and import it
here. Lab's schedules are in the registry's table.
"""

from ._naive import naive
from ._gpipe import gpipe
from ._one_f_one_b import capped_row, one_f_one_b
from ._interleaved import in_groups, interleaved, looped_rows, stages_of_loop
from ._zero_bubble import zb_h1, zb_h2
from ._weave import phases, split_backwards
from .registry import Builder, build, find, known, register

__all__ = [name for name in globals() if not name.startswith("_") and name != "registry"]
