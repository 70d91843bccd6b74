"""Pieces from which the rows of many schedules are made."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat

from ..actions import Action, B, I, Kind, W


def actions_of(stage: int, kind: Kind, microbatches: Iterable[int]) -> list[Action]:
    """The actions of one stage and kind on several microbatches. They are made without a Python
    call each, because builders make millions.

    >>> actions_of(1, B, range(3))
    [1B0, 1B1, 1B2]
    """
    values = zip(repeat(stage), repeat(kind), microbatches, strict=False)
    return list(map(tuple.__new__, repeat(Action), values))


def phases(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards left over."""
    steady = [a for pair in zip(forwards[warmup:], backwards, strict=False) for a in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def split_backwards(row: Sequence[Action], delay: int) -> list[Action]:
    """Replace each B by its I, and run its W after `delay` further I's have run. The W's that are
    left over come last, oldest first.
    """
    made: list[Action] = []
    waiting: deque[Action] = deque()
    for action in row:
        if action.kind is not B:
            made.append(action)
            continue
        stage, _, microbatch = action
        made.append(Action(stage, I, microbatch))
        waiting.append(Action(stage, W, microbatch))
        if len(waiting) > delay:
            made.append(waiting.popleft())
    return made + list(waiting)
