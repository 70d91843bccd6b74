"""Checkers of the chapter on messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from pathlib import Path

from pplab.builders import build
from pplab.costs import Costs
from pplab.lab import Case
from pplab.simulator import simulate

from .answers import told_bill
from .observed import located
from .spine import file_checker, judge, run_as, to_write, with_faults, written
from .verdict import (
    Verdict,
    Wrong,
    checker,
    checker_of_each,
    matched,
    number,
    one_or_several,
    right,
    told,
    values_of,
)

__all__ = [
    "causes",
    "early_file",
    "gigabits_needed",
    "least_tickets",
    "offer",
    "overwritten",
    "repaired",
]

OFFER = Case(gigabits=10, dollars_per_hour=1.8)
# Of all cuts into stages of 3 to 13 layers, with up to 12, 9, 7 and 4 tickets and the least
# recomputation that fits
BEST_KNOWN = {"cut": (8, 9, 9, 6), "in_flight": (7, 5, 3, 1), "recompute": (4, 2, 0, 0)}
NEAR = 1.0  # dollars above the best known
ONE_BUFFER = (  # for all that goes out in a direction
    (
        "\n\n\ndef send",
        "\nbuffers = {way: torch.empty_like(inputs) for way in ways}  # what goes out is "
        "here\n\n\ndef send",
    ),
    (
        "        sent.append(",
        "        tensor = buffers[to - rank][: len(tensor)].copy_(tensor)\n        sent.append(",
    ),
)
CLUSTERS = {"A": "rank 0", "B": "one short", "C": "network", "D": "rank 2"}
CAUSES = ("network", "one short", "rank 0", "rank 1", "rank 2", "rank 3")


def gigabits_needed(answer: object) -> Verdict:
    """Find the gigabits per second at which the network sets the beat, for 1F1B on the case, cut
    evenly, with 4, 3, 2, 1 tickets.
    """
    case = Case()
    bits, head_ms = 8 * case.message_mb, 3 * case.head_ms  # megabits; forward and backward
    traps = {
        bits / 8 / (head_ms / 2): "that is in gigabytes a second: a byte has eight bits",
        bits
        / (
            case.head_ms / 2
        ): "it may take longer: each of four beats has the head's forward and backward in it",
        head_ms
        / 2: "that is how many milliseconds a message may take: at how many gigabits per second "
        "does it?",
        bits
        / (
            2 * head_ms / 3
        ): "the head is missing in the round trip: every ticket passes rank 3, too",
        bits / head_ms: "a boundary is crossed twice, on the way down and on the way up",
    }
    why = (
        "a message may take half of the head's 64.5 ms; then a ticket is back just when rank 3 can "
        "use it"
    )
    return number(answer, bits / (head_ms / 2), why, traps=traps, tolerance=5e-3)


@one_or_several
@checker(
    "a number for each of four ranks, such as (4, 3, 2, 1)",
    lambda answer: isinstance(answer, Iterable),
)
def least_tickets(answer: object) -> Verdict:
    """Find the `in_flight` with the smallest sum whose beat is 3, for P=4 and a message that takes
    2.
    """
    with told("", TypeError, ValueError):
        caps = tuple(index(cap) for cap in values_of(answer))
        beat = _beat(caps)
    if beat > 3 + 1e-9:
        r, s, trip, goes = _slowest_loop(caps)
        loop = (
            f": in the loop from rank {r} to rank {s}, which takes {trip}, {goes} go round"
            if goes
            else ""
        )
        raise Wrong(f"{caps} has a beat of {beat:.2f}, and 3 is possible{loop}")
    if sum(caps) > 22:
        raise Wrong(f"{caps} has a beat of {beat:g} and holds {sum(caps)} in all; less is enough")
    return right(
        "a beat of 3: three tickets more than the next rank, where eager 1F1B has two more"
    )


def _slowest_loop(caps: tuple[int, ...]) -> tuple[int, int, int, int]:
    """The ranks of the slowest loop, what it takes, and how many go round, or 0 where a rank has
    fewer than the next.
    """
    if list(caps) != sorted(caps, reverse=True):
        return 0, 0, 0, 0
    every = [
        (r, s, 3 * (s - r + 1) + 4 * (s - r), caps[r] - caps[s] + 1)
        for r in range(4)
        for s in range(r, 4)
    ]
    return max(every, key=lambda loop: loop[2] / loop[3])


def _beat(caps: tuple[int, ...]) -> float:
    """The time that a microbatch adds to a long step."""
    ends = (
        simulate(
            build("1F1B", num_ranks=4, num_microbatches=M, in_flight=caps), Costs(latency=2)
        ).makespan
        for M in (120, 240)
    )
    first, second = ends
    return (second - first) / 120


def overwritten(to: str | Path = "my_buffer.py") -> str:
    """Write pipe_early.py with a fault, one buffer per direction for what is sent. An existing file
    stays.
    """
    says = f"{to} is pipe_early.py with a fault in it: open it next to this page"
    return written(to, with_faults("pipe_early.py", ONE_BUFFER), says)


@file_checker
def early_file(answer: object) -> Verdict:
    """Write 1F1B whose messages travel while ranks compute: a file that torchrun starts, with
    TICKETS, EARLY and LAG.
    """
    path = located(answer)
    if path.is_file() and not to_write(path):
        run_as(path, "eager-1F1B", 2, 4, pace_s=0)
        _check_asking(path)
        # who waits until a message has left stops his neighbour, too, if that one hasn't asked yet
        try:
            run_as(path, "1F1B", 2, 4, pace_s=0, EARLY=0)
        except Wrong as error:
            waits = (
                ". Does send wait until the message has left?"
                if "hasn't ended" in str(error)
                else ""
            )
            raise Wrong(f"with EARLY=0, {error}{waits}") from None
    try:
        return judge(answer, "eager-1F1B", ((3, 5), (4, 2)), (4, 12), lag=1.5)
    except Wrong as error:
        early = (
            "does `receive` sleep until the moment from which the message counts as there, `lag` "
            "after it came?"
        )
        raise Wrong(str(error).replace("put the lines with `pace` back", early)) from None


def _check_asking(path: Path) -> None:
    """Check that a rank that asks for the next message first and then waits has two on their way,
    so eight take as long as four.
    """
    M = 8
    for lag in (0.03, 0.1):  # what disturbs a busy machine weighs less then
        took = run_as(path, "GPipe", 2, M, pace_s=0, LAG=lag).timeline().makespan / 1e3 / lag
        if took < 1.5 * M:
            return
    raise Wrong(
        f"gradients and order are right, but {M} messages each way take {took:.0f} times as long "
        f"as one, and {M + 1} times is possible: does receive ask for the next message before it "
        "waits for this one?"
    )


@file_checker
def repaired(answer: object) -> Verdict:
    """Repair the file, so that it is right also where messages are asked for late and leave late.
    Checked like `early_file`.
    """
    path = located(answer)
    if path.is_file():
        try:
            run_as(path, "GPipe", 2, 6, pace_s=0.3, LAG=0.03, EARLY=0)
        except Wrong as error:
            asked = (
                ": what is in the buffer when its message leaves?" if "differ" in str(error) else ""
            )
            raise Wrong(f"with EARLY=0, {error}{asked}") from None
    return early_file(answer)


@checker_of_each("ABCD")
def causes(answer: dict) -> Verdict:
    """Find what slows each cluster down: the network, a forward that is short, or a rank that takes
    twice as long.
    """

    def clue(letter: str) -> str:
        took, would = times(CLUSTERS[letter]), times(answer[letter])
        says = (
            f"it takes {took[0]:g} with 1F1B and {took[1]:g} with GPipe; with "
            f"{_said(answer[letter])} it would take"
        )
        return f"{says} {would[0]:g} and {would[1]:g}"

    says = (
        "1F1B tells where the slow rank is, GPipe that there is one, and a slow network hurts 1F1B "
        "more"
    )
    return matched(answer, CLUSTERS, CAUSES, clue, says)


def times(cause: str) -> tuple[float, float]:
    """The times of eight microbatches on four ranks with 1F1B and with GPipe."""
    work = [2 if cause == f"rank {rank}" else 1 for rank in range(4)]
    caps = [3, 2, 1, 1] if cause == "one short" else [4, 3, 2, 1]
    costs = Costs(work, work, work, latency=0.5 if cause == "network" else 0)
    schedules = (
        build("1F1B", num_ranks=4, num_microbatches=8, in_flight=each) for each in (caps, [8] * 4)
    )
    one_f_one_b, gpipe = (simulate(schedule, costs).makespan for schedule in schedules)
    return one_f_one_b, gpipe


def _said(cause: str) -> str:
    named = {"network": "a network on which a message takes 0.5", "one short": "a forward short"}
    return named.get(cause, f"a slow {cause}")


@checker(
    "a dict with the keys cut, in_flight and recompute", lambda answer: isinstance(answer, Mapping)
)
def offer(answer: Mapping[str, object]) -> Verdict:
    """Give cut, tickets and layers to recompute with the smallest bill, on the offered machines
    with 16 sequences a step.
    """
    if set(answer) != set(BEST_KNOWN):
        raise Wrong(
            f"expected the keys {', '.join(BEST_KNOWN)}, got "
            f"{', '.join(map(str, answer)) or 'none'}"
        )
    chosen = {name: _four(name, answer[name]) for name in BEST_KNOWN}
    with told("", ValueError):
        row = OFFER.row("1F1B", num_microbatches=16, **chosen)
    return told_bill(row, OFFER.row("1F1B", num_microbatches=16, **BEST_KNOWN).dollars, NEAR)


def _four(name: str, value: object) -> tuple[int, ...]:
    """A whole number for each rank."""
    try:
        found = tuple(index(each) for each in value)
    except TypeError:
        found = ()
    if len(found) != 4 or any(isinstance(each, bool) for each in value):
        raise Wrong(f"{name}: expected four whole numbers, one per rank, got {value!r}")
    return found
