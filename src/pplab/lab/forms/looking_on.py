"""Where somebody looks on while long work goes on: a terminal, a notebook, or the book's page."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from ...progress import Show


def onlooker() -> Show | None:
    """How to show a line there, or None where nobody looks: then nothing is written."""
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
