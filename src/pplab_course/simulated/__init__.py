"""Run a reader's file on simulated ranks. This works without torch, for example in the book's page,
and explains why a file hangs.

Chapters 2 to 4 use it. `run` is for checkers, because what it returns looks as if processes had run
the file. The same file runs unchanged with torch. `tensors` and `modules` are a stand-in for the
parts of torch that such files use, and `messages` is one for torch.distributed. If a part is
missing, the error names it. `replay` runs the ranks, `telling` explains the result, and `player`
lets a reader step through it. All of it is pure Python, without threads.
"""

from __future__ import annotations

from pathlib import Path

from ..observed import Ran, located
from .player import debug
from .replay import Replay
from .telling import hang, record

__all__ = ["debug", "run", "why_it_hangs"]


def replayed(file: str | Path, ranks: int, **settings: object) -> Replay:
    """Run a file on so many simulated ranks, with settings such as M=8 in its environment."""
    path = located(file)
    return Replay(path.read_text(), ranks, name=path.name, **settings)


def run(file: str | Path, ranks: int, **settings: object) -> Ran:
    """`observed.run`, on simulated ranks."""
    return record(replayed(file, ranks, **settings))


def why_it_hangs(file: str | Path, ranks: int, **settings: object) -> str:
    """Why the file hangs, in words, or "" if it doesn't hang on simulated ranks."""
    return str(hang(replayed(file, ranks, **settings)) or "")
