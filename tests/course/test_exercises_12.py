"""Chapter 12's checkers refuse wrong answers and say what is wrong; its faults strike where they are told to."""

from __future__ import annotations

import os

import pytest

import pplab as pp
from conftest import assert_explained, assert_solutions
from pplab import lab
from pplab.course import for_real

STALE = dict(zip("ABCD", [for_real.STATES[i] for i in (1, 3, 0, 2)], strict=True))
WRITE, SYNC, RENAME, FOLDER = for_real._STEPS


def own_norm(gradients, all_reduce, limit):
    norm = sum(float((g * g).sum()) for g in gradients) ** 0.5
    all_reduce(norm)
    return norm


def not_scaled(gradients, all_reduce, limit):
    return all_reduce(sum(float((g * g).sum()) for g in gradients)) ** 0.5


def always_scaled(gradients, all_reduce, limit):
    norm = not_scaled(gradients, all_reduce, limit)
    for g in gradients:
        g *= limit / norm
    return norm


def leaves_early(gradients, all_reduce, limit):
    if not gradients:
        return 0.0
    return right_clip(gradients, all_reduce, limit)


def right_clip(gradients, all_reduce, limit):
    norm = not_scaled(gradients, all_reduce, limit)
    for g in gradients:
        g *= min(1, limit / norm)
    return norm


def nothing(gradients, all_reduce, limit):
    right_clip(gradients, all_reduce, limit)


def raises(*arguments):
    return [][1]


def even_cut(name, stage, num_stages, num_layers):
    if not name.startswith("blocks"):
        return name
    layer, rest = name.removeprefix("blocks.").split(".", 1)
    return f"blocks.{stage * (num_layers // num_stages) + int(layer)}.{rest}"


def same_name(name, *sizes):
    return name


WRONG = [
    (for_real.scale, 2.6 / 12, "by the rank's own norm"),
    (for_real.scale, 2.6 / 19, "norms don't add up"),
    (for_real.scale, 13, "that is the norm"),
    (for_real.scale, "0.2", "expected a number"),
    (for_real.clipper, 1, "expected a function of (gradients, all_reduce, limit)"),
    (for_real.clipper, raises, "rank 0 raised IndexError"),
    (for_real.clipper, own_norm, "its own: add up the squares of all ranks first"),
    (for_real.clipper, not_scaled, "three ranks over the limit: rank 0's gradients aren't"),
    (for_real.clipper, always_scaled, "two ranks under the limit: rank 0's gradients aren't 1.000 times"),
    (for_real.clipper, leaves_early, "a rank without gradients: some ranks called all_reduce and waited"),
    (for_real.clipper, nothing, "rank 0 returned None; expected the norm"),
    (for_real.whole_name, "blocks", "expected a function"),
    (for_real.whole_name, raises, "your function raised IndexError"),
    (for_real.whole_name, same_name, "'blocks.0.up.weight' on stage 1 of 2, 8 layers: got 'blocks.0.up.weight'"),
    (for_real.whole_name, even_cut, "on stage 1 of 4, 6 layers: got 'blocks.1.up.weight', expected 'blocks.2."),
    (for_real.commit, [WRITE, RENAME], "expected the four steps"),
    (for_real.commit, [RENAME, WRITE, SYNC, FOLDER], 'after "rename it over the old one": the name leads to nothing'),
    (for_real.commit, [WRITE, RENAME, SYNC, FOLDER], "whose data never reached the disk"),
    (for_real.commit, [SYNC, WRITE, RENAME, FOLDER], "a file is synced before it is written"),
    (for_real.commit, [WRITE, SYNC, FOLDER, RENAME], "the new name may not have reached the disk"),
    (for_real.stale, "nothing", "expected a dict with the keys A, B, C and D"),
    (for_real.stale, {**STALE, "A": "weights"}, "A: expected one of a layer's weights"),
    (for_real.stale, {**STALE, "A": "nothing"}, "A: not nothing; its first loss after the break is exactly right"),
    (for_real.stale, {**STALE, "B": "the optimizer's state"}, "B: not the optimizer's state; its losses are those"),
    (for_real.stale, {**STALE, "D": "a layer's weights"}, "D: not a layer's weights; its first loss after the break"),
    (for_real.groups, 4, "when messages take no time"),
    (for_real.groups, 6, "five are enough"),
    (for_real.across_hosts, 16, "their gradients come back"),
    (for_real.across_hosts, 176, "that is all messages"),
    (for_real.resized, 1, "expected a pair of runs"),
]


@pytest.mark.parametrize(("check", "answer", "says"), WRONG)
def test_wrong_answers_are_explained(check, answer, says):
    assert_explained(check, answer, says)


@pytest.mark.parametrize("check", dict.fromkeys(check for check, _, _ in WRONG), ids=lambda check: check.__name__)
def test_dots_are_no_answer(check):
    assert check(...).right is None


def test_runs_that_do_not_follow_each_other_are_explained(tmp_path):
    from pplab.runtime import Pool

    file, gpt = tmp_path / "run.safetensors", for_real.small_gpt()
    save, resume = lab.Save(file), lab.Resume(file)
    with Pool(2, device="cpu") as pool:

        def train(name, *extras, **options):
            schedule = pp.build(name, num_ranks=2, num_microbatches=4)
            return pool.train(schedule, gpt, *extras, steps=1, **{"optimizer": for_real.adam, **options})

        first, anew = train("1F1B", save), train("ZBVZeroBubble")
        same, frozen = train("GPipe", resume), train("ZBVZeroBubble", resume, optimizer=None)
        later = train("ZBVZeroBubble", resume, save)
        lost = pool.train(later.schedule, gpt, resume, steps=2)  # no optimizer: the weights stay
        four = train("1F1B", resume)
    assert_explained(for_real.resized, (first, same), "both have 2 stages")
    assert_explained(for_real.resized, (first, anew), "the second run starts at step 0")
    assert_explained(for_real.resized, (four, lost), "starts at step 2")
    assert for_real.resized((first, later)) and for_real.resized((first, frozen)) and for_real.resized((later, four))


def test_the_cases_are_what_they_are_said_to_be():
    for name, case in for_real.cases().items():
        errors = [abs(a - b) for a, b in zip(case.losses, case.uninterrupted, strict=True)]
        assert errors[:3] == [0, 0, 0]
        match STALE[name]:
            case "nothing":
                assert 0 < max(errors) < 1e-5
            case "the optimizer's state":
                assert errors[3] < 1e-6 and errors[4] > 1e-3
            case "the number of the batch":
                assert errors[3] > 1e-2 and abs(case.losses[3] - case.on_batch_0) < 1e-5
            case _:
                assert errors[3] > 1e-2 and abs(case.losses[3] - case.on_batch_0) > 1e-2


def test_a_fault_strikes_in_its_call_once(tmp_path):
    mark = tmp_path / "mark"
    fault = for_real.Fault("raise", str(mark), call=1, once=True)
    fault()
    assert not mark.exists()
    with pytest.raises(ArithmeticError):
        fault()
    assert for_real.marked(mark) <= mark.stat().st_ctime
    for_real.Fault("kill", str(mark), once=True)()  # the mark is there: this process lives
    with pytest.raises(ValueError, match="unknown fault 'crash'"):
        for_real.Fault("crash", os.devnull)


def test_the_solutions_of_the_chapter_are_right():
    assert_solutions("12_for_real", for_real, 8)
