"""What `make gpu` imports, and what isn't run without it. It loads nothing, so it can speak before all else."""

from __future__ import annotations

import sys
import time
from importlib import import_module, util

STARTED = time.monotonic()  # of the command
ESSENTIAL = ("torch", "numpy")  # without one of these nothing runs
NEEDS = {  # the parts that aren't run without a package
    "pyarrow": ("runs", "paced", "versus", "profile"),
    "transformers": ("profile",),
    "pytest": ("tests",),
}
LESS = {"datasets": "the text is the sample that comes with pplab, which is what most parts use anyway"}


def here(package: str) -> bool:
    """Whether a package can be imported, which is tried only where it is essential."""
    try:
        return bool(import_module(package) if package in ESSENTIAL else util.find_spec(package))
    except ImportError:
        return False


def require() -> None:
    """SystemExit with a sentence where nothing can run."""
    if missing := [package for package in ESSENTIAL if not here(package)]:
        raise SystemExit(f"make gpu runs nothing without {' and '.join(missing)}: {sys.executable} can't import it")


def missing() -> dict[str, str]:
    """The parts that can't be run here, and why."""
    return {
        part: f"{package} is not installed" for package, parts in NEEDS.items() if not here(package) for part in parts
    }


def show() -> str:
    """What is missing, a line each; nothing where nothing is."""
    lost = {package: f"not run: {', '.join(parts)}" for package, parts in NEEDS.items()} | LESS
    return "\n".join(f"{package} is not installed: {why}" for package, why in lost.items() if not here(package))
