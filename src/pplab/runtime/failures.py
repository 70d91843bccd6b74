"""What is said when something goes wrong in a rank, or nothing moves: opened when it does."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from ..actions import F, parts
from ..text import parse
from .comm import LostPeer

if TYPE_CHECKING:
    from .processes import Ranks
    from .rank import Board

BLAME_S = (
    2.0  # after a rank lost its peer, how long to wait for the news of what happened to that peer
)
STOPPED_S = 2.0  # a rank that the system says is stopped is given up after this
ALL_WAIT_S = 10.0  # ranks that all wait for each other are given up after this
GONE = object()  # in place of the answer of a rank that has ended
UNGUARDED = 86  # what a rank exits with when the import of the pool's script starts another pool


class RankError(RuntimeError):
    """Something went wrong in a rank. All ranks are gone when this is raised; the pool starts new
    ones when used again.

    `rank`, `action` (where in the schedule, or None), `cause` and `remote_traceback` (text) say
    what.
    """

    def __init__(self, rank: int | None, action: object, cause: str, remote_traceback: str = ""):
        self.rank, self.action, self.cause, self.remote_traceback = (
            rank,
            action,
            cause,
            remote_traceback,
        )
        super().__init__(
            f"{cause}\n\nIn rank {rank}:\n{remote_traceback}" if remote_traceback else cause
        )


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
        lost = isinstance(error, (LostPeer, dist.DistError)) or "gloo/" in str(
            error
        )  # gloo names its file
        phase = board.place(rank)[0]
        said = f"{type(error).__name__}: {error}{remedy(str(error), whereabouts(phase)[0])}"
        return cls(rank, said, "".join(traceback.format_exception(error)), lost, phase)


def error_of(ranks: Ranks, failures: Sequence[Failure], dead: set[int]) -> RankError:
    """One error for all that went wrong: the first cause, not its consequences."""
    for failure in sorted(failures, key=lambda failure: failure.secondary):
        if failure.secondary and dead:
            continue
        action, words = whereabouts(failure.phase)
        cause = f"rank {failure.rank} failed {words}: {failure.error}"
        return RankError(
            failure.rank, action, cause, failure.traceback + _printed(ranks, failure.rank)
        )
    rank = min(
        dead, key=lambda rank: (ranks.board.place(rank)[1], rank)
    )  # one that waited may have ended for that
    process = ranks.processes[rank]
    process.join(1.0)
    code, (action, words) = process.exitcode, whereabouts(ranks.board.place(rank)[0])
    how, remark = f"exited with {code}", ""
    if code == UNGUARDED:
        remark = ': the ranks import your script, which starts a pool: do that under `if __name__ == "__main__":`'
    elif code is None:
        how = "closed its pipe"
    elif code < 0:
        how = f"was killed ({signal.Signals(-code).name})"
        if code == -signal.SIGKILL and oom_kills() > ranks.oom_kills:
            remark = ": the system had run out of memory: take smaller microbatches, fewer ranks, or recompute"
    elif state(process.pid) not in "ZX":
        return RankError(
            None, None, "the fork server, which starts the ranks, was killed: all ranks were ended"
        )
    elif not ranks.board.counts()[rank]:
        remark = ": it imports your script first, and printed why it couldn't"
    cause = f"rank {rank} {how} {words}{remark}: all ranks were ended"
    return RankError(rank, action, cause, _printed(ranks, rank).strip())


def remedy(error: str, action: object = None) -> str:
    """What to do about an error of the system's, or of Python's at an action, that a user can do
    something about.
    """
    if action and (
        found := re.search(
            r"forward\(\) (?:missing .*: (.*)|got an unexpected keyword argument)", error
        )
    ):
        stage = max(
            parts(action), key=lambda half: half.kind is F
        ).stage  # of an overlap, the forward
        gets = f": stage {stage} gets what the one before returns (the first: the inputs), and Batch.context by name"
        return (
            f"{gets}: {f'put {found[1]} there' if found[1] else 'let its forward take **context'}"
        )
    if "Too many open files" in error:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f": {limit} are allowed, and a pool of P ranks needs about 25 + 6 P: allow more (ulimit -n 1024)"
    if "AF_UNIX path too long" in error:
        return ": set TMPDIR to a shorter path"
    if "No space left on device" in error:
        return ': make /dev/shm larger (docker run --shm-size), empty it, or take transport="gloo"'
    return ""


def different_batches(
    digests: Sequence[int], step: int, alike: bool, several_hosts: bool
) -> ValueError:
    """Ranks have batches with these digests; `alike`: a rank that makes its own again has the
    same.
    """
    sets = [
        [rank for rank, other in enumerate(digests) if other == each]
        for each in dict.fromkeys(digests)
    ]
    why = "each rank shuffles or draws for itself" if alike else "it is another one each time"
    sides = " and ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for ranks in sets
    )
    remedy = "`batch(step)` must depend on the step alone: seed what draws with the step, on all ranks alike"
    if several_hosts:
        remedy += "; all bits count, and other CPUs may round floats differently: compute inputs once, and load them"
    return ValueError(f"{sides} have different batches for step {step}: {why}; {remedy}")


def oom_kills() -> int:
    """How many processes the system has killed for want of memory since it started, as far as it
    says.
    """
    try:
        return int(re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)[1])
    except (OSError, TypeError):
        return 0


def state(pid: int) -> str:
    """The system's letter for a process: T when it is stopped, Z and X when it has ended; Z where
    there is none.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "Z"


