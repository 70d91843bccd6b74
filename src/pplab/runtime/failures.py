"""What is said when something goes wrong in a rank, or nothing moves: opened when it does."""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..text import parse
from .comm import LostPeer

if TYPE_CHECKING:
    from .processes import Ranks
    from .rank import Board

STOPPED_S = 2.0  # a rank that the system says is stopped is given up after this
ALL_WAIT_S = 10.0  # ranks that all wait for each other are given up after this


class RankError(RuntimeError):
    """Something went wrong in a rank. All ranks are gone when this is raised; the pool starts new ones when used again.

    `rank`, `action` (where in the schedule, or None), `cause` and `remote_traceback` (text) say what.
    """

    def __init__(self, rank: int | None, action: object, cause: str, remote_traceback: str = ""):
        self.rank, self.action, self.cause, self.remote_traceback = rank, action, cause, remote_traceback
        super().__init__(f"{cause}\n\nIn rank {rank}:\n{remote_traceback}" if remote_traceback else cause)


@dataclass(frozen=True)
class Failure:
    """An exception in a rank, as text."""

    rank: int
    error: str
    traceback: str
    secondary: bool  # the rank failed because another one did
    phase: str  # what it was doing

    @classmethod
    def of(cls, error: Exception, rank: int, board: Board) -> Failure:
        """The failure of a rank, in that rank."""
        text = "".join(traceback.format_exception(error))
        return cls(rank, f"{type(error).__name__}: {error}", text, isinstance(error, LostPeer), board.place(rank)[0])


def error_of(ranks: Ranks, failures: Sequence[Failure], dead: set[int]) -> RankError:
    """One error for all that went wrong: the first cause, not its consequences."""
    for failure in sorted(failures, key=lambda failure: failure.secondary):
        if failure.secondary and dead:
            continue
        action, words = whereabouts(failure.phase)
        cause = f"rank {failure.rank} failed {words}: {failure.error}"
        return RankError(failure.rank, action, cause, failure.traceback + _printed(ranks, failure.rank))
    rank = min(dead)
    ranks.processes[rank].join(1.0)
    code = ranks.processes[rank].exitcode
    how = f"was killed ({signal.Signals(-code).name})" if code is not None and code < 0 else f"exited with {code}"
    action, words = whereabouts(ranks.board.place(rank)[0])
    return RankError(rank, action, f"rank {rank} {how} {words}: all ranks were ended", _printed(ranks, rank).strip())


def _printed(ranks: Ranks, rank: int) -> str:
    """The end of what a rank printed, where errors outside Python end up."""
    descriptor = ranks.logs[rank].fileno()
    size = os.fstat(descriptor).st_size
    text = os.pread(descriptor, 2000, max(0, size - 2000)).decode(errors="replace").strip()
    return f"\nIt printed:\n{text}" if text else ""


class Stillness:
    """Looks why nothing moves, as long as nothing does."""

    def __init__(self, ranks: Ranks, timeout_s: float):
        self.ranks, self.timeout_s = ranks, timeout_s
        self._stopped_since: dict[int, float] = {}

    def look(self, pending: Sequence[int], still_s: float) -> None:
        """Raise RankError once it is known that none of the ranks that haven't answered will, or it took too long."""
        places = {rank: self.ranks.board.place(rank) for rank in pending}
        for rank, (phase, _) in places.items():
            if self._stopped_s(rank) > STOPPED_S:
                action, words = whereabouts(phase)
                raise RankError(rank, action, f"rank {rank} was stopped (SIGSTOP) {words}: all ranks were ended")
        all_wait = all(waits for _, waits in places.values())
        if still_s > self.timeout_s or (all_wait and still_s > ALL_WAIT_S):
            found = {rank: whereabouts(phase) for rank, (phase, _) in places.items()}
            what = "; ".join(f"rank {rank} {words}" for rank, (_, words) in found.items())
            cause = f"no rank made progress for {still_s:.0f} s: {what}: all ranks were ended"
            raise RankError(min(found), found[min(found)][0], cause)

    def _stopped_s(self, rank: int) -> float:
        """Seconds for which the system has said that the process is stopped (0 where it can't say)."""
        try:
            stat = Path(f"/proc/{self.ranks.processes[rank].pid}/stat").read_text()
            state = stat.rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            state = ""
        if state != "T":
            self._stopped_since.pop(rank, None)
            return 0.0
        return time.monotonic() - self._stopped_since.setdefault(rank, time.monotonic())


def whereabouts(phase: str) -> tuple[object, str]:
    """The action in a phase such as "at 1F2" or "waits at 0B0 for 0RECV_B0", None if there is none, and the words."""
    words = phase if phase.startswith(("at ", "in ", "waits ")) else f"while {phase}"
    found = re.match(r"(waits )?at (\S*\d\S*)", words)
    return found and parse(found[2]), words
