"""A building block: what it holds, what it refuses, and that the schedules made of it are what they were."""

import hashlib
import random
import re
from dataclasses import replace
from math import ceil

import pytest

import pplab as pp
from pplab import lab
from pplab.actions import B, F, I, Kind

# sha256 of the rows that V-Half and V-Min had before they were made of blocks
ROWS = ["32fe7c214b09f71a", "1ea6869076293de2", "b63b50d20ed16e37"]


def digest(costs) -> str:
    made = hashlib.sha256()
    for name in ("V-Half", "V-Min"):
        for P, M in ((1, 3), (2, 1), (3, 5), (4, 8), (5, 12), (6, 7), (8, 9)):
            made.update(str(pp.build(name, num_ranks=P, num_microbatches=M, costs=costs).rows).encode())
    return made.hexdigest()[:16]


def test_v_half_and_v_min_have_the_rows_that_they_had():
    assert [digest(costs) for costs in (None, pp.Costs(3, 4, 2), pp.Costs(2, 1, 3, latency=0.5))] == ROWS


def random_block(rng: random.Random) -> lab.Block | None:
    """Any placement, times, kinds of backward and gaps; None for one that meets itself."""
    P = rng.randint(1, 4)
    placement = rng.choice([(*range(P),), (*range(P),) * 2, (*range(P), *reversed(range(P)))])
    S, costs, now, starts = len(placement), pp.Costs(*(rng.randint(1, 3) for _ in range(3))), 0, {}
    for key in [f"{s}F" for s in range(S)] + [f"{s}{rng.choice('BI')}" for s in reversed(range(S))]:
        starts[key] = now
        now += costs.of(Kind(key[-1]), 0) + rng.choice([0, 0, 1, 3])
    for s in range(S):
        if f"{s}I" in starts and rng.random() < 0.5:
            starts[f"{s}W"] = starts[f"{s}I"] + costs.backward_input + rng.randint(0, 12)
    try:
        block = lab.Block(starts, placement, S // P * (costs.forward + costs.of(B, 0)) + rng.randint(0, 6), costs)
        return block if block.lifespans else None
    except ValueError:  # it meets itself, or has no gap for a W
        return None


def held_over_time(timeline: pp.Timeline) -> list[int]:
    """What every rank holds at most, by the clock: from the start of an F to the end of its B or W."""
    most = []
    for rank in range(timeline.schedule.num_ranks):
        changes = []
        for span in timeline.spans_of(rank):
            if span.action.kind is F:
                changes.append((span.start, 1))
            elif span.action.kind is not I:
                changes.append((span.end, -1))
        held, peak = 0, 0
        for _, change in sorted(changes):  # what ends at a moment, before what starts then
            held += change
            peak = max(peak, held)
        most.append(peak)
    return most


def test_a_rank_holds_no_more_than_its_lifespans_say_and_no_less_than_their_mean():
    rng, met, open_ = random.Random(0), 0, 0
    blocks = [block for _ in range(1500) if (block := random_block(rng))][:120]
    assert len(blocks) == 120
    for block in blocks:
        stamped = block.stamp(40)
        peaks = held_over_time(stamped)
        assert stamped.schedule.placement == block.placement and pp.validate(stamped.schedule) is None
        for rank, peak in enumerate(peaks):
            assert ceil(block.mean_held[rank] - 1e-9) <= peak <= block.bound[rank], (block, rank)
            assert peak == block.peak[rank]
            met += peak == block.bound[rank]
        squeezed = block.squeeze(40)
        assert squeezed.peak_in_flight == tuple(peaks) and squeezed.makespan <= stamped.makespan
        open_ += "0I" in block.starts and "0W" not in block.starts
    assert met > 100 and 10 < open_ < 110  # the bound is met often, and both kinds of W were there


def test_reordered_rows_hold_no_more_and_are_not_slower():
    rng, faster = random.Random(1), 0
    for block in [block for _ in range(800) if (block := random_block(rng))][:60]:
        reordered, squeezed = block.reorder(9), block.squeeze(9)
        assert max(reordered.peak_in_flight) <= max(squeezed.peak_in_flight)
        assert reordered.makespan <= squeezed.makespan
        faster += reordered.makespan < squeezed.makespan
    assert faster > 5


@pytest.mark.parametrize("P", [2, 3, 4, 7])
def test_zb_v_comes_of_its_block(P):
    block, M = lab.zb_v_block(P), 3 * P
    zb_v = pp.simulate(pp.build("ZB-V", num_ranks=P, num_microbatches=M))
    made = block.reorder(M)
    assert block.interval == 6 and block.mean_held == made.peak_in_flight == zb_v.peak_in_flight == (2 * P,) * P
    assert zb_v.makespan <= made.makespan <= zb_v.makespan + 1 < block.squeeze(M).makespan + 1


def test_1f1b_as_a_block():
    starts = {f"{s}F": s for s in range(4)} | {f"{s}B": 10 - 2 * s for s in range(4)}
    block = lab.Block(starts, range(4), 3)
    assert block.squeeze(8).schedule == pp.build("1F1B", num_ranks=4, num_microbatches=8)
    assert block.lifespans == (12, 9, 6, 3) and block.bound == (4, 3, 2, 1)


@pytest.mark.parametrize(
    ("starts", "placement", "interval", "words"),
    [
        ({"0F": 0, "1F": 1, "1B": 2, "0B": 6}, (0, 1), 3, ["rank 0, 0F (at 0) and 0B (at 6) meet in unit 0", "of 3"]),
        ({"0F": 0, "1F": 1, "1B": 2, "0B": 5}, (0, 1), 3, ["meet in unit 0"]),
        ({"0F": 0, "1F": 1, "1B": 2, "0B": 3}, (0, 1), 3, ["0B starts at 3", "1B makes arrives at 4"]),
        ({"0F": 0, "1F": 1, "1B": 2, "0B": 4}, (0, 1), 2, ["rank 0 has 3 of work", "the interval is 2"]),
        ({"0F": 0, "1F": 1, "0B": 4}, (0, 1), 3, ["stage 1 must start an F and a B"]),
        ({"0F": 0, "0B": 4, "1F": 2, "1B": 2}, (0,), 9, ["1F is of a stage that placement, with 1 stages"]),
        ({"0F": 0, "zero": 4}, (0,), 3, ["such as '0F', got 'zero'"]),
        ({"0F": 0, "0B": 1}, (1,), 3, ["placement must give"]),
    ],
)
def test_a_block_that_cannot_be_is_refused(starts, placement, interval, words):
    with pytest.raises(ValueError) as refused:
        lab.Block(starts, placement, interval)
    for each in words:
        assert each in str(refused.value)


def test_a_weight_gradient_that_finds_no_gap_is_refused():
    with pytest.raises(ValueError, match="rank 0 has no gap for stage 0's W in every interval of 8"):
        lab.Block({"0F": 0, "0I": 3}, (0,), 8, pp.Costs(2, 3, 2.5))  # gaps of 1 and of 2


def test_weight_gradients_that_fit_too_seldom_are_refused_though_two_microbatches_are_held_alike(monkeypatch):
    """Rank 1 has one gap of two units in every interval, for two W's. In the cool-down there are more."""
    starts = {"0F": 0, "1F": 2, "2F": 3, "3F": 5, "3I": 9, "2I": 14, "1I": 16, "0I": 18}
    with pytest.raises(ValueError, match="rank 1 has no gap for stage 1's W in every interval of 8, and holds"):
        lab.Block(starts, [0, 1, 1, 0], 8, pp.Costs(1, 1, 2))
    monkeypatch.setattr(lab.Block, "_has_room", lambda self, rank: True)
    block = lab.Block(starts, [0, 1, 1, 0], 8, pp.Costs(1, 1, 2))
    assert [block.stamp(M).peak_in_flight for M in (15, 30, 60)] == [(4, 18), (4, 33), (4, 63)]


def tight_block(rng: random.Random) -> lab.Block | None:
    """With times of its own for every stage, and few gaps to spare; None for one that meets itself."""
    P = rng.randint(1, 4)
    placement = rng.choice([(*range(P),), (*range(P),) * 2, (*range(P), *reversed(range(P))), (*range(P),) * 3])
    stages, now, starts = range(len(placement)), 0, {}
    values = rng.choice([(1, 2, 3, 4), (0.25, 0.75, 1, 1.5, 2.25, 3)])
    costs = pp.Costs(*([rng.choice(values) for _ in stages] for _ in range(3)))
    for key in [f"{s}F" for s in stages] + [f"{s}{rng.choice('BIII')}" for s in reversed(stages)]:
        starts[key] = now
        now += costs.of(Kind(key[-1]), int(key[:-1])) + rng.choice([0, 0, 1, 2, 3])
    work = [sum(costs.of(F, s) + costs.of(B, s) for s in stages if placement[s] == rank) for rank in range(P)]
    try:
        return lab.Block(starts, placement, max(work) + rng.choice([0, 0, 0, 0.25, 1, 2, 5]), costs)
    except ValueError:
        return None


def test_what_is_accepted_holds_what_it_says_for_any_number_of_microbatches_and_what_is_refused_ever_more(monkeypatch):
    rng, accepted, refused, has_room = random.Random(3), 0, 0, lab.Block._has_room
    monkeypatch.setattr(lab.Block, "_has_room", lambda self, rank: True)  # or there would be none to look at
    blocks = [block for _ in range(2000) if (block := tight_block(rng))][:200]
    monkeypatch.setattr(lab.Block, "_has_room", has_room)
    for block in blocks:
        few, many = block.stamp(60), block.stamp(240)
        try:
            bound, peak = block.bound, block.peak
            assert replace(block) == block
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                replace(block)
            assert "has no gap for stage" in str(error)
            rank = int(str(error).split()[1])
            assert many.peak_in_flight[rank] > 1.5 * few.peak_in_flight[rank]
            refused += 1
            continue
        assert few.peak_in_flight == many.peak_in_flight == peak, block
        assert all(held <= most for held, most in zip(held_over_time(many), bound, strict=True)), block
        accepted += 1
    assert accepted > 100 and refused > 25


def test_a_block_is_read_off_a_steady_state_only():
    t = pp.simulate(pp.build("ZB-H1", num_ranks=4, num_microbatches=16))
    assert lab.Block.of(t, 7).interval == 3
    for microbatch in (0, 15):
        with pytest.raises(ValueError, match="take one of the steady state"):
            lab.Block.of(t, microbatch)
    with pytest.raises(ValueError, match="has no microbatch 99"):
        lab.Block.of(t, 99)


def test_the_drawing_has_one_block_in_colour():
    ax = lab.v_min_block(3).draw(4)
    strong = [bar for bar in ax.patches if bar.get_alpha() == 1]
    assert len(strong) == 18 and len(ax.patches) == 4 * 18
    assert [text.get_text() for text in ax.texts].count("F") == 6
