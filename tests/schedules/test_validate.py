"""Illegal schedules are refused with the place, the cause and what to change; and nothing hangs on them."""

import inspect
import random

import pytest

import pplab as pp
from conftest import built, halves, is_ready, random_schedule, registry
from pplab import lab, simulator


def refuse(*rows: str) -> pp.ScheduleError:
    with pytest.raises(pp.ScheduleError) as caught:
        pp.validate(pp.Schedule([row.split() for row in rows]))
    assert isinstance(caught.value, ValueError)
    return caught.value


def test_every_builder_makes_legal_schedules():
    for num_ranks in (1, 2, 3, 4, 8):
        for num_microbatches in (1, 2, 3, 8, 20):
            for builder in pp.builders.known():
                if "limit" in builder.options and num_ranks * num_microbatches > 32:
                    continue  # a search takes a second; test_simulate.py validates more of what it finds
                s = built(builder, num_ranks, num_microbatches)
                if s is not None:
                    pp.validate(s)
                    assert (s.num_ranks, s.num_microbatches) == (num_ranks, num_microbatches)
                    place = PLACES[builder.placement]
                    assert s.placement == tuple(place(stage, num_ranks) for stage in range(s.num_stages))
                    assert s.name == builder.name


PLACES = {
    "one stage per rank": lambda stage, P: stage,
    "loop": lambda stage, P: stage % P,
    "V": lambda stage, P: min(stage, 2 * P - 1 - stage),
    "bidirectional": lambda stage, P: tuple(sorted((stage, P - 1 - stage))),
}


def test_every_builder_takes_its_stages_per_rank():
    for builder in pp.builders.known():
        if "stages_per_rank" in builder.options:
            for V in (1, 2, 3, 4):
                for P, M in ((1, 2), (2, 3), (3, 6), (4, 10)):
                    s = built(builder, P, M, stages_per_rank=V)
                    if s is None:
                        assert M % 2 and "slices" in builder.options
                        continue
                    pp.validate(s)
                    assert s.num_stages == P * V
            with pytest.raises(ValueError, match="stages_per_rank must be an integer of at least 1, got 0"):
                builder(2, 2, stages_per_rank=0)


def test_an_interleaved_group_fills_the_loop():
    """Fewer microbatches than ranks come back to rank 0 later than it is ready to take them up again: a deadlock."""
    for size in (3, 4, 5, 6, 9, 20):
        for V in (1, 2, 3):
            pp.validate(pp.build("interleaved", num_ranks=3, num_microbatches=9, stages_per_rank=V, group_size=size))
    with pytest.raises(ValueError, match="group_size = 4 leaves a last group of 1 for 4 ranks.*a size that divides 5"):
        pp.build("Interleaved1F1B", num_ranks=4, num_microbatches=5, stages_per_rank=3, group_size=4)
    with pytest.raises(ValueError, match="group_size must be at least P = 3, got 2"):
        pp.build("interleaved", num_ranks=3, num_microbatches=9, group_size=2)


def test_random_schedules_are_legal(rng):
    for _ in range(50):
        for s in (
            random_schedule(rng),
            random_schedule(rng, overlap_share=0.5),
            random_schedule(rng, bidirectional=True),
        ):
            pp.validate(s)


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
        (["0F0 0B0 1F2 1B2", "1F0 1B0 0F2 0B2"], None, "0F1", "0F1 is missing: no rank runs any of it"),
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
        (
            ["(0F0;1F0)OVERLAP_F_F 1B0 0B0"],
            0,
            "1F0",
            "deadlock: rank 0 waits at 1F0 for 0F0; on rank 0, run 0F0 before",
        ),
        (["0F0 0F1 (0W0;0I1)OVERLAP_W_I 0I0 0W1"], 0, "0W0", "rank 0 runs 0W0 before 0I0, which it needs"),
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
    lab.check_memory(s, 4)
    said = "memory limit: rank 0 holds 3 forwards' activations when it reaches 0F3, which needs 1 more"
    with pytest.raises(pp.ScheduleError, match=said) as caught:
        lab.check_memory(s, 3)
    assert "run a backward before 0F3" in caught.value.remedy


def test_an_illegal_schedule_is_not_simulated():
    for rows in (["0B0", "0F0"], ["0F0"], ["1F0", "0F0", "1B0", "0B0"]):
        with pytest.raises(pp.ScheduleError):
            pp.simulate(pp.Schedule([rows]))


def test_a_simulator_that_stops_for_no_reason_says_so(monkeypatch):
    """As when somebody changes its loop, and who waits for an item is no longer put back once it has run."""
    source = inspect.getsource(simulator.run)
    forgets = source.replace("ready.extend(waiting.pop(i))", "waiting.pop(i)")
    assert forgets != source
    monkeypatch.setattr(simulator, "run", simulator.run)  # which comes back after the test
    exec(forgets, vars(simulator))
    with pytest.raises(AssertionError, match="simulator.run has a fault: rank . stops at .*, and nothing is missing"):
        pp.simulate(pp.build("DualPipeV", num_ranks=4, num_microbatches=8))


