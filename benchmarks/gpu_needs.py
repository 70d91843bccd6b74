"""Check what `make gpu` needs: a Python and a torch that it knows, and this tree's pplab. This file loads nothing, so
that it runs before everything else, and in words that an old Python understands."""

from __future__ import annotations

import os
import re
import sys
import time
from importlib import import_module, util
from pathlib import Path

STARTED = time.monotonic()  # of the command
ESSENTIAL = ("torch", "numpy")  # without one of these nothing runs
OLDEST = {"Python": (3, 11), "torch": (2, 10)}


def here(package: str) -> bool:
    """Whether a package can be imported. It is really imported only if it is essential."""
    try:
        return bool(import_module(package) if package in ESSENTIAL else util.find_spec(package))
    except ImportError:
        return False


def require() -> None:
    """Exit with a sentence where nothing can run, and make sure that this process and ranks import this tree's
    pplab."""
    refuse("Python", ".".join(map(str, sys.version_info[:2])))
    if missing := [package for package in ESSENTIAL if not here(package)]:
        raise SystemExit(f"make gpu runs nothing without {' and '.join(missing)}: {sys.executable} can't import it")
    refuse("torch", import_module("torch").__version__)
    source = str(Path(__file__).resolve().parents[1] / "src")
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    sys.path.insert(1, source)


def refuse(what: str, version: str) -> None:
    """Exit if a version is too old."""
    major, minor = map(int, re.match(r"(\d+)\.(\d+)", version).groups())
    if (major, minor) < OLDEST[what]:
        least = ".".join(map(str, OLDEST[what]))
        raise SystemExit(
            f"make gpu needs {what} {least} or later, and {sys.executable} has {version}: make gpu PY=another"
        )


def missing(parts: dict) -> dict[str, str]:
    """The parts that can't be run here, and why."""
    lacks = {name: [each for each in part.needs if not here(each)] for name, part in parts.items()}
    return {
        name: f"{' and '.join(found)} {'are' if len(found) > 1 else 'is'} not installed"
        for name, found in lacks.items()
        if found
    }


def show(parts: dict) -> str:
    """The missing parts, each on a line."""
    needed = dict.fromkeys(package for part in parts.values() for package in part.needs)
    lost = {each: f"not run: {', '.join(name for name in parts if each in parts[name].needs)}" for each in needed}
    return "\n".join(f"{name} is not installed: {why}" for name, why in lost.items() if not here(name))
