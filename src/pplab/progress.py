"""A line that says how far long work has come, to whoever looks on: on a terminal, in a notebook or
in the book's page. Elsewhere nothing is written.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

AFTER_S = 0.5  # work that ends earlier needs no line
EVERY_S = 0.2  # the line changes no more often
Show = Callable[[str, float], None]  # a text in place of the last one, and the seconds so far


@contextmanager
def line() -> Iterator[Callable[[str], None]]:
    """Give a function that shows a text in place of the one before. When the block ends, the line
    is removed.

    >>> with line() as tell:
    ...     for step in range(3):
    ...         tell(f"step {step + 1} of 3")
    """
    show, began = _place(), time.monotonic()
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


def _place() -> Show | None:
    """Where somebody looks, if anybody does."""
    if sys.stderr is None:  # a shell has closed it
        return None
    if show := getattr(sys.stderr, "progress", None):  # the page's
        return show
    if sys.stderr.isatty():
        return _on_terminal if os.environ.get("TERM") != "dumb" else None
    return _in_notebook() if "IPython" in sys.modules and _somebody_runs_this_cell() else None


def _on_terminal(text: str, seconds: float) -> None:
    """Write over the line that the cursor is in. An empty text clears it."""
    text = f"{text}, {seconds:.1f} s" if text else ""
    with suppress(OSError, ValueError):  # the terminal has gone, and the work goes on
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        sys.stderr.write(f"\r{text[: columns - 1]}\x1b[K")
        sys.stderr.flush()


def _somebody_runs_this_cell() -> bool:
    """Whether a front end does, where somebody can answer questions, and no program."""
    from IPython import get_ipython

    kernel: Any = getattr(get_ipython(), "kernel", None)
    request = kernel.get_parent() if hasattr(kernel, "get_parent") else {}
    return request.get("content", {}).get("allow_stdin", False)


def _in_notebook() -> Show:
    from IPython.display import display

    handle = None

    def show(text: str, seconds: float) -> None:
        nonlocal handle
        data = {"text/plain": f"{text}, {seconds:.1f} s"} if text else {}
        if handle:
            handle.update(data, raw=True)
        else:
            handle = display(data, raw=True, display_id=True)

    return show
