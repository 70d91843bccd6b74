"""The game's blocks: what the page says of one is what pplab.lab.Block says, in every figure, row and refusal."""

from __future__ import annotations

import json
import random

import pytest

import pplab as pp
from javascript import Evaluate
from pplab import lab

IDS = ("one-microbatch", "stamp-a-v", "a-v-in-less-memory")


def levels() -> tuple:
    from pplab_blocks import LEVELS

    return LEVELS


def say(evaluate: Evaluate, level: str, starts: dict, interval: int, times: int) -> dict:
    """What the page says of a block."""
    state = f"{{ ...stamp.start(stamp.level('{level}')), starts: {json.dumps(starts)}, interval: {interval} }}"
    made = f"[stamp.stamped, stamp.squeezed, stamp.reordered].map((make) => reportOf(make(state, {times})))"
    figures = (
        f"({{ made: {made}.map(({{ csv, times, peaks }}) => ({{ csv, times, peaks }})), ...stamp.memory(state) }})"
    )
    code = f"((state, stamp) => ({{ judged: stamp.judge(state), ...(stamp.problem(state) ? {{}} : {figures}) }}))"
    return evaluate(f"((stamp) => {code}({state}, stamp))(pplab.stamp)")


def expected(placement: tuple, starts: dict, interval: int, times: int) -> dict:
    """What the package says of it."""
    try:
        block = lab.Block(starts, placement, interval)
    except ValueError as error:
        return {"problem": str(error)}
    made = [
        {
            "csv": lab.to_csv(t.schedule),
            "times": [[x for s in t.spans_of(r) for x in (s.start, s.end)] for r in range(t.schedule.num_ranks)],
            "peaks": list(t.peak_in_flight),
        }
        for t in (block.stamp(times), block.squeeze(times), block.reorder(times))
    ]
    memory = {"lifespans": list(block.lifespans), "bound": list(block.bound), "peak": list(block.peak)}
    return {"problem": None, "made": made, **memory}


def agree(evaluate: Evaluate, level, starts: dict, interval: int, times: int) -> dict:
    """Compare the two. Returns what the page judges."""
    said = say(evaluate, level.id, starts, interval, times)
    judged, wanted = said.pop("judged"), expected(level.reference.placement, starts, interval, times)
    assert {"problem": judged["problem"], **said} == wanted, (starts, interval)
    return judged


def chain(placement: tuple) -> list[str]:
    stages = range(len(placement))
    return [f"{s}F" for s in stages] + [f"{s}I" for s in reversed(stages)]


def in_order(placement: tuple, block: lab.Block) -> dict:
    return {key: int(block.starts[key]) for key in chain(placement)}


def test_the_levels(evaluate: Evaluate) -> None:
    told = evaluate("pplab.stamp.levels")
    assert [level["id"] for level in told] == [level.id for level in levels()] == list(IDS)
    for level, said in zip(levels(), told, strict=True):
        assert (said["cap"], said["makespan"]) == (max(level.reference.peak), level.reference.reorder(8).makespan)
        assert str(said["cap"]) in said["task"] and f"by {said['makespan']:g}." in said["task"]
        assert not {"reference", "starts"} & set(said), "the page isn't told an answer"
    assert evaluate("pplab.stamp.level('none') === undefined")


def test_the_levels_figures_are_those_of_the_published_schedules() -> None:
    """A level's goal is what the schedule takes that is made of the block."""
    for level, name in zip(levels(), ("V-Min", "ZB-V", "V-Half"), strict=True):
        t = pp.simulate(pp.build(name, num_ranks=level.reference.num_ranks, num_microbatches=8))
        assert (t.makespan, max(t.peak_in_flight)) == (level.makespan, level.cap)
    full = pp.build("1F1B", num_ranks=4, num_microbatches=8).peak_in_flight
    assert levels()[1].cap == 2 * max(full), "half a rank's layers: twice as many as 1F1B's whole ones"


@pytest.mark.parametrize("name", IDS)
def test_a_reference_solves_its_level_and_the_shortest_block_does_not(evaluate: Evaluate, name: str) -> None:
    level = levels()[IDS.index(name)]
    starts = in_order(level.reference.placement, level.reference)
    judged = agree(evaluate, level, starts, 6, level.num_microbatches)
    assert judged["isSolved"] and judged["makespan"] == level.makespan and level.end in judged["text"]
    first = evaluate(f"pplab.stamp.start(pplab.stamp.level('{name}')).starts")
    assert list(first) == chain(level.reference.placement) and list(first.values()) == list(range(len(first)))
    judged = agree(evaluate, level, first, 6, level.num_microbatches)
    assert not judged["isSolved"] and level.end not in judged["text"]
    assert (" meet in unit " in judged["text"]) == (name == "one-microbatch") == bool(judged["problem"])
    slow = agree(evaluate, level, starts, 9, level.num_microbatches)
    assert not slow["isSolved"]


@pytest.mark.parametrize("count", [80, pytest.param(230, marks=pytest.mark.long)])
def test_random_blocks(evaluate: Evaluate, count: int) -> None:
    """Legal ones and those that meet, start too early, or have too short an interval."""
    rng, legal, why = random.Random(0), 0, set()
    for _ in range(count):
        level = rng.choice(levels())
        keys, starts = chain(level.reference.placement), {}
        now, interval = rng.choice([0, 0, 0, 5]), rng.choice([5, 6, 6, 6, 7, 8, 11])
        used: dict[int, set] = {}
        careful, early = rng.random() < 0.6, rng.random() < 0.1
        for key in keys:
            rank = level.reference.placement[int(key[:-1])]
            now += rng.choice([0, 0, 1, 2, 6])
            while careful and now % interval in used.setdefault(rank, set()) and len(used[rank]) < interval:
                now += 1
            used.setdefault(rank, set()).add(now % interval)
            starts[key] = now
            now += 1
        if early:
            starts[rng.choice(keys)] = rng.randint(0, now)
        judged = agree(evaluate, level, starts, interval, rng.choice([1, 2, 5, 8]))
        legal += judged["problem"] is None
        if judged["problem"]:
            why |= {word for word in ("meet in unit", "arrives at", "make it longer") if word in judged["problem"]}
        else:
            block = lab.Block(starts, level.reference.placement, interval)
            makespan = block.reorder(8).makespan
            assert judged["makespan"] == makespan
            assert judged["isSolved"] == (max(block.peak) <= level.cap and makespan <= level.makespan)
    assert 0.4 * count < legal < count and len(why) == 3


def test_moves_and_what_every_interval_holds(evaluate: Evaluate) -> None:
    evaluate("state = pplab.stamp.start(pplab.stamp.level('one-microbatch'))")
    beat = evaluate("pplab.stamp.beat(state)")
    assert beat[0] == [["0F", "5I"], [], [], [], [], ["5F", "0I"]] and beat[2][2:4] == [["2F", "3I"], ["3F", "2I"]]
    evaluate("state = pplab.stamp.move(state, '5I', 2)")
    assert evaluate("Object.values(state.starts)") == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]
    assert evaluate("state.starts") == in_order((0, 1, 2, 2, 1, 0), lab.v_min_block(3))
    assert evaluate("pplab.stamp.judge(state).isSolved")
    alone = evaluate("pplab.stamp.move(state, '5I', -1, true).starts")
    assert alone["5I"] == 7 and alone["4I"] == 9
    assert evaluate("pplab.stamp.move(state, '0F', -1) === state")
    line = evaluate("pplab.stamp.inPython(state)")
    assert eval(line, {"lab": lab}).makespan == 53
