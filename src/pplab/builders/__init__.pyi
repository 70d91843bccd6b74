# The names that the package gives, each with its home: it opens when it is asked for.

from ._gpipe import gpipe as gpipe
from ._interleaved import in_groups as in_groups
from ._interleaved import interleaved as interleaved
from ._interleaved import looped_rows as looped_rows
from ._interleaved import stages_of_loop as stages_of_loop
from ._naive import naive as naive
from ._one_f_one_b import capped_row as capped_row
from ._one_f_one_b import one_f_one_b as one_f_one_b
from ._weave import phases as phases
from ._weave import split_backwards as split_backwards
from ._zero_bubble import zb_h1 as zb_h1
from ._zero_bubble import zb_h2 as zb_h2
from .registry import Builder as Builder
from .registry import build as build
from .registry import find as find
from .registry import known as known
from .registry import register as register
