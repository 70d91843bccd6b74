"""Checkers of the chapter on layouts, with the machines and the tables of its exercises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pplab.builders import build
from pplab.costs import Link
from pplab.lab import Layout, Machine, Plan, Transformer, layouts, plan
from pplab.lab.planning import bubble_fraction, bubble_ratio
from pplab.schedule import Schedule
from pplab.simulator import simulate

from .answers import drawn, schedule_of, trained
from .verdict import (
    Verdict,
    Wrong,
    checker,
    checker_of_each,
    matched,
    numbers,
    one_or_several,
    right,
    told,
    wrong,
)

if TYPE_CHECKING:
    from torch import nn

MODEL = Transformer(num_layers=48, width=5120, sequence=4096)
BATCH = 128
# Four boxes of eight accelerators without NVLink: PCIe inside, one 100 Gb/s port per accelerator
# between.
MACHINE = Machine(8, Link(20e-6, 22e9), Link(30e-6, 11e9), flops=120e12, memory=48e9)


@one_or_several
def volumes(answer: object) -> Verdict:
    """Compute, for C=5120, L=2048, b=4, two bytes, 4 stages, M=16 and 13 billion parameters, three
    volumes.

    They are one message in MB, the gradients' bytes divided by a message's, and a step's messages
    over all boundaries in GB.
    """
    one = 4 * 2048 * 5120 * 2
    gradients = 2 * 13e9
    everything = 2 * 3 * 16 * one
    mixed = "a message is 80 MiB, which is 83.9 MB: powers of two and of ten are mixed"
    traps = (
        {
            one / 2**20: "that is in MiB; MB here is 10^6 bytes",
            one / 2e6: "that is how many millions of numbers: each has two bytes",
            one / 4e6: "that is one sample; a microbatch has four",
            one
            * 2
            / 1e6: "that is with four bytes a number, or both directions: one message has two "
            "bytes a number",
            float(one): "that is in bytes; the question asks for MB",
            one / 1e9: "that is in GB; the question asks for MB",
        },
        {
            gradients / 80e6: mixed,
            gradients / 2 / one: "each gradient has two bytes, too",
            gradients * 2 / one: "gradients have two bytes here, as the messages have",
            one / gradients: "the other way round: the gradients' bytes over the message's",
        },
        {
            96 * 80e6 / 1e9: mixed,
            everything / 2e9: "that is one direction: a gradient of the same size comes back",
            2 * 4 * 16 * one / 1e9: "4 stages have 3 boundaries",
            2 * 16 * one / 1e9: "that is one boundary; 4 stages have 3",
            2 * 3 * one / 1e9: "that is one microbatch of 16",
            everything / 2**30: "GB here is 10^9 bytes",
        },
    )
    why = (
        "4 x 2,048 x 5,120 x 2 bytes; 26 GB over that; 2 directions x 3 boundaries x 16 "
        "microbatches of it"
    )
    expected = (one / 1e6, gradients / one, everything / 1e9)
    return numbers(
        answer,
        expected,
        why,
        ("one message", "gradients over a message", "all boundaries"),
        traps=traps,
    )


@one_or_several
def launched(answer: object) -> Verdict:
    """Find dp, M, V and the bubble of 128 ranks, tp 4, pp 8, 64 layers in stages of 2, microbatches
    of 2, and a global batch of 256.
    """
    replicas, microbatches, stages = 4, 32, 4
    bubble = bubble_fraction(8, microbatches, stages)
    traps = (
        {
            16: "128 ranks over eight stages: each stage also has four tensor ranks",
            32: "that is 128 over tp alone",
        },
        {64: "that is in sequences: a microbatch has two", 128: "the replicas share the batch"},
        {
            8: "that is how many layers a rank has: a stage has two of them",
            2: "that is how many layers a stage has",
        },
        {
            bubble_fraction(
                8, microbatches
            ): "that is 1F1B's: with four stages on a rank the ramps are a quarter",
            bubble_ratio(
                8, microbatches, stages
            ): "that is a share of the work: the question is for one of all time",
        },
    )
    names = ("replicas", "microbatches", "stages per rank", "bubble")
    why = "128 / (4 x 8), 256 / (4 x 2), 64 / 8 / 2, and (P-1) / (VM + P-1)"
    return numbers(
        answer, (replicas, microbatches, stages, bubble), why, names, traps=traps, digits=2
    )


_VERDICTS = ("runs", "missing", "deadlock", "losses")

_TABLES = {
    "A": ("0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F1,1B0,1F2,1B1,1F3,1B2,1F4,1B3\n", "missing"),
    "B": ("0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0\n1F0,1F1,1F2,1F3,1B3,1B2,1B1,1B0\n", "runs"),
    "C": ("0F1,0F0,0B1,0F3,0B0,0F2,0B3,0B2\n1F1,1B1,1F0,1B0,1F3,1B3,1F2,1B2\n", "losses"),
    "D": ("0F0,0B0,0F1,0F2,0B1,0F3,0B2,0B3\n1F0,1F1,1B0,1B1,1F2,1F3,1B2,1B3\n", "deadlock"),
}
_CLUES = {
    "A": "count the forwards of rank 1: `pp.validate` names the one that isn't there, and the one "
    "too many",
    "B": "nothing waits for ever, every action is there, and rank 1's forwards are in order: "
    "backwards may be in any",
    "C": "in what order does the last stage run its forwards, and where does torch look for their "
    "losses?",
    "D": "what does rank 0 wait for at 0B0? and rank 1, before 1B0?",
}


def tables() -> dict[str, str]:
    """Four schedules of two ranks and four microbatches as CSV text."""
    return {name: text for name, (text, _) in _TABLES.items()}


@checker_of_each("ABCD")
def judge(answer: object) -> Verdict:
    """Find what becomes of each table under torch: "runs", "missing", "deadlock" or "losses"."""
    says = "A is torch's own listing; C is legal, and only torch's bookkeeping of losses objects"
    return matched(
        answer, {name: truth for name, (_, truth) in _TABLES.items()}, _VERDICTS, _CLUES.get, says
    )


@one_or_several
@checker()
def run_csv(answer: object) -> Verdict:
    """Write a CSV of 2 ranks and 4 microbatches that is shorter than 1F1B, holds no more, and that
    torch runs with right gradients.
    """
    schedule = schedule_of(
        answer, (2, 2, 4), "expected 2 ranks, a stage on each, and 4 microbatches"
    )
    takes, of_1f1b = (
        simulate(s).makespan for s in (schedule, build("1F1B", num_ranks=2, num_microbatches=4))
    )
    if takes >= of_1f1b:
        return wrong(
            f"it takes {takes} where F = I = W = 1, and 1F1B takes {of_1f1b}: split the backwards"
        )
    if schedule.peak_in_flight > (2, 1):
        return wrong(
            f"ranks hold {schedule.peak_in_flight} at most, under 1F1B (2, 1): a rank holds until W"
        )
    from torch import nn

    ran = by_torch(schedule, [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)])
    return right(f"{takes} instead of {of_1f1b}, by torch, gradients {ran}")


def by_torch(schedule: Schedule, stages: Sequence[nn.Module]) -> str:
    """The gradients of a run by torch on two processes, in words. Raises `Wrong` if it fails or
    they aren't right.
    """
    from pplab.lab import TorchEngine
    from pplab.runtime import RankError

    try:
        found = trained(
            schedule, stages, *drawn(1, (2, 8, 3, 6))[0], TorchEngine(), steps=1
        ).gradients
    except (RankError, ValueError) as error:
        raise Wrong(" ".join(str(error).split("In rank")[0].split())) from None
    if not found.equal:
        raise Wrong(f"the gradients are {found}")
    return "equal to one process"


def plans() -> list[Plan]:
    """Every layout of the 32 ranks of exercise 5 that divides its model and batch."""
    found = []
    for layout in layouts(32):
        try:
            found.append(plan(MODEL, MACHINE, layout, BATCH))
        except ValueError:
            continue
    return found


@checker()
def choose(answer: object) -> Verdict:
    """Choose the fastest layout of `MODEL` on four nodes of `MACHINE` that fits in its memory.
    Within 2 % counts.
    """
    if isinstance(answer, Mapping):
        with told("", TypeError, ValueError):
            answer = Layout(**answer)
    if not isinstance(answer, Layout):
        return wrong(f"expected a pplab.lab.Layout, got {answer!r}")
    if answer.num_ranks != 32:
        return wrong(
            f"{answer.tp} x {answer.pp} x {answer.dp} = {answer.num_ranks} ranks, and there are 32"
        )
    with told("", ValueError):
        given = plan(MODEL, MACHINE, answer, BATCH)
    if not given.fits:
        return wrong(
            f"it needs {given.memory_bytes / 1e9:.1f} GB of a rank's {MACHINE.memory / 1e9:.0f}"
        )
    fastest_s = min(each.step_s for each in plans() if each.fits)
    if given.step_s > 1.02 * fastest_s:
        bubble = given.timeline.makespan - given.compute_s - given.tp_s
        slow = max(
            ("tp", given.tp_s), ("dp", given.dp_s), ("bubble", bubble), key=lambda part: part[1]
        )
        times = f"{given.step_s / fastest_s:.2f} times the fastest"
        return wrong(f"it fits and takes {times}; its largest loss is {slow[0]}")
    return right(f"{given.step_s:.1f} s a step in {given.memory_bytes / 1e9:.0f} GB")
