"""Who looks on while ranks work: nobody, unless lab, which knows terminals and notebooks, puts its
own function here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def of_run(
    statuses: Callable[[], Sequence[Any]], first: int, steps: int
) -> AbstractContextManager[Callable[[], None]]:
    """Give a function that tells how far ranks are with so many steps after the `first`. It is
    called several times a second.
    """
    return nullcontext(lambda: None)
