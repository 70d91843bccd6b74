"""Chapter 13's checkers refuse wrong answers and say what is wrong; its faults strike where they are told to."""

from __future__ import annotations

import os

import pytest
from checkers import builds, raises, table_tests

from conftest import assert_explained
from pplab import lab
from pplab.course import for_real as exercise

STALE = dict(zip("ABCD", [exercise.STATES[i] for i in (1, 3, 0, 2)], strict=True))
WRITE, SYNC, RENAME, FOLDER = exercise.WRITE, exercise.SYNC, exercise.RENAME, exercise.SYNC_FOLDER


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


def even_cut(name, stage, num_stages, num_layers):
    if not name.startswith("blocks"):
        return name
    layer, rest = name.removeprefix("blocks.").split(".", 1)
    return f"blocks.{stage * (num_layers // num_stages) + int(layer)}.{rest}"


def same_name(name, *sizes):
    return name


WRONG = [
    (exercise.scale, 2.6 / 12, "by the rank's own norm"),
    (exercise.scale, 2.6 / 19, "norms don't add up"),
    (exercise.scale, 13, "that is the norm"),
    (exercise.scale, "1/5", "expected a number"),
    (exercise.clipper, 1, "expected a function of (gradients, all_reduce, limit)"),
    (exercise.clipper, raises, "rank 0 raised IndexError"),
    (exercise.clipper, own_norm, "its own: add up the squares of all ranks first"),
    (exercise.clipper, not_scaled, "three ranks over the limit: rank 0's gradients aren't"),
    (exercise.clipper, always_scaled, "two ranks under the limit: rank 0's gradients aren't 1.000 times"),
    (exercise.clipper, leaves_early, "a rank without gradients: some ranks called all_reduce and waited"),
    (exercise.clipper, nothing, "rank 0 returned None; expected the norm"),
    (exercise.whole_name, "blocks", "expected a function"),
    (exercise.whole_name, raises, "your function raised IndexError"),
    (exercise.whole_name, same_name, "'blocks.0.up.weight' on stage 1 of 2, 8 layers: got 'blocks.0.up.weight'"),
    (exercise.whole_name, even_cut, "on stage 1 of 4, 6 layers: got 'blocks.1.up.weight', expected 'blocks.2."),
    (exercise.commit, [WRITE, RENAME], "expected the four steps"),
    (exercise.commit, [RENAME, WRITE, SYNC, FOLDER], 'after "rename it over the old one": the name leads to nothing'),
    (exercise.commit, [WRITE, RENAME, SYNC, FOLDER], "whose data never reached the disk"),
    (exercise.commit, [SYNC, WRITE, RENAME, FOLDER], "a file is synced before it is written"),
    (exercise.commit, [WRITE, SYNC, FOLDER, RENAME], "the new name may not have reached the disk"),
    (exercise.stale, "nothing", "expected a dict with the keys A, B, C and D"),
    (exercise.stale, {**STALE, "A": "weights"}, "A: expected one of a layer's weights"),
    (exercise.stale, {**STALE, "A": "nothing"}, "A: not nothing; its first loss after the break is exactly right"),
    (exercise.stale, {**STALE, "B": "the optimizer's state"}, "B: not the optimizer's state; its losses are those"),
    (exercise.stale, {**STALE, "D": "a layer's weights"}, "D: not a layer's weights; its first loss after the break"),
    (exercise.groups, 4, "when messages take no time"),
    (exercise.groups, 6, "five are enough"),
    (exercise.across_hosts, 16, "their gradients come back"),
    (exercise.across_hosts, 176, "that is all messages"),
    (exercise.resized, 1, "expected a pair of runs"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


@pytest.mark.slow
def test_runs_that_do_not_follow_each_other_are_explained(tmp_path):
    from pplab.runtime import Pool

    file, gpt = tmp_path / "run.safetensors", exercise.small_gpt()
    resume = lab.Resume(file)
    with Pool(2, device="cpu") as pool:

        def train(name, *extras, **options):
            options = {"steps": 1, "warmup": 0, "optimizer": exercise.adam, **options}
            return pool.train(builds(name)(2, 4), gpt, *extras, **options)

        first, anew = train("1F1B", lab.Save(file)), train("ZBVZeroBubble")
        same, frozen = train("GPipe", resume), train("ZBVZeroBubble", resume, optimizer=None)
        later = train("ZBVZeroBubble", resume, lab.Save(file))
        lost = pool.train(later.schedule, gpt, resume, steps=2, warmup=0)  # no optimizer: the weights stay
        four = train("1F1B", resume)
    assert_explained(exercise.resized, (first, same), "both have 2 stages")
    assert_explained(exercise.resized, (first, anew), "the second run starts at step 0")
    assert_explained(exercise.resized, (four, lost), "starts at step 2")
    assert exercise.resized((first, later)) and exercise.resized((first, frozen)) and exercise.resized((later, four))


@pytest.mark.slow
def test_the_cases_are_what_they_are_said_to_be():
    for name, case in exercise.cases().items():
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
    fault = exercise.Fault("raise", str(mark), call=1, once=True)
    fault()
    assert not mark.exists()
    with pytest.raises(ArithmeticError):
        fault()
    assert exercise.marked(mark) <= mark.stat().st_ctime
    exercise.Fault("kill", str(mark), once=True)()  # the mark is there: this process lives
    with pytest.raises(ValueError, match="unknown fault 'crash'"):
        exercise.Fault("crash", os.devnull)
