"""Illegal schedules are refused with the place, the cause and what to change; and nothing hangs on them."""

import random

import pytest

import pplab as pp
from conftest import is_ready, random_schedule


def refuse(*rows: str, **options) -> pp.ScheduleError:
    with pytest.raises(pp.ScheduleError) as caught:
        pp.validate(pp.Schedule([row.split() for row in rows]), **options)
    assert isinstance(caught.value, ValueError)
    return caught.value


def test_every_builder_makes_legal_schedules():
    for builder in pp.builders.ALL:
        for num_ranks in (1, 2, 3, 4, 8):
            for num_microbatches in (1, 2, 3, 8, 20):
                pp.validate(builder(num_ranks, num_microbatches))


def test_random_schedules_are_legal(rng):
    for _ in range(50):
        pp.validate(random_schedule(rng))


@pytest.mark.parametrize(
    ("rows", "rank", "action", "says"),
    [
        (["0B0 0F0"], 0, "0B0", "rank 0 runs 0B0 before 0F0, which it needs; move 0F0 in front of 0B0"),
        (["0F0 0W0 0I0"], 0, "0W0", "rank 0 runs 0W0 before 0I0"),
        (["0F0"], 0, "0B0", "0B0 is missing: rank 0 runs 0F0; add 0B0 to rank 0's row (or 0I0 and 0W0)"),
        (["0B0"], 0, "0F0", "0F0 is missing"),
        (["0F0 0I0"], 0, "0W0", "0W0 is missing: rank 0 runs 0F0, 0I0"),
        (["0F0 0B0 0I0"], 0, "0I0", "rank 0 runs both 0B0 and 0I0"),
        (["0F0 0F0 0B0"], 0, "0F0", "rank 0 runs 0F0 twice"),
        (["0F0 0B0 0F2 0B2"], 0, "0F1", "0F1 is missing: rank 0 runs nothing of it"),
        (["0F0 0B0", "2F0 2B0"], None, None, "no rank runs stage 1"),
        (["0F0 0B0", "1F0 1B0", ""], 2, None, "rank 2 has nothing to run"),
        (["0F0 0B0 0F1 0B1 1F1", "1F0 1B0 1B1"], 0, "1F1", "rank 0 runs 1F1, but stage 1 lives on rank 1"),
        (["0F0 0SEND_F0 0B0", "1F0 1B0"], 0, "0SEND_F0", "0SEND_F0 is communication"),
        (
            ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
            1,
            "1F1",
            "deadlock: rank 0 waits at 0B0 for 1B0; rank 1 waits at 1F1 for 0F1; on rank 1, run 1B0 before 1F1",
        ),
        (
            ["2F0 0F0 2B0 0B0", "1F0 1B0"],
            0,
            "2F0",
            "deadlock: rank 0 waits at 2F0 for 1F0; rank 1 waits at 1F0 for 0F0",
        ),
        (["1F0 0F0 1B0 0B0"], 0, "1F0", "deadlock: rank 0 waits at 1F0 for 0F0; on rank 0, run 0F0 before 1F0"),
    ],
)
def test_the_first_fault_is_located(rows, rank, action, says):
    error = refuse(*rows)
    assert says in str(error)
    assert error.rank == rank
    assert (error.action and str(error.action)) == action
    assert error.cause and error.remedy


def test_a_cycle_through_many_ranks_is_named_whole():
    rows = ["0F0 4F0 4F1 0F1 4B0 0B0 4B1 0B1", *(f"{r}F0 {r}F1 {r}B0 {r}B1" for r in (1, 2, 3))]
    message = str(refuse(*rows))
    waits = ["rank 0 waits at 4F1 for 3F1", "rank 3 waits at 3F1 for 2F1", "rank 2 waits at 2F1 for 1F1"]
    assert message == f"deadlock: {'; '.join(waits)}; rank 1 waits at 1F1 for 0F1; on rank 0, run 0F1 before 4F1"


