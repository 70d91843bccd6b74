"""Show the progress of long work at a terminal, in a notebook, or on the book's page."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

AFTER_S = 0.5  # work that ends earlier needs no line
EVERY_S = 0.2  # the line changes no more often
Show = Callable[[str, float], None]  # a text in place of the last one, and the seconds so far


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A context that gives a function which shows a text, each one over the one before. When the
    block ends, the line is removed.

    >>> with progress_line() as tell:
    ...     for step in range(3):
    ...         tell(f"step {step + 1} of 3")
    """
    show, began = onlooker(), time.monotonic()
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


@contextmanager
def progress_of_run(
    statuses: Callable[[], Sequence[Any]], first: int, steps: int
) -> Iterator[Callable[[], None]]:
    """A context that gives a function which shows how far the ranks are with so many steps after
    the `first`. It shows a step once all have done it, because only then their losses add up to the
    batch's.
    """
    with progress_line() as tell:

        def look() -> None:
            ranks = statuses()
            done, *others = {rank.steps for rank in ranks} or {0}
            if others:
                return
            what = f"rank 0: {ranks[0].doing if ranks else 'starting'}"
            if 0 < done < steps:
                what = f"loss {sum(rank.loss for rank in ranks):.4g}"
            tell(f"step {first + done} of {first + steps}, {what}")

        yield look


def onlooker() -> Show | None:
    """The function that shows a line, or None if nobody is there to look, so that nothing is
    written.
    """
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
    """Whether a front end runs this cell, where somebody can answer questions, and not a
    program.
    """
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
