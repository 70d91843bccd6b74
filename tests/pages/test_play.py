"""The play mode's rules and levels: a reference can be built by hand, an illegal move is refused with its reason."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

import pplab
from conftest import is_ready
from javascript import Evaluate
from pplab import Costs, Schedule, lab, simulate, validate
from pplab.text import parse
from pplab_course import levels

ROOT = Path(__file__).parents[2]
LEVELS = (  # from the first steps to zero bubble
    *("first-steps", "eighteen", "memory-line", "latency", "two-stages", "split-backward"),
    *("zero-bubble", "zero-bubble-v"),
)


def test_the_levels_that_chapters_name_are_there():
    titles, named = {level.title for level in levels.LEVELS}, []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            for paragraph in "".join(cell["source"]).split("\n\n"):
                if "(../book/play.md) belong" in paragraph:
                    named += re.findall(r'"([^"]+)"', " ".join(paragraph.split()))
    assert len(named) == 4 and set(named) <= titles, named


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, evaluate: Evaluate) -> dict:
    """A level in play: JavaScript keeps it as `level`, and `state` with nothing placed."""
    named = f"(level = pplab.play.level({json.dumps(request.param)}), state = pplab.play.start(level), level)"
    said = evaluate(f"(({{ referenceTimeline, ...level }}) => level)({named})")
    given = said["costs"]
    names = {"forward": "forward", "backwardInput": "backward_input", "backwardWeight": "backward_weight"}
    durations = {python: given[page] for page, python in names.items()}
    said["costs"] = Costs(**durations, backward=given["backward"], latency=given["latency"])
    said["reference"] = Schedule([[item["text"] for item in row] for row in said["reference"]["rows"]])
    return said


def placed(evaluate: Evaluate, rank: int, text: str) -> str | None:
    """Make a move. Returns why it is refused."""
    return evaluate(
        f"(({{ state: next, refused }}) => (state = next, refused))(pplab.play.place(state, {rank}, '{text}'))"
    )


def test_the_levels(evaluate: Evaluate) -> None:
    levels = evaluate(
        "pplab.play.levels.map(({ id, title, task, end, numRanks, numMicrobatches, kinds, numActions }) => "
        "({ id, title, task, end, sizes: [numRanks, numMicrobatches], kinds, numActions }))"
    )
    assert [level["id"] for level in levels] == list(LEVELS)
    assert levels[0]["sizes"] == [2, 1] and levels[0]["kinds"] == ["B", "F"] and levels[-1]["kinds"] == ["F", "I", "W"]
    assert all(level["title"] and level["end"] and level["numActions"] <= 36 for level in levels)
    assert evaluate("pplab.play.level('none') === undefined")


@pytest.mark.parametrize("name, asked", [("eighteen", "Finish before 18."), ("memory-line", "Finish by 21.")])
def test_what_chapters_say_of_their_levels(evaluate: Evaluate, name: str, asked: str) -> None:
    level = evaluate(f"(({{ referenceTimeline, reference, ...level }}) => level)(pplab.play.level('{name}'))")
    assert level["task"].endswith(asked) and level["par"]["makespan"] == int(asked.split()[-1][:-1])
    assert (level["numRanks"], level["numMicrobatches"]) == ((3, 5) if level["cap"] else (3, 4))
    assert level["cap"] in (None, [3, 3, 3]) and level["isBefore"] == (name == "eighteen")


def test_a_levels_reference_is_legal_and_meets_par(evaluate: Evaluate, level: dict) -> None:
    t = simulate(level["reference"], level["costs"])
    assert level["par"] == {
        "makespan": t.makespan,
        "peakInFlight": list(t.peak_in_flight),
        "bubbleFraction": t.bubble_fraction,
        "spanBubbleFraction": t.span_bubble_fraction,
    }
    mine = lab.read_csv(lab.to_csv(level["reference"]))
    assert eval(level["inPython"], {"pp": pplab, "mine": mine}).makespan == t.makespan
    assert level["cap"] is None or all(p <= most for p, most in zip(t.peak_in_flight, level["cap"], strict=True))
    assert len(t.spans) == level["numActions"]
    for count, span in enumerate(sorted(t.spans, key=lambda s: (s.start, s.rank))):
        score = evaluate("pplab.play.score(state)")
        assert not score["isComplete"] and score["text"] == f"{count} of {level['numActions']} actions are placed."
        assert placed(evaluate, span.rank, str(span.action)) is None
        assert evaluate("pplab.play.least(state)") <= t.makespan
    score = evaluate("pplab.play.score(state)")
    assert score["isComplete"] and score["isSolved"] and score["isFound"], score
    held = "(, and its ranks hold .+ forwards at most)?"
    says = rf"You built [^.]+\. Your order takes {t.makespan:g}{held}\. .+ You took no hints in this try\."
    assert re.fullmatch(says, score["text"]), score["text"]
    assert level["end"] in score["text"]
    assert lab.read_csv(evaluate("pplab.play.toCSV(state)")) == level["reference"]


def test_a_level_by_hints_alone_is_solved_and_not_found(evaluate: Evaluate, level: dict) -> None:
    while found := evaluate("(found = pplab.play.hint(state)) && (state = found.state, found)"):
        assert placed(evaluate, found["rank"], found["text"]) is None
    score, count = evaluate("pplab.play.score(state)"), level["numActions"]
    assert score["isSolved"] and not score["isFound"] and evaluate("state.hints.length") == count
    assert score["text"].endswith(
        f"You took {count} hints, for more than half of your choices, so this doesn't count as found. Start again to find it yourself."  # noqa: E501
    )
    moves = json.dumps(evaluate("state.moves"))
    again = evaluate(f"pplab.play.score(pplab.play.replay(level, {moves}, state.hints.slice(0, {count // 2})))")
    assert again["isFound"] and again["text"].endswith(f"You took {count // 2} hints in this try.")


def test_playing_at_random(evaluate: Evaluate, level: dict) -> None:
    """Against the rules written down a second time; what comes out is a schedule of the package."""
    rng = random.Random(level["id"])
    done: list[tuple[int, str]] = []
    while tray := evaluate("pplab.play.remaining(state)"):
        for move in tray:
            missing = why_not(level, done, move["rank"], move["text"])
            assert move["refused"] is None if missing is None else missing in move["refused"], (done, move)
        legal = [(move["rank"], move["text"]) for move in tray if not move["refused"]]
        assert evaluate("pplab.play.isStuck(state)") == (not legal)
        illegal = [move for move in tray if move["refused"]]
        if illegal:
            before, move = evaluate("state"), rng.choice(illegal)
            assert placed(evaluate, move["rank"], move["text"]) == move["refused"] and evaluate("state") == before
        if not legal or (done and rng.random() < 0.1):
            for _ in range(rng.randint(1, 3) if legal else len(done)):
                evaluate("state = pplab.play.undo(state)")
                del done[-1:]
            continue
        hint = evaluate("pplab.play.hint(state)")
        assert (hint["rank"], hint["text"]) in legal
        done.append(rng.choice(legal))
        assert placed(evaluate, *done[-1]) is None
        assert evaluate("state.moves") == [[*move, False] for move in done]

    mine = lab.read_csv(evaluate("pplab.play.toCSV(state)"))
    assert [[str(item) for item in row] for row in mine.rows] == [
        [text for r, text in done if r == rank] for rank in range(level["numRanks"])
    ]
    validate(mine)
    t, score = simulate(mine, level["costs"]), evaluate("pplab.play.score(state)")
    assert level["cap"] is None or all(peak <= cap for peak, cap in zip(t.peak_in_flight, level["cap"], strict=True))
    assert (score["makespan"], score["peakInFlight"]) == (t.makespan, list(t.peak_in_flight))
    assert score["spanBubbleFraction"] == t.span_bubble_fraction and score["isComplete"]
    assert score["bubbleFraction"] == t.bubble_fraction
    prefixes = "state.moves.map((_, i, moves) => pplab.play.least(pplab.play.replay(level, moves.slice(0, i + 1))))"
    bounds = evaluate(prefixes)
    assert bounds == sorted(bounds) and bounds[-1] == t.makespan, "no order ends before what was said to be the least"
    is_straight = not level["isAboutSpan"] or t.span_bubble_fraction <= level["par"]["spanBubbleFraction"]
    assert score["isSolved"] == (t.makespan <= level["par"]["makespan"] and is_straight)
    assert t.makespan >= level["par"]["makespan"], "an end that says as fast as the reference would be wrong"
    times = {
        text: (start, end)
        for text, start, end in evaluate("state.timeline.spans.map((s) => [s.item.text, s.start, s.end])")
    }
    assert times == {str(s.action): (s.start, s.end) for s in t.spans}
    again = evaluate(f"pplab.play.replay(level, {json.dumps([*done, (0, '0F0')])}).moves")
    assert again == [[*move, False] for move in done]


PRESSES = {"first-steps": 1, "eighteen": 10, "memory-line": 16, "latency": 9, "two-stages": 25, "split-backward": 23}
PRESSES |= {"zero-bubble": 18, "zero-bubble-v": 27}


def test_what_has_no_alternative_runs_by_itself(evaluate: Evaluate, level: dict) -> None:
    """Played at random: whatever the other ranks do, nothing else could have come next there."""
    rng, forced = random.Random(level["id"]), 0
    while legal := [move for move in evaluate("pplab.play.slots(state).flat()") if not move["refused"]]:
        move, before = rng.choice(legal), evaluate("state.moves")
        assert placed(evaluate, move["rank"], move["text"]) is None
        moves = evaluate("(state = pplab.play.settle(state)).moves")
        assert moves[: len(before) + 1] == [*before, [move["rank"], move["text"], False]]
        for at in range(len(before) + 1, len(moves)):
            rank, text, is_forced = moves[at]
            assert is_forced and could_follow(level, [(r, t) for r, t, _ in moves[:at]], rank) == {text}, moves[
                : at + 1
            ]
            forced += 1
        if rng.random() < 0.2:  # and undo takes what was forced along
            assert evaluate("pplab.play.undo(state).moves") == before
            assert evaluate("(state = pplab.play.replay(level, state.moves, [])).moves") == moves
    assert forced >= 3


def could_follow(level: dict, done: list[tuple[int, str]], rank: int) -> set[str]:
    """What may come next on a rank, whatever the others do before. Microbatches are alike, and keep their order."""
    found, seen, waiting = set(), set(), [tuple(done)]
    while waiting and len(found) < 2:
        now = waiting.pop()
        first: dict[tuple[int, str], str] = {}
        for action in level["actions"]:
            text = "{stage}{kind}{microbatch}".format(**action)
            if (action["rank"], text) not in now:
                first.setdefault((action["rank"], text.rstrip("0123456789")), text)
        for (other, _), text in first.items():
            if why_not(level, now, other, text) is not None:
                continue
            if other == rank:
                found.add(text)
            elif (then := frozenset([*now, (other, text)])) not in seen:
                seen.add(then)
                waiting.append((*now, (other, text)))
    return found


def test_a_level_takes_as_many_presses_as_choices(evaluate: Evaluate, level: dict) -> None:
    presses = 0
    while found := evaluate("(found = pplab.play.hint(state)) && (state = found.state, found)"):
        shown = {move["text"] for move in evaluate("pplab.play.slots(state).flat()") if not move["refused"]}
        assert found["text"] in shown and placed(evaluate, found["rank"], found["text"]) is None
        evaluate("(state = pplab.play.settle(state)).moves.length")
        presses += 1
    score = evaluate("pplab.play.score(state)")
    assert score["isSolved"] and not score["isFound"] and presses == PRESSES[level["id"]]


read = cache(parse)


def test_an_order_that_an_earlier_edition_kept_can_go_on(evaluate: Evaluate) -> None:
    """There one could place microbatch 1 before microbatch 0: the buttons offer what can run, and nothing is forced."""
    kept = json.dumps([[0, "0F1"]])
    evaluate(f"state = pplab.play.replay(pplab.play.level('memory-line'), {kept}, [])")
    shown = evaluate("pplab.play.slots(state).map((slots) => slots.map(({ text, refused }) => refused ? null : text))")
    assert shown == [["0F0", None], ["1F1", None], [None, None]]
    assert evaluate("pplab.play.hint(state).text") == "0F0"
    assert placed(evaluate, 1, "1F1") is None and placed(evaluate, 2, "2F1") is None
    assert evaluate("pplab.play.settle(state).moves") == evaluate("state.moves")


def why_not(level: dict, done: Sequence[tuple[int, str]], rank: int, text: str) -> str | None:
    """A word of why a move is illegal; None for a legal one."""
    stage, kind, m = action = read(text)
    before = {(a.stage, a.kind.value, a.microbatch) for a in (read(text) for _, text in done)}
    if not is_ready((stage, kind.value, m), before, level["numStages"]):
        own = {"F": None, "B": "F", "I": "F", "W": "I"}[kind.value]
        return (
            f"{stage}{own}{m}"
            if own and (stage, own, m) not in before
            else f"waits for the {'o' if own is None else 'g'}"
        )
    row = [read(text) for r, text in done if r == rank]
    held = sum(a.kind == "F" for a in row) - sum(a.kind in "BW" for a in row)
    if action.kind == "F" and level["cap"] and held == level["cap"][rank]:
        return f"Rank {rank} has no memory left: it holds "
    return None


def test_moves_that_are_refused(evaluate: Evaluate) -> None:
    evaluate("state = pplab.play.start(pplab.play.level('memory-line'))")
    for rank, text in [(0, "0F0"), (0, "0F1"), (0, "0F2"), (1, "1F0"), (2, "2F0")]:
        assert placed(evaluate, rank, text) is None
    full = "Rank 0 has no memory left: it holds 0F0, 0F1 and 0F2. Before 0F3 fits, "
    for rank, text, reason in [
        (0, "0F0", "0F0 is already placed."),
        (1, "1F3", "1F3 waits for the output of 0F3 on rank 0: place that first."),
        (1, "1B0", "1B0 waits for the gradient from 2B0 on rank 2: place that first."),
        (0, "0B3", "0B3 needs 0F3: place that first."),
        (1, "0F3", "Rank 1 has no 0F3 in this level."),  # as a browser may have stored it
        (0, "0F5", "Rank 0 has no 0F5 in this level."),
        (0, "F", "Rank 0 has no F in this level."),
        (3, "2F0", "Rank 3 has no 2F0 in this level."),
        (0, "0F3", full + "2B0, 1B0 and 0B0 have to run."),
    ]:
        assert placed(evaluate, rank, text) == reason
    assert placed(evaluate, 2, "2B0") is None and placed(evaluate, 1, "1B0") is None
    assert placed(evaluate, 0, "0F3") == full + "0B0 has to run."


def test_an_end_compares_with_the_reference(evaluate: Evaluate) -> None:
    """1F1B reaches eighteen, too; an order that no schedule has isn't given a name; a late one says by how much."""

    def says(level: str, schedule: Schedule) -> str:
        t = simulate(schedule, Costs(backward=2))
        moves = [(s.rank, str(s.action)) for s in sorted(t.spans, key=lambda s: (s.start, s.rank))]
        return evaluate(f"pplab.play.score(pplab.play.replay(pplab.play.level('{level}'), {json.dumps(moves)})).text")

    four, five = {"num_ranks": 3, "num_microbatches": 4}, {"num_ranks": 3, "num_microbatches": 5}
    end = says("eighteen", pplab.build("1F1B", **four))
    assert end.startswith("You built 1F1B. Your order takes 18, as GPipe does. Nobody finishes before 18")
    late = says("eighteen", pplab.build("naive", **four))
    out = "Once 1B0 ran on rank 1 from 5 to 7, 18 was out of reach: "
    assert late.startswith(f"Your order takes 36, and it can be done in 18. {out}")
    rows = [list(map(str, row)) for row in pplab.build("1F1B", **five).rows]
    rows[1] = "1F0 1F1 1F2 1B0 1B1 1F3 1B2 1F4 1B3 1B4".split()
    end = says("memory-line", Schedule(rows))
    assert end.startswith("You built an order of your own; a known one is 1F1B. Your order takes 21, as 1F1B ")
    assert "as 1F1B does; your ranks hold 3, 3 and 1 forwards at most, and those of 1F1B 3, 2 and 1." in end
    rows[2] = "2F0 2F1 2B0 2B1 2F2 2B2 2F3 2B3 2F4 2B4".split()
    assert "which is 1 more than asked" in says("memory-line", Schedule(rows))