def test_an_awaited_overlap_is_named_by_the_half_that_is_awaited():
    error = refuse("0F0 0B0 0F1 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1")
    assert "rank 0 waits at 0B0 for 1B0; rank 1 waits at 1F1 for 0F1" in str(error)


def test_a_memory_cap_is_kept():
    s = pp.build("GPipe", num_ranks=2, num_microbatches=4)
    pp.validate(s, max_in_flight=4)
    error = refuse(*(" ".join(map(str, row)) for row in s.rows), max_in_flight=3)
    assert "memory limit: rank 0 holds 3 forwards' activations when it reaches 0F3, which needs 1 more" in str(error)
    assert "run a backward before 0F3" in error.remedy
    with pytest.raises(ValueError, match="max_in_flight must be at least 1"):
        pp.validate(s, max_in_flight=0)


def test_an_illegal_schedule_is_not_simulated():
    for rows in (["0B0", "0F0"], ["0F0"], ["1F0", "0F0", "1B0", "0B0"]):
        with pytest.raises(pp.ScheduleError):
            pp.simulate(pp.Schedule([rows]))


def mutate(s: pp.Schedule, rng: random.Random) -> pp.Schedule:
    """Drop, double, swap, move, renumber or retype an action."""
    rows = [list(row) for row in s.rows]
    rank = rng.choice([r for r in range(len(rows)) if rows[r]])
    i = rng.randrange(len(rows[rank]))
    action = rows[rank][i]
    what = rng.choice(["drop", "double", "swap", "move", "rank", "renumber", "retype"])
    if what == "drop":
        del rows[rank][i]
    elif what == "double":
        rows[rank].insert(rng.randrange(len(rows[rank]) + 1), action)
    elif what == "swap":
        j = rng.randrange(len(rows[rank]))
        rows[rank][i], rows[rank][j] = rows[rank][j], rows[rank][i]
    elif what == "move":
        rows[rank].insert(rng.randrange(len(rows[rank])), rows[rank].pop(i))
    elif what == "rank":
        other = rng.randrange(len(rows))
        rows[other].insert(rng.randrange(len(rows[other]) + 1), rows[rank].pop(i))
    elif what == "renumber":
        rows[rank][i] = action._replace(microbatch=rng.randrange(s.num_microbatches + 1))
    else:
        rows[rank][i] = action._replace(kind=rng.choice(list(pp.Kind)[:4]))
    return pp.Schedule(rows) if any(rows) else s


def is_legal(s: pp.Schedule) -> bool:
    """What `validate` must find out, the slow way."""
    everything = [(a.stage, str(a.kind), a.microbatch) for row in s.rows for a in row]
    pairs = {(stage, m) for stage in range(s.num_stages) for m in range(s.num_microbatches)}
    for stage, m in pairs:
        kinds = sorted(k for t, k, n in everything if (t, n) == (stage, m))
        if kinds not in (["B", "F"], ["F", "I", "W"]):
            return False
    if any(len({rank for rank, row in enumerate(s.rows) for a in row if a.stage == st}) != 1 for st, _ in pairs):
        return False
    if not all(s.rows):
        return False
    done: set = set()
    position = [0] * s.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(s.rows):
            while position[rank] < len(row):
                a = row[position[rank]]
                if not is_ready((a.stage, str(a.kind), a.microbatch), done, s.num_stages):
                    break
                done.add((a.stage, str(a.kind), a.microbatch))
                position[rank] += 1
                moved = True
    return len(done) == len(everything)


def test_thousands_of_mutations_are_judged_right(rng):
    refused = 0
    for _ in range(400):
        s = mutate(random_schedule(rng), rng)
        if is_legal(s):
            pp.validate(s)
            pp.simulate(s)
            continue
        refused += 1
        with pytest.raises(pp.ScheduleError) as caught:
            pp.validate(s)
        assert caught.value.cause and caught.value.remedy
        with pytest.raises(pp.ScheduleError):
            pp.simulate(s)
    assert refused > 200
