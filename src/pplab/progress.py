"""A line that says how far long work has come, to whoever looks on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AFTER_S = 0.5  # work that ends earlier needs no line
EVERY_S = 0.2  # the line changes no more often
Show = Callable[[str, float], None]  # a text in place of the last one, and the seconds so far


def place() -> Show | None:
    """Where somebody looks, if anybody does. lab, which knows terminals and notebooks, puts its own
    function here.
    """


@contextmanager
def line() -> Iterator[Callable[[str], None]]:
    """Give a function that shows a text in place of the one before. When the block ends, the line
    is removed.

    >>> with line() as tell:
    ...     for step in range(3):
    ...         tell(f"step {step + 1} of 3")
    """
    show, began = place(), time.monotonic()
    shown = began + AFTER_S - EVERY_S  # when it changed last

    def tell(text: str) -> None:
        nonlocal shown
        if show and (now := time.monotonic()) - shown >= EVERY_S:
            shown = now
            show(text, now - began)

    try:
        yield tell
    finally:
        if show and shown > began + AFTER_S - EVERY_S:
            show("", 0)
