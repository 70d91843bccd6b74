"""Checkers of chapter 12, sends that wait for their receive, and the machines that its exercises are about."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise

from ..actions import parts
from ..builders import build
from ..costs import Link
from ..lab.layout import Layout, Machine, Plan, Transformer, best, layouts, plan
from ..lab.replicas import replicate
from ..schedule import Schedule
from ..simulator import simulate
from .answers import schedule_of, shape_of
from .verdict import (
    Verdict,
    Wrong,
    checker,
    number,
    numbers,
    one_or_several,
    readers_code,
    right,
    told,
    values_of,
    wrong,
)

Order = Sequence[tuple[str, int]]  # what a rank does, in order: ("send", to) or ("recv", from)

MODEL = Transformer(num_layers=48, width=5120, sequence=4096)
BATCH = 64
# Four boxes of eight accelerators without NVLink: PCIe inside, one 100 Gb/s port per accelerator between.
MACHINE = Machine(8, Link(20e-6, 22e9), Link(30e-6, 11e9), flops=120e12, memory=48e9)


def meet(orders: Sequence[Order]) -> int:
    """Run blocking sends that wait for their receive: how many rounds they take, all pairs that meet in one at once.

    Raises ValueError for a deadlock, with who waits for whom.
    """
    rest = [list(order) for order in orders]
    rounds = 0
    while any(rest):
        heads = {rank: order[0] for rank, order in enumerate(rest) if order}
        pairs = [(a, b) for a, (what, b) in heads.items() if what == "send" and heads.get(b) == ("recv", a)]
        if not pairs:
            waits = [f"rank {rank} {'sends to' if what == 'send' else 'receives from'} {other}"
                     for rank, (what, other) in heads.items()]  # fmt: skip
            raise ValueError(f"deadlock: {'; '.join(waits)}")
        for rank in (rank for pair in pairs for rank in pair):
            rest[rank].pop(0)
        rounds += 1
    return rounds


def send_first(context: object, num_bytes: int, timeout_s: float = 3) -> float | None:
    """On each of two ranks: send to the other, then receive from it. Where sends wait for their receive, it hangs.

    Returns the seconds after which the transport gave up (its channel is broken then), or None if it went through.
    """
    import torch
    import torch.distributed as dist

    pair = dist.new_group([0, 1], timeout=timedelta(seconds=timeout_s), backend="gloo")
    other, started = 1 - context.rank, time.perf_counter()
    try:
        dist.send(torch.zeros(num_bytes, dtype=torch.uint8), other, group=pair)
        dist.recv(torch.zeros(num_bytes, dtype=torch.uint8), other, group=pair)
    except RuntimeError:  # a timeout on one rank, and on the other that, or the loss of its peer
        return time.perf_counter() - started
    return None


@one_or_several
def volumes(answer: object) -> Verdict:
    """C=5120, L=2048, b=4, two bytes, 4 stages, M=16, 13 billion parameters.

    One message in MB, the gradients' bytes over a message's, a step's messages over all boundaries in GB.
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
            one * 2 / 1e6: "that is with four bytes a number, or both directions: one message has two bytes a number",
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
    why = "4 x 2,048 x 5,120 x 2 bytes; 26 GB over that; 2 directions x 3 boundaries x 16 microbatches of it"
    expected = (one / 1e6, gradients / one, everything / 1e9)
    return numbers(answer, expected, why, ("one message", "gradients over a message", "all boundaries"), traps=traps)


@one_or_several
@checker("four ranks", lambda answer: isinstance(answer, Iterable))
def pipeline_group(answer: object) -> Verdict:
    """The ranks of rank 13's pipeline, first stage first: tp 8, pp 4, dp 16, order tp-dp-pp, 512 ranks."""
    given = values_of(answer)
    layout = Layout(tp=8, pp=4, dp=16)
    group = {axis: next(g for g in layout.groups(axis) if 13 in g) for axis in ("tp", "pp", "dp")}
    if given == group["pp"]:
        return right("one rank in every 8 x 16 = 128")
    if sorted(map(repr, given)) == sorted(map(repr, group["pp"])):
        return wrong("those are the ranks; list them first stage first")
    skips = "a stride of 8 skips the tensor ranks only; between two stages there also are 16 replicas"
    traps = {
        frozenset(group["dp"]): "those hold the same stage in all replicas: they add up gradients",
        frozenset(group["tp"]): "those cut the same layers' matrices: the tensor group",
        frozenset((12, 13, 14, 15)): "that would be pp-...: here tp is nearest, then dp, and pp is the farthest",
        frozenset((13, 21, 29, 37)): skips,
    }
    if 13 not in given:
        return wrong("rank 13 itself is part of its pipeline")
    asked = f"{given} isn't it: which ranks have rank 13's place along tp and along dp?"
    return wrong(traps.get(frozenset(given), asked))


@one_or_several
@checker("ranks", lambda answer: isinstance(answer, Iterable))
def tied_group(answer: object) -> Verdict:
    """The ranks that add up a tied embedding's gradient: 1F1B on 4 stages, 2 replicas by lab.replicate."""
    given = sorted(set(values_of(answer)), key=repr)
    if given == [0, 3, 4, 7]:
        return right("first and last stage, in both replicas, in one sum")
    traps = {
        (0, 3): "the first replica would step on its own half of the batch: the replicas would drift apart",
        (0, 4): "those hold the embedding; the head is the same weight, and gets a gradient, too",
        (0, 7): "every replica has a first and a last stage",
    }
    asked = f"{given} isn't it: the ranks of the first stage and of the last, in both replicas"
    return wrong(traps.get(tuple(given), asked))


