"""Find out what went wrong in a rank, or why nothing moves, and put it into words. This file is
opened only then.
"""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..text import parse
from .comm import LostPeer
from .workload import EndOfBatches

if TYPE_CHECKING:
    from .context import Status
    from .processes import Ranks

BLAME_S = 2.0  # how long a rank that lost its peer waits for the news of what happened to that peer
STOPPED_S = 2.0  # a rank that the system says is stopped is given up after this
ALL_WAIT_S = 10.0  # ranks that all wait for each other are given up after this
NO_BATCH = -1  # in place of a batch's digest, which is never negative
GONE = object()  # in place of the answer of a rank that has ended
UNGUARDED = 86  # what a rank exits with when the import of the pool's script starts another pool
# What to do, by what an error says.
_REMEDIES = {
    r"forward\(\) (missing|got an unexpected keyword)": "a stage gets what the one before returns "
    "(the first: the inputs), and all of Batch.context by name: put there what is missing, or let "
    "its forward take **context",
    "a leaf Variable that requires grad is being used in an in-place operation": "a stage must not "
    "change what it is given: let its first module work out of place (inplace=False), or cut "
    "elsewhere",
    "element 0 of tensors does not require grad": "the loss depends on no weight that requires a "
    "gradient: train some of them, or leave check_gradients out",
    "Too many open files": "a pool of P ranks needs about 25 + 6 P: allow more (ulimit -n 1024)",
    "AF_UNIX path too long": "set TMPDIR to a shorter path",
    "No space left on device": "make /dev/shm larger (docker run --shm-size), empty it, or take "
    'transport="gloo"',
}


class RankError(RuntimeError):
    """An error in a rank, or the loss of one. All ranks are gone when it is raised, and the pool
    starts new ones when you use it again.

    `rank`, `action` (its place in the schedule, or None), `cause` and `remote_traceback` (text)
    describe it.
    """

    def __init__(self, rank: int | None, action: object, cause: str, remote_traceback: str = ""):
        self.rank, self.action, self.cause = rank, action, cause
        self.remote_traceback = remote_traceback
        there = f"\n\nIn rank {rank}:\n{remote_traceback}" if remote_traceback else ""
        super().__init__(cause + there)


@dataclass(frozen=True)
class Failure:
    """An exception in a rank, as text."""

    rank: int
    error: str
    traceback: str
    secondary: bool  # the rank failed because another one did
    phase: str  # what it was doing

    @classmethod
    def of(cls, error: Exception, rank: int, phase: str) -> Failure:
        """The failure of a rank, made in the process of that rank."""
        by_gloo = "gloo/" in str(error)  # it names its file
        lost = by_gloo or isinstance(error, (LostPeer, dist.DistError))
        said = f"{type(error).__name__}: {error}{remedy(str(error))}"
        return cls(rank, said, "".join(traceback.format_exception(error)), lost, phase)


def error_of(ranks: Ranks, failures: Sequence[Failure], dead: set[int]) -> RankError:
    """One error for everything that went wrong. It names the first cause, not its consequences."""
    for failure in sorted(failures, key=lambda failure: failure.secondary):
        if not (failure.secondary and dead):
            rank, (action, words) = failure.rank, whereabouts(failure.phase)
            cause = f"rank {rank} failed {words}: {failure.error}"
            return RankError(rank, action, cause, failure.traceback + _printed(ranks, rank))
    statuses = ranks.statuses
    rank = min(
        dead, key=lambda rank: statuses[rank].waits
    )  # one that waited may have ended for that
    process = ranks.processes[rank]
    process.join(1.0)
    code, (action, words) = process.exitcode, whereabouts(statuses[rank].doing)
    how, remark = f"exited with {code}", ""
    if code == UNGUARDED:
        guard = 'do that under `if __name__ == "__main__":`'
        remark = f": the ranks import your script, which starts a pool: {guard}"
    elif code is None:
        how = "closed its pipe"
    elif code < 0:
        how = f"was killed ({signal.Signals(-code).name})"
        if code == -signal.SIGKILL and oom_kills() > ranks.oom_kills:
            less = "take smaller microbatches, fewer ranks, or recompute"
            remark = f": the system had run out of memory: {less}"
    elif state(process.pid) not in "ZX":
        how = "the fork server, which starts the ranks, was killed: all ranks were ended"
        return RankError(None, None, how)
    elif not statuses[rank].changes:
        remark = ": it imports your script first, and printed why it couldn't"
    cause = f"rank {rank} {how} {words}{remark}: all ranks were ended"
    return RankError(rank, action, cause, _printed(ranks, rank).strip())


def remedy(error: str) -> str:
    """What you can do about an error of the system or of Python, with a colon before it, or "" if
    nothing is known.
    """
    found = [remedy for sign, remedy in _REMEDIES.items() if re.search(sign, error)]
    return f": {found[0]}" if found else ""


def different_batches(digests: Sequence[int], step: int, alike: bool) -> ValueError:
    """The error for ranks whose batches differ, by their digests. `alike` tells whether a rank that
    makes its batch a second time gets the same.
    """
    sides = [_ranks_with(each, digests) for each in dict.fromkeys(digests)]
    why = "each rank shuffles or draws for itself" if alike else "it is another one each time"
    return ValueError(
        f"{' and '.join(sides)} have different batches for step {step}: {why}; `batch(step)` must "
        "depend on the step alone: seed what draws with the step, on all ranks alike. (Ranks on "
        "several hosts, whose CPUs may round floats differently: compute inputs once, and load "
        "them.)"
    )


