"""Packages that pplab needs only in places, and the extra that installs each. It also knows what no
extra can install, which is Linux.
"""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

_RUN = "torch transformers tokenizers huggingface_hub datasets pyarrow safetensors".split()
EXTRA_OF = {"matplotlib": "plot", "numpy": "plot", "ortools": "prove", **dict.fromkeys(_RUN, "run")}


def bring(name: str) -> ModuleType:
    """Import a module. If it needs a package that an extra installs, the error names that extra."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        if name == "fcntl":  # which Windows lacks
            raise ModuleNotFoundError(needs_linux(), name=name) from None
        if name not in EXTRA_OF:
            raise
        raise ModuleNotFoundError(
            f"{name} is missing: pip install 'pplab[{EXTRA_OF[name]}]'", name=name
        ) from None


def needs_linux() -> str:
    """The text of the error for a system on which ranks can't run."""
    return (
        f"ranks run on Linux only, and this is {sys.platform}: open the repository in its dev "
        "container, or on Windows in WSL2. Schedules, simulation and charts work here, too"
    )


def lazily(package: str, file: str) -> tuple[list[str], Callable, Callable]:
    """The `__all__`, `__getattr__` and `__dir__` of a package that opens a module only when one of
    its names is asked for. The names are those that the `.pyi` next to its `file` imports.
    """
    stub = Path(file).with_suffix(".pyi").read_text("utf-8")
    found = re.findall(r"^from \.(\w*) import (\w+) as", stub, re.M)
    home_of = {name: home for home, name in found}

    def find(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = bring(f"{package}.{home_of[name] or name}")
        return getattr(module, name) if home_of[name] else module

    return list(home_of), find, lambda: sorted(home_of)
