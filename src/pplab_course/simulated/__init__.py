"""A reader's file on simulated ranks: it runs where no torch is, such as in the book's page, and
tells why it hangs.

For chapters 2 to 4. `run` is for checkers: what it returns looks as if processes had run the file.
The same file runs unchanged with torch: `tensors` and `modules` are a stand-in for the parts of
torch that such files use, and `messages` is one for torch.distributed. They tell by name what they
lack. `replay` runs the ranks, `telling` says what came of it, and `player` shows it to be stepped
through. All of it is pure Python, without threads.
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
    """Why the file hangs, in words; nothing where it doesn't hang on simulated ranks."""
    return str(hang(replayed(file, ranks, **settings)) or "")
