"""Pictures of ideas, drawn from the numbers that they show, for the places where a chapter explains
an idea before a Gantt chart shows its times.

Each takes its sizes, ranks and gigabytes as arguments and returns the Axes, whose label describes
the picture in a sentence. They are so narrow, and their letters so large, that a phone shows them
whole.
"""

from ._experts import experts
from ._floor import floor_receipt
from ._fold import fold
from ._graph import handshake
from ._knobs import knobs
from ._lives import lives
from ._memory import more_microbatches, what_is_held
from ._model import crossing, cut_model
from ._pair import pair, streams
from ._resident import resident
from ._slices import sliced_attention
from ._tickets import tickets

__all__ = [
    "crossing",
    "cut_model",
    "experts",
    "floor_receipt",
    "fold",
    "handshake",
    "knobs",
    "lives",
    "more_microbatches",
    "pair",
    "resident",
    "sliced_attention",
    "streams",
    "tickets",
    "what_is_held",
]