def _printed(ranks: Ranks, rank: int) -> str:
    """The end of what a rank printed, where errors outside Python end up."""
    descriptor = ranks.logs[rank].fileno()
    text = (
        os.pread(descriptor, 2000, max(0, os.fstat(descriptor).st_size - 2000))
        .decode(errors="replace")
        .strip()
    )
    return f"\nIt printed:\n{text}" if text else ""


class Stillness:
    """Looks what is wrong, from when a rank has failed or nothing moves."""

    def __init__(self, ranks: Ranks, timeout_s: float):
        self.ranks, self.timeout_s = ranks, timeout_s
        self._stopped_since: dict[int, float] = {}
        self._failed: tuple[float, list[int]] | None = (
            None  # since when ranks have failed, and where the others were
        )

    def look(self, answers: Mapping[int, object], still_s: float) -> None:
        """Raise RankError once it is known what failed, that no rank that is left will answer, or
        it took too long.
        """
        now, board = time.monotonic(), self.ranks.board
        if self.ranks.closed:
            raise RankError(None, None, "the pool was closed while it ran")
        pending = [rank for rank in range(len(self.ranks.mails)) if rank not in answers]
        failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
        dead = {rank for rank, answer in answers.items() if answer is GONE}
        if dead or not pending or any(not failure.secondary for failure in failures):
            raise error_of(self.ranks, failures, dead)
        waits = {rank: board.place(rank)[1] for rank in pending}
        for rank in pending:
            if state(self.ranks.processes[rank].pid) != "T":
                self._stopped_since.pop(rank, None)
            elif (
                now - self._stopped_since.setdefault(rank, now) > STOPPED_S
                or still_s > self.timeout_s
            ):
                action, words = whereabouts(board.place(rank)[0])
                raise RankError(
                    rank, action, f"rank {rank} was stopped (SIGSTOP) {words}: all ranks were ended"
                )
        if failures:
            since, counts = self._failed = self._failed or (now, board.counts())
            if now - since <= BLAME_S:
                return
            if all(waits[rank] or board.counts()[rank] != counts[rank] for rank in pending):
                raise error_of(
                    self.ranks, failures, dead
                )  # else somebody let the others wait, and still does
        elif still_s <= (
            min(ALL_WAIT_S, self.timeout_s) if all(waits.values()) else self.timeout_s
        ):
            return
        phases = {rank: board.place(rank)[0] for rank in pending}
        stuck = sorted(
            pending, key=lambda r: (waits[r], phases[r] != "idle", not whereabouts(phases[r])[0])
        )
        what = [f"rank {rank} {whereabouts(phases[rank], now=True)[1]}" for rank in stuck]
        what += [
            f"rank {failure.rank} failed {whereabouts(failure.phase)[1]}: {failure.error}"
            for failure in failures
        ]
        cause = (
            f"no rank made progress for {still_s:.0f} s: {'; '.join(what)}: all ranks were ended"
        )
        raise RankError(stuck[0], whereabouts(phases[stuck[0]])[0], cause)


def whereabouts(phase: str, now: bool = False) -> tuple[object, str]:
    """The action in a phase such as "at 1F2" or "waits at 0B0 for 0RECV_B0", None if there is none,
    and the words.
    """
    words = (
        phase
        if phase.startswith(("at ", "in ", "waits "))
        else f"while {phase}"
        if phase
        else "before it started"
    )
    found = re.match(r"(waits )?at (\S*\d\S*)", words)
    return found and parse(found[2]), words if now else words.replace(
        "waits ", "while it waited ", 1
    )