def mutate(s: pp.Schedule, rng: random.Random) -> pp.Schedule:
    """Drop, double, swap, move, renumber or retype an action, or a half of an overlap."""
    rows = [list(row) for row in s.rows]
    rank = rng.choice([r for r in range(len(rows)) if rows[r]])
    i = rng.randrange(len(rows[rank]))
    item = rows[rank][i]
    what = rng.choice(["drop", "double", "swap", "move", "rank", "renumber", "retype", "restage"])
    if what == "drop":
        del rows[rank][i]
    elif what == "double":
        rows[rank].insert(rng.randrange(len(rows[rank]) + 1), item)
    elif what == "swap":
        j = rng.randrange(len(rows[rank]))
        rows[rank][i], rows[rank][j] = rows[rank][j], rows[rank][i]
    elif what == "move":
        rows[rank].insert(rng.randrange(len(rows[rank])), rows[rank].pop(i))
    elif what == "rank":
        other = rng.randrange(len(rows))
        rows[other].insert(rng.randrange(len(rows[other]) + 1), rows[rank].pop(i))
    elif isinstance(item, pp.Overlap):
        changed = item.first._replace(microbatch=rng.randrange(s.num_microbatches + 1))
        rows[rank][i] = item._replace(first=changed) if changed[::2] != item.second[::2] else changed
    elif what == "renumber":
        rows[rank][i] = item._replace(microbatch=rng.randrange(s.num_microbatches + 1))
    elif what == "restage":
        rows[rank][i] = item._replace(stage=rng.randrange(s.num_stages))
    else:
        rows[rank][i] = item._replace(kind=rng.choice(list(pp.Kind)[:4]))
    return pp.Schedule(rows) if any(rows) else s


def is_legal(s: pp.Schedule) -> bool:
    """What `validate` must find out, the slow way."""
    found = [
        (rank, a.stage, str(a.kind), a.microbatch) for rank, row in enumerate(s.rows) for x in row for a in halves(x)
    ]
    for stage in range(s.num_stages):
        for m in range(s.num_microbatches):
            of_it = [(rank, kind) for rank, t, kind, n in found if (t, n) == (stage, m)]
            if sorted(kind for _, kind in of_it) not in (["B", "F"], ["F", "I", "W"]) or len({r for r, _ in of_it}) > 1:
                return False
    ranks_of = [{rank for rank, t, _, _ in found if t == stage} for stage in range(s.num_stages)]
    one_each = all(len(ranks) == 1 for ranks in ranks_of)
    mirrored = all(len(ranks) == 2 and sum(ranks) == s.num_ranks - 1 for ranks in ranks_of)
    if not all(s.rows) or not (one_each or mirrored):
        return False
    done: set = set()
    position = [0] * s.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(s.rows):
            while position[rank] < len(row):
                item = [(a.stage, str(a.kind), a.microbatch) for a in halves(row[position[rank]])]
                if not all(is_ready(action, done, s.num_stages) for action in item):
                    break
                done.update(item)
                position[rank] += 1
                moved = True
    return len(done) == len(found)


@pytest.mark.parametrize("kind", ["fused and split", "overlapped", "bidirectional", "of the registry"])
def test_thousands_of_mutations_are_judged_right(rng, kind):
    refused = 0
    for _ in range(60):
        if kind == "of the registry":
            original = rng.choice(registry(4, 8))
        else:
            overlap_share = 0.6 * (kind != "fused and split")
            original = random_schedule(rng, overlap_share=overlap_share, bidirectional=kind == "bidirectional")
        s = mutate(original, rng)
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
        with pytest.raises(pp.ScheduleError):
            pp.simulate(s, pp.Costs(bandwidth=2))
    assert refused > 20


def test_a_memory_limit_is_judged_right(rng):
    for _ in range(40):
        s = random_schedule(rng, overlap_share=0.3)
        memory = pp.Memory([rng.randint(1, 9) for _ in range(s.num_stages)], 1, recomputed=2, parameters=3)
        peaks = s.peak_held(memory)
        lab.check_memory(s, peaks, memory)
        rank = rng.randrange(s.num_ranks)
        with pytest.raises(pp.ScheduleError, match=f"memory limit: rank {rank} holds") as caught:
            lab.check_memory(s, [peak - (r == rank) for r, peak in enumerate(peaks)], memory)
        assert f"raise the limit to {peaks[rank]:g}" in caught.value.remedy and caught.value.action
    with pytest.raises(ValueError, match="limit has 9 values for"):
        lab.check_memory(s, [1] * 9)
    lab.check_memory(s, float("inf"))
    for nonsense in (float("nan"), -1, True, "9"):
        with pytest.raises(ValueError, match="limit must be a number from 0 to inf"):
            lab.check_memory(s, nonsense)
