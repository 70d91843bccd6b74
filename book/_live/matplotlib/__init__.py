"""The page's own matplotlib: what the course calls, drawn as SVG without numpy. Whatever it lacks, it says so.

Sizes, places and defaults are matplotlib's, so that a chart looks the same here and in a notebook.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from ._style import lacking

__version__ = "3.11, as far as the course uses it"


@contextmanager
def rc_context(settings: dict | None = None) -> Iterator[None]:
    """Settings of SVG have no effect: there is one way to draw."""
    if other := {name for name in settings or () if not name.startswith("svg.")}:
        raise lacking(f"rcParams {sorted(other)}")
    yield


def use(backend: str) -> None:
    """Every backend is SVG."""


def __getattr__(name: str) -> object:
    raise lacking(name)
