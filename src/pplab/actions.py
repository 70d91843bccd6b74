"""What a rank can do: one action of one stage on one microbatch, or two at once.

The text form is PyTorch's: `0F3` is stage 0, forward, microbatch 3.
"""

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kind of an action. The letters are PyTorch's, but the zero-bubble papers write B for our
    I.
    """

    F = "F"  # forward
    B = "B"  # full backward: I and W at once
    I = "I"  # gradient of the stage's input  # noqa: E741
    W = "W"  # gradient of the stage's weights
    SEND_F = "SEND_F"  # this stage's output goes to the next stage
    RECV_F = "RECV_F"  # this stage's input comes from the previous stage
    SEND_B = "SEND_B"  # the gradient of this stage's input goes to the previous stage
    RECV_B = "RECV_B"  # the gradient of this stage's output comes from the next stage

    # Enum's own is a Python call, and tables over millions of actions are looked up by kind.
    __hash__ = str.__hash__


F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
SEND_F, RECV_F, SEND_B, RECV_B = Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B

COMPUTE = frozenset((F, B, I, W))
INPUT_GRADIENT = (B, I)  # the kinds that produce the gradient which the previous stage waits for


class Action(NamedTuple):
    """One stage works on one microbatch. `str()` is the text form, such as `0F3`."""

    stage: int
    kind: Kind
    microbatch: int

    def __repr__(self) -> str:  # str(), too
        return f"{self.stage}{self.kind.value}{self.microbatch}"


class Overlap(NamedTuple):
    """Two computations that run at the same time on one rank; neither waits for the other."""

    first: Action
    second: Action

    def __repr__(self) -> str:  # str(), too
        first, second = self
        return f"({first};{second})OVERLAP_{first.kind.value}_{second.kind.value}"


Item = Action | Overlap  # of a row


def parts(item: Item) -> tuple[Action, ...]:
    """The actions of an item of a row: itself, or the two halves of an overlap."""
    return (item,) if isinstance(item, Action) else (item.first, item.second)