def too_few_batches(digests: Sequence[int], step: int) -> EndOfBatches:
    """The error for a step for which only some ranks have a batch."""
    return EndOfBatches(
        f"{_ranks_with(NO_BATCH, digests)} had no batch for step {step}, and the others had one: "
        "all ranks must be given the same batches"
    )


def _ranks_with(digest: int, digests: Sequence[int]) -> str:
    ranks = [str(rank) for rank, each in enumerate(digests) if each == digest]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


def oom_kills() -> int:
    """How many processes the system has killed since it started because memory ran out, as far as
    it tells.
    """
    try:
        return int(
            re.findall(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)[0]
        )
    except (OSError, IndexError):
        return 0


def state(pid: int) -> str:
    """The system's letter for a process: T when it is stopped, Z and X when it has ended or doesn't
    exist.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "Z"


def _printed(ranks: Ranks, rank: int, most: int = 2000) -> str:
    """The end of what a rank printed. Errors outside Python end up there."""
    log = ranks.logs[rank].fileno()
    end = os.pread(log, most, max(0, os.fstat(log).st_size - most))
    text = end.decode(errors="replace").strip()
    return f"\nIt printed:\n{text}" if text else ""


def _line(ranks: Ranks, rank: int) -> str:
    """The line of Python at which a rank stands, in a file of yours if it was called from one."""
    os.kill(ranks.processes[rank].pid, signal.SIGUSR2)
    time.sleep(0.1)
    main = _printed(ranks, rank, 2**16).rpartition("hread 0x")[2].partition(" in rank_main")[0]
    frames = re.findall(r'(File ".+", line \d+)', main)
    own = [each for each in frames if not re.search("/(torch|pplab/runtime)/", each)]
    return f" ({(own or frames)[0]})" if frames else ""


class Stillness:
    """Watches for the reason once a rank has failed or nothing moves."""

    def __init__(self, ranks: Ranks, timeout_s: float):
        self.ranks, self.timeout_s = ranks, timeout_s
        self._stopped_since: dict[int, float] = {}
        self._failed: tuple[float, list[int]] | None = None  # since when, and the counts of then

    def look(self, answers: Mapping[int, object], still_s: float) -> None:
        """Raise RankError once the cause of a failure is known, once no rank that is left will
        answer, or once it has taken too long.
        """
        if self.ranks.closed:
            raise RankError(None, None, "the pool was closed while it ran")
        now, statuses = time.monotonic(), self.ranks.statuses
        pending = {r: status for r, status in enumerate(statuses) if r not in answers}
        failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
        dead = {rank for rank, answer in answers.items() if answer is GONE}
        if dead or not pending or not all(failure.secondary for failure in failures):
            raise error_of(self.ranks, failures, dead)
        for rank, status in pending.items():
            if state(self.ranks.processes[rank].pid) != "T":
                self._stopped_since.pop(rank, None)
                continue
            stopped_s = now - self._stopped_since.setdefault(rank, now)
            if stopped_s > STOPPED_S or still_s > self.timeout_s:
                action, words = whereabouts(status.doing)
                cause = f"rank {rank} was stopped (SIGSTOP) {words}: all ranks were ended"
                raise RankError(rank, action, cause)
        if failures:
            counts = [status.changes for status in statuses]
            since, counts = self._failed = self._failed or (now, counts)
            if now - since <= BLAME_S:
                return
            if all(each.waits or each.changes != counts[r] for r, each in pending.items()):
                raise error_of(self.ranks, failures, dead)
            # else somebody let the others wait, and still does
        else:
            all_wait = all(status.waits for status in pending.values())
            if still_s <= min(ALL_WAIT_S if all_wait else self.timeout_s, self.timeout_s):
                return
        stuck = sorted(pending, key=lambda rank: _excuse(pending[rank]))
        stand = {r: whereabouts(pending[r].doing, now=True) for r in stuck}
        what = [
            f"rank {r} {stand[r][1]}{_line(self.ranks, r) if pending[r].changes else ''}"
            for r in stuck
        ]
        what += [f"rank {f.rank} failed {whereabouts(f.phase)[1]}: {f.error}" for f in failures]
        cause = (
            f"no rank made progress for {still_s:.0f} s: {'; '.join(what)}: all ranks were ended"
        )
        raise RankError(stuck[0], stand[stuck[0]][0], cause)


def _excuse(status: Status) -> tuple[bool, ...]:
    """How well a rank that doesn't move is excused. The rank with the worst excuse is named first:
    one that waits for nobody, among these one that is idle although its answer is due, then one at
    an action.
    """
    return status.waits, status.doing != "idle", not whereabouts(status.doing)[0]


def whereabouts(phase: str, now: bool = False) -> tuple[Any, str]:
    """The action in a phase such as "at 1F2" or "waits at 0B0 for 0RECV_B0" (None if it has none),
    and the phase in words.
    """
    words = phase
    if not phase.startswith(("at ", "after ", "in ", "waits ")):
        words = f"while {phase}" if phase else "before it started"
    found = re.match(r"(waits )?at (\S*\d\S*)", words)
    if not now:
        words = words.replace("waits ", "while it waited ", 1)
    return found and parse(found[2]), words
