"""The play mode's rules and levels: a reference can be built by hand, an illegal move is refused with its reason."""

from __future__ import annotations

import json
import random

import pytest

import pplab
from conftest import is_ready
from javascript import Evaluate
from pplab import Costs, Schedule, lab, simulate, validate
from pplab.text import parse

LEVELS = (  # from the first steps to zero bubble
    *("first-steps", "fill-and-drain", "less-memory", "four-ranks", "latency", "two-stages", "split-backward"),
    *("zero-bubble", "zero-bubble-v"),
)


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
        "pplab.play.levels.map(({ id, title, text, numRanks, numMicrobatches, kinds, numActions }) => "
        "({ id, title, text, sizes: [numRanks, numMicrobatches], kinds, numActions }))"
    )
    assert [level["id"] for level in levels] == list(LEVELS)
    assert levels[0]["sizes"] == [2, 1] and levels[0]["kinds"] == ["B", "F"] and levels[-1]["kinds"] == ["F", "I", "W"]
    assert all(level["title"] and level["text"] and level["numActions"] <= 36 for level in levels)
    assert evaluate("refused(() => pplab.play.level('none'))").startswith("no level none: there are first-")


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
    assert level["cap"] in (None, list(t.peak_in_flight)) and len(t.spans) == level["numActions"]
    for count, span in enumerate(sorted(t.spans, key=lambda s: (s.start, s.rank))):
        score = evaluate("pplab.play.score(state)")
        assert not score["isComplete"] and score["text"] == f"{count} of {level['numActions']} actions are placed."
        assert placed(evaluate, span.rank, str(span.action)) is None
    score = evaluate("pplab.play.score(state)")
    assert score["isComplete"] and score["isFast"] and score["isLean"], score
    assert "; no rank holds more than there" in score["text"]
    assert lab.read_csv(evaluate("pplab.play.toCSV(state)")) == level["reference"]


@pytest.mark.parametrize("seed", range(3))
def test_playing_at_random(evaluate: Evaluate, level: dict, seed: int) -> None:
    """Against the rules written down a second time; what comes out is a schedule of the package."""
    rng = random.Random(seed)
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
        assert evaluate("state.moves") == [list(move) for move in done]

    mine = lab.read_csv(evaluate("pplab.play.toCSV(state)"))
    assert [[str(item) for item in row] for row in mine.rows] == [
        [text for r, text in done if r == rank] for rank in range(level["numRanks"])
    ]
    validate(mine)
    t, score = simulate(mine, level["costs"]), evaluate("pplab.play.score(state)")
    assert level["cap"] is None or all(peak <= cap for peak, cap in zip(t.peak_in_flight, level["cap"], strict=True))
    assert (score["makespan"], score["peakInFlight"]) == (t.makespan, list(t.peak_in_flight))
    assert score["spanBubbleFraction"] == t.span_bubble_fraction and score["isComplete"]
    assert score["isFast"] == (t.makespan <= level["par"]["makespan"])
    times = {
        text: (start, end) for text, start, end in evaluate("state.spans.map((s) => [s.item.text, s.start, s.end])")
    }
    assert times == {str(s.action): (s.start, s.end) for s in t.spans}
    again = evaluate(f"pplab.play.replay(level, {json.dumps([*done, (0, '0F0')])}).moves")
    assert again == [list(move) for move in done]


def why_not(level: dict, done: list[tuple[int, str]], rank: int, text: str) -> str | None:
    """A word of why a move is illegal; None for a legal one."""
    stage, kind, m = action = parse(text)
    before = {(a.stage, a.kind.value, a.microbatch) for a in (parse(text) for _, text in done)}
    if not is_ready((stage, kind.value, m), before, level["numStages"]):
        own = {"F": None, "B": "F", "I": "F", "W": "I"}[kind.value]
        return (
            f"{stage}{own}{m}"
            if own and (stage, own, m) not in before
            else f"waits for the {'o' if own is None else 'g'}"
        )
    row = [parse(text) for r, text in done if r == rank]
    held = sum(a.kind == "F" for a in row) - sum(a.kind in "BW" for a in row)
    if action.kind == "F" and level["cap"] and held == level["cap"][rank]:
        return f"Memory cap: rank {rank} already holds {held} forward"
    return None


def test_moves_that_are_refused(evaluate: Evaluate) -> None:
    evaluate("state = pplab.play.start(pplab.play.level('less-memory'))")
    for rank, text in [(0, "0F0"), (0, "0F1"), (0, "0F2"), (1, "1F0"), (2, "2F0")]:
        assert placed(evaluate, rank, text) is None
    instead = "and 0F3 would be one more: a B such as 0B0 must come first."
    for rank, text, reason in [
        (0, "0F0", "0F0 is already placed."),
        (0, " 0F0", "0F0 is already placed."),
        (1, "1F3", "1F3 waits for the output of 0F3 on rank 0: place that first."),
        (1, "1B0", "1B0 waits for the gradient from 2B0 on rank 2: place that first."),
        (0, "0B3", "0B3 needs 0F3: place that first."),
        (1, "0F3", "Stage 0 lives on rank 0: 0F3 can't run on rank 1."),
        (0, "0I0", "0I0 is not for this level: its actions are B, F."),
        (0, "(0F3;0B0)OVERLAP_F_B", "(0F3;0B0)OVERLAP_F_B is not for this level: its actions are B, F."),
        (0, "0F4", "There is no microbatch 4: this level has microbatches 0 to 3."),
        (2, "3F0", "There is no stage 3: this level has stages 0 to 2."),
        (3, "2F0", "There is no rank 3: this level has ranks 0 to 2."),
        (0, "0F3", f"Memory cap: rank 0 already holds 3 forwards' activations, as many as it may, {instead}"),
    ]:
        assert placed(evaluate, rank, text) == reason
    assert "is not an action: expected stage" in placed(evaluate, 0, "F")


def test_what_the_levels_say_of_their_references(evaluate: Evaluate) -> None:
    built, two = pplab.build, Costs(backward=2)
    small = {"num_ranks": 3, "num_microbatches": 4}
    gpipe, one_f_one_b = (simulate(built(name, **small), two) for name in ("GPipe", "1F1B"))
    assert gpipe.makespan == one_f_one_b.makespan and one_f_one_b.peak_in_flight == (3, 2, 1)
    late = Costs(backward=2, latency=1)
    eager, waiting = (simulate(built(n, num_ranks=3, num_microbatches=5), late) for n in ("eager-1F1B", "1F1B"))
    assert eager.makespan < waiting.makespan
    plain, looped = (simulate(built(n, num_ranks=2, num_microbatches=4), two.finer(v)) for n, v in TWO_STAGES)
    assert sum(looped.idle) == sum(plain.idle) / 2
    assert simulate(built("ZB-H1", **small)).peak_in_flight == (3, 3, 3)
    for level in ("zero-bubble", "zero-bubble-v"):
        assert evaluate(f"pplab.play.level('{level}').par.spanBubbleFraction") == 0
    assert simulate(built("ZB-H2", num_ranks=2, num_microbatches=5)).peak_in_flight == (3, 3)
    assert simulate(built("ZB-V", num_ranks=2, num_microbatches=3)).peak_in_flight == (4, 4)


TWO_STAGES = (("1F1B", 1), ("Interleaved1F1B", 2))