def test_what_the_levels_say_of_their_references() -> None:
    from pplab_course.levels import LEVELS, Level

    def level(name: str) -> Level:
        return next(each for each in LEVELS if each.id == name)

    of_memory, gpipe = level("memory-line"), level("memory-line").simulated("GPipe")
    assert of_memory.simulated("1F1B").makespan == gpipe.makespan == 21 and gpipe.peak_in_flight == (5, 5, 5)
    looped = level("two-stages")
    assert sum(looped.simulated("Interleaved1F1B", 2).idle) == sum(looped.simulated("1F1B").idle) / 2
    assert all(each.simulated(each.instead).makespan > each.simulated(each.reference, each.stages_per_rank).makespan
               for each in LEVELS if each.instead)  # fmt: skip
    for each in (level("zero-bubble"), level("zero-bubble-v")):
        assert each.simulated(each.reference, each.stages_per_rank).span_bubble_fraction == 0
    assert level("zero-bubble").simulated("1F1B").peak_in_flight == (2, 1)
    assert level("zero-bubble-v").cap == (4, 4) and level("zero-bubble-v").simulated("1F1B").peak_in_flight == (2, 1)
    secrets = {name for each in LEVELS for name in (each.reference, each.reference.replace("ZBVZeroBubble", "ZB-V"))}
    for each in LEVELS:
        told = each.title + each.task().replace(f"{each.instead} would take", "").replace("more memory than 1F1B", "")
        assert not any(name in told for name in secrets - {"naive"}), each.id
