"""What the rows of many schedules are woven from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..actions import Action, B, I, W


def phases(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards left over."""
    steady = [a for pair in zip(forwards[warmup:], backwards, strict=False) for a in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def split_backwards(row: Sequence[Action], delay: int) -> list[Action]:
    """Every B as its I, its W put off until `delay` further I's have run; the W's left over last, oldest first."""
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
