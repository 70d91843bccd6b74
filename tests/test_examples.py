"""The examples in the package's docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
NEED_TORCH = ("models", "runtime", "lab")


def examples() -> list:
    """Every module with an example, by its name."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if ">>> " in path.read_text():
            place = path.relative_to(SOURCE).with_suffix("").parts
            found.append(pytest.param(".".join(place), marks=[pytest.mark.slow] * (place[1] in NEED_TORCH)))
    return found


@pytest.mark.parametrize("module", examples())
def test_examples(module):
    done = doctest.testmod(importlib.import_module(module))
    assert done.attempted and not done.failed
