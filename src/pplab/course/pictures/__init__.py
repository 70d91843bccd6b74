"""Pictures of ideas, drawn from the numbers that they show: what chapters say before a Gantt chart says when.

Each takes its sizes, ranks and gigabytes as arguments and returns the Axes, whose label is the picture in a sentence.
They are so narrow, and their letters so large, that a phone shows them whole.
"""

from ._floor import floor_receipt
from ._graph import handshake
from ._knobs import knobs
from ._memory import more_slices, what_is_held
from ._model import crossing, cut_model
from ._tickets import tickets

__all__ = ["crossing", "cut_model", "floor_receipt", "handshake", "knobs", "more_slices", "tickets", "what_is_held"]
