"""Checkers of the chapter on GPipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import ndiff
from pathlib import Path

from pplab.builders import build
from pplab.lab import Case, Entry
from pplab.schedule import Schedule
from pplab.simulator import simulate

from . import spine
from .answers import (
    drawn,
    in_whole_backwards,
    is_module,
    rows_of,
    schedule_from,
    shape_of,
    sizes_of,
    trained,
)
from .observed import located
from .verdict import (
    Verdict,
    Wrong,
    checker,
    joined,
    numbers,
    one_or_several,
    readers_code,
    right,
    told,
    values_of,
    wrong,
)


def one_rank_recomputes(*answer: object) -> Verdict:
    """Find how long a step of GPipe takes on 3 ranks with 5 microbatches, F = 1 and B = 2, if rank
    1 alone recomputes (its B is 3), and if all ranks do. A pair of numbers.
    """
    alone = {
        28: "that is with all three",
        22: "rank 1 recomputes every microbatch, not only one",
        24: "rank 1 works until then, and rank 0 still has a backward to do",
        25: "rank 0's last backward takes 2 units",
        27: "rank 0's last backward takes 2 units: it doesn't recompute",
    }
    every = {
        26: "that is with rank 1 alone",
        36: "ranks recompute at the same time, not one after the other",
    }
    names, why = (
        ("rank 1 alone", "all three"),
        "the slowest rank sets the pace, and others hide behind it",
    )
    return numbers(joined(answer), (26, 28), why, names, traps=(alone, every))


def larger_cards(*answer: object) -> Verdict:
    """For GPUs with room for 141 GB, find the most microbatches of one sequence that GPipe can run
    without recomputation, and the dollars per GPU and hour below which that is cheaper than four on
    the case's GPUs. A pair of numbers.
    """
    case = Case()
    price = case.dollars_per_hour * case.row("GPipe", 4).dollars / case.row("GPipe", 10).dollars
    most = {
        8: "8 and the state take 113.9 GB: there is room for more",
        11: "11 microbatches and the state take 141.3 GB",
        15: "rank 0 has state, too",
    }
    dollars = {
        case.dollars_per_hour
        / price
        * 2: "the other way round: a step with more microbatches is worth more"
    }
    dollars |= {2 * 141 / 80: "gigabytes aren't what you pay for: compare the bills"}
    dollars |= {
        2.69: "that is the chart's count. The bill has messages and the head, too (case.row)"
    }
    why = f"10 microbatches fill the GPU, and the bill is the same at ${price:.2f}"
    return numbers(
        joined(answer),
        (10, price),
        why,
        ("microbatches", "dollars"),
        traps=(most, dollars),
        digits=2,
    )


def overhead_from_a_sweep(*answer: object) -> Verdict:
    """Find the work per rank (all forwards and backwards of a batch, without overhead) and the
    overhead per microbatch, in ms, that explain `sweep()`: GPipe on 4 ranks, one batch in 2, 4, 8
    and 16 microbatches. A pair of numbers.
    """
    work, overhead = SWEEP
    names, why = ("work", "overhead"), "(M + 3)(work / M + overhead) gives all four times"
    traps = (
        {overhead: "that is the overhead"},
        {
            work: "that is the work",
            2: "with 40 and 2, two microbatches would take 5 (40 / 2 + 2) = 110 ms, not 105",
        },
    )
    return numbers(joined(answer), SWEEP, why, names, traps=traps)


SWEEP = (40.0, 1.0)


def sweep() -> dict[int, float]:
    """The times of the exercise `overhead_from_a_sweep`, in ms, by number of microbatches."""
    work, overhead = SWEEP
    return {m: (m + 3) * (work / m + overhead) for m in (2, 4, 8, 16)}


@checker("a torch module", is_module)
def a_norm_that_survives(answer: object) -> Verdict:
    """Give a normalisation for 8 features, a torch module, under which two processes with four
    microbatches have the gradients of one process with the whole batch.
    """
    import torch
    from torch import nn

    from pplab.runtime import RankError

    x, y = drawn(0, (8, 8), (8, 8))
    with readers_code("it fails on 8 samples of 8 features:"):
        of_x, of_more, of_other = answer(x), answer(10 * x), answer(10 * x + 3)
    if not isinstance(of_x, torch.Tensor) or of_x.shape != x.shape:
        return wrong("it should return a tensor of the shape that it takes, (8, 8)")
    if torch.allclose(of_other, of_x * 10 + 3, atol=1e-2):
        return wrong("this module doesn't normalise anything")
    if not torch.allclose(of_more, of_x, atol=1e-2):
        return wrong("this module doesn't normalise: ten times the input gives a different output")
    stages = [nn.Sequential(nn.Linear(8, 8), answer), nn.Linear(8, 8)]
    try:
        found = trained(build("GPipe", num_ranks=2, num_microbatches=4), stages, x, y).gradients
    except RankError as error:
        return wrong(error.cause)
    if not found.equal:
        return wrong(
            f"gradients {found}: which samples does it look at, in one process and in a microbatch?"
        )
    return right(
        "it looks at one sample at a time, and the gradients are equal to those of one process"
    )


SPEEDUP = (  # of a GPipe that was right
    (
        "held, counts = {}, []",
        "buffers = {}  # allocated once, not for every message\nheld, counts = {}, []",
    ),
    (
        "torch.empty_like(tensor)  # a message doesn't tell its shape",
        "buffers.setdefault((source, tensor.shape), torch.empty_like(tensor))",
    ),
    ("    return tensor\n", "    return tensor.detach()\n"),
)


def begin_repair(to: str = "my_repair.py") -> str:
    """Write the file for the exercise `repaired_file`, unless it already exists."""
    says = (
        f"{to} is a GPipe that allocates its buffers once: open it next to this page, and repair it"
    )
    return spine.written(to, _with_fault(), says)


@checker(
    'the name of the file, such as "my_repair.py"', lambda answer: isinstance(answer, (str, Path))
)
def repaired_file(answer: str | Path) -> Verdict:
    """Repair the file of `begin_repair`, whose gradients are right with one microbatch only. The
    answer is its name.
    """
    path = located(answer)
    if path.is_file():
        lines = path.read_text().splitlines()
        changed = sum(line[:2] in ("- ", "+ ") for line in ndiff(_with_fault().splitlines(), lines))
        if path.name in ("pipe_gpipe.py", "my_gpipe.py") or changed > MOST_CHANGED:
            raise Wrong(
                f"{path.name} isn't the file that begin_repair() wrote, with a repair: change as "
                "little as you can"
            )
    verdict = spine.gpipe_file(answer)
    if verdict.right is False and "gradients of" in verdict.says:
        for rank, report in enumerate(spine.run(path, 2, M=4, PACE=0).reports):
            for first, second in report.shared[:1]:
                where = f"the input of microbatch {second} lies where microbatch {first}'s is held"
                return wrong(f"{verdict.says}. On rank {rank} {where}")
    return verdict


MOST_CHANGED = 16  # lines that go or come


def _with_fault() -> str:
    return spine.with_faults("pipe_gpipe.py", SPEEDUP)


@in_whole_backwards(stage_per_rank=True)
@checker("a function of (num_ranks, num_microbatches, most)")
def flushing_builder(answer: Callable[[int, int, int], object]) -> Verdict:
    """Write `rows(num_ranks, num_microbatches, most)`, a GPipe that flushes so that no rank ever
    holds more than `most` microbatches, as fast as possible.
    """
    for P, M, most in ((2, 4, 2), (4, 16, 4), (3, 7, 3), (4, 5, 8), (1, 3, 2), (3, 4, 1)):
        with told(f"at {P} ranks, {M} microbatches and at most {most}: "):
            schedule = schedule_from(answer, P, M, most)
            if schedule.num_microbatches > M:
                raise Wrong(
                    f"you run microbatch {schedule.num_microbatches - 1}, and there are {M}: 0 to "
                    f"{M - 1}"
                )
            if shape_of(schedule) != (P, P, M):
                raise Wrong(
                    f"expected a stage on each rank; your schedule has {sizes_of(schedule)}"
                )
            _check_flushes(schedule, most)
            flushes = -(-M // most)
            took, best = simulate(schedule).makespan, (M + flushes * (P - 1)) * 3
            if took != best:
                raise Wrong(
                    f"it takes {took} units (F = 1, B = 2), and GPipe with {flushes} flushes takes "
                    f"{best}"
                )
    return right("at six sizes no rank holds more than it may, and no flush is needless")


def _check_flushes(schedule: Schedule, most: int) -> None:
    """Raise `Wrong` unless every rank holds at most `most`, and after a backward starts no forward
    before it holds nothing.
    """
    for rank, row in enumerate(schedule.rows):
        held, backward = 0, False
        for action in row:
            if action.kind.name == "F":
                if backward and held:
                    raise Wrong(
                        f"rank {rank} starts {action} while it holds {held}: GPipe finishes a "
                        "flush before the next one"
                    )
                held, backward = held + 1, False
            else:
                held, backward = held - 1, True
            if held > most:
                raise Wrong(f"rank {rank} holds {held} at {action}")


# of all cuts, each with the least that has to be recomputed
BEST_PLAN = ([8, 8, 6, 4], [9, 9, 8, 6])
NEAR = 1.005  # of the best plan's dollars


_EXAMPLE = "([8, 8, 8, 8], [8, 8, 8, 8])"


@one_or_several
@checker(f"two lists, such as {_EXAMPLE}", lambda answer: isinstance(answer, (tuple, list, str)))
def sixteen_sequences(answer: Sequence[object] | str) -> Verdict:
    """Plan the case under GPipe with 16 sequences in a step: in how many of its layers each rank
    recomputes, and how many layers it has. The cheapest plan that fits.
    """
    answer = rows_of(answer) if isinstance(answer, str) else answer
    if len(answer) != 2:
        raise Wrong(f"expected two lists, such as {_EXAMPLE}, got {len(answer)} values")
    recompute, cut = (
        _counts(*each) for each in zip(("recompute", "cut"), answer, (0, 1), strict=True)
    )
    if len(cut) != 4 or len(recompute) != 4:
        raise Wrong(
            f"recompute and cut: expected a number for each of 4 ranks, got {recompute} and {cut}"
        )
    for rank, (again, layers) in enumerate(zip(recompute, cut, strict=True)):
        if again > layers:
            raise Wrong(f"rank {rank} can't recompute in {again} layers: it has {layers}")
    with told("", ValueError):
        plan, best = planned(recompute, cut), planned(*BEST_PLAN)
    if not plan.fits:
        rank = max(range(4), key=plan.held_gb.__getitem__)
        raise Wrong(
            f"it doesn't fit: rank {rank} would hold {plan.held_gb[rank]:.1f} of "
            f"{plan.case.room_gb:g} GB"
        )
    over = plan.dollars - best.dollars
    says = f"it fits, in {max(plan.held_gb):.1f} GB, and costs ${plan.dollars:.1f}"
    if plan.dollars > NEAR * best.dollars:
        raise Wrong(f"{says}: ${over:.1f} more than the best plan that we know")
    if over < -0.05:
        return right(f"{says}: ${-over:.1f} less than the best plan that we knew")
    return right(
        f"{says}; the best plan that we know costs "
        f"{f'${over:.1f} less' if over > 0.05 else 'as much'}"
    )


def planned(recompute: Sequence[int], cut: Sequence[int]) -> Entry:
    """A row of the ledger for GPipe on the case."""
    return Case().row("GPipe", 16, recompute=recompute, cut=cut)


def _counts(name: str, given: object, least: int) -> list[int]:
    if not isinstance(given, Iterable):
        raise Wrong(f"{name}: expected a list of numbers, such as [8, 8, 8, 8], got {given!r}")
    found = list(values_of(given))
    for value in found:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise Wrong(f"{name}: expected whole numbers of {least} or more, got {value!r}")
    return found
