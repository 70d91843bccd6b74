# The names that the package gives, each with its home: it opens when it is asked for.

from .block import Block as Block
from .controllable import v_block as v_block
from .controllable import v_blocks as v_blocks
from .controllable import v_half as v_half
from .controllable import v_half_block as v_half_block
from .controllable import v_min as v_min
from .controllable import v_min_block as v_min_block
from .controllable import zb_v_block as zb_v_block
from .greedy import depth_first as depth_first
from .replicas import replicate as replicate
from .sliced_case import best_slices as best_slices
from .sliced_case import sliced_row as sliced_row
from .sliced_chart import sliced_gantt as sliced_gantt
from .sliced_schedules import check_slices as check_slices
from .sliced_schedules import last_first as last_first
from .slices import Slices as Slices
