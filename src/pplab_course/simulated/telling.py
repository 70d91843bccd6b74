"""The results of a simulated run: the course's own record of it, why it hangs in words, and what
was suspicious.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .. import microbatches, observed
from . import tensors
from .messages import distributed, in_line
from .modules import stand_in
from .replay import Message, Rank, Replay


@dataclass(frozen=True)
class Hang:
    """Why a run hangs."""

    causes: tuple[str, ...]  # the likeliest first; none where nothing is known
    waits: tuple[str, ...]  # what each of these ranks waits for
    ranks: tuple[int, ...]
    is_circle: bool  # each waits for the next one, and the last for the first

    def __str__(self) -> str:
        what = "Deadlock, in a circle" if self.is_circle else "It hangs"
        return "".join(f"{cause}. " for cause in self.causes) + f"{what}: {'; '.join(self.waits)}"


def record(replay: Replay) -> observed.Ran:
    """The run as if processes had made it; the checkers judge it by this."""
    tensors.computes(tensors.Computing())
    failed = any(rank.state == "failed" for rank in replay.ranks)
    reports = tuple(_report(replay, rank, failed) for rank in replay.ranks)
    return observed.Ran(replay.file, _count(replay), math.inf, reports, str(hang(replay) or ""))


def _count(replay: Replay) -> int:
    return int(replay.settings.get("M", 1))


def _report(replay: Replay, rank: Rank, failed: bool) -> observed.Report:
    has_ended, torch, gradients, seen = (
        rank.state == "ended",
        stand_in(distributed(replay)),
        None,
        None,
    )
    lacks = tuple(name for name in observed.NAMES if name not in rank.names) if has_ended else ()
    if has_ended and not lacks:
        gradients = observed.compare(torch, *(rank.names[name] for name in observed.NAMES))
        seen = microbatches.seen(torch, rank.names, _count(replay), gradients.error)
    frames = [(name, number, replay.line(number)) for name, number in reversed(rank.stood)]
    return observed.Report(
        actions=tuple(rank.actions),
        gradients=gradients,
        microbatches=seen,
        lacks=lacks,
        shared=tuple(rank.shared),
        error=observed.said_of(rank.error) if rank.error else "",
        failed_at=rank.clock,
        place=observed.place(frames) if frames else "",
        ended=rank.state != "waits",
        stuck=rank.state == "waits" and not failed,
        exitcode={"ended": 0, "failed": 1}.get(rank.state),
        printed=rank.printed.getvalue(),
    )


@lru_cache(4)  # it may run the file once more
def hang(replay: Replay) -> Hang | None:
    """Why the run hangs, or None if it ends or fails."""
    stuck = {rank.number: _needs(rank, replay) for rank in replay.ranks if rank.state == "waits"}
    if not stuck or any(rank.state == "failed" for rank in replay.ranks):
        return None
    path = [min(stuck)]
    while (following := next((n for n in stuck[path[-1]] if n in stuck), None)) not in (
        None,
        *path,
    ):
        path.append(following)
    is_circle = following is not None
    ranks = path[path.index(following) :] if is_circle else path
    waits = tuple(_waiting(replay.ranks[number], replay) for number in ranks)
    return Hang(tuple(_causes(replay, ranks, is_circle)), waits, tuple(ranks), is_circle)


def _needs(rank: Rank, replay: Replay) -> list[int]:
    """The ranks that a rank waits for."""
    if rank.waits.message:
        return [rank.waits.message.peer]
    return [other.number for other in replay.ranks if other.number not in rank.waits.came]


def _waiting(rank: Rank, replay: Replay) -> str:
    """What a rank waits for, with the lines."""
    message, places = (
        rank.waits.message,
        [f"line {line}" for name, line in rank.stood if name != "<module>"],
    )
    lines = ", called in ".join(places[:2] or [f"line {rank.stood[0][1]}"])
    if message is None:
        others = " and ".join(map(str, _needs(rank, replay)))
        return f"rank {rank.number} waits at the {rank.waits.what} for rank {others} ({lines})"
    nth = _posted(replay, message.rank, message.kind, message.peer).index(message) + 1
    until = (
        f"until rank {message.peer} receives its"
        if message.kind == "send"
        else f"for rank {message.peer} to send"
    )
    return f"rank {rank.number} waits {until} message {nth} ({lines})"


def _posted(replay: Replay, rank: int, kind: str, peer: int) -> list[Message]:
    return [
        each for each in replay.messages if (each.rank, each.kind, each.peer) == (rank, kind, peer)
    ]


def _causes(replay: Replay, ranks: list[int], is_circle: bool) -> Iterator[str]:
    for rank in replay.ranks:
        for left in (operation for operation in rank.operations if not operation.has_begun):
            yield (
                f"Rank {rank.number} prepares a {left.kind} in line {left.stack[0][1]} and never "
                "starts it: no batch_isend_irecv comes after it"
            )
    waits = [replay.ranks[number].waits.message for number in ranks]
    kinds = {message.kind if message else "barrier" for message in waits}
    if is_circle and kinds == {"send"}:
        yield (
            "Every rank in the circle sends, and none of them receives: let one of them receive "
            "first, or start a send and a receive together with batch_isend_irecv"
        )
    if is_circle and kinds == {"receive"}:
        yield (
            "Every rank in the circle receives first, and would send only afterwards"
            f"{_earlier(replay, ranks)}"
        )
    for message in filter(None, waits):
        yield from _of_peer(replay, message)
    if "send" in kinds and replay.sends_wait:
        if all(rank.state == "ended" for rank in replay.without_waits.ranks):
            yield "Where sends don't wait for their receive, the same file comes to its end"


def _earlier(replay: Replay, circle: list[int]) -> str:
    """What could come before a receive, so that a circle of receives opens. It is "" where that
    isn't known.
    """
    for rank in circle:
        for kind, what, peer in (("F", "an output", rank + 1), ("B", "a gradient", rank - 1)):
            if peer in circle and len(_posted(replay, rank, "send", peer)) < _ran(
                replay, rank, kind
            ):
                return (
                    f". Rank {rank} has {what} for rank {peer} that it hasn't sent yet: let it "
                    "send first"
                )
    if len(circle) != 2:
        return ""
    upper, lower = sorted(circle)
    runs = f"let rank {upper} run one more forward before it waits for a gradient"
    other = f", or rank {lower} a backward before it waits for one more input"
    can = _ran(replay, lower, "F") > _ran(replay, lower, "B")
    return f". What they have run, they have sent: {runs}{other * can}"


def _ran(replay: Replay, rank: int, kind: str) -> int:
    return sum(action[0] == kind for action in replay.ranks[rank].actions)


def _of_peer(replay: Replay, message: Message) -> Iterator[str]:
    """Why the other side of this message doesn't come."""
    rank, peer, is_send = message.rank, replay.ranks[message.peer], message.kind == "send"
    if peer.state == "ended":
        yield f"Rank {peer.number} has ended, and rank {rank} still waits for it"
    elif peer.waits and peer.waits.message is None:
        kind, did = ("receive", "received") if is_send else ("send", "sent")
        met = _posted(replay, peer.number, kind, rank)
        yield (
            f"Rank {peer.number} is at the {peer.waits.what} already: rank {rank} waits for one "
            "message more than the "
            f"{len(met)} that rank {peer.number} has {did}"
        )


def hints(replay: Replay) -> list[str]:
    """What was suspicious, in the order in which it happened."""
    found = []
    for rank in replay.ranks:
        for words, (clock, stack) in rank.notes.items():
            line = f", line {stack[0][1]}" if stack else ""
            found.append((clock, rank.number, f"rank {rank.number}{line}: {words}"))
    for send in (
        message for message in replay.messages if message.kind == "send" and message.match
    ):
        if send.shape != send.match.shape:
            shapes = f"a message of shape {list(send.shape)} (rank {send.rank}{in_line(send)})"
            asked = f"one of shape {list(send.match.shape)} (rank {send.peer}{in_line(send.match)})"
            found.append((send.posted, send.rank, f"{shapes} meets a receive for {asked}"))
            break
    return [words for *_, words in sorted(found)][:4]
