"""A head over all ranks: the paper's figures, and every pass held against what it waits for, written down anew."""

from __future__ import annotations

import random

import pytest

import pplab as pp
from pplab import lab


def passes(timeline):
    """(kind, rank, microbatch) -> start, end, and every rank's in order of time."""
    found, rows = {}, []
    for rank, row in enumerate(timeline.schedule.rows):
        own = {(str(s.action.kind), rank, s.action.microbatch): (s.start, s.end) for s in timeline.spans_of(rank)}
        for kind in "ST":
            spans = sorted(s[2:] for s in timeline.others if s.rank == rank and s.action == kind)
            own |= {(kind, rank, m): span for m, span in enumerate(spans)}
        assert len(own) == 2 * len(row)
        rows.append(sorted(own.values()))
        found |= own
    return found, rows


@pytest.mark.parametrize("seed", range(30))
def test_every_pass_starts_as_soon_as_it_can(seed):
    rng = random.Random(seed)
    P, M, waits = rng.randint(2, 6), rng.randint(1, 9), rng.randint(1, 2)
    times = [[rng.randint(1, 6) for _ in range(P)] for _ in "FIW"]
    late, message = rng.choice([0, 1.5]), rng.choice([0, 2])
    head = lab.VocabularyParallel(rng.randint(1, 4) / 4, rng.randint(1, 4) / 4, message, waits)
    found, rows = passes(head.simulate(P, M, pp.Costs(*times, latency=late)))
    end = lambda kind, rank, m: found[kind, rank, m][1]  # noqa: E731
    for kind, rank, m in found:
        start, ended = found[kind, rank, m]
        backward = times[1][rank] + times[2][rank]
        assert ended - start == pytest.approx(
            {"F": times[0][rank], "B": backward, "S": head.softmax, "T": head.gradient}[kind]
        )
        if kind == "F":
            ready = end("F", rank - 1, m) + late if rank else 0
        elif kind == "S":
            ready = end("F", P - 1, m) + message
        elif kind == "B" and rank < P - 1:
            ready = end("B", rank + 1, m) + late
        else:
            gate = "T" if kind == "B" and waits == 2 else "S"
            ready = max(end(gate, each, m) for each in range(P)) + message * (kind == "B")
        free = max((e for s, e in rows[rank] if s < start), default=0)
        assert start == pytest.approx(max(free, ready)) and free <= start + 1e-9


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("waits", [1, 2])
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 4, 2)])
def test_the_papers_figures(num_ranks, waits, times):
    """Yeung et al. 2024, table 2: P + 1 and P + 2 microbatches; and a beat in which no rank is ever idle."""
    head, costs = lab.VocabularyParallel(0.5, 0.25, waits=waits), pp.Costs(*times)
    some, more = (head.simulate(num_ranks, count * num_ranks, costs) for count in (3, 5))
    assert some.peak_in_flight[0] == max(some.peak_in_flight) <= num_ranks + waits
    assert num_ranks == 2 or some.peak_in_flight[0] == num_ranks + waits
    beat = (more.makespan - some.makespan) / (2 * num_ranks)
    assert beat == pytest.approx(sum(times) + 0.75)
    assert max(span.end for span in more.others) <= more.makespan
    on_one = pp.Costs(*([t] * (num_ranks - 1) + [t + num_ranks * 0.25] for t in times))  # the same head on one rank
    assert (
        more.makespan
        < pp.simulate(pp.build("1F1B", num_ranks=num_ranks, num_microbatches=5 * num_ranks), on_one).makespan
    )


def test_without_a_head_it_is_1f1b():
    for P, M in ((2, 3), (4, 8), (8, 16)):
        one = pp.simulate(pp.build("1F1B", num_ranks=P, num_microbatches=M))
        assert lab.VocabularyParallel(0, 0).simulate(P, M).makespan == one.makespan


def test_in_the_case():
    """The head is two layers' work: a cut makes up for it on 4 ranks, and not on 16."""
    case, wide = lab.Case(), lab.Case(num_ranks=16, gigabits=100)
    spread = lab.vocabulary_row(case, 16)
    assert not spread.fits and 0.98 < spread.dollars / case.row("1F1B", 16, cut=[8, 9, 8, 7]).dollars < 1
    cut = wide.row("1F1B", 64, cut=[3, 2, 3] + [2] * 12 + [0])  # the best with the head alone
    found = lab.vocabulary_row(wide, 64)
    assert found.fits and found.dollars < 0.9 * cut.dollars
    work = wide.row("a perfect pipeline", 64).step_s
    assert found.busy * found.step_s == pytest.approx(work)


def test_bad_input_is_named():
    for given, said in (
        ({"softmax": -1, "gradient": 1}, "softmax"),
        ({"softmax": 1, "gradient": 1, "waits": 3}, "waits must be 1 or 2, got 3"),
        ({"softmax": 1, "gradient": 1, "message": "x"}, "message"),
    ):
        with pytest.raises(ValueError, match=said):
            lab.VocabularyParallel(**given)
    with pytest.raises(ValueError, match="num_ranks must be an integer of at least 2"):
        lab.VocabularyParallel(1, 1).simulate(1, 4)
    with pytest.raises(ValueError, match="3 values for 4 stages"):
        lab.VocabularyParallel(1, 1).simulate(4, 4, pp.Costs([1, 2, 3]))