@one_or_several
@checker()
def replicated(answer: object) -> Verdict:
    """Write the rows of two replicas of 1F1B, each of two ranks with three microbatches: four rows."""
    try:
        schedule = schedule_of(answer)
    except Wrong as error:
        if "only replicas, which share no microbatch" not in str(error):
            raise
        return wrong("the replicas share microbatches: the first has 0, 1 and 2, and the second has 3, 4 and 5")
    sizes = shape_of(schedule)
    if sizes != (4, 2, 6):
        return wrong(f"expected 4 ranks, 2 stages and 6 microbatches, got {sizes[0]}, {sizes[1]} and {sizes[2]}")
    if len(schedule.replicas) != 2:
        return wrong(f"the ranks make {len(schedule.replicas)} replica(s): two replicas share no microbatch")
    one = simulate(build("1F1B", num_ranks=2, num_microbatches=3))
    found = simulate(schedule)
    if found.makespan > one.makespan:
        return wrong(f"it takes {found.makespan:g}, and one pipeline with three microbatches takes {one.makespan:g}")
    expected = replicate(one.schedule, 2)
    if sorted(schedule.peak_in_flight) != sorted(expected.peak_in_flight):
        return wrong(f"it holds {schedule.peak_in_flight} in flight, and 1F1B holds {expected.peak_in_flight}")
    return right("two pipelines, each with microbatches of its own")


@checker("a function of (rank, num_ranks)")
def safe_order(answer: object) -> Verdict:
    """Write `order(rank, num_ranks)`: one message each way with each neighbour, blocking, in at most four rounds."""
    for num_ranks in (2, 3, 4, 7, 16):
        with readers_code(f"at {num_ranks} ranks: your function raised"):
            orders = [[(str(what), other) for what, other in answer(rank, num_ranks)] for rank in range(num_ranks)]
        for rank, order in enumerate(orders):
            neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < num_ranks]
            wanted = sorted((what, other) for other in neighbours for what in ("send", "recv"))
            if sorted(order) != wanted:
                return wrong(f"at {num_ranks} ranks, rank {rank} must do {wanted} in some order, got {order}")
        with told(f"at {num_ranks} ranks: ", ValueError):
            rounds = meet(orders)
        if rounds > 4:
            grows = f"it takes {rounds} rounds: safe, but it grows with the ranks; 4 are enough"
            return wrong(f"at {num_ranks} ranks {grows}")
    return right("even and odd ranks take opposite turns: four rounds, however many ranks")


def gathers_of(schedule: Schedule, rank: int) -> int:
    """How often a rank gathers a stage's weights in a step, when it keeps one stage's at a time."""
    stages = [parts(item)[0].stage for item in schedule.rows[rank]]
    return 1 + sum(a != b for a, b in pairwise(stages))


@checker("a function of (schedule, rank)")
def gathers(answer: object) -> Verdict:
    """Write `gathers(schedule, rank)`: how often the rank gathers weights, keeping one stage's at a time."""
    for name in ("1F1B", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble"):
        schedule = build(name, num_ranks=4, num_microbatches=8)
        for rank in range(4):
            with readers_code(f"{name}, rank {rank}: your function raised"):
                given = answer(schedule, rank)
            traps = {
                len(schedule.rows[rank]): "that is a gather per action; what is gathered stays until another is needed",
                len(schedule.stages_of(rank)): "that is a gather per stage: one that is dropped is gathered again",
                gathers_of(schedule, rank) - 1: "that counts the changes; the first stage is gathered, too",
            }
            expected = gathers_of(schedule, rank)
            traps.pop(expected, None)
            verdict = number(given, expected, "", traps=traps)
            if not verdict:
                return wrong(f"{name}, rank {rank}: {verdict.says}")
    return right("BFS gathers three times, whatever the number of microbatches; interleaving every few actions")


def plans() -> list[Plan]:
    """Every layout of the 32 ranks of exercise 7 that divides its model and batch."""
    found = []
    for layout in layouts(32):
        try:
            found.append(plan(MODEL, MACHINE, layout, BATCH))
        except ValueError:
            continue
    return found


@checker()
def choose(answer: object) -> Verdict:
    """The fastest layout of `MODEL` on four nodes of `MACHINE` that fits in its memory; within 2 % counts."""
    if isinstance(answer, Mapping):
        with told("", TypeError, ValueError):
            answer = Layout(**answer)
    if not isinstance(answer, Layout):
        return wrong(f"expected a pplab.lab.layout.Layout, got {answer!r}")
    if answer.num_ranks != 32:
        return wrong(f"{answer.tp} x {answer.pp} x {answer.dp} = {answer.num_ranks} ranks, and there are 32")
    with told("", ValueError):
        given = plan(MODEL, MACHINE, answer, BATCH)
    if given.memory_bytes > MACHINE.memory:
        return wrong(f"it needs {given.memory_bytes / 1e9:.1f} GB of a rank's {MACHINE.memory / 1e9:.0f}")
    fastest = best(plans(), MACHINE.memory)
    if given.step_s > 1.02 * fastest.step_s:
        slow = max(("tp", given.tp_s), ("dp", given.dp_s), ("bubble", _bubble(given)), key=lambda part: part[1])
        times = f"{given.step_s / fastest.step_s:.2f} times the fastest"
        return wrong(f"it fits and takes {times}; its largest loss is {slow[0]}")
    return right(f"{given.step_s:.1f} s a step in {given.memory_bytes / 1e9:.0f} GB")


def _bubble(given: Plan) -> float:
    return given.timeline.makespan - given.compute_s - given.tp_s
